"""Runs the optimizers of sessions: Keras's own, on variables of one session."""

from __future__ import annotations

import gc
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from gradrule.common.optimizer_settings import setting_fault
from gradrule.v1 import errors_pb2, session_pb2
from gradrule_server.engine import tf_private
from gradrule_server.errors import did_you_mean, error

NAMES = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "Adafactor",
    "Lamb",
)

_LEARNING_RATE = "learning_rate"

_STATE = "start.optimizer_state"
_SLOT = re.compile(r"v(\d+)(?:_(.+))?")
_NUMBER = re.compile(r"_\d+$")

# Not supported: averages of variables would have to be swapped in and out, and accumulated gradients span steps.
_NOT_OFFERED = frozenset({"name", "self", "kwargs"} | {"use_ema", "ema_momentum", "ema_overwrite_frequency"})
_NOT_OFFERED |= {"loss_scale_factor", "gradient_accumulation_steps"}


def _update_each(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
    for gradient, variable in zip(gradients, variables, strict=True):
        optimizer.update_step(gradient, variable, learning_rate)


# Keras passes the step to tf.distribute, which keeps every traced graph alive, and with it the variables.
TFOptimizer._backend_update_step = _update_each
# Imported objects are never garbage; frozen, they do not slow down the collections after sessions.
gc.freeze()


class StepOptimizer:
    """An optimizer with its slots."""

    def __init__(self, message: session_pb2.Optimizer, values: Mapping[str, tf.Tensor]) -> None:
        """Creates the optimizer for the variables `values`. Raises INVALID_OPTIMIZER if Keras refuses the settings."""
        settings = _settings(message)
        try:
            self._optimizer: Any = getattr(keras.optimizers, message.name)(**settings)
        except (ValueError, TypeError) as cause:
            raise _invalid_optimizer(f"{message.name}: {cause}") from cause
        self.message = message
        """The optimizer with the settings of its last step."""
        self._default_rate = _known_settings(message.name)[_LEARNING_RATE]
        self._shapes = _shapes(values)
        self._variables = {
            name: keras.Variable(value, dtype=value.dtype.name, trainable=True, name=f"v{number}")
            for number, (name, value) in enumerate(values.items())
        }
        self._optimizer.build(list(self._variables.values()))
        self._apply: dict[tuple[str, ...], Any] = {}

    def fits(self, message: session_pb2.Optimizer, values: Mapping[str, tf.Tensor]) -> bool:
        """Returns whether a step with this message and these values can continue with the slots."""
        return _identity(message) == _identity(self.message) and _shapes(values) == self._shapes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots."""
        return sum(_bytes_of(variable) for variable in self._optimizer.variables)

    @property
    def variables(self) -> list[str]:
        """Names of the variables that it updates."""
        return list(self._variables)

    @property
    def slots(self) -> dict[str, tf.Tensor]:
        """Values of the slots by name: `w/momentum`, and `iteration`, the number of steps of the optimizer."""
        return {name: tf.identity(slot.value) for name, slot in self._slots().items()}

    def restore(self, slots: Mapping[str, tf.Tensor]) -> None:
        """Sets all slots. Raises INVALID_OPTIMIZER for other names, types or shapes than those of the slots."""
        own = self._slots()
        for name in [*own, *slots]:
            if name not in slots or name not in own:
                what = "is missing" if name in own else f"is none of the slots: {', '.join(own)}"
                raise _invalid_optimizer(f"{self.message.name}: the slot {name!r} {what}", _STATE)
            wanted, given = tf.TensorSpec(own[name].shape, own[name].dtype), slots[name]
            if not wanted.is_compatible_with(given):
                raise _invalid_optimizer(
                    f"{self.message.name}: the slot {name!r} is {wanted.dtype.name} of shape {wanted.shape}, not "
                    f"{given.dtype.name} of shape {given.shape}",
                    _STATE,
                )
        for name, slot in own.items():
            slot.assign(slots[name])

    def _slots(self) -> dict[str, Any]:
        """Returns Keras's variables of the slots by name.

        Keras names a slot after its variable, `v0_momentum`, or counts unnamed ones in the process: `variable_7`.
        """
        found: dict[str, Any] = {}
        for slot in self._optimizer.variables:
            if slot is self._optimizer._learning_rate:
                continue
            match = _SLOT.fullmatch(slot.name)
            name = f"{self.variables[int(match[1])]}/{match[2] or 'slot'}" if match else _NUMBER.sub("", slot.name)
            count = sum(other == name or other.startswith(f"{name}#") for other in found)
            found[f"{name}#{count}" if count else name] = slot
        return found

    def step(
        self, message: session_pb2.Optimizer, values: Mapping[str, tf.Tensor], gradients: Mapping[str, Any]
    ) -> dict[str, tf.Tensor]:
        """Returns new values of the variables that have a gradient (a tensor or `tf.IndexedSlices`)."""
        self._optimizer.learning_rate.assign(_settings(message).get(_LEARNING_RATE, self._default_rate))
        for name in gradients:
            # The client may have assigned them since the last step.
            self._variables[name].assign(values[name])
        # Keras's functions for slices contain branches, which must not run on the calling thread (`build._is_small`).
        with tf_private.on_tensorflow_threads():
            self._update(tuple(gradients))(*gradients.values())
        self.message = message
        return {name: tf.identity(self._variables[name].value) for name in gradients}

    def _update(self, names: tuple[str, ...]) -> Any:
        """Returns a function that applies the gradients of these variables."""
        if names not in self._apply:
            variables = [self._variables[name] for name in names]

            def update(*gradients: Any) -> None:
                self._optimizer.apply_gradients(zip(gradients, variables, strict=True))

            self._apply[names] = tf.function(update, autograph=False)
        return self._apply[names]


def _identity(message: session_pb2.Optimizer) -> tuple[str, tuple[tuple[str, float], ...]]:
    return message.name, tuple(sorted(item for item in message.settings.items() if item[0] != _LEARNING_RATE))


def _settings(message: session_pb2.Optimizer) -> dict[str, float | bool | int]:
    """Returns the settings as Keras takes them. Raises INVALID_OPTIMIZER for an unknown name or an invalid value."""
    if message.name not in NAMES:
        hint = did_you_mean(message.name, NAMES)
        raise _invalid_optimizer(f"there is no optimiser {message.name!r}.{hint} There are {', '.join(NAMES)}")
    known = _known_settings(message.name)
    settings: dict[str, float | bool | int] = {}
    for name, value in message.settings.items():
        if name not in known:
            raise _invalid_optimizer(
                f"{message.name} has no setting {name!r}.{did_you_mean(name, known)} It has {', '.join(known)}"
            )
        is_switch = isinstance(known[name], bool)
        fault = setting_fault(name, value, is_switch=is_switch)
        if fault is not None:
            raise _invalid_optimizer(f"{message.name}: {fault}")
        settings[name] = bool(value) if is_switch else value
    return settings


def _known_settings(name: str) -> dict[str, Any]:
    """Returns the settings of an optimizer of Keras's, with their defaults."""
    parameters = inspect.signature(getattr(keras.optimizers, name).__init__).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key not in _NOT_OFFERED}


def _shapes(values: Mapping[str, tf.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(value.shape)) for name, value in values.items())


def _bytes_of(variable: Any) -> int:
    size = math.prod(variable.shape)
    return int(size * tf.as_dtype(variable.dtype).size)


def _invalid_optimizer(message: str, field: str = "step.optimizer") -> Exception:
    return error(errors_pb2.ERROR_REASON_INVALID_OPTIMIZER, message, field=field)
