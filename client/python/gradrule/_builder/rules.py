"""Defines rules that a request carries, and converts rules and params to messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gradrule._builder.notebook_text import html_block, html_line, html_table, short_repr
from gradrule.common import tensor_codec
from gradrule.errors import InvalidOverrideError, InvalidParamError, InvalidRuleError
from gradrule.v1 import rule_pb2

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradrule import Client
    from gradrule._builder.graph_sources import GraphLike

Params: TypeAlias = "Mapping[str, Any]"


class Rule:
    """Defines a rule that is not registered; it can be used wherever a rule's name can.

    Args:
        expression: a formula over `x`, `y`, `dy`, `default` and the params.
        graph: instead of an expression: a graph with placeholders of those names and nodes `dx`, `dx1`, …. Each of
            these depends on `dy` or `default`, is zeros, or has the attribute `_ignore_dy=True`.
        params: declared params: a dict of name to default (None: each use must give a value), or a list of names.
        gradient: the rule for the gradient of this rule, used for second derivatives. Its `x` are this rule's inputs
            (the op's `x`, then its `y`, then `dy`), its `y` are this rule's gradients; params of the same name share
            one value. None: the rule itself is differentiated.

    Raises:
        InvalidRuleError: not exactly one of `expression` and `graph` is given, or one has a wrong type.
    """

    __slots__ = ("expression", "gradient", "graph", "params")

    def __init__(
        self,
        expression: str | None = None,
        *,
        graph: GraphLike | None = None,
        params: Params | Iterable[str] | None = None,
        gradient: Rule | None = None,
    ) -> None:
        if (expression is None) == (graph is None):
            raise InvalidRuleError("a rule is either an expression or a graph")
        if expression is not None and not isinstance(expression, str):
            raise InvalidRuleError(f"an expression is a string, not {type(expression).__name__}")
        if gradient is not None and not isinstance(gradient, Rule):
            raise InvalidRuleError(f"the gradient of a rule is a gr.Rule, not {gradient!r}")
        self.expression = expression
        self.graph = graph
        self.gradient = gradient
        if params is None or isinstance(params, Mapping):
            self.params: dict[str, Any] | None = None if params is None else dict(params)
        else:
            self.params = dict.fromkeys(params)

    def definition(self, used_params: Iterable[str] = ()) -> rule_pb2.RuleDefinition:
        """Returns the rule as a message.

        Args:
            used_params: Names of the params that a use of the rule gives; declared if the rule declares none.

        Raises:
            InvalidParamError: A default is not a number or a tensor of numbers.
        """
        from gradrule._builder.graph_sources import graph_source

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
        if self.gradient is not None:
            definition.gradient.CopyFrom(self.gradient.definition())
        return definition

    def __repr__(self) -> str:
        what = repr(self.expression) if self.expression is not None else "graph=…"
        params = f", params={self.params!r}" if self.params else ""
        gradient = "" if self.gradient is None else f", gradient={self.gradient!r}"
        return short_repr(f"Rule({what}{params}{gradient})")

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [("dx", self.expression if self.graph is None else "a graph")]
        rows += [
            (f"param {name}", "required" if default is None else default)
            for name, default in (self.params or {}).items()
        ]
        if self.gradient is not None:
            rows.append(("its gradient", repr(self.gradient)))
        return html_block(html_table("Rule", ("", ""), rows), html_line("plot(client) draws the curve"))

    def plot(self, client: Client, *, ax: Axes | None = None, **options: Any) -> Axes:
        """Draws the rule's curve, see `gradrule.viz.plot_rule`.

        Args:
            client: The synchronous client of the server that runs the rule.
            ax: Axes to draw into.
            **options: Further arguments of `plot_rule`: `op_type`, `params`, `interval`, …

        Raises:
            UnsupportedError: The rule is no function of one number, or Matplotlib is not installed.
            GradruleError: As in `client.sample_rule`.
        """
        import gradrule as gr

        return gr.viz.plot_rule(client, self, ax=ax, **options)


RuleLike: TypeAlias = "str | Rule"
"""A rule's name, a formula that cannot be a name, or a `Rule`."""
OverrideValue: TypeAlias = "RuleLike | tuple[RuleLike, Params]"


EXPRESSION = "expr:"
"""Prefix of a formula where text may also be a name."""
# Names of registered rules and of op types.
_NAME = re.compile(r"((rules|builtin)/)?[A-Za-z_][A-Za-z0-9_.>-]*")


def named_or_rule(rule: RuleLike) -> RuleLike:
    """Returns text that cannot be a name as a `Rule` with that formula, and everything else unchanged.

    So `"dy * x"` is a formula, and `"dy"` and `"ste"` are names.
    """
    return Rule(rule) if isinstance(rule, str) and rule.strip() and not _NAME.fullmatch(rule) else rule


def rule_and_params(value: OverrideValue, where: str) -> tuple[RuleLike, Params | None]:
    """Splits `rule` or `(rule, params)`; `where` starts error messages. Raises `InvalidOverrideError`."""
    if isinstance(value, str | Rule):
        return named_or_rule(value), None
    pair: Any = value
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str | Rule):
        rule, params = pair
        if isinstance(params, Mapping):
            return named_or_rule(rule), params
        raise InvalidOverrideError(f"{where}: params are a dict by name, not {type(params).__name__}")
    raise InvalidOverrideError(
        f"{where}: expected a rule's name, a formula, a gr.Rule, or a tuple of one and its params; got {value!r}"
    )


def param_value(name: str, value: Any) -> rule_pb2.ParamValue:
    """Converts a number, or an array of floats, ints or bools, to a message. Raises `InvalidParamError`."""
    if isinstance(value, bool | int | float):
        return rule_pb2.ParamValue(number=value)
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "SUOT":
            return rule_pb2.ParamValue(tensor=tensor_codec.to_message(array))
    except ValueError as cause:
        raise InvalidParamError(f"param {name!r}: {cause}") from None
    raise InvalidParamError(f"param {name!r} is a number or a tensor of numbers, not {value!r}")
