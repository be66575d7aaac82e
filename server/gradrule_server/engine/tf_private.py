"""Wraps the parts of TensorFlow that have no public name. A test checks each with the installed version."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2, op_def_pb2
from tensorflow.core.function.polymorphism import function_type
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph, op_def_registry, ops, tensor_util
from tensorflow.python.ops import cond_v2, gradients_util, while_v2

from gradrule_server.policy.op_tables import ops_with

GRADIENT_NAME = "gradrule"
"""Name of the gradient that gradrule registers; no tenant's rule has it."""

GRADIENT_ATTR = "_gradient_op_type"
"""Attribute of an op that names another registered gradient than that of its type."""

WAITED_FOR_ATTR = "_has_manual_control_dependencies"
"""Attribute of ops that `tf.control_dependencies` named. Nothing but TensorFlow's telemetry reads it."""

_LOOPS = ops_with("loop")
# Name of the Python attribute in which TensorFlow keeps the graph of a branch, by the number of the branch.
_BRANCHES: dict[str, Callable[[int], str]] = {
    "If": ("_true_graph", "_false_graph").__getitem__,
    "StatelessIf": ("_true_graph", "_false_graph").__getitem__,
    "Case": "_branch_graph_{}".format,
    "StatelessCase": "_branch_graph_{}".format,
}

GradientFunction = Callable[..., Any]


def registered_gradients() -> dict[str, GradientFunction | None]:
    """Returns TensorFlow's gradient functions by op type; None for an op registered as not differentiable."""
    registry = ops.gradient_registry
    return {name: registry.lookup(name) for name in registry.list() if name != GRADIENT_NAME}


def gradient_of(op_type: str) -> GradientFunction | None:
    """Returns the gradient function of an op type; None if registered as not differentiable. Raises `LookupError`."""
    function: GradientFunction | None = ops.gradient_registry.lookup(op_type)
    return function


def all_op_definitions() -> list[bytes]:
    """Returns the serialised `OpDef` of every op type that TensorFlow has registered."""
    registered = op_def_pb2.OpList.FromString(c_api.TF_GetBuffer(c_api.TF_GetAllOpList()))
    return [op.SerializeToString() for op in registered.op]


def op_definition(op_type: str) -> bytes:
    """Returns the serialised `OpDef` of an op type; empty for a function that is called by its name as an op."""
    found = op_def_registry.get(op_type)
    return b"" if found is None else bytes(found.SerializeToString())


def runs_functions(op_type: str) -> bool:
    """Returns whether ops of this type have attributes that are functions."""
    found = _runs_functions.get(op_type)
    if found is None:
        definition = op_def_registry.get(op_type)
        found = definition is None or any(attr.type in ("func", "list(func)") for attr in definition.attr)
        _runs_functions[op_type] = found
    return found


_runs_functions: dict[str, bool] = {}


def functions_named(node: node_def_pb2.NodeDef) -> list[str]:
    """Returns the names of the functions in a node's attributes."""
    values = node.attr.values()
    found = [value.func.name for value in values if value.HasField("func")]
    return [*found, *(function.name for value in values for function in value.list.func)]


def function_definition(name: str) -> function_pb2.FunctionDef:
    """Returns the definition of a function that the process knows."""
    return context.context().get_function_def(name)


def functions_reached(names: Iterable[str]) -> Iterator[function_pb2.FunctionDef]:
    """Yields the functions of these names, then the functions that they run, and so on, each once."""
    reached = dict.fromkeys(names)
    pending = deque(reached)
    while pending:
        function = function_definition(pending.popleft())
        yield function
        found = dict.fromkeys(name for node in function.node_def for name in functions_named(node))
        pending += [name for name in found if name not in reached]
        reached |= found


def add_functions(library: function_pb2.FunctionDefLibrary) -> list[str]:
    """Adds functions to the process, where built functions find the bodies of loops; returns their names."""
    for function in library.function:
        context.context().add_function_def(function)
    return [function.signature.name for function in library.function]


