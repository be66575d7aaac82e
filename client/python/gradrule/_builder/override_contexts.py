"""Gives rules to nodes that are added inside `gradient_override_map` contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from gradrule._builder.graph_lookup import GRADIENT_ATTR, OPTIONAL_ATTR
from gradrule._builder.names import did_you_mean
from gradrule._builder.overrides import Override
from gradrule._builder.rules import OverrideValue, Rule, rule_and_params
from gradrule.errors import Detail, InvalidOverrideError, UnmatchedOverrideError
from gradrule.v1 import graph_pb2

_MAX_SHOWN = 10


@dataclass(slots=True, eq=False)
class _Entry:
    """One op type of a context: its rule, and the names of the nodes that got the rule."""

    value: OverrideValue
    optional: bool
    nodes: list[str] = field(default_factory=list)

    def override(self, op_type: str) -> Override:
        """Returns the override of its nodes."""
        rule, params = rule_and_params(self.value, _where(op_type))
        nodes = self.nodes if len(self.nodes) > 1 else self.nodes[0]
        return Override(rule, node=nodes, op_type=op_type, params=params, optional=self.optional)


class OverrideContexts:
    """Holds the open contexts of one graph, and the nodes to which they gave a rule with params or a `Rule`."""

    def __init__(self, graph: graph_pb2.Graph) -> None:
        self._graph = graph
        self._current: Mapping[str, _Entry] = {}
        self._recorded: list[tuple[str, _Entry]] = []

    @property
    def recorded(self) -> tuple[Override, ...]:
        """Overrides with a `Rule` or params, which a node's attribute cannot hold."""
        return tuple(entry.override(op_type) for op_type, entry in self._recorded)

    @contextlib.contextmanager
    def entered(self, overrides: Mapping[str, OverrideValue], optional: bool) -> Iterator[None]:
        """Opens one context. Raises `UnmatchedOverrideError` at its end if an op type got no node, unless optional."""
        for op_type, value in overrides.items():
            rule_and_params(value, _where(op_type))
            if op_type.startswith("@"):
                raise InvalidOverrideError(
                    f"{_where(op_type)}: a context takes op types; put groups into the overrides of a request"
                )
        outer, first = self._current, len(self._graph.node)
        self._current = {**outer, **{op_type: _Entry(value, optional) for op_type, value in overrides.items()}}
        try:
            yield
        finally:
            self._current = outer
        # Not in `finally`: an exception of the body is more useful than this one.
        if not optional:
            _refuse_unused(overrides, {node.op for node in self._graph.node[first:]})

    def apply(self, node: graph_pb2.Node) -> None:
        """Gives a new node the rule of the open contexts for its op type, if there is one."""
        entry = self._current.get(node.op)
        if entry is None:
            return
        rule, params = rule_and_params(entry.value, _where(node.op))
        if isinstance(rule, Rule) or params:
            if not entry.nodes:
                self._recorded.append((node.op, entry))
            entry.nodes.append(node.name)
            return
        node.attr[GRADIENT_ATTR].s = rule.encode()
        if entry.optional:
            node.attr[OPTIONAL_ATTR].b = True

    def refuse_export(self) -> None:
        """Raises `InvalidOverrideError` if the graph's bytes would lose an override."""
        if not self._recorded:
            return
        op_type, first = self._recorded[0]
        rule, given = rule_and_params(first.value, _where(op_type))
        count = sum(len(entry.nodes) for _, entry in self._recorded)
        more = f" (and {count - 1} more nodes)" if count > 1 else ""
        params = f" with params {dict(given)!r}" if given else ""
        raise InvalidOverrideError(
            f"gradient_override_map gave node {first.nodes[0]!r}{more} the rule {rule!r}{params}, which "
            "a GraphDef cannot hold: it holds only the name of a registered rule. Register the rule with its params "
            "as defaults (client.create_rule) and give its name, or send the gr.Graph itself to evaluate or compile"
        )


def _where(op_type: str) -> str:
    return f"gradient_override_map[{op_type!r}]"


def _refuse_unused(overrides: Mapping[str, OverrideValue], made: Set[str]) -> None:
    shown = sorted(made)[:_MAX_SHOWN]
    others = f"only {', '.join(shown)}{', …' if len(made) > _MAX_SHOWN else ''}" if made else "nor any other node"
    details = [
        Detail(
            UnmatchedOverrideError.REASON,
            f"{_where(op_type)}: no {op_type} node was made inside the context, {others}.{did_you_mean(op_type, made)} "
            "Add its nodes inside the `with` block, or give optional=True",
            field=_where(op_type),
        )
        for op_type in overrides
        if op_type not in made
    ]
    if details:
        raise UnmatchedOverrideError(details[0].message, details=details)
