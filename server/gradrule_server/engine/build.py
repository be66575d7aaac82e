"""Builds a program: a TensorFlow function that runs forward and backward in one call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import evaluate_pb2, override_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.arguments import FeedPlan
from gradrule_server.engine.backward import TwoPartProgram
from gradrule_server.engine.batching import create_merged_runs
from gradrule_server.engine.checks import check_ops
from gradrule_server.engine.graph_import import tensor_name
from gradrule_server.engine.jit import XlaCall, check_xla
from gradrule_server.engine.memory import check_memory
from gradrule_server.engine.program import BuiltProgram, FunctionCall, Input, ParamInput, create_graph_call
from gradrule_server.engine.trace import Trace, import_tensors
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy.op_tables import ops_with
from gradrule_server.rules import RuleContent
from gradrule_server.rules.catalogue import BUILTINS

_SMALL_OPS = 256
# The executor of the calling thread does not run the control flow that these become.
_NEEDS_THREADS = ops_with("bodies") | ops_with("call")


def build(
    request: link_pb2.CompileRequest,
    values: Sequence[tf.Tensor] = (),
    device: str = "CPU:0",
    disabled_fast_paths: frozenset[str] = frozenset(),
) -> BuiltProgram:
    """Builds the program; `GradruleError` where TensorFlow refuses the graph or a rule does not fit its node.

    Args:
        request: The program.
        values: Values of the request's variables, in their order.
        device: Where it will run.
        disabled_fast_paths: See `gradrule.common.fast_paths`.
    """
    graph_def = tf_graph_pb2.GraphDef.FromString(request.graph)
    # Removed with the program: names are unique to it, so nothing else refers to them.
    functions = tf_private.add_functions(graph_def.library)
    try:
        built = _build(request, graph_def, values, device, disabled_fast_paths)
    except BaseException:
        tf_private.remove_functions(functions)
        raise
    weakref.finalize(built, tf_private.remove_functions, functions)
    return built


def _start_build(
    request: link_pb2.CompileRequest, graph_def: tf_graph_pb2.GraphDef, values: Sequence[tf.Tensor], device: str
) -> tuple[BuiltProgram, Trace]:
    """Returns the program without its graph, and the trace that builds the graph."""
    contents = [_read_content(rule) for rule in request.rules]
    used = {mark.rule for mark in request.marks} | {made.rule for made in request.made}
    built = BuiltProgram(
        inputs=[
            *(Input.of(spec) for spec in request.inputs),
            *(Input.of(item.spec, value) for item, value in zip(request.variables, values, strict=True)),
        ],
        aliases=dict(request.input_aliases),
        params=[
            ParamInput(index, param.name)
            for index, content in enumerate(contents)
            if content is not None and index in used
            for param in content.params
        ],
        kind=request.derivative or evaluate_pb2.DERIVATIVE_VJP,
        stacked=request.stacked_grad_ys,
        max_rank=request.max_rank,
        max_unpacking=request.max_unpacking,
        device=device,
    )
    built.statuses = [override_pb2.RESOLUTION_STATUS_OFF_PATH] * len(request.marks)
    _add_fed_inputs(request, graph_def, built)
    return built, Trace(request, graph_def, contents, built)


def _signature(built: BuiltProgram) -> list[tf.TensorSpec]:
    """Returns the types and shapes of the program's arguments."""
    return [
        *(tf.TensorSpec(item.shape, item.dtype, name=f"in{index}") for index, item in enumerate(built.inputs)),
        *(tf.TensorSpec(_stacked(item, built), item.dtype) for item in built.grad_ys),
        *(tf.TensorSpec(item.shape, item.dtype) for item in built.directions),
        *(tf.TensorSpec(None, tf.float64, name=f"param{index}") for index in range(len(built.params))),
    ]


