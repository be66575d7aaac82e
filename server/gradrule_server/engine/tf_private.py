"""The parts of TensorFlow that have no public name. A test holds each against the installed version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, op_def_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util

GRADIENT_NAME = "gradrule"
"""The one name that gradrule itself registers; it is no tenant's rule."""

GradientFunction = Callable[..., Any]


def registered_gradients() -> dict[str, GradientFunction | None]:
    """TensorFlow's own gradients by op type; None where an op is registered as not differentiable."""
    registry = ops.gradient_registry
    return {name: registry.lookup(name) for name in registry.list() if name != GRADIENT_NAME}


def gradient_of(op_type: str) -> GradientFunction | None:
    """The gradient function of an op type, None if it is registered as not differentiable; else `LookupError`."""
    function: GradientFunction | None = ops.gradient_registry.lookup(op_type)
    return function


def all_op_definitions() -> list[bytes]:
    """Serialised `OpDef` of every op type that TensorFlow has registered."""
    registered = op_def_pb2.OpList.FromString(c_api.TF_GetBuffer(c_api.TF_GetAllOpList()))
    return [op.SerializeToString() for op in registered.op]


def add_functions(library: function_pb2.FunctionDefLibrary) -> list[str]:
    """Makes functions known to the process, where a built function looks for its loop bodies; returns their names."""
    for function in library.function:
        context.context().add_function_def(function)
    return [function.signature.name for function in library.function]


def remove_functions(names: Iterable[str]) -> None:
    """Takes back what `add_functions` made known."""
    for name in names:
        context.context().remove_function(name)


def on_calling_thread() -> AbstractContextManager[None]:
    """Within this context functions run op by op on the thread that calls them.

    It saves a small function the hand-over to other threads, which costs more than its kernels.
    """
    manager: AbstractContextManager[None] = context.function_executor_type("SINGLE_THREADED_EXECUTOR")
    return manager


def gradients_in(
    graph: tf.Graph, ys: Sequence[tf.Tensor], xs: Sequence[tf.Tensor], grad_ys: Sequence[Any]
) -> list[Any]:
    """Partial gradients of tensors of `graph`, which may be another than the one in which gradients are built.

    Each x counts as a variable of its own, even where one depends on another; of one that stands there twice the first
    place gets the gradient.
    """
    if not ys:
        return [None] * len(xs)
    found: list[Any] = gradients_util._GradientsHelper(
        list(ys), list(xs), grad_ys=list(grad_ys), stop_gradients=list(xs), src_graph=graph
    )
    first = {x.ref(): index for index, x in reversed(list(enumerate(xs)))}
    return [
        gradient if first[x.ref()] == index else None for index, (x, gradient) in enumerate(zip(xs, found, strict=True))
    ]


def in_graph(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` as seen from inside `graph`: captured where it belongs to an outer graph (as in a loop's gradient)."""
    if tensor.graph is graph:
        return tensor
    around = getattr(graph, "outer_graph", None)
    further = around
    while further is not None and further is not tensor.graph:
        further = getattr(further, "outer_graph", None)
    if around is not None and further is not None:
        # The gradient of a branch takes only what lies right around it: what lies further out comes level by level.
        tensor = in_graph(around, tensor)
    return graph.capture(tensor)
