"""Compares a rule with central finite differences of its forward function, number by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradrule.common.tensor_codec import Array
from gradrule.viz._setups import RuleRunner

POINTS = 241
_STEP = 1e-4
_TOLERANCE = 1e-5
# To find kinks, intervals are halved until they have this width, which is also the step of one-sided slopes.
_NARROW_WIDTH = 1e-7
_KINK = 1e-3
_JUMP = 1e-4
_SNAP = 2e-7
_SEED = 0

Function = Callable[[Array], Array]


@dataclass(frozen=True)
class Kink:
    """Describes a point where the slopes on both sides differ.

    Attributes:
        x: Position.
        left: Slope on the left side.
        right: Slope on the right side.
        is_jump: Whether the values differ too.
        rule: The rule's gradient there for dy = 1.
    """

    x: float
    left: float
    right: float
    is_jump: bool
    rule: float


@dataclass(frozen=True)
class InputClaim:
    """Holds the comparison of one input's gradient with finite differences.

    Attributes:
        name: Variable of the input.
        compared: Number of compared points.
        skipped: Number of points at kinks or with values that are not finite.
        largest: Largest absolute difference.
        at: Value of the input at the largest difference, relative to the allowed one.
        dy: Upstream gradient there; None if the gradient is a sum over points.
        rule: The rule's gradient there.
        expected: The finite difference there.
        holds: Whether all differences are within the tolerance.
    """

    name: str
    compared: int
    skipped: int
    largest: float
    at: float | None
    dy: float | None
    rule: float
    expected: float
    holds: bool


def find_kinks(runner: RuleRunner, low: float, high: float) -> list[Kink]:
    """Finds all kinks and jumps of the forward function within the range, in order."""

    def forward(x: Array) -> Array:
        return np.asarray(runner.forward(x), np.float64)

    positions = _jump_positions(forward, np.linspace(low, high, POINTS))
    if not positions:
        return []
    x = np.array(positions)
    left = (forward(x - _NARROW_WIDTH) - forward(x - 2 * _NARROW_WIDTH)) / _NARROW_WIDTH
    right = (forward(x + 2 * _NARROW_WIDTH) - forward(x + _NARROW_WIDTH)) / _NARROW_WIDTH
    change = np.abs(forward(x + _NARROW_WIDTH) - forward(x - _NARROW_WIDTH))
    rule = runner.gradient(x, np.ones_like(x))
    return [
        Kink(position, float(a), float(b), bool(c > _JUMP), float(given))
        for position, a, b, c, given in zip(positions, left, right, change, rule, strict=True)
    ]


def compare(runner: RuleRunner, low: float, high: float, kinks: list[Kink]) -> list[InputClaim]:
    """Compares the first input at each point, and each further input summed over all points."""
    x = np.linspace(low, high, POINTS)
    rng = np.random.default_rng(_SEED)
    # Use dy of both signs, so that a rule that is right for only one sign fails.
    dy = rng.uniform(0.5, 1.5, x.shape) * rng.choice([-1.0, 1.0], x.shape)
    step = _STEP * np.maximum(1, np.abs(x))
    slope, error = _slopes(runner.forward, x, step)
    near = np.zeros(x.shape, bool)
    for kink in kinks:
        near |= np.abs(x - kink.x) < 2 * step
    given = runner.gradients(x, dy)
    first = np.zeros_like(x) if given[0] is None else np.asarray(given[0], np.float64)
    usable = ~near & np.isfinite(slope) & np.isfinite(error)
    expected = dy * slope
    difference = np.where(usable, np.abs(first - expected), 0.0)
    # A rule fails if its gradient is not finite but the slope is.
    difference[usable & ~np.isfinite(first)] = np.inf
    allowed = _TOLERANCE * np.maximum(1, np.abs(expected)) + np.abs(dy) * error
    excess = np.where(usable, difference / np.where(usable, allowed, 1.0), 0.0)
    worst = int(np.argmax(excess))
    claims = [
        InputClaim(
            "x", int(usable.sum()), int((~usable).sum()), float(difference.max(initial=0.0)), float(x[worst]),
            float(dy[worst]), float(first[worst]), float(expected[worst]), bool(excess.max(initial=0.0) <= 1),
        )
    ]  # fmt: skip
    masked_dy = np.where(usable, dy, 0.0)
    summed = runner.gradients(x, masked_dy)
    for index, name in enumerate(runner.setup.inputs, start=1):
        gradient = summed[index] if index < len(summed) else None
        if gradient is not None:
            claims.append(_compare_further_input(runner, name, x, masked_dy, float(np.sum(gradient))))
    return claims


def sample(runner: RuleRunner, low: float, high: float, kinks: list[Kink]) -> tuple[Array, Array, Array]:
    """Returns x, the rule's gradients for dy = 1, and finite differences, which are NaN next to kinks."""
    x = np.linspace(low, high, POINTS)
    step = _STEP * np.maximum(1, np.abs(x))
    slope, _ = _slopes(runner.forward, x, step)
    for kink in kinks:
        slope[np.abs(x - kink.x) < 2 * step] = np.nan
    return x, np.asarray(runner.gradient(x, np.ones_like(x)), np.float64), slope


