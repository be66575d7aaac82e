"""Wraps the private parts of TensorFlow that tracing needs; a test checks each with the installed version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, op_def_pb2
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, function_def_to_graph, op_def_registry, ops
from tensorflow.python.ops import handle_data_util
from tensorflow.python.util import nest, tf_decorator

FuncGraph = func_graph.FuncGraph

_TAPE_FUNCTION = "tape_grad_fn"


def flat_with_paths(structure: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the leaves of a structure with their paths; composite tensors become their parts."""
    found: list[tuple[tuple[Any, ...], Any]] = nest.flatten_with_tuple_paths(structure, expand_composites=True)
    return found


def op_definition(op_type: str) -> op_def_pb2.OpDef | None:
    """Returns TensorFlow's definition of an op type."""
    return op_def_registry.get(op_type)


def registered_gradient(name: str) -> Callable[..., Any] | None:
    """Returns the registered gradient function; None for "no gradient". Raises `LookupError` for unknown names."""
    function: Callable[..., Any] | None = ops.gradient_registry.lookup(name)
    return function


def function_in(graph: Any, name: str) -> Any:
    """Returns the function that nodes of the graph call by this name, with a `definition`, or None."""
    return graph._get_function(name)


def graph_of(function: Any, user: Any) -> Any:
    """Returns the function graph of what `function_in` returned; `user` is the graph that calls the function."""
    if hasattr(function, "graph"):
        return function.graph
    # A function in the style of TensorFlow 1, as in tf.nn.ctc_loss, has a definition only.
    with user.as_default():
        return function_def_to_graph.function_def_to_graph(function.definition)


def definition_of(graph: Any, name: str) -> function_pb2.FunctionDef:
    """Returns a function graph's definition; input i of the graph is argument i."""
    definition = function_pb2.FunctionDef()
    definition.CopyFrom(atomic_function.from_func_graph(name, graph, {}).definition)
    return definition


def identity_of(tensor: Any) -> Hashable:
    """Returns a key of a tensor: its position in a graph, or the identity of an eager tensor."""
    if is_eager(tensor):
        return ("eager", id(tensor))
    return (id(tensor.graph), tensor.op.name, tensor.value_index)


def is_eager(tensor: Any) -> bool:
    """Returns whether a tensor has a value."""
    return isinstance(tensor, ops.EagerTensor)


def is_recorded(tensors: Iterable[Any]) -> bool:
    """Returns whether a gradient tape records operations on any of the tensors."""
    return bool(record.should_record_backprop(list(tensors)))


def captures(graph: Any) -> list[tuple[Any, Any]]:
    """Returns the outer tensors that a function graph captures, each with its inner placeholder."""
    return list(graph.captures)


def deferred_captures(graph: Any) -> int:
    """Returns the number of captures that get their value when the function is called."""
    return len(graph.deferred_external_captures)


def handle_data(tensor: Any) -> Any:
    """Returns the dtypes and shapes of a resource handle's content; None if unknown."""
    data = tensor._handle_data if is_eager(tensor) else handle_data_util.get_resource_handle_data(tensor)
    return list(data.shape_and_type) if data is not None and data.is_set else None


def custom_gradient_of(function: Callable[..., Any]) -> tuple[str, int] | None:
    """Returns name and number of results of the Python function of a `tf.custom_gradient`.

    None for any other function.
    """
    tape = inspect.getclosurevars(function).nonlocals.get(_TAPE_FUNCTION) if _has_closure(function) else None
    if tape is None:
        return None
    inside = inspect.getclosurevars(tape).nonlocals
    return _function_name(inside["grad_fn"]), int(inside["flat_result_len"])


def is_loaded_gradient(function: Callable[..., Any]) -> bool:
    """Returns whether a gradient comes from a SavedModel."""
    return function.__module__ == "tensorflow.python.saved_model.function_deserialization"


def read_variable(handle: Any, dtype: Any) -> Any:
    """Returns the value of a variable's handle as an array."""
    # init_scope: a RemoteLayer is traced while Keras traces the training step.
    with tf.init_scope():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()


def _has_closure(function: Any) -> bool:
    return getattr(function, "__closure__", None) is not None


def _function_name(gradient: Any) -> str:
    """Returns the name of the function that defines a gradient function, or the gradient function's own name."""
    plain = inspect.unwrap(tf_decorator.unwrap(gradient)[1])
    qualified = getattr(plain, "__qualname__", type(plain).__qualname__)
    outer, _, _ = qualified.rpartition(".<locals>.")
    return (outer or qualified).rpartition(".")[2].strip("<>")
