"""Traces functions to graphs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import types_pb2

from gradrule._builder.graph import Graph
from gradrule._tracing import tf_private
from gradrule._tracing.assembly import assembled
from gradrule._tracing.signatures import as_specs, leaf_names
from gradrule.errors import GradruleError, InvalidGraphError, UnsupportedError

if TYPE_CHECKING:
    from gradrule._tracing.keras_models import TracedCall


def trace(fn: Any, specs: Sequence[Any], kwspecs: Mapping[str, Any]) -> Graph:
    """Traces a function that is not a Keras model; `gradrule.trace` documents the arguments."""
    if hasattr(fn, "captured_inputs") and hasattr(fn, "structured_input_signature"):
        if specs or kwspecs:
            raise InvalidGraphError("a ConcreteFunction has its signature; give no specs")
        return graph_of_concrete(fn)
    with _keras_paths() as paths:
        function = concrete(fn, specs, kwspecs)
    return graph_of_concrete(function, paths=paths)


def _keras_paths() -> contextlib.AbstractContextManager[dict[Hashable, str]]:
    """Returns a context that collects the paths of the Keras variables that are used in it."""
    if "keras" not in sys.modules:
        return contextlib.nullcontext({})
    from gradrule._tracing import keras_variables

    return keras_variables.paths_of_used_variables()


def concrete(fn: Any, specs: Sequence[Any], kwspecs: Mapping[str, Any]) -> Any:
    """Returns the ConcreteFunction of a Python function or `tf.function`. Raises `InvalidGraphError`."""
    if not callable(fn):
        raise InvalidGraphError(f"{fn!r} is no function, tf.function, Keras model or ConcreteFunction")
    args = [as_specs(spec, f"spec {index}") for index, spec in enumerate(specs)]
    kwargs = {name: as_specs(spec, f"spec {name}") for name, spec in kwspecs.items()}
    traceable = fn if hasattr(fn, "get_concrete_function") else tf.function(fn)
    try:
        return traceable.get_concrete_function(*args, **kwargs)
    except GradruleError:
        raise
    except (TypeError, ValueError, tf.errors.OpError) as cause:
        raise InvalidGraphError(f"{_name_of(fn)} cannot be traced with these specs: {cause}") from cause


def graph_of_concrete(
    function: Any,
    names: Mapping[int, str] | None = None,
    aliases: Sequence[str] | None = None,
    calls: Sequence[TracedCall] = (),
    paths: Mapping[Hashable, str] | None = None,
) -> Graph:
    """Returns the graph of a ConcreteFunction.

    Args:
        function: a `ConcreteFunction`.
        names: names of inputs by index, instead of the arguments' names.
        aliases: one per output tensor, instead of the names in the output structure.
        calls: calls of layers that were recorded during tracing.
        paths: names of variables by identity of the handle, instead of TensorFlow's names.

    Raises:
        UnsupportedError: the function captures values that are chosen when it is called.
    """
    graph = function.graph
    if tf_private.deferred_captures(graph):
        raise UnsupportedError(
            f"{_name_of(function)} captures values that are chosen when it is called; pass them as arguments"
        )
    input_names = _input_names(function)
    for index, name in (names or {}).items():
        input_names[index] = name
    outputs = list(aliases) if aliases is not None else _output_aliases(function)
    return assembled(graph, input_names, outputs, calls, paths)


def _input_names(function: Any) -> list[str]:
    args, kwargs = function.structured_input_signature
    positional = list(args)
    found: list[tuple[str, Any]] = []
    for name, parameter in function.function_type.parameters.items():
        if name in kwargs:
            found += leaf_names(name, kwargs[name])
        elif positional:
            found += leaf_names(name, positional.pop(0))
        elif parameter.type_constraint is not None:
            found += leaf_names(name, parameter.type_constraint)
    inputs = list(function.inputs)[: len(function.inputs) - len(tf_private.captures(function.graph))]
    if len(found) == len(inputs):
        return [name for name, _ in found]
    return [tensor.op.name for tensor in inputs]


def _output_aliases(function: Any) -> list[str]:
    """Returns one alias per output tensor: `output`, `output_0`, …, or the keys of a dict."""
    structure = function.structured_outputs
    prefix = "" if isinstance(structure, Mapping) or hasattr(structure, "_fields") else "output"
    found = [name for name, _ in leaf_names(prefix, structure)]
    outputs = [tensor for tensor in function.outputs if tensor.dtype.as_datatype_enum != types_pb2.DT_RESOURCE]
    if len(found) == len(outputs):
        return found
    return ["output"] if len(outputs) == 1 else [f"output_{index}" for index in range(len(outputs))]


def is_keras_model(fn: Any) -> bool:
    """Returns whether the value is a Keras model."""
    return any(base.__name__ == "Model" and base.__module__.startswith("keras.") for base in type(fn).__mro__)


def _name_of(fn: Any) -> str:
    return f"function {getattr(fn, '__name__', None) or getattr(fn, 'name', None) or type(fn).__name__!r}"