def is_elementwise(runner: RuleRunner, low: float, high: float) -> bool:
    """Tests whether each element of gradient and forward depends only on the input's element at the same index."""
    x = np.linspace(low, high, 8)[1:7]
    other = x.copy()
    other[1::2] = low + 0.37 * (high - low)
    functions: list[Function] = [lambda at: runner.gradient(at, np.ones_like(at))]
    if runner.has_forward:
        functions.append(runner.forward)
    pairs = [(function(x), function(other)) for function in functions]
    return all(np.array_equal(one[::2], two[::2], equal_nan=True) for one, two in pairs)


def _compare_further_input(runner: RuleRunner, name: str, x: Array, dy: Array, given: float) -> InputClaim:
    value = float(runner.setup.inputs[name])
    step = _STEP * max(1.0, abs(value))

    def weighted(at: Array) -> Array:
        totals = [np.sum(dy * runner.forward(x, {**runner.setup.inputs, name: one})) for one in at]
        return np.array(totals)

    slope, error = _slopes(weighted, np.array([value]), np.array([step]))
    expected = float(slope[0])
    difference = abs(given - expected)
    allowed = _TOLERANCE * max(1.0, abs(expected), float(np.abs(dy).sum())) + float(error[0])
    return InputClaim(name, 1, 0, difference, value, None, given, expected, difference <= allowed)


def _slopes(function: Function, x: Array, step: Array) -> tuple[Array, Array]:
    """Returns central differences, extrapolated from a step and half of it, and their error estimate."""
    positions = np.concatenate([x + step, x - step, x + step / 2, x - step / 2])
    values = np.asarray(function(positions), np.float64).reshape(4, -1)
    with np.errstate(invalid="ignore"):
        wide = (values[0] - values[1]) / (2 * step)
        narrow = (values[2] - values[3]) / step
        slope = (4 * narrow - wide) / 3
        return slope, np.abs(slope - narrow)


def _jump_positions(function: Function, grid: Array) -> list[float]:
    """Finds where slopes or values jump, by halving each interval towards its larger change."""
    a, b = grid[:-1].copy(), grid[1:].copy()
    while float((b - a).max()) > _NARROW_WIDTH:
        middle = (a + b) / 2
        first, second = _changes(function, a, middle), _changes(function, middle, b)
        right = second > first
        a, b = np.where(right, middle, a), np.where(right, b, middle)
    slope_a, slope_b, value_a, value_b = _ends(function, a, b)
    with np.errstate(invalid="ignore"):
        scale = np.maximum(1, np.maximum(np.abs(slope_a), np.abs(slope_b)))
        found = (np.abs(slope_b - slope_a) > _KINK * scale) | (np.abs(value_b - value_a) > _JUMP)
    positions: list[float] = []
    for position in ((a + b) / 2)[found]:
        rounded = round(float(position), 4)
        exact = rounded if abs(rounded - position) < _SNAP else float(position)
        if not positions or exact - positions[-1] > 10 * _NARROW_WIDTH:
            positions.append(exact + 0.0)
    return positions


def _changes(function: Function, a: Array, b: Array) -> Array:
    slope_a, slope_b, value_a, value_b = _ends(function, a, b)
    with np.errstate(invalid="ignore"):
        straight = (slope_a + slope_b) / 2 * (b - a)
        change = np.abs(value_b - value_a - straight) + np.abs(slope_b - slope_a) * (b - a)
    return np.asarray(np.nan_to_num(change, nan=0.0))


def _ends(function: Function, a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """Returns the outward slopes and the values at an interval's ends."""
    values = np.asarray(function(np.concatenate([a - _NARROW_WIDTH, a, b, b + _NARROW_WIDTH])), np.float64).reshape(
        4, -1
    )
    with np.errstate(invalid="ignore"):
        return (values[1] - values[0]) / _NARROW_WIDTH, (values[3] - values[2]) / _NARROW_WIDTH, values[1], values[2]
