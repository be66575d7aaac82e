"""Computes a rule's curve: values of the op and of the gradient, from a server's `sample_rule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from gradrule._builder.rules import Rule
from gradrule._results.rule_infos import RuleInfo
from gradrule.common.tensor_codec import Array
from gradrule.errors import MissingFeedError
from gradrule.viz._rule_text import number_text
from gradrule.viz._setups import NoSetupError, Setup, examples_used, params_with_examples, setup_of

if TYPE_CHECKING:
    from gradrule import Client

LineRole: TypeAlias = Literal["forward", "gradient", "opposite"]
Axis: TypeAlias = Literal["x", "dy"]

POINTS = 241
# Number of points if each point needs its own call.
_FEW_POINTS = 121


@dataclass(frozen=True)
class Line:
    """Holds one line of a curve.

    Attributes:
        label: Text of the legend.
        values: One value for each x.
        role: `forward` (the op), `gradient`, or `opposite` (the gradient for -dy).
    """

    label: str
    values: Array
    role: LineRole = "gradient"


@dataclass(frozen=True)
class Curve:
    """Holds the lines of a rule.

    Attributes:
        title: Name and params of the rule.
        axis: The horizontal axis: `x`, or `dy` if the rule depends on dy only.
        x: Values on the horizontal axis.
        lines: The op's line first, if there is an op, then the gradients.
        notes: Example values that were used for params, and values of further inputs.
    """

    title: str
    axis: Axis
    x: Array
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def curve(
    client: Client,
    rule: RuleInfo | Rule,
    *,
    op_type: str | None = None,
    others: tuple[Any, ...] = (),
    params: Mapping[str, Any] | None = None,
    interval: tuple[float, float] | None = None,
    dy: float = 1.0,
    over: Axis | None = None,
) -> Curve:
    """Computes the curve of a rule. Raises `NoSetupError` if it is not a function of one number."""
    given = dict(params or {})
    setup = setup_of(rule, op_type, others)
    values = params_with_examples(rule, given)
    sampler = Sampler(client, rule, setup, values)
    over_dy = setup.over_dy if over is None else over == "dy"
    low, high = interval or setup.interval
    x = np.linspace(low, high, POINTS if sampler.is_per_sample else _FEW_POINTS)
    notes = _notes(rule, setup, given, sampler)
    title = _title(rule, values)
    if over_dy:
        _, gradient = sampler.at(x, x)
        return Curve(title, "dy", x, (Line("dx", gradient),), notes)
    forward, gradient = sampler.at(x, np.full_like(x, dy))
    _, opposite = sampler.at(x, np.full_like(x, -dy))
    lines = [] if forward is None else [Line(setup.forward, forward, "forward")]
    lines.append(Line(f"dx, dy = {dy:g}", gradient))
    if not np.allclose(opposite, -gradient, rtol=1e-4, atol=1e-6, equal_nan=True):
        lines.append(Line(f"dx, dy = {-dy:g}", opposite, "opposite"))
    return Curve(title, "x", x, tuple(lines), notes)


class Sampler:
    """Runs a rule on many numbers, each as its own input.

    A number v is the first element of a tensor [v, 0], whose second element has an upstream gradient of 0: rules that
    reduce over a sample or tensor need more than one element. If samples may depend on each other, each number needs
    its own call.
    """

    def __init__(self, client: Client, rule: RuleInfo | Rule, setup: Setup, params: Mapping[str, Any]) -> None:
        self._client = client
        self._rule = rule.name if isinstance(rule, RuleInfo) else rule
        self._site = setup
        self._params = dict(params)
        self.is_per_sample = isinstance(rule, RuleInfo) and rule.per_sample is True

    def at(self, x: Array, dy: Array, dtype: str = "float32") -> tuple[Array | None, Array]:
        """Returns the op's output, if there is an op, and the gradient, for each x and dy."""
        xs, dys = (np.stack([part, np.zeros_like(part)], axis=1).astype(dtype) for part in (x, dy))
        if self.is_per_sample:
            return self._call(xs, dys)
        calls = [self._call(xs[index : index + 1], dys[index : index + 1]) for index in range(len(x))]
        forwards = [forward for forward, _ in calls if forward is not None]
        gradient = np.concatenate([gradient for _, gradient in calls]) if calls else x[:0]
        return (np.concatenate(forwards) if forwards else None), gradient

    def _call(self, x: Array, dy: Array) -> tuple[Array | None, Array]:
        setup = self._site
        values: dict[str, Any] = {name: np.asarray(value, x.dtype) for name, value in setup.inputs.items()}
        step = (x > 0).astype(x.dtype) if setup.is_step else None
        y = step
        if setup.y:
            import gradrule as gr

            y = self._client.sample_rule(gr.Rule(f"ignore_dy({setup.y} + 0 * x)"), x=x).gradients["dx"]
        try:
            sampled = self._client.sample_rule(
                self._rule, x=x, y=y, dy=dy, params=self._params or None, op_type=setup.op_type, **values
            )
        except MissingFeedError as refusal:
            raise NoSetupError(
                f"{refusal.message} (an op: op_type=…, --op-type; further inputs: others=(…), --feed)"
            ) from None
        gradient = sampled.gradients["dx"]
        if gradient is None:
            raise NoSetupError("the rule gives no gradient to the first input")
        forward = sampled.outputs.get("y") if y is None else y
        return (None if forward is None else _first(forward)), _first(gradient)


def _first(rows: Array) -> Array:
    return np.asarray(rows, np.float64).reshape(len(rows), -1)[:, 0]


def _title(rule: RuleInfo | Rule, params: Mapping[str, Any]) -> str:
    if isinstance(rule, Rule):
        name, shown = rule.expression or "", dict(params)
    else:
        name, shown = rule.name, {**rule.params, **params}
    values = ", ".join(f"{name}={number_text(value)}" for name, value in shown.items())
    return f"{name} ({values})" if values else name


def _notes(rule: RuleInfo | Rule, setup: Setup, given: Mapping[str, Any], sampler: Sampler) -> tuple[str, ...]:
    notes = []
    examples = examples_used(rule, given)
    if examples:
        values = ", ".join(f"{name}={number_text(value)}" for name, value in examples.items())
        notes.append(f"{values}: example values, because these params have no default")
    if setup.others and not setup.op_type:
        notes.append(", ".join(f"{name} = {number_text(value)}" for name, value in setup.inputs.items()))
    if not sampler.is_per_sample:
        notes.append("each number is in a tensor [x, 0] of its own; dy is 0 for the second element")
    return tuple(notes)
