"""Chooses the op, further inputs and range with which a rule is run, and runs it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule._builder.rules import EXPRESSION, Rule
from gradrule._results.rule_infos import RuleInfo
from gradrule.common.tensor_codec import Array
from gradrule.errors import MissingFeedError, UnsupportedError

if TYPE_CHECKING:
    from gradrule import Client

STEP = "@step"
DEFAULT_RANGE = (-3.0, 3.0)

_VARIABLE = re.compile(r"\b(x|y|default)\d*\b")
_FURTHER_INPUT = re.compile(r"\bx([1-9]\d*)\b")
_REASONS_WITHOUT_SETUP: Mapping[str, str] = {
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


class NoSetupError(UnsupportedError):
    """Reports that a rule cannot be run as a function of one number, and why."""


@dataclass(frozen=True)
class Setup:
    """Describes how a rule is run as a function of one number.

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


def _plain(*op_types: str, low: float = DEFAULT_RANGE[0], high: float = DEFAULT_RANGE[1]) -> dict[str, Setup]:
    return {name: Setup(name, f"{name}(x)", interval=(low, high)) for name in op_types}


SETUPS: Mapping[str, Setup] = {
    **_plain(
        "Sign", "Round", "Rint", "Floor", "Ceil", "Abs", "Identity", "Relu", "LeakyRelu", "Elu", "Selu", "Softsign"
    ),
    **_plain("Exp", "Square", "Sin", "Cos", "Neg", "Erf", "Expm1", "Sinh", "Cosh"),
    **_plain("Sigmoid", "Tanh", "Softplus", low=-4.0, high=4.0),
    **_plain("Relu6", low=-3.0, high=9.0),
    **_plain("Log", "Rsqrt", "Reciprocal", "Inv", low=0.05, high=4.0),
    **_plain("Sqrt", low=0.0, high=4.0),
    **_plain("Log1p", low=-0.9, high=4.0),
    "Minimum": Setup("Minimum", "Minimum(x, 1)", (1.0,)),
    "Maximum": Setup("Maximum", "Maximum(x, -1)", (-1.0,)),
    "ClipByValue": Setup("ClipByValue", "ClipByValue(x, -1, 1)", (-1.0, 1.0)),
    "RealDiv": Setup("RealDiv", "x / 2", (2.0,)),
    "DivNoNan": Setup("DivNoNan", "DivNoNan(x, 2)", (2.0,)),
    "FakeQuantWithMinMaxVars": Setup("FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVars(x, -1, 1)", (-1.0, 1.0)),
    STEP: Setup(None, "x > 0", is_step=True),
    "@activation": Setup("Relu", "Relu(x)"),
}
"""Ops that map one number to one number; groups are represented by one of their ops."""

_REGION_SETUPS: Mapping[str, Setup] = {
    "safe_norm": Setup(forward="norm([x, 0])", y="norm(x, axis=-1)"),
    "lsq": Setup(others=(0.5,)),
}
"""Setups of rules for regions, which need more than `x`."""


def setup_of(rule: RuleInfo | Rule, op_type: str | None, others: Sequence[Any] | None = None) -> Setup:
    """Returns the setup of a rule, with the given op type and further inputs, if any. Raises `NoSetupError`."""
    setup = _setup_for(rule, op_type)
    if others:
        words = ", ".join(str(value) for value in others)
        setup = replace(setup, others=tuple(others), forward=f"{setup.op_type}(x, {words})" if setup.op_type else "")
    formula = _expression(rule)
    further = _FURTHER_INPUT.findall(formula)
    if further and not setup.others:
        names = " ".join(f"--feed x{index}=…" for index in sorted(set(further)))
        raise NoSetupError(
            f"the rule has several inputs: give the others (others=(…), {names}), or an op (op_type=…, --op-type)"
        )
    return setup


