"""Tests how a rule handles element types, shapes, non-finite numbers and batches."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gradrule._results.rule_infos import RuleInfo
from gradrule.common.tensor_codec import Array
from gradrule.errors import GradruleError
from gradrule.viz._setups import RuleRunner

_DTYPES: tuple[type, ...] = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
_SHAPES = ((), (0,), (3,), (2, 3), (2, 2, 3), (0, 3))
_SEED = 0


@dataclass(frozen=True)
class TypeBehaviour:
    """Compares the gradient in one element type with the gradient in float64.

    Attributes:
        dtype: Element type of x.
        gives: Element type of the gradient, or the reason why the server refused x.
        difference: Largest difference from float64, relative to the largest element; None if it cannot be computed.
        is_finite: Whether all elements are finite; None if the server refused x.
        holds: Whether the gradient has the element type of x.
    """

    dtype: str
    gives: str
    difference: float | None
    is_finite: bool | None
    holds: bool


@dataclass(frozen=True)
class ShapeBehaviour:
    """Describes the result for one shape.

    Attributes:
        shape: Shape of x.
        gives: Shape of the gradient, or the reason why the server refused x.
        holds: Whether the gradient has the shape of x.
    """

    shape: tuple[int, ...]
    gives: str
    holds: bool


@dataclass(frozen=True)
class SpecialValue:
    """Holds the gradient for one x and dy, in float32."""

    x: float
    dy: float
    dx: float


@dataclass(frozen=True)
class SampleBehaviour:
    """Compares the registry's `per_sample` with a test.

    Attributes:
        claimed: `per_sample` of the registry; None: unknown.
        found: Whether the gradients of examples were independent of each other.
        holds: Whether the test does not contradict the registry.
    """

    claimed: bool | None
    found: bool
    holds: bool


def check_types(runner: RuleRunner, low: float, high: float) -> list[TypeBehaviour]:
    """Runs the rule in four floating types on values that the narrowest type represents exactly."""
    # Rules often have kinks at round numbers.
    xs = low + (high - low) * np.linspace(0.0317, 0.9713, 13)
    found = []
    for dtype in _DTYPES:
        name = np.dtype(dtype).name
        x: Array = xs.astype(dtype)
        try:
            gradient = runner.gradient(x, np.ones_like(x))
        except GradruleError as refusal:
            found.append(TypeBehaviour(name, _refusal_text(refusal), None, None, True))
            continue
        try:
            wide = np.asarray(runner.gradient(x.astype(np.float64), np.ones(x.shape)), np.float64)
        except GradruleError:
            wide = None
        narrow = np.asarray(gradient, np.float64)
        is_finite = bool(np.isfinite(narrow).all())
        difference = None
        if wide is not None and is_finite:
            size = float(np.abs(wide).max(initial=0.0))
            difference = float(np.abs(narrow - wide).max(initial=0.0)) / (size or 1.0)
        gives = gradient.dtype.name
        found.append(TypeBehaviour(name, gives, difference, is_finite, gives == name))
    return found


def check_shapes(runner: RuleRunner, low: float, high: float) -> list[ShapeBehaviour]:
    """Runs the rule on shapes of rank 0 to 3, and on an empty one."""
    rng = np.random.default_rng(_SEED)
    found = []
    for shape in _SHAPES:
        x = rng.uniform(low, high, shape).astype(np.float32)
        try:
            gradient_shape = runner.gradient(x, np.ones_like(x)).shape
        except GradruleError as refusal:
            found.append(ShapeBehaviour(shape, _refusal_text(refusal), True))
        else:
            found.append(ShapeBehaviour(shape, str(list(gradient_shape)), gradient_shape == shape))
    return found


def sample_special_values(runner: RuleRunner, low: float, high: float) -> list[SpecialValue]:
    """Runs the rule on NaN, infinities, zeros and extreme float32 values, first as x (dy = 1), then as dy."""
    info = np.finfo(np.float32)
    ends = (np.nan, np.inf, -np.inf, 0.0, -0.0, float(info.max), -float(info.max), float(info.tiny))
    middle = low + 0.6 * (high - low)
    pairs = [(value, 1.0) for value in ends] + [(middle, value) for value in (np.nan, np.inf, -np.inf, 0.0)]
    found = []
    for x, dy in pairs:
        gradient = runner.gradient(np.array([x], np.float32), np.array([dy], np.float32))
        found.append(SpecialValue(x, dy, float(gradient[0])))
    return found


def check_samples(runner: RuleRunner, low: float, high: float) -> SampleBehaviour | None:
    """Tests whether an example's gradient does not depend on the other examples; None if the rule refuses batches."""
    claimed = runner.rule.per_sample if isinstance(runner.rule, RuleInfo) else None
    rng = np.random.default_rng(_SEED)
    x, dy = rng.uniform(low, high, (2, 5)).astype(np.float32), rng.normal(size=(2, 5)).astype(np.float32)
    other_x, other_dy = x.copy(), dy.copy()
    other_x[1], other_dy[1] = x[0] / 2 + low / 3, 4 * dy[1] + 1
    try:
        first, second = runner.gradient(x, dy), runner.gradient(other_x, other_dy)
    except GradruleError:
        return None
    independent = _equal(first[0], second[0])
    return SampleBehaviour(claimed, independent, independent or claimed is not True)


def _equal(first: Array, second: Array) -> bool:
    return bool(np.array_equal(first, second, equal_nan=True))


def _refusal_text(refusal: GradruleError) -> str:
    return f"refused: {refusal.reason}"
