"""What `gradient_override_map` contexts say of the nodes that are made inside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set

from gradrule._names import near
from gradrule._overrides import Override
from gradrule._rules import OverrideValue, Rule, rule_and_params
from gradrule.errors import Detail, InvalidOverrideError, UnmatchedOverrideError
from gradrule.v1 import graph_pb2

GRADIENT_ATTR = "_gradient_op_type"

_SHOWN = 10


class OverrideContexts:
    """The contexts of one graph that is being built, and the overrides that they gave to single nodes."""

    def __init__(self, graph: graph_pb2.Graph) -> None:
        self._graph = graph
        self._current: Mapping[str, OverrideValue] = {}
        self._recorded: list[Override] = []

    @property
    def recorded(self) -> tuple[Override, ...]:
        """The overrides that no attribute of a node can hold."""
        return tuple(self._recorded)

    @contextlib.contextmanager
    def entered(self, overrides: Mapping[str, OverrideValue], optional: bool) -> Iterator[None]:
        """One context. Raises `UnmatchedOverrideError` where it ends without a node of an op type, unless optional."""
        for op_type, value in overrides.items():
            rule_and_params(value, _where(op_type))
            if op_type.startswith("@"):
                raise InvalidOverrideError(
                    f"{_where(op_type)}: a context takes op types; groups belong into the overrides of a request"
                )
        outer, first = self._current, len(self._graph.node)
        self._current = {**outer, **overrides}
        try:
            yield
        finally:
            self._current = outer
        # Reached only where no exception is under way, which would tell more.
        if not optional:
            _refuse_unused(overrides, {node.op for node in self._graph.node[first:]})

    def apply(self, node: graph_pb2.Node) -> None:
        """Gives a node that was just made the rule that the contexts have for its op type."""
        value = self._current.get(node.op)
        if value is None:
            return
        rule, params = rule_and_params(value, _where(node.op))
        if isinstance(rule, Rule) or params:
            # Optional, as in TensorFlow: a node of the context may lie off the path of what a request differentiates.
            self._recorded.append(
                Override(rule, node=node.name, op_type=node.op, params=params, label=node.op, optional=True)
            )
        else:
            node.attr[GRADIENT_ATTR].s = rule.encode()

    def refuse_export(self) -> None:
        """Raises `InvalidOverrideError` where the graph's bytes alone would lose an override."""
        if not self._recorded:
            return
        first = self._recorded[0]
        more = f" (and {len(self._recorded) - 1} more nodes)" if len(self._recorded) > 1 else ""
        params = f" with params {dict(first.params)!r}" if first.params else ""
        raise InvalidOverrideError(
            f"gradient_override_map gave node {first.selector.node!r}{more} the rule {first.rule!r}{params}, which "
            "bytes cannot hold: only the name of a registered rule travels in them. Register the rule with its params "
            "as defaults (client.create_rule) and give its name, or send the gr.Graph itself to evaluate or compile"
        )


def _where(op_type: str) -> str:
    return f"gradient_override_map[{op_type!r}]"


def _refuse_unused(overrides: Mapping[str, OverrideValue], made: Set[str]) -> None:
    shown = sorted(made)[:_SHOWN]
    others = f"only {', '.join(shown)}{', …' if len(made) > _SHOWN else ''}" if made else "nothing at all"
    details = [
        Detail(
            UnmatchedOverrideError.REASON,
            f"{_where(op_type)}: no {op_type} node was made inside the context, {others}.{near(op_type, made)} "
            "Make the nodes that it is meant for inside the `with`, or give optional=True",
            field=_where(op_type),
        )
        for op_type in overrides
        if op_type not in made
    ]
    if details:
        raise UnmatchedOverrideError(details[0].message, details=details)
