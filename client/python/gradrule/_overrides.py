"""Rules and overrides as a user writes them, and their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gradrule import _tensors
from gradrule.errors import InvalidOverrideError, InvalidParamError, InvalidRuleError
from gradrule.v1 import override_pb2, rule_pb2

if TYPE_CHECKING:
    from gradrule._sources import GraphLike

Params: TypeAlias = "Mapping[str, Any]"


class Rule:
    """A rule that is not registered: it fits wherever a rule's name fits.

    expression: a formula over `x`, `y`, `dy`, `default` and the params. graph: in its place, a graph with placeholders
    of those names and nodes `dx`, `dx1`, …. params: what it declares, a dict of name to default (None: a value must be
    given with each use) or a list of names. Raises `InvalidRuleError` unless one of expression and graph is given.
    """

    __slots__ = ("expression", "graph", "params")

    def __init__(
        self,
        expression: str | None = None,
        *,
        graph: GraphLike | None = None,
        params: Params | Iterable[str] | None = None,
    ) -> None:
        if (expression is None) == (graph is None):
            raise InvalidRuleError("a rule is either an expression or a graph")
        if expression is not None and not isinstance(expression, str):
            raise InvalidRuleError(f"an expression is a string, not {type(expression).__name__}")
        self.expression = expression
        self.graph = graph
        if params is None or isinstance(params, Mapping):
            self.params: dict[str, Any] | None = None if params is None else dict(params)
        else:
            self.params = dict.fromkeys(params)

    def definition(self, used_params: Iterable[str] = ()) -> rule_pb2.RuleDefinition:
        """The message. Where the rule declares no params itself, those that its use gives count as declared."""
        from gradrule._sources import graph_source

        definition = rule_pb2.RuleDefinition()
        if self.expression is not None:
            definition.expression = self.expression
        else:
            definition.graph.CopyFrom(graph_source(self.graph))
        declared = dict.fromkeys(used_params) if self.params is None else self.params
        for name, default in declared.items():
            param = definition.params.add(name=name)
            if default is not None:
                param.default_value.CopyFrom(param_value(name, default))
        return definition

    def __repr__(self) -> str:
        what = repr(self.expression) if self.expression is not None else "graph=…"
        return f"Rule({what}{f', params={self.params!r}' if self.params else ''})"


RuleLike: TypeAlias = "str | Rule"
OverrideValue: TypeAlias = "RuleLike | tuple[RuleLike, Params]"


@dataclass(frozen=True, slots=True, init=False)
class Override:
    """Which nodes get which rule. Selectors given together must all hold; at least one is needed.

    rule: a registered rule's name, `default` to carve out an exception, or a `Rule`. op_type: exact. node: exact name
    or glob (`*` and `?` stay between slashes, `**` crosses them). scope: nodes under `scope/`. params: values for the
    rule. label: how calls give params and answers tell the override; default: op type, else node, else scope.
    optional: no error where nothing matches.
    """

    rule: RuleLike
    op_type: str | None
    node: str | None
    scope: str | None
    params: Params | None
    label: str | None
    optional: bool

    def __init__(
        self,
        rule: RuleLike,
        *,
        op_type: str | None = None,
        node: str | None = None,
        scope: str | None = None,
        params: Params | None = None,
        label: str | None = None,
        optional: bool = False,
    ) -> None:
        if not isinstance(rule, str | Rule):
            raise InvalidOverrideError(f"an override takes a rule's name or a gr.Rule, not {type(rule).__name__}")
        if not (op_type or node or scope):
            raise InvalidOverrideError(f"the override with rule {rule!r} selects nothing; give op_type, node or scope")
        values = (rule, op_type, node, scope, params, label, optional)
        for field, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, field, value)

    def message(self) -> override_pb2.Override:
        """The message."""
        params = dict(self.params or {})
        message = override_pb2.Override(
            selector=override_pb2.Selector(op_type=self.op_type or "", node=self.node or "", scope=self.scope or ""),
            label=self.label or "",
            optional=self.optional,
        )
        if isinstance(self.rule, str):
            message.rule = self.rule
        else:
            message.definition.CopyFrom(self.rule.definition(params))
        for name, value in params.items():
            message.params[name].CopyFrom(param_value(name, value))
        return message


Overrides: TypeAlias = "Mapping[str, OverrideValue] | Sequence[Override]"


def rule_and_params(value: OverrideValue, where: str) -> tuple[RuleLike, Params | None]:
    """The parts of `rule` or `(rule, params)`. `where` names the entry in errors."""
    if isinstance(value, str | Rule):
        return value, None
    pair: Any = value
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str | Rule):
        rule, params = pair
        if isinstance(params, Mapping):
            return rule, params
        raise InvalidOverrideError(f"{where}: params are a dict by name, not {type(params).__name__}")
    raise InvalidOverrideError(
        f"{where}: expected a rule's name, a gr.Rule, or a tuple of one and its params; got {value!r}"
    )


def override_messages(overrides: Overrides | None) -> list[override_pb2.Override]:
    """The messages of a dict by op type, or of a list of `Override`, in order. Raises `InvalidOverrideError`."""
    if overrides is None:
        return []
    if isinstance(overrides, Override):
        return [overrides.message()]
    if isinstance(overrides, Mapping):
        messages = []
        for op_type, value in overrides.items():
            if not isinstance(op_type, str):
                raise InvalidOverrideError(f"the keys of an override map are op types, not {type(op_type).__name__}")
            rule, params = rule_and_params(value, f"overrides[{op_type!r}]")
            messages.append(Override(rule, op_type=op_type, params=params).message())
        return messages
    messages = []
    for index, override in enumerate(overrides):
        if not isinstance(override, Override):
            raise InvalidOverrideError(f"overrides[{index}] is {type(override).__name__}; a list holds gr.Override")
        messages.append(override.message())
    return messages


def param_value(name: str, value: Any) -> rule_pb2.ParamValue:
    """A param's value: a number, or what becomes a tensor of floats, ints or bools. Raises `InvalidParamError`."""
    if isinstance(value, bool | int | float):
        return rule_pb2.ParamValue(number=value)
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "SUOT":
            return rule_pb2.ParamValue(tensor=_tensors.to_message(array))
    except ValueError as cause:
        raise InvalidParamError(f"param {name!r}: {cause}") from None
    raise InvalidParamError(f"param {name!r} is a number or a tensor of numbers, not {value!r}")
