"""Defines the optimizers of `Session.step`: those of Keras, with Keras's names, settings and defaults.

The server runs Keras's implementation; these classes hold the settings. `learning_rate` may change from step to step.
If another setting changes, the optimizer's slots start again from their initial values.

`learning_rate` may be a schedule: an object of `gradrule.schedules` or `keras.optimizers.schedules`, or any function of
the number of steps that the session has completed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from gradrule.common.optimizer_settings import setting_fault
from gradrule.common.tensor_codec import Array
from gradrule.errors import InvalidOptimizerError
from gradrule.v1 import session_pb2

__all__ = [
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "Nadam",
    "Optimizer",
    "OptimizerState",
    "RMSprop",
]


LearningRate: TypeAlias = float | Callable[[int], Any]
"""A number, or a schedule: a function of the number of completed steps."""


@dataclass(frozen=True)
class Optimizer:
    """Holds the settings that all optimizers have.

    Attributes:
        learning_rate: Step size, >= 0, or a schedule.
        weight_decay: Decoupled weight decay per step, multiplied by the learning rate; None: none.
        clipnorm: Largest Euclidean norm of each gradient, > 0; set at most one of the three bounds.
        clipvalue: Largest absolute value of a gradient's elements, > 0.
        global_clipnorm: Largest Euclidean norm of all gradients together, > 0.
    """

    learning_rate: LearningRate = 0.001
    weight_decay: float | None = None
    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    def __post_init__(self) -> None:
        """Raises InvalidOptimizerError for a setting that is no finite number or outside of its range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not callable(value):
                self._number(field.name, value, 0)

    def message(self, step: int = 0) -> session_pb2.Optimizer:
        """Returns the settings as a message; a setting that is None keeps Keras's default.

        Args:
            step: Number of completed steps, for a schedule.

        Raises:
            InvalidOptimizerError: A schedule does not return a finite number >= 0.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        settings = {name: self._number(name, value, step) for name, value in given.items() if value is not None}
        return session_pb2.Optimizer(name=type(self).__name__, settings=settings)

    def _number(self, name: str, value: Any, step: int) -> float:
        where, expected = f"{type(self).__name__}: {name} is {value!r}", "a finite number"
        if name == "learning_rate":
            expected = "a finite number, or a function that returns one for a number of steps"
            if callable(value):
                try:
                    value = value(step)
                except Exception as cause:
                    raise InvalidOptimizerError(f"{where}; it failed at step {step}: {cause}") from cause
                where += f", which returned {value!r} for step {step}"
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise InvalidOptimizerError(f"{where}; expected {expected}") from None
        if not math.isfinite(number):
            raise InvalidOptimizerError(f"{where}; expected {expected}")
        fault = setting_fault(name, number, is_switch=isinstance(getattr(type(self), name), bool))
        if fault is not None:
            raise InvalidOptimizerError(f"{where}: {fault}")
        return number


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """Holds the state of a session's optimizer, as `Graph.optimizer_state`; a session of the graph continues with it.

    Attributes:
        name: Name of the optimizer.
        settings: Its settings at the last step.
        step: Number of steps that the session has completed.
        variables: Names of the variables that it updates.
        slots: Values of its slots by name, for example `w/momentum`.
    """

    name: str
    settings: Mapping[str, float]
    step: int
    variables: Sequence[str]
    slots: Mapping[str, Array]


@dataclass(frozen=True)
class SGD(Optimizer):
    """Applies gradient descent with momentum: v = momentum · v − learning_rate · g; w += v.

    Nesterov: w += momentum · v − learning_rate · g.

    Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013).

    Attributes:
        learning_rate: Step size, >= 0, or a schedule.
        momentum: From 0 to 1.
        nesterov: Uses Nesterov's momentum.
    """

    learning_rate: LearningRate = 0.01
    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Divides gradients by a running root mean square.

    Tieleman and Hinton, lecture 6.5 (2012).

    Attributes:
        rho: Decay of the running mean of squares, from 0 to 1.
        momentum: From 0 to 1.
        epsilon: Added to the denominator, > 0.
        centered: Divides by the running standard deviation instead.
    """

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False