def _build(
    request: link_pb2.CompileRequest,
    graph_def: tf_graph_pb2.GraphDef,
    values: Sequence[tf.Tensor],
    device: str,
    disabled_fast_paths: frozenset[str],
) -> BuiltProgram:
    built, trace = _start_build(request, graph_def, values, device)

    def run(*arguments: tf.Tensor) -> list[tf.Tensor]:
        return trace.run(arguments)

    built.graph = graph = tf_private.trace(run, _signature(built), is_stateful=_is_stateful(graph_def))
    if not request.trusted:
        check_ops(graph)
    if request.jit:
        check_xla(graph)
    check_memory(
        graph, {index for index, item in enumerate(built.inputs) if item.default is not None}, request.memory_limit
    )
    returned = {id(tensor) for tensor in graph.outputs}
    arguments = graph.inputs[: len(built.inputs)]
    built.small = "calling-thread" not in disabled_fast_paths and is_small(graph)
    built.result_types = [tensor.dtype.base_dtype.as_datatype_enum for tensor in graph.outputs]
    built.unused = [not argument.consumers() and id(argument) not in returned for argument in arguments]
    if trace.backward is not None:
        built.two_parts = TwoPartProgram(trace.backward, trusted=request.trusted)
        built.layout = built.two_parts.layout
        built.call = FunctionCall(built.function, single_threaded=built.small)
    else:
        may_use_session = device.startswith("CPU") and "sessions" not in disabled_fast_paths
        built.call = create_graph_call(built, may_use_session=may_use_session)
        if request.jit and device.startswith("CPU") and graph.outputs:
            built.call, built.jit = XlaCall(built.function, built.call), True
    if request.batched:
        built.merged_runs = create_merged_runs(built)
    built.feed_plan = FeedPlan(built)
    return built


def _add_fed_inputs(request: link_pb2.CompileRequest, graph_def: tf_graph_pb2.GraphDef, built: BuiltProgram) -> None:
    """Adds the fed grad_ys and the directions to the program's arguments. Importing the graph gives their types."""
    fed_ys = [y for y, item in zip(request.ys, request.grad_ys, strict=True) if item.WhichOneof("source") == "fed"]
    moved_xs = [x for x, is_given in zip(request.xs, request.directions, strict=False) if is_given]
    endpoints = [*fed_ys, *moved_xs]
    if not endpoints:
        return
    specs = _infer_specs(graph_def, built.inputs, [endpoint.tensor for endpoint in endpoints])
    fed = [Input(item.name, spec.dtype, spec.shape) for item, spec in zip(endpoints, specs, strict=True)]
    built.grad_ys, built.directions = fed[: len(fed_ys)], fed[len(fed_ys) :]


def _stacked(item: Input, built: BuiltProgram) -> tf.TensorShape:
    return tf.TensorShape([None]).concatenate(item.shape) if built.stacked else item.shape


def _is_stateful(graph_def: tf_graph_pb2.GraphDef) -> bool:
    """Returns whether a node of the graph or of its functions is stateful."""
    bodies = (graph_def.node, *(function.node_def for function in graph_def.library.function))
    return any(map(tf_private.is_stateful, {node.op for body in bodies for node in body}))


def is_small(graph: tf.Graph) -> bool:
    """Returns whether a function has few ops and no control flow, so that it is faster on the calling thread."""
    ops = graph.get_operations()
    if len(ops) > _SMALL_OPS or any(op.type in _NEEDS_THREADS for op in ops):
        return False
    # Kernels of strings and of lists of tensors do not use TensorFlow's allocator. If they run out of memory, the C++
    # exception ends a thread of TensorFlow's with a clear message, but the calling thread with a SIGSEGV.
    return not any(tensor.dtype in (tf.string, tf.variant) for op in ops for tensor in op.outputs)


def _read_content(rule: link_pb2.BoundRule) -> RuleContent | None:
    match rule.WhichOneof("form"):
        case "definition":
            return RuleContent.from_stored(rule.name, rule.definition)
        case "code":
            return BUILTINS[rule.code].content
        case "brought":
            return RuleContent(graph_bytes=rule.brought, embedded=True)
        case _:
            return None


def _infer_specs(graph_def: tf_graph_pb2.GraphDef, inputs: Sequence[Input], names: list[str]) -> list[tf.TensorSpec]:
    """Returns types and shapes of tensors. Imports the graph into another one, which is thrown away."""
    with tf.Graph().as_default():
        feeds = {tensor_name(item.name): tf.compat.v1.placeholder(item.dtype, item.shape) for item in inputs}
        # This graph never runs, so its labels may stay.
        tensors = import_tensors(graph_def, feeds, names, [])
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
