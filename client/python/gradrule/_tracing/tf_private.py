"""The parts of TensorFlow that have no public name. A test holds each against the installed version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, op_def_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, op_def_registry, ops
from tensorflow.python.ops import handle_data_util
from tensorflow.python.util import nest, tf_decorator

FuncGraph = func_graph.FuncGraph

_TAPE_FUNCTION = "tape_grad_fn"


def flat_with_paths(structure: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a nested structure with their paths, composite tensors taken apart."""
    found: list[tuple[tuple[Any, ...], Any]] = nest.flatten_with_tuple_paths(structure, expand_composites=True)
    return found


def op_definition(op_type: str) -> op_def_pb2.OpDef | None:
    """What TensorFlow knows of an op type."""
    return op_def_registry.get(op_type)


def registered_gradient(name: str) -> Callable[..., Any] | None:
    """The Python function that is registered as a gradient; None for "no gradient". `LookupError` for other names."""
    function: Callable[..., Any] | None = ops.gradient_registry.lookup(name)
    return function


def function_in(graph: Any, name: str) -> Any:
    """The function of that name that nodes of the graph may call: has `graph` and `definition`. None: there is none."""
    return graph._get_function(name)


def definition_of(graph: Any, name: str) -> function_pb2.FunctionDef:
    """A function graph's definition. Input i of the graph is argument i."""
    definition = function_pb2.FunctionDef()
    definition.CopyFrom(atomic_function.from_func_graph(name, graph, {}).definition)
    return definition


def identity_of(tensor: Any) -> Hashable:
    """Equal for equal tensors: of a graph by their place, eager ones by their object."""
    if is_eager(tensor):
        return ("eager", id(tensor))
    return (id(tensor.graph), tensor.op.name, tensor.value_index)


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has a value."""
    return isinstance(tensor, ops.EagerTensor)


def captures(graph: Any) -> list[tuple[Any, Any]]:
    """Tensors from outside that a function graph uses, each with the placeholder that stands for it inside."""
    return list(graph.captures)


def deferred_captures(graph: Any) -> int:
    """How many captures get their value only when the function is called."""
    return len(graph.deferred_external_captures)


def handle_data(tensor: Any) -> Any:
    """What a resource handle points to: a list of dtypes and shapes; None where TensorFlow does not know."""
    data = tensor._handle_data if is_eager(tensor) else handle_data_util.get_resource_handle_data(tensor)
    return list(data.shape_and_type) if data is not None and data.is_set else None


def custom_gradient_of(function: Callable[..., Any]) -> tuple[str, int] | None:
    """For a gradient that `tf.custom_gradient` registered: the Python function's name, and its number of results.

    None for any other function.
    """
    tape = inspect.getclosurevars(function).nonlocals.get(_TAPE_FUNCTION) if _has_closure(function) else None
    if tape is None:
        return None
    inside = inspect.getclosurevars(tape).nonlocals
    return _function_name(inside["grad_fn"]), int(inside["flat_result_len"])


def is_loaded_gradient(function: Callable[..., Any]) -> bool:
    """Whether a gradient came with a SavedModel."""
    return function.__module__ == "tensorflow.python.saved_model.function_deserialization"


def read_variable(handle: Any, dtype: Any) -> Any:
    """The value that a variable's handle points to, as an array."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()


def _has_closure(function: Any) -> bool:
    return getattr(function, "__closure__", None) is not None


def _function_name(gradient: Any) -> str:
    """The function in which a gradient function was defined; its own name where it was defined outside."""
    plain = inspect.unwrap(tf_decorator.unwrap(gradient)[1])
    qualified = getattr(plain, "__qualname__", type(plain).__qualname__)
    outer, _, _ = qualified.rpartition(".<locals>.")
    return (outer or qualified).rpartition(".")[2].strip("<>")
