"""Optimisers for `Session.step`: those of Keras, by the same names, with the same settings and defaults.

The server runs Keras's own implementation; here are only the settings. Each class tells the paper. `learning_rate` may
differ from step to step; a change of any other setting begins with new slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
    "RMSprop",
]


@dataclass(frozen=True)
class Optimizer:
    """What all have in common.

    learning_rate: step size, > 0. weight_decay: decoupled decay per step, times the learning rate. clipnorm, clipvalue,
    global_clipnorm: bounds of each gradient's norm, of its elements, of the norm of all; at most one of them.
    """

    learning_rate: float = 0.001
    weight_decay: float | None = None
    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    def message(self) -> session_pb2.Optimizer:
        """The settings as the server takes them; None leaves Keras's default."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        settings = {name: float(value) for name, value in given.items() if value is not None}
        return session_pb2.Optimizer(name=type(self).__name__, settings=settings)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent: v = momentum · v − learning_rate · g; w += v, or with nesterov w += momentum · v − rate · g.

    Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013).
    """

    learning_rate: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Divides by a running root mean square of gradients. Tieleman and Hinton, lecture 6.5 (2012)."""

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False


@dataclass(frozen=True)
class Adam(Optimizer):
    """Running means of gradients and of their squares. Kingma and Ba, arXiv:1412.6980; amsgrad: Reddi et al. (2018)."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay. Loshchilov and Hutter, arXiv:1711.05101."""

    weight_decay: float | None = 0.004


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Zeiler, arXiv:1212.5701. The paper's own step size is a learning rate of 1."""

    rho: float = 0.95
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Duchi, Hazan and Singer, JMLR 12 (2011)."""

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adam with the infinity norm. Kingma and Ba, arXiv:1412.6980, section 7.1."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Nadam(Optimizer):
    """Adam with Nesterov momentum. Dozat (2016)."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """Follow the regularised leader. McMahan et al., "Ad click prediction: a view from the trenches" (2013)."""

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True)
class Lion(Optimizer):
    """Signs of a running mean. Chen et al., arXiv:2302.06675."""

    beta_1: float = 0.9
    beta_2: float = 0.99


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Factored second moments. Shazeer and Stern, arXiv:1804.04235."""

    beta_2_decay: float = -0.8
    epsilon_1: float = 1e-30
    epsilon_2: float = 0.001
    clip_threshold: float = 1.0
    relative_step: bool = True


@dataclass(frozen=True)
class Lamb(Optimizer):
    """Layer-wise adapted Adam for large batches. You et al., arXiv:1904.00962."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
