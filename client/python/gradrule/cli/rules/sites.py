"""Chooses the op, further inputs and range with which a rule is drawn and checked.

A builtin rule lists op types; the first that maps one number to one number is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradrule._builder.rules import Rule
from gradrule._results.rule_infos import RuleInfo
from gradrule.cli.failures import CommandError

STEP = "@step"
DEFAULT_RANGE = (-3.0, 3.0)

_VARIABLE = re.compile(r"\b(x|y|default)\d*\b")
_FURTHER_INPUT = re.compile(r"\bx([1-9]\d*)\b")


class NoSiteError(CommandError):
    """Reports that a rule is not a function of one number, and why."""


@dataclass(frozen=True)
class Site:
    """Describes where a rule is drawn and checked.

    Attributes:
        op_type: Op of the rule; None: the rule runs without an op.
        forward: Text of the forward function.
        others: Values of further inputs, `x1` first.
        interval: Range of x.
        is_step: Whether the forward function is the step x > 0.
        over_dy: Whether the rule depends on dy only.
        y: Expression of the output, if the rule runs without an op and needs it.
        attrs: Attributes of the op.
    """

    op_type: str | None = None
    forward: str = ""
    others: tuple[Any, ...] = ()
    interval: tuple[float, float] = DEFAULT_RANGE
    is_step: bool = False
    over_dy: bool = False
    y: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the further inputs by variable."""
        return {f"x{index}": value for index, value in enumerate(self.others, start=1)}


def _plain(*op_types: str, low: float = DEFAULT_RANGE[0], high: float = DEFAULT_RANGE[1]) -> dict[str, Site]:
    return {name: Site(name, f"{name}(x)", interval=(low, high)) for name in op_types}


SITES: Mapping[str, Site] = {
    **_plain(
        "Sign", "Round", "Rint", "Floor", "Ceil", "Abs", "Identity", "Relu", "LeakyRelu", "Elu", "Selu", "Softsign"
    ),
    **_plain("Exp", "Square", "Sin", "Cos", "Neg", "Erf", "Expm1", "Sinh", "Cosh"),
    **_plain("Sigmoid", "Tanh", "Softplus", low=-4.0, high=4.0),
    **_plain("Relu6", low=-3.0, high=9.0),
    **_plain("Log", "Rsqrt", "Reciprocal", "Inv", low=0.05, high=4.0),
    **_plain("Sqrt", low=0.0, high=4.0),
    **_plain("Log1p", low=-0.9, high=4.0),
    "Minimum": Site("Minimum", "Minimum(x, 1)", (1.0,)),
    "Maximum": Site("Maximum", "Maximum(x, -1)", (-1.0,)),
    "ClipByValue": Site("ClipByValue", "ClipByValue(x, -1, 1)", (-1.0, 1.0)),
    "RealDiv": Site("RealDiv", "x / 2", (2.0,)),
    "DivNoNan": Site("DivNoNan", "DivNoNan(x, 2)", (2.0,)),
    "FakeQuantWithMinMaxVars": Site("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVars(x, -1, 1)", (-1.0, 1.0)),
    STEP: Site(None, "x > 0", is_step=True),
    "@activation": Site("Relu", "Relu(x)"),
}
"""Ops that map one number to one number; groups are represented by one of their ops."""

_REGIONS: Mapping[str, Site] = {
    "safe_norm": Site(forward="norm([x, 0])", y="norm(x, axis=-1)"),
    "lsq": Site(others=(0.5,)),
}
"""Sites of rules for regions, which need more than `x`."""

_WHY_NOT: Mapping[str, str] = {
    "@linear": "it is for layers with weights",
    "@sum": "it distributes dy among the inputs of a sum or a pool",
    "@pool": "it distributes dy among the inputs of a sum or a pool",
    "MaxPool": "a pool reads several numbers at once",
    "SelfAdjointEigV2": "its input is a matrix",
}

EXAMPLE_PARAMS: Mapping[str, Any] = {
    "seed": 0, "step": 0, "lo": -1.0, "hi": 1.0, "low": -1.0, "high": 1.0, "factor": 0.5, "mask": 1.0, "levels": 2.0,
    "qn": -2.0, "qp": 1.0,
}  # fmt: skip
"""Example values for params of builtin rules that have no default."""


def site_of(rule: RuleInfo | Rule, op_type: str | None, others: Sequence[Any] | None = None) -> Site:
    """Returns the site of a rule, with the given op type and further inputs, if any. Raises `NoSiteError`."""
    site = _chosen(rule, op_type)
    if others:
        words = ", ".join(str(value) for value in others)
        site = replace(site, others=tuple(others), forward=f"{site.op_type}(x, {words})" if site.op_type else "")
    formula = _expression(rule)
    further = _FURTHER_INPUT.findall(formula)
    if further and not site.others:
        names = " ".join(f"--feed x{index}=…" for index in sorted(set(further)))
        raise NoSiteError(f"the rule has several inputs: give the others with {names}, or an op with --op-type")
    return site


def params_of(rule: RuleInfo | Rule, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given params, and example values for missing required ones. Raises `NoSiteError`."""
    if isinstance(rule, Rule):
        return dict(given)
    found = dict(given)
    for info in rule.param_infos:
        if info.default is None and info.name not in found:
            if rule.kind != "builtin" or info.name not in EXAMPLE_PARAMS:
                raise NoSiteError(f"the param {info.name!r} has no default: give it with --param {info.name}=…")
            found[info.name] = EXAMPLE_PARAMS[info.name]
    return found


def examples_used(rule: RuleInfo | Rule, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the params of `params_of` that are example values."""
    return {name: value for name, value in params_of(rule, given).items() if name not in given}


def _chosen(rule: RuleInfo | Rule, op_type: str | None) -> Site:
    if op_type is not None:
        site = SITES.get(op_type)
        if site is None and op_type.startswith("@"):
            raise NoSiteError(f"no op of the group {op_type} makes one number of one number")
        return site or Site(op_type, f"{op_type}(x)")
    if isinstance(rule, RuleInfo):
        if rule.kind == "op":
            return SITES.get(rule.name) or Site(rule.name, f"{rule.name}(x)")
        for name in rule.op_types:
            if name in SITES:
                site = SITES[name]
                return replace(site, over_dy=name == "Identity" and _needs_only_dy(rule))
        if rule.op_types:
            raise NoSiteError(
                f"it is no function of one number: {_WHY_NOT.get(rule.op_types[0], f'it is for {rule.op_types[0]}')}"
            )
        if rule.kind == "builtin" and rule.name in _REGIONS:
            return _REGIONS[rule.name]
    return Site(over_dy=_needs_only_dy(rule))


def _needs_only_dy(rule: RuleInfo | Rule) -> bool:
    formula = _expression(rule)
    return bool(formula) and not _VARIABLE.search(formula)


def _expression(rule: RuleInfo | Rule) -> str:
    return rule.expression or ""