def remove_functions(names: Iterable[str]) -> None:
    """Removes functions that `add_functions` added."""
    for name in names:
        context.context().remove_function(name)


def on_calling_thread() -> AbstractContextManager[None]:
    """Makes functions run op by op on the calling thread within the context.

    A small function is then faster: passing its ops to other threads costs more than its kernels.
    """
    manager: AbstractContextManager[None] = context.function_executor_type("SINGLE_THREADED_EXECUTOR")
    return manager


def session_call(
    graph: tf.Graph, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], *, single_threaded: bool
) -> tuple[Callable[..., list[Any]], Callable[[], None]]:
    """Returns a function that runs a graph on the CPU, and a function that frees its session.

    The first takes NumPy arrays for `inputs` and returns those of `outputs`. It runs in a session that shares the
    graph: calling it costs a tenth of calling a concrete function, which gives each call to another thread.

    Args:
        graph: A graph that does not change any more; of a concrete function also.
        inputs: Tensors of the graph.
        outputs: Tensors of the graph.
        single_threaded: Whether ops run one after the other on the calling thread. There may be no control flow then.
    """
    # The options of functions, so that sessions compute the same results.
    config = context.context().config
    _limit_optimizer(config.graph_options.rewrite_options, graph)
    # The session needs neither a second copy of the whole graph nor one of the graph that runs.
    config.graph_options.place_pruned_graph = True
    config.experimental.disable_output_partition_graphs = True
    if single_threaded:
        config.experimental.executor_type = "SINGLE_THREADED_EXECUTOR"
    session = tf.compat.v1.Session(graph=graph, config=config)
    options = config_pb2.CallableOptions(
        feed=[tensor.name for tensor in inputs],
        fetch=[tensor.name for tensor in outputs],
        # Ops that must run although no output depends on them, such as checks.
        target=[op.name for op in getattr(graph, "control_outputs", ())],
    )
    return session._make_callable_from_options(options), session.close


def _limit_optimizer(rewrites: rewriter_config_pb2.RewriterConfig, graph: tf.Graph) -> None:
    """Turns off the graph optimizer, except for what makes loops a fifth faster.

    The other passes that compute the same results take longer than many runs of the graph, and no run gets faster.
    """
    if any(op.type in _LOOPS for op in graph.get_operations()):
        rewrites.optimizers.append("dependency")
        rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    else:
        rewrites.disable_meta_optimizer = True


class CopiedOp(NamedTuple):
    """Type and attributes of an op. `list_lengths`: for each input of the op type, the length if it is a list."""

    op_type: str
    attributes: Sequence[tuple[str, bytes]]
    list_lengths: Sequence[int | None]

    @classmethod
    def of(cls, op: tf.Operation) -> CopiedOp:
        """Returns the type and attributes of an op."""
        node = op.node_def
        lengths: list[int | None] = []
        for argument in op.op_def.input_arg:
            if argument.number_attr:
                lengths.append(node.attr[argument.number_attr].i)
            elif argument.type_list_attr:
                lengths.append(len(node.attr[argument.type_list_attr].list.type))
            else:
                lengths.append(None)
        return cls(op.type, [(name, value.SerializeToString()) for name, value in node.attr.items()], lengths)


