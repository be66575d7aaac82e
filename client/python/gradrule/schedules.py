"""Defines schedules of the learning rate: those of Keras, with Keras's names, settings and defaults.

A schedule is a function of the number of steps that a session has completed. It is evaluated in the client, in float64.
An optimizer takes any such function: `gr.optimizers.SGD(lambda step: 0.1 / (1 + step))`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from gradrule.errors import InvalidOptimizerError

__all__ = [
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
]


@dataclass(frozen=True)
class _Schedule:
    """Checks the settings of a schedule."""

    def __post_init__(self) -> None:
        """Raises InvalidOptimizerError for a setting that is out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("decay_steps", "first_decay_steps") and not value > 0:
                raise InvalidOptimizerError(f"{type(self).__name__}: {field.name} is {value!r}; expected a number > 0")
            if field.name == "t_mul" and not value >= 1:
                raise InvalidOptimizerError(f"{type(self).__name__}: t_mul is {value!r}; expected a number >= 1")


@dataclass(frozen=True)
class ExponentialDecay(_Schedule):
    """Returns initial_learning_rate · decay_rate^(step / decay_steps).

    Attributes:
        initial_learning_rate: Learning rate at step 0.
        decay_steps: Steps after which the learning rate has been multiplied by `decay_rate`, > 0.
        decay_rate: Factor.
        staircase: Rounds step / decay_steps down.
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        """Returns the learning rate after this number of steps."""
        periods = step / self.decay_steps
        return float(
            self.initial_learning_rate * self.decay_rate ** (math.floor(periods) if self.staircase else periods)
        )


@dataclass(frozen=True)
class InverseTimeDecay(_Schedule):
    """Returns initial_learning_rate / (1 + decay_rate · step / decay_steps).

    Attributes:
        initial_learning_rate: Learning rate at step 0.
        decay_steps: Length of a period in steps, > 0.
        decay_rate: Growth of the denominator in each period.
        staircase: Rounds step / decay_steps down.
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        """Returns the learning rate after this number of steps."""
        periods = _periods(step, self.decay_steps, staircase=self.staircase)
        return self.initial_learning_rate / (1 + self.decay_rate * periods)


@dataclass(frozen=True)
class PiecewiseConstantDecay(_Schedule):
    """Returns `values[i]` for the first boundary with step <= boundaries[i], and the last value after all boundaries.

    Attributes:
        boundaries: Numbers of steps, increasing.
        values: Learning rates, one more than there are boundaries.
    """

    boundaries: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        """Raises InvalidOptimizerError if the lengths or the order are wrong."""
        if len(self.values) != len(self.boundaries) + 1 or sorted(self.boundaries) != list(self.boundaries):
            raise InvalidOptimizerError(
                f"PiecewiseConstantDecay: {len(self.boundaries)} increasing boundaries need one value more, not "
                f"{len(self.values)}; they are {list(self.boundaries)}"
            )

    def __call__(self, step: int) -> float:
        """Returns the learning rate after this number of steps."""
        return self.values[sum(step > boundary for boundary in self.boundaries)]


@dataclass(frozen=True)
class PolynomialDecay(_Schedule):
    """Returns (initial − end) · (1 − step / decay_steps)^power + end, and the end's learning rate after `decay_steps`.

    Attributes:
        initial_learning_rate: Learning rate at step 0.
        decay_steps: Length of the decay in steps, > 0.
        end_learning_rate: Learning rate at the end.
        power: Exponent.
        cycle: After the end, starts again with the smallest multiple of `decay_steps` that is not below the step.
    """

    initial_learning_rate: float
    decay_steps: float
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __call__(self, step: int) -> float:
        """Returns the learning rate after this number of steps."""
        length = self.decay_steps
        if self.cycle:
            length *= max(1, math.ceil(step / length))
        left = 1 - min(step, length) / length
        return float((self.initial_learning_rate - self.end_learning_rate) * left**self.power + self.end_learning_rate)


@dataclass(frozen=True)
class CosineDecay(_Schedule):
    """Returns peak · ((1 − alpha) · (1 + cos(π · s / decay_steps)) / 2 + alpha), s: steps after the warm-up.

    The peak is `warmup_target`, or the initial learning rate without a warm-up. During the warm-up, the learning rate
    changes linearly.

    Loshchilov and Hutter, arXiv:1608.03983.

    Attributes:
        initial_learning_rate: Learning rate at step 0.
        decay_steps: Length of the decay in steps, > 0.
        alpha: Share of the peak at the end.
        warmup_target: Learning rate at the end of the warm-up; None: no warm-up.
        warmup_steps: Length of the warm-up in steps.
    """

    initial_learning_rate: float
    decay_steps: float
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: float = 0

    def __call__(self, step: int) -> float:
        """Returns the learning rate after this number of steps."""
        start, target, warmup_steps = self.initial_learning_rate, self.warmup_target, self.warmup_steps
        if target is None:
            target, warmup_steps = start, 0
        if step < warmup_steps:
            return start + (target - start) * step / warmup_steps
        return target * _cosine(min((step - warmup_steps) / self.decay_steps, 1.0), 1.0, self.alpha)


@dataclass(frozen=True)
class CosineDecayRestarts(_Schedule):
    """Returns a cosine decay that starts again: each period is `t_mul` times as long, and `m_mul` times as high.

    Loshchilov and Hutter, arXiv:1608.03983.

    Attributes:
        initial_learning_rate: Learning rate at step 0.
        first_decay_steps: Length of the first period in steps, > 0.
        t_mul: Factor of the length, >= 1.
        m_mul: Factor of the height.
        alpha: Share of the initial learning rate at the end of a period.
    """

    initial_learning_rate: float
    first_decay_steps: float
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0

    def __call__(self, step: int) -> float:
        """Returns the learning rate after this number of steps."""
        left, length, restarts = float(step), float(self.first_decay_steps), 0
        if self.t_mul == 1:
            restarts, left = int(left // length), left % length
        while left >= length:
            left -= length
            length *= self.t_mul
            restarts += 1
        return self.initial_learning_rate * _cosine(left / length, self.m_mul**restarts, self.alpha)


def _periods(step: int, length: float, *, staircase: bool) -> float:
    return math.floor(step / length) if staircase else step / length


def _cosine(fraction: float, height: float, alpha: float) -> float:
    return (1 - alpha) * 0.5 * height * (1 + math.cos(math.pi * fraction)) + alpha
