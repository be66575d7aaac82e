"""The parts of TensorFlow that have no public name. A test holds each against the installed version."""

from __future__ import annotations

import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2, op_def_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph, function_def_to_graph, op_def_registry, ops
from tensorflow.python.ops import cond_v2, gradients_util, while_v2

from gradrule_server.engine.tf_config import limit_to_cpu_passes
from gradrule_server.policy.op_traits import ops_with

GRADIENT_NAME = "gradrule"
"""The one name that gradrule itself registers; it is no tenant's rule."""

GRADIENT_ATTR = "_gradient_op_type"
"""Names the registered gradient that an op has instead of its type's."""

_LOOPS = ops_with("loop")
# Where TensorFlow looks for the graph of a branch.
_BRANCHES: dict[str, Callable[[int], str]] = {
    "If": ("_true_graph", "_false_graph").__getitem__,
    "StatelessIf": ("_true_graph", "_false_graph").__getitem__,
    "Case": "_branch_graph_{}".format,
    "StatelessCase": "_branch_graph_{}".format,
}

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


def op_definition(op_type: str) -> bytes:
    """Serialised `OpDef` of an op type; of a function that is called by its name as op, one with nothing but that."""
    found = op_def_registry.get(op_type)
    return b"" if found is None else bytes(found.SerializeToString())


def runs_functions(op_type: str) -> bool:
    """Whether ops of this type have attributes that are functions."""
    found = _runs_functions.get(op_type)
    if found is None:
        definition = op_def_registry.get(op_type)
        found = definition is None or any(attr.type in ("func", "list(func)") for attr in definition.attr)
        _runs_functions[op_type] = found
    return found


_runs_functions: dict[str, bool] = {}


def functions_named(node: node_def_pb2.NodeDef) -> list[str]:
    """Names of the functions in a node's attributes."""
    values = node.attr.values()
    found = [value.func.name for value in values if value.HasField("func")]
    return [*found, *(function.name for value in values for function in value.list.func)]


def function_definition(name: str) -> function_pb2.FunctionDef:
    """A function that is known to the process."""
    return context.context().get_function_def(name)


def functions_reached(names: Iterable[str]) -> Iterator[function_pb2.FunctionDef]:
    """The functions of these names, then those that they run and so on, each once."""
    reached = dict.fromkeys(names)
    pending = deque(reached)
    while pending:
        function = function_definition(pending.popleft())
        yield function
        found = dict.fromkeys(name for node in function.node_def for name in functions_named(node))
        pending += [name for name in found if name not in reached]
        reached |= found


def function_graph(name: str, shapes: Sequence[tf.TensorShape]) -> Any:
    """The graph of a function, its arguments being of these shapes; None where they contradict what is inside, or where
    that has an op of old graphs alone, for which nothing is built anew.
    """
    try:
        return function_def_to_graph.function_def_to_graph(function_definition(name), input_shapes=list(shapes))
    except (ValueError, tf.errors.UnimplementedError):
        return None


def is_branch(op: tf.Operation) -> bool:
    """Whether the op runs one of its functions."""
    return op.type in _BRANCHES


def argument_shapes(op: tf.Operation) -> list[tf.TensorShape]:
    """What an op that runs functions gives these, as far as is known: what goes round a loop is as its results are."""
    if op.type in _LOOPS:
        return [tensor.shape for tensor in op.outputs]
    return [tensor.shape for tensor in (list(op.inputs)[1:] if op.type in _BRANCHES else op.inputs)]


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


def session_call(
    graph: tf.Graph, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], *, single_threaded: bool
) -> tuple[Callable[..., list[Any]], Callable[[], None]]:
    """Returns a function that runs a graph on the CPU, and one that frees what the first one holds.

    The first takes NumPy arrays for `inputs` and returns those of `outputs`. It runs in a session that shares the
    graph: calling it costs a tenth of calling a concrete function, which gives each call to another thread.

    Args:
        graph: A graph that does not change any more; of a concrete function also.
        inputs: Tensors of the graph.
        outputs: Tensors of the graph.
        single_threaded: Whether ops run one after the other on the calling thread. There may be no control flow then.
    """
    # Its options are those with which functions run, so that both compute the same.
    config = context.context().config
    limit_to_cpu_passes(config.graph_options.rewrite_options)
    if single_threaded:
        config.experimental.executor_type = "SINGLE_THREADED_EXECUTOR"
    session = tf.compat.v1.Session(graph=graph, config=config)
    options = config_pb2.CallableOptions(
        feed=[tensor.name for tensor in inputs],
        fetch=[tensor.name for tensor in outputs],
        # Ops that a function runs although no output needs them, such as checks.
        target=[op.name for op in getattr(graph, "control_outputs", ())],
    )
    return session._make_callable_from_options(options), session.close


