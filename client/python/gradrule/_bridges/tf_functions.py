"""Runs functions of arrays from TensorFlow, for the modules that differentiate through `tf.custom_gradient`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from gradrule.errors import UnsupportedError


class Spec(Protocol):
    """Dtype and static shape of a tensor, such as a `tf.TensorSpec`."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Any: ...


def run_on_host(function: Callable[..., Sequence[Any]], tensors: Sequence[Any], specs: Sequence[Spec]) -> list[Any]:
    """Runs a function of arrays on tensors: at once in eager mode, as a node inside `tf.function`.

    Args:
        function: The function; returns one array for each spec.
        tensors: Its arguments.
        specs: Types of the results.
    """
    if tf.executing_eagerly():
        values = function(*(tensor.numpy() for tensor in tensors))
        found = [tf.constant(value, spec.dtype) for value, spec in zip(values, specs, strict=True)]
    else:

        def compute(*arrays: Any) -> list[Any]:
            pairs = zip(function(*arrays), specs, strict=True)
            return [np.asarray(value, spec.dtype.as_numpy_dtype) for value, spec in pairs]

        found = tf.numpy_function(compute, list(tensors), [spec.dtype for spec in specs])
    for tensor, spec in zip(found, specs, strict=True):
        tensor.set_shape(spec.shape)
    return list(found)


def listed(found: Any) -> list[Any]:
    """Returns a list of what `tf.custom_gradient` returns, which is a tensor if there is one."""
    return list(found) if isinstance(found, list | tuple) else [found]


def without_derivative(function: Callable[..., list[Any]], why: str) -> Callable[..., list[Any]]:
    """Returns a function of tensors whose derivative raises `UnsupportedError`, with the reason."""

    @tf.custom_gradient
    def compute(*given: Any) -> tuple[Any, Callable[..., Any]]:
        def backward(*_: Any) -> Any:
            raise UnsupportedError(why)

        return function(*given), backward

    return lambda *given: listed(compute(*given))