@dataclass(frozen=True)
class Adam(Optimizer):
    """Uses running means of gradients and of their squares.

    Kingma and Ba, arXiv:1412.6980; amsgrad: Reddi et al. (2018).

    Attributes:
        beta_1: Decay of the mean of gradients, from 0 to 1.
        beta_2: Decay of the mean of squares, from 0 to 1.
        epsilon: Added to the denominator, > 0.
        amsgrad: Divides by the largest mean of squares so far.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False


@dataclass(frozen=True)
class AdamW(Adam):
    """Applies Adam with decoupled weight decay.

    Loshchilov and Hutter, arXiv:1711.05101.

    Attributes:
        weight_decay: Decay per step, multiplied by the learning rate; None: none.
    """

    weight_decay: float | None = 0.004


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adapts step sizes by running means of squared gradients and updates.

    The paper's step size is a learning rate of 1.

    Zeiler, arXiv:1212.5701.

    Attributes:
        rho: Decay of the running means, from 0 to 1.
        epsilon: Added to the running means, > 0.
    """

    rho: float = 0.95
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Divides gradients by the root of the sum of all earlier squares.

    Duchi, Hazan and Singer, JMLR 12 (2011).

    Attributes:
        initial_accumulator_value: Start of the sum, >= 0.
        epsilon: Added to the denominator, > 0.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Applies Adam with the infinity norm.

    Kingma and Ba, arXiv:1412.6980, section 7.1.

    Attributes:
        beta_1: Decay of the mean of gradients, from 0 to 1.
        beta_2: Decay of the infinity norm, from 0 to 1.
        epsilon: Added to the denominator, > 0.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Nadam(Optimizer):
    """Applies Adam with Nesterov momentum.

    Dozat (2016).

    Attributes:
        beta_1: Decay of the mean of gradients, from 0 to 1.
        beta_2: Decay of the mean of squares, from 0 to 1.
        epsilon: Added to the denominator, > 0.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """Follows the regularised leader.

    McMahan et al., "Ad click prediction: a view from the trenches" (2013).

    Attributes:
        learning_rate_power: Exponent of the accumulator, <= 0.
        initial_accumulator_value: Start of the accumulator, >= 0.
        l1_regularization_strength: Weight of the L1 norm, >= 0.
        l2_regularization_strength: Weight of the L2 norm, >= 0.
        l2_shrinkage_regularization_strength: Weight of the L2 norm in the gradient, >= 0.
        beta: The paper's beta, >= 0.
    """

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True)
class Lion(Optimizer):
    """Steps by the signs of a running mean.

    Chen et al., arXiv:2302.06675.

    Attributes:
        beta_1: Weight of the mean in the step, from 0 to 1.
        beta_2: Decay of the mean, from 0 to 1.
    """

    beta_1: float = 0.9
    beta_2: float = 0.99


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Uses factored running means of squares.

    Shazeer and Stern, arXiv:1804.04235.

    Attributes:
        beta_2_decay: Exponent of the decay, <= 0.
        epsilon_1: Added to squared gradients, > 0.
        epsilon_2: Smallest scale of a variable, > 0.
        clip_threshold: Largest root mean square of an update, >= 1.
        relative_step: Bounds the learning rate by 1 / sqrt(step).
    """

    beta_2_decay: float = -0.8
    epsilon_1: float = 1e-30
    epsilon_2: float = 0.001
    clip_threshold: float = 1.0
    relative_step: bool = True


@dataclass(frozen=True)
class Lamb(Optimizer):
    """Applies Adam with a step size per layer, for large batches.

    You et al., arXiv:1904.00962.

    Attributes:
        beta_1: Decay of the mean of gradients, from 0 to 1.
        beta_2: Decay of the mean of squares, from 0 to 1.
        epsilon: Added to the denominator, > 0.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
