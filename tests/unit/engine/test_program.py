"""Tests that built programs run on arrays, with and without fast paths, and answer as protobuf would write."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.build import build
from gradrule_server.engine.program import BuiltProgram, FunctionCall, SessionCall, create_graph_call
from gradrule_server.engine.run import run
from gradrule_server.engine.tensor_sources import BlobReader
from gradrule_server.link.messages import ReceivedRequest
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy.op_tables import ops_with
from tests.call_payloads import call_values
from tests.service.graph_defs import build_graph
from tests.unit.engine.building import prepared

_SESSION = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "string"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)
_FUNCTION = ("qint8", "quint8", "qint32", "int4", "uint4", "float8_e5m2", "float8_e4m3fn")


def passed_on(name: str) -> gr.Graph:
    """Returns a graph in which y is x, of any element type."""
    return build_graph(lambda: tf.identity(tf.compat.v1.placeholder(tf.as_dtype(name), [None], "x"), name="y"))


def answer(graph: gr.Graph, feeds: dict[str, Any], **derivative: Any) -> evaluate_pb2.EvaluateResponse:
    """Returns the answer of an engine."""
    built = build(prepared(graph, **derivative).request)
    call = evaluate_pb2.EvaluateRequest()
    for name, value in feeds.items():
        call.feeds.add(name=name).value.inline_tensor.CopyFrom(value)
    received = ReceivedRequest(b"", 0, call_values(call))
    parts = run(built, link_pb2.RunRequest(), received, ArgumentReader(BlobReader(None)))
    return evaluate_pb2.EvaluateResponse.FromString(b"".join(parts))


def values_of(name: str) -> np.ndarray:
    """Returns three values of an element type."""
    if name == "string":
        return np.array([b"a", b"", b"\xff"], object)
    return np.array([1, 0, 1]).astype(tensor_codec.numpy_dtype(tensor_codec.dtype_number(name)))


@pytest.mark.parametrize("name", [*_SESSION, *_FUNCTION])
def test_values_of_every_type_are_returned(name: str) -> None:
    value = tensor_codec.to_message(values_of(name), name)
    (output,) = answer(passed_on(name), {"x": value}).outputs
    assert (output.name, output.value.inline_tensor) == ("y", value)


@pytest.mark.parametrize(("names", "kind"), [(_SESSION, SessionCall), (_FUNCTION, FunctionCall)])
def test_programs_run_in_a_session_if_it_supports_their_types(names: tuple[str, ...], kind: type) -> None:
    for name in names:
        assert isinstance(build(prepared(passed_on(name)).request).call, kind), name
    on_gpu = build(prepared(passed_on("float32")).request, device="GPU:0")
    assert isinstance(on_gpu.call, FunctionCall)


def mixed() -> gr.Graph:
    """Returns a graph with a table lookup, an input on which nothing depends, and integers."""

    def build() -> None:
        table = tf.compat.v1.placeholder(tf.float32, [4, 2], "table")
        index = tf.compat.v1.placeholder(tf.int32, [None], "index")
        tf.compat.v1.placeholder(tf.float32, [2], "apart")
        tf.reduce_sum(tf.gather(table, index) ** 2, name="y")

    return build_graph(build)


def test_answers_equal_those_that_protobuf_writes() -> None:
    table, index = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([2, 0, 2], np.int32)
    feeds = {"table": tensor_codec.to_message(table), "index": tensor_codec.to_message(index)}
    found = answer(mixed(), feeds, vjp=program_pb2.Vjp(ys=["y"], xs=["table", "index", "apart"]))
    assert tensor_codec.to_numpy(found.outputs[0].value.inline_tensor) == 2 * (4**2 + 5**2) + 1
    by_table, by_index, by_apart = found.gradients
    assert [item.x for item in found.gradients] == ["table", "index", "apart"]
    assert by_index.WhichOneof("value") == "not_differentiable" and by_apart.WhichOneof("value") == "unconnected"
    assert tensor_codec.to_numpy(by_table.sparse.indices).tolist() == [2, 0, 2]
    assert tensor_codec.to_numpy(by_table.sparse.values).tolist() == (2 * table[index]).tolist()
    assert tensor_codec.to_numpy(by_table.sparse.dense_shape).tolist() == [4, 2]
    assert found.device == "CPU:0" and found.timings.run.nanos > 0
    # The same message through protobuf's own writer.
    assert evaluate_pb2.EvaluateResponse.FromString(found.SerializeToString()) == found


def test_one_writer_serves_any_shapes() -> None:
    for size in (3, 0, 5000, 3):
        value = tensor_codec.to_message(np.arange(size, dtype=np.float64))
        (output,) = answer(passed_on("float64"), {"x": value}).outputs
        assert tensor_codec.to_numpy(output.value.inline_tensor).tolist() == list(range(size))


def test_a_session_computes_what_the_function_computes_in_several_threads() -> None:
    rng = np.random.default_rng(1)

    def function(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        hidden = tf.tanh(x @ w)
        kept = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2.0), (0, hidden))[1]
        return [kept, *tf.gradients(kept, [x, w])]

    graph = tf_private.trace(function, [tf.TensorSpec([None, 4]), tf.TensorSpec([4, 4])], is_stateful=True)
    built = BuiltProgram(graph=graph)
    call = create_graph_call(built, may_use_session=True)
    assert isinstance(call, SessionCall)
    arrays = [rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(4, 4)).astype(np.float32)]
    wanted = [tensor.numpy() for tensor in built.function(*map(tf.constant, arrays))]
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(call(arrays))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for results in found:
        for result, value in zip(results, wanted, strict=True):
            np.testing.assert_allclose(result, value, rtol=1e-6)


def test_checks_run_although_no_output_depends_on_them() -> None:
    def function(x: tf.Tensor) -> list[tf.Tensor]:
        tf.raw_ops.Assert(condition=x > 0, data=["x is not positive"])
        return [x * 2]

    graph = tf_private.trace(function, [tf.TensorSpec([])], is_stateful=True)
    call = create_graph_call(BuiltProgram(graph=graph, small=True), may_use_session=True)
    assert call([np.array(1, np.float32)])[0] == 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="x is not positive"):
        call([np.array(-1, np.float32)])


@pytest.mark.parametrize("op_type", sorted(ops_with("keeps_shape")))
def test_ops_with_trait_keeps_shape_keep_the_shape(op_type: str) -> None:
    dtype = tf.bool if op_type == "LogicalNot" else tf.float32
    for shape in ([2, 3, 5], [7]):
        with tf.Graph().as_default() as graph:
            value = tf.compat.v1.placeholder(dtype, shape)
            op = graph.create_op(op_type, [value], attrs={})
            assert [output.shape.as_list() for output in op.outputs] == [shape]
            assert len(op.inputs) == 1


def built_without(*disabled: str) -> BuiltProgram:
    """Returns a program for y = relu(x) and its gradient under a rule, built without some fast paths."""
    g = gr.Graph()
    g.op_output("Relu", g.placeholder("x", "float32", [None]), name="y")
    request = prepared(g, {"Relu": "guided_relu"}, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request
    return build(request, disabled_fast_paths=frozenset(disabled))


def fast_paths_of(built: BuiltProgram) -> tuple[Any, bool]:
    return type(built.call), built.small


def test_each_fast_path_has_a_switch() -> None:
    assert fast_paths_of(built_without()) == (SessionCall, True)
    assert fast_paths_of(built_without("sessions")) == (FunctionCall, True)
    assert fast_paths_of(built_without("calling-thread")) == (SessionCall, False)


def test_results_without_fast_paths_are_the_same() -> None:
    x = np.array([-2.0, -0.5, 0.0, 0.5, 2.0], np.float32)
    for found, wanted in zip(
        built_without("sessions", "calling-thread").call([x]), built_without().call([x]), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.complex128, tf.bool])
def test_sessions_take_large_arrays_at_any_address(dtype: tf.DType) -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(dtype, [None, None])
        y = tf.transpose(x)
    call = SessionCall(graph, [x], [y], single_threaded=False)
    element = dtype.as_numpy_dtype(0).nbytes
    values = np.random.default_rng(1).integers(0, 2, (1200, 1100)).astype(dtype.as_numpy_dtype)
    moved = np.frombuffer(bytes(element) + values.tobytes(), values.dtype)[1:].reshape(values.shape)
    for array in (values, moved, np.asfortranarray(values)):
        np.testing.assert_array_equal(call([array])[0], values.T)