class RecordingGraph(func_graph.FuncGraph):  # type: ignore[misc]
    """A function's graph that records the ops created in it, without imported ones."""

    def __init__(self) -> None:
        super().__init__("program")
        self.made: list[tf.Operation] = []

    def create(
        self, copied: CopiedOp, name: str, inputs: Sequence[tf.Tensor], waits_for: Sequence[tf.Operation]
    ) -> tf.Operation:
        """Creates an op with tensors of this graph as inputs, in a small part of the time of TensorFlow's functions.

        Args:
            copied: The type and attributes.
            name: A base for the name.
            inputs: The inputs.
            waits_for: Ops of this graph that must have run before it.
        """
        with self._c_graph.get() as c_graph:
            description = c_api.TF_NewOperation(c_graph, copied.op_type, self.unique_name(name))
        outputs = [value._as_tf_output() for value in inputs]
        start = 0
        for count in copied.list_lengths:
            if count is None:
                c_api.TF_AddInput(description, outputs[start])
                start += 1
            else:
                c_api.TF_AddInputList(description, outputs[start : start + count])
                start += count
        for waited_for in waits_for:
            c_api.TF_AddControlInput(description, waited_for._c_op)
        for attribute, value in copied.attributes:
            c_api.TF_SetAttrValueProto(description, attribute, value)
        op = tf.Operation(c_api.TF_FinishOperation(description), ops.SymbolicTensor)
        op._init(self)
        self.made.append(op)
        return op

    def control_dependencies(self, control_inputs: Any) -> Any:
        """As in the base class, but does not mark the ops: a mark distinguishes equal gradients, and only counts."""
        controller = super().control_dependencies(control_inputs)
        for op in controller.control_inputs:
            op._clear_attr(WAITED_FOR_ATTR)
        return controller

    def _create_op_internal(self, *args: Any, **kwargs: Any) -> tf.Operation:
        op = super()._create_op_internal(*args, **kwargs)
        self.made.append(op)
        return op


