"""Defines the case of an expression rule: its reference computation in NumPy, and its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Values = dict[str, Array]
Results = tuple[Array | None, ...]


@dataclass(frozen=True)
class Case:
    """Describes the expected gradients: `element` returns that of one element, `whole` one gradient per input.

    `whole` gets all values in float64, and the params with `dtype`, the name of the dtype in which noise is drawn.
    `primitive`: the function whose slope a surrogate is. `true`: the op itself, computed from its inputs, where the
    rule is its true gradient; `domain` moves any inputs into the domain of the op.
    `other`: values of params that differ from the defaults; params without a default must be here.
    `inputs`, `output`: shapes of the inputs and the output: that of x (`same`) or rank 0 (`scalar`).
    `mixing`: the same for inputs through which one sample affects another, where a rule is not per sample.
    `prepare` adjusts the values to each other.
    """

    element: Callable[[float, float, float, float, Any], float] | None = None
    primitive: Callable[[float, Any], float] | None = None
    whole: Callable[[Values, Any], Results] | None = None
    true: Callable[[Sequence[Array], Any], Array] | None = None
    domain: Callable[[Sequence[Array]], Sequence[Array]] = list
    other: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[str] = ("same",)
    output: str = "same"
    mixing: Sequence[str] | None = None
    prepare: Callable[[Values], None] | None = None
    least_rank: int = 0
    random: bool = False


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > 0 else math.exp(value) / (1 + math.exp(value))


def density(value: float, mean: float, deviation: float) -> float:
    return math.exp(-((value - mean) ** 2) / (2 * deviation**2)) / math.sqrt(2 * math.pi * deviation**2)


def sign(value: float) -> float:
    return float(value > 0) - float(value < 0)
