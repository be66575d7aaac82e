"""Runs the optimizers of sessions: Keras's own, on variables of one session."""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from gradrule.common.optimizer_settings import setting_fault
from gradrule.v1 import errors_pb2, session_pb2
from gradrule_server.engine.build import is_small
from gradrule_server.engine.kept_bytes import saved_bytes
from gradrule_server.engine.program import FunctionCall
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


# Imported objects are never garbage; frozen, they do not slow down the collections after sessions.
gc.freeze()


class _LocalSteps(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Does not pass steps to tf.distribute, which keeps every traced graph. A base of each optimizer used here."""

    def _backend_update_step(self, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            self.update_step(gradient, variable, learning_rate)


class StepOptimizer:
    """An optimizer with its slots."""

    def __init__(self, message: session_pb2.Optimizer, values: Mapping[str, tf.Tensor]) -> None:
        """Creates the optimizer for the variables `values`. Raises INVALID_OPTIMIZER if Keras refuses the settings."""
        settings = _settings(message)
        try:
            own = getattr(keras.optimizers, message.name)
            self._optimizer: Any = type(message.name, (own, _LocalSteps), {})(**settings)
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
        self.slot_bytes = saved_bytes([slot.value for slot in self._optimizer.variables])
        """Bytes of the slots."""
        self._updates: dict[tuple[tuple[str, tf.IndexedSlicesSpec | None], ...], FunctionCall] = {}

    def fits(self, message: session_pb2.Optimizer, values: Mapping[str, tf.Tensor]) -> bool:
        """Returns whether a step with this message and these values can continue with the slots."""
        return _identity(message) == _identity(self.message) and _shapes(values) == self._shapes

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
            if slot is self._optimizer.learning_rate:
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
        forms = tuple((name, _spec_of_slices(gradient)) for name, gradient in gradients.items())
        update = self._updates.get(forms)
        if update is None:
            update = self._updates[forms] = self._make_update(dict(forms))
        rate = _settings(message).get(_LEARNING_RATE, self._default_rate)
        arguments = [
            rate,
            *(values[name] for name in gradients),
            *tf.nest.flatten(list(gradients.values()), expand_composites=True),
        ]
        found = update.on_device(arguments)
        self.message = message
        return dict(zip(gradients, found, strict=True))

    def _make_update(self, forms: Mapping[str, tf.IndexedSlicesSpec | None]) -> FunctionCall:
        """Returns a function of the learning rate, values and gradients that returns the new values.

        `forms`: names of the variables, each with the type of its gradient if that is slices.
        """
        variables = [self._variables[name] for name in forms]
        values = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        gradients = [spec or value for spec, value in zip(forms.values(), values, strict=True)]

        def update(rate: tf.Tensor, values: Sequence[tf.Tensor], gradients: Sequence[Any]) -> list[tf.Tensor]:
            self._optimizer.learning_rate.assign(rate)
            for variable, value in zip(variables, values, strict=True):
                # The client may have assigned them since the last step.
                variable.assign(value)
            self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return [tf.identity(variable.value) for variable in variables]

        signature = [tf.TensorSpec([], self._optimizer.learning_rate.dtype), values, gradients]
        function = tf.function(update, input_signature=signature, autograph=False).get_concrete_function()
        return FunctionCall(function, single_threaded=is_small(function.graph))


def _spec_of_slices(gradient: Any) -> tf.IndexedSlicesSpec | None:
    """Returns the type of a gradient that is slices, of any number; None for a tensor."""
    if isinstance(gradient, tf.Tensor):
        return None
    values, indices, shape = gradient.values, gradient.indices, gradient.dense_shape
    return tf.IndexedSlicesSpec([None, *values.shape[1:]], values.dtype, indices.dtype, shape.dtype, [None])


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


@functools.cache
def _known_settings(name: str) -> dict[str, Any]:
    """Returns the settings of an optimizer of Keras's, with their defaults."""
    parameters = inspect.signature(getattr(keras.optimizers, name).__init__).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key not in _NOT_OFFERED}


def _shapes(values: Mapping[str, tf.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(value.shape)) for name, value in values.items())


def _invalid_optimizer(message: str, field: str = "step.optimizer") -> Exception:
    return error(errors_pb2.ERROR_REASON_INVALID_OPTIMIZER, message, field=field)