def trace(
    function: Callable[..., Sequence[tf.Tensor]], signature: Sequence[tf.TensorSpec], *, is_stateful: bool
) -> RecordingGraph:
    """Returns the graph that `function` builds for arguments of the types and shapes of `signature`.

    is_stateful: Whether it imports ops that have side effects: then they run, in the order in which they were created.
    """

    def run(*arguments: tf.Tensor) -> list[tf.Tensor]:
        seen = {id(argument) for argument in arguments}
        returned = []
        for tensor in function(*arguments):
            # A session cannot return an argument.
            returned.append(tf.identity(tensor) if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        return returned

    graph = RecordingGraph()
    func_graph.func_graph_from_py_func(
        graph.name, run, (), {}, list(signature), func_graph=graph, add_control_dependencies=is_stateful
    )
    return graph


def callable_function(graph: RecordingGraph) -> Any:
    """Returns a concrete function that runs a graph of `trace`. TensorFlow keeps a copy of the graph for it."""
    kind = function_type.from_structured_signature(
        graph.structured_input_signature, graph.structured_outputs, graph.function_captures.capture_types
    )
    return concrete_function.ConcreteFunction.from_func_graph(graph, kind, {})


def is_marked_zero(value: tf.Tensor) -> bool:
    """Returns whether Python code has marked a tensor as zeros; some gradient functions then leave out a term."""
    return bool(getattr(value, "_is_zeros_tensor", False))


def mark_zero(value: Any) -> None:
    """Marks a tensor as zeros."""
    value._is_zeros_tensor = True


def is_stateful(op_type: str) -> bool:
    """Returns whether ops of this type have side effects or do not return the same for the same inputs."""
    definition = op_def_registry.get(op_type)
    return definition is None or bool(definition.is_stateful)


def computed_constant(value: tf.Tensor) -> Any:
    """Returns the value that TensorFlow computes for a tensor when it infers shapes, as an array; None: it cannot."""
    with value.graph._c_graph.get() as c_graph:
        return c_api.TF_TryEvaluateConstant_wrapper(c_graph, value._as_tf_output())


def known_shape(value: tf.Tensor) -> tf.TensorShape:
    """Returns what is known of the sizes that a vector holds while the graph is built."""
    return tensor_util.constant_value_as_shape(value)


def gradients_in(
    graph: tf.Graph, ys: Sequence[tf.Tensor], xs: Sequence[tf.Tensor], grad_ys: Sequence[Any]
) -> list[Any]:
    """Returns partial gradients of tensors of `graph`, built in the current graph.

    Each x counts as an independent variable, even if it depends on another x. If an x occurs twice, the first
    occurrence gets the gradient.
    """
    if not ys:
        return [None] * len(xs)
    found = gradients_from(graph, ys, xs, grad_ys, xs, tf.UnconnectedGradients.NONE)
    first = {x.ref(): index for index, x in reversed(list(enumerate(xs)))}
    return [
        gradient if first[x.ref()] == index else None for index, (x, gradient) in enumerate(zip(xs, found, strict=True))
    ]


def use_gradrule_gradients(ops: Iterable[tf.Operation]) -> None:
    """Makes TensorFlow call gradrule for the gradients of these ops."""
    for op in ops:
        try:
            op.get_attr(GRADIENT_ATTR)
        except ValueError:
            op._set_attr(GRADIENT_ATTR, attr_value_pb2.AttrValue(s=GRADIENT_NAME.encode()))


def clear_attribute(op: tf.Operation, name: str) -> None:
    """Removes an attribute of an op. Its graph must not have run yet."""
    op._clear_attr(name)


def use_gradrule_gradients_inside(op: tf.Operation) -> None:
    """Makes TensorFlow call gradrule for the ops in the body or branches of an op; does nothing for other ops."""
    if op.type in _LOOPS:
        for part in ("cond", "body"):
            graph = while_v2._get_graph(op, part, f"_{part}_graph")
            # TensorFlow finds the graph here when it builds the gradient of the loop.
            setattr(op, f"_{part}_graph", graph)
            use_gradrule_gradients(graph.get_operations())
    elif op.type in _BRANCHES:
        for index, graph in enumerate(cond_v2.get_func_graphs(op)):
            setattr(op, _BRANCHES[op.type](index), graph)
            use_gradrule_gradients(graph.get_operations())


def gradients_from(
    graph: tf.Graph,
    ys: Sequence[tf.Tensor],
    xs: Sequence[tf.Tensor],
    grad_ys: Sequence[tf.Tensor | None],
    stop_gradients: Sequence[tf.Tensor],
    unconnected_gradients: tf.UnconnectedGradients,
) -> list[Any]:
    """Returns `tf.gradients` of tensors of `graph`, built in the current graph."""
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
    """Runs a concrete function that returns a flat list, with other tensors in place of its captured tensors."""
    return list(function._call_flat(list(arguments), list(captures)) or ())


def shared_array(tensor: tf.Tensor) -> Any:
    """Returns a tensor's values; those in host memory are not copied, and must not be changed."""
    return tensor._numpy()


def shared_tensor(value: Any) -> tf.Tensor:
    """Returns a result of a session as a tensor on the CPU, which uses the memory of an array, if it is one."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return tf.constant(value)
    context.ensure_initialized()
    return ops.EagerTensor(value, "/device:CPU:0", None)


def identity_n(tensors: Sequence[tf.Tensor], notes: Mapping[str, str | int]) -> list[tf.Tensor]:
    """Passes tensors through an IdentityN with additional attributes, in the default graph."""
    value_of = attr_value_pb2.AttrValue
    attrs = {
        name: value_of(s=value.encode()) if isinstance(value, str) else value_of(i=value)
        for name, value in notes.items()
    }
    types = [tensor.dtype.base_dtype.as_datatype_enum for tensor in tensors]
    attrs["T"] = value_of(list=value_of.ListValue(type=types))
    graph = tf.compat.v1.get_default_graph()
    # The public function takes no additional attributes.
    return list(graph.create_op("IdentityN", list(tensors), attrs=attrs, name="rule/gradient").outputs)


def in_graph(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """Returns `tensor` for use in `graph`: captured if it belongs to an outer graph, as in the gradient of a loop."""
    if tensor.graph is graph:
        return tensor
    around = getattr(graph, "outer_graph", None)
    further = around
    while further is not None and further is not tensor.graph:
        further = getattr(further, "outer_graph", None)
    if around is not None and further is not None:
        # The gradient of a branch captures from the next outer graph only, so tensors are captured level by level.
        tensor = in_graph(around, tensor)
    return graph.capture(tensor)


def from_graph(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor of `graph` from which `tensor` was captured; `tensor` itself if it was not."""
    found = tensor
    while found.graph is not graph:
        outer = [external for external, internal in getattr(found.graph, "captures", ()) if internal is found]
        if not outer:
            return tensor
        found = outer[0]
    return found