def params_with_examples(rule: RuleInfo | Rule, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given params, and example values for missing required ones. Raises `NoSetupError`."""
    if isinstance(rule, Rule):
        return dict(given)
    found = dict(given)
    for info in rule.param_infos:
        if info.default is None and info.name not in found:
            if rule.kind != "builtin" or info.name not in EXAMPLE_PARAMS:
                raise NoSetupError(
                    f"the param {info.name!r} has no default: give its value (params=…, --param {info.name}=…)"
                )
            found[info.name] = EXAMPLE_PARAMS[info.name]
    return found


def examples_used(rule: RuleInfo | Rule, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the params of `params_with_examples` that are example values."""
    return {name: value for name, value in params_with_examples(rule, given).items() if name not in given}


def _setup_for(rule: RuleInfo | Rule, op_type: str | None) -> Setup:
    if op_type is not None:
        setup = SETUPS.get(op_type)
        if setup is None and op_type.startswith("@"):
            raise NoSetupError(f"no op of the group {op_type} maps one number to one number")
        return setup or Setup(op_type, f"{op_type}(x)")
    if isinstance(rule, RuleInfo):
        if rule.kind == "op":
            return SETUPS.get(rule.name) or Setup(rule.name, f"{rule.name}(x)")
        for name in rule.op_types:
            if name in SETUPS:
                setup = SETUPS[name]
                return replace(setup, over_dy=name == "Identity" and _needs_only_dy(rule))
        if rule.op_types:
            why = _REASONS_WITHOUT_SETUP.get(rule.op_types[0], f"it is for {rule.op_types[0]}")
            raise NoSetupError(f"it is no function of one number: {why}")
        if rule.kind == "builtin" and rule.name in _REGION_SETUPS:
            return _REGION_SETUPS[rule.name]
    return Setup(over_dy=_needs_only_dy(rule))


def _needs_only_dy(rule: RuleInfo | Rule) -> bool:
    formula = _expression(rule)
    return bool(formula) and not _VARIABLE.search(formula)


def _expression(rule: RuleInfo | Rule) -> str:
    return rule.expression or ""


@dataclass(frozen=True)
class RuleRunner:
    """Runs a rule and its forward function on tensors.

    Attributes:
        client: Client of the server that runs the rule.
        rule: The rule.
        setup: Op and further inputs of the rule.
        params: Values of the rule's params.
        of: Op type or `expr:FORMULA` to compare the rule with, or None.
    """

    client: Client
    rule: RuleInfo | Rule
    setup: Setup
    params: Mapping[str, Any]
    of: str | None = None

    @property
    def op_type(self) -> str | None:
        """Returns the rule's op; None for a formula, whose values are the rule's `y`."""
        return None if self._formula is not None else self.setup.op_type

    @property
    def has_forward(self) -> bool:
        """Returns whether the forward function is known."""
        return self._formula is not None or self.setup.op_type is not None or self.setup.is_step

    @property
    def _formula(self) -> str | None:
        return self.of.removeprefix(EXPRESSION) if self.of is not None and self.of.startswith(EXPRESSION) else None

    def gradients(
        self, x: Array, dy: Array | None = None, others: Mapping[str, Any] | None = None
    ) -> list[Array | None]:
        """Returns one gradient per input."""
        y = self.forward(x) if self.op_type is None and self.has_forward else None
        try:
            sampled = self.client.sample_rule(
                self.rule.name if isinstance(self.rule, RuleInfo) else self.rule,
                x=x,
                y=y,
                dy=dy,
                params=dict(self.params) or None,
                op_type=self.op_type,
                **self._further(x, others),
            )
        except MissingFeedError as refusal:
            raise NoSetupError(
                f"{refusal.message} (an op: op_type=… or of=…, --op-type or --of; further inputs: others=(…), --feed)"
            ) from None
        return list(sampled.gradients.values())

    def gradient(self, x: Array, dy: Array | None = None) -> Array:
        """Returns the gradient of the first input; zeros if it has none."""
        found = self.gradients(x, dy)[0]
        return np.zeros_like(x) if found is None else found

    def forward(self, x: Array, others: Mapping[str, Any] | None = None) -> Array:
        """Computes the forward function: the op, the step or the formula."""
        import gradrule as gr

        further = self._further(x, others)
        if self._formula is not None:
            # The formula runs as a rule, whose gradient is the value.
            rule = gr.Rule(f"ignore_dy({self._formula})")
            value = self.client.sample_rule(rule, x=x, **further).gradients["dx"]
            assert value is not None
            return value
        if self.setup.is_step:
            return (x > 0).astype(x.dtype)
        assert self.setup.op_type is not None
        graph = gr.Graph()
        feeds: dict[Any, Any] = {"x": x, **further}
        handles = [graph.placeholder(name, value.dtype, value.shape) for name, value in feeds.items()]
        outputs = graph.op(self.setup.op_type, *handles, name="forward", **self.setup.attrs)
        first = outputs if not isinstance(outputs, tuple) else outputs[0]
        return self.client.evaluate(graph, feeds, fetches=[first]).outputs[first]

    def _further(self, x: Array, others: Mapping[str, Any] | None) -> dict[str, Any]:
        return {name: np.asarray(value, x.dtype) for name, value in (others or self.setup.inputs).items()}