class RecordingGraph(func_graph.FuncGraph):  # type: ignore[misc]
    """A function's graph that notes the ops that are made in it one by one, imported ones not."""

    def __init__(self) -> None:
        super().__init__("recording")
        self.made: list[tf.Operation] = []

    def _create_op_internal(self, *args: Any, **kwargs: Any) -> tf.Operation:
        op = super()._create_op_internal(*args, **kwargs)
        self.made.append(op)
        return op


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


AddTensors = Callable[[Sequence[tf.Tensor]], tf.Tensor | None]
"""Returns the sum of gradients; None leaves it to TensorFlow."""

_add_tensors: contextvars.ContextVar[AddTensors | None] = contextvars.ContextVar("add_tensors", default=None)
_add_on_devices = gradients_util._MultiDeviceAddN


@contextlib.contextmanager
def sums_made_by(add: AddTensors) -> Iterator[None]:
    """Within this context `add` makes the sums of the gradients that arrive at one tensor."""
    token = _add_tensors.set(add)
    try:
        yield
    finally:
        _add_tensors.reset(token)


def _sum_of_gradients(tensors: Sequence[tf.Tensor], gradient_uid: str) -> tf.Tensor:
    add = _add_tensors.get()
    found = None if add is None else add(tensors)
    return _add_on_devices(tensors, gradient_uid) if found is None else found


gradients_util._MultiDeviceAddN = _sum_of_gradients


def watch(ops: Iterable[tf.Operation]) -> None:
    """Sees to it that the gradients of these ops are asked of gradrule."""
    for op in ops:
        try:
            op.get_attr(GRADIENT_ATTR)
        except ValueError:
            op._set_attr(GRADIENT_ATTR, attr_value_pb2.AttrValue(s=GRADIENT_NAME.encode()))


def clear_attribute(op: tf.Operation, name: str) -> None:
    """Removes an attribute of an op of a graph that has not run yet."""
    op._clear_attr(name)


def watch_inside(op: tf.Operation) -> None:
    """`watch`, for the loop body or the branches of an op that a gradient made; nothing for other ops."""
    if op.type in _LOOPS:
        for part in ("cond", "body"):
            graph = while_v2._get_graph(op, part, f"_{part}_graph")
            # Found here by whoever builds the loop's gradient.
            setattr(op, f"_{part}_graph", graph)
            watch(graph.get_operations())
    elif op.type in _BRANCHES:
        for index, graph in enumerate(cond_v2.get_func_graphs(op)):
            setattr(op, _BRANCHES[op.type](index), graph)
            watch(graph.get_operations())


def gradients_from(
    graph: tf.Graph,
    ys: Sequence[tf.Tensor],
    xs: Sequence[tf.Tensor],
    grad_ys: Sequence[tf.Tensor | None],
    stop_gradients: Sequence[tf.Tensor],
    unconnected_gradients: tf.UnconnectedGradients,
) -> list[Any]:
    """`tf.gradients` of tensors of `graph`, built in the graph that is current."""
    found: list[Any] = gradients_util._GradientsHelper(
        list(ys),
        list(xs),
        grad_ys=list(grad_ys),
        stop_gradients=list(stop_gradients),
        unconnected_gradients=unconnected_gradients,
        src_graph=graph,
    )
    return found


def call_with_captures(function: Any, arguments: Sequence[tf.Tensor], captures: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Runs a concrete function that returns a flat list, with other tensors in the place of those it captured."""
    return list(function._call_flat(list(arguments), list(captures)) or ())


def identity_n(tensors: Sequence[tf.Tensor], notes: Mapping[str, str | int]) -> list[tf.Tensor]:
    """The tensors, through an IdentityN of the default graph that carries attributes of its own."""
    value_of = attr_value_pb2.AttrValue
    attrs = {
        name: value_of(s=value.encode()) if isinstance(value, str) else value_of(i=value)
        for name, value in notes.items()
    }
    types = [tensor.dtype.base_dtype.as_datatype_enum for tensor in tensors]
    attrs["T"] = value_of(list=value_of.ListValue(type=types))
    graph = tf.compat.v1.get_default_graph()
    # Made without the public function, which knows no attributes of others.
    return list(graph.create_op("IdentityN", list(tensors), attrs=attrs, name="rule/gradient").outputs)


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


def from_graph(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of `graph` that `tensor` is, where it was captured from there; else itself."""
    found = tensor
    while found.graph is not graph:
        outer = [external for external, internal in getattr(found.graph, "captures", ()) if internal is found]
        if not outer:
            return tensor
        found = outer[0]
    return found
