"""Concurrent calls of a program that declares batching run together in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, tensor_pb2
from tests.service.servers import RunningServer, running_server

pytestmark = pytest.mark.fast_path("batching")

CLIENTS = 64
_MOST_ROUNDS = 40
_rng = np.random.default_rng(0)
_LAYERS = [_rng.normal(size=shape).astype(np.float32) / 16 for shape in ((64, 256), (256, 256), (256, 5))]


def perceptron(*, rows: int | None = None) -> gr.Graph:
    g = gr.Graph()
    h: Any = g.placeholder("x", "float32", [rows, 64])
    for weights in _LAYERS[:-1]:
        h = g.op_output("Relu", g.matmul(h, g.constant(weights)))
    g.matmul(h, g.constant(_LAYERS[-1]), name="y")
    return g


def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the perceptron's output and its gradient by guided backpropagation."""
    inputs, h = [], x
    for weights in _LAYERS[:-1]:
        h = h @ weights
        inputs.append(h)
        h = np.maximum(h, 0)
    dy = np.ones((len(x), 5), np.float32) @ _LAYERS[-1].T
    for value, weights in zip(inputs[::-1], _LAYERS[-2::-1], strict=True):
        dy = np.where((value > 0) & (dy > 0), dy, 0) @ weights.T
    return h @ _LAYERS[-1], dy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server whose engine runs one request at a time, so that concurrent calls wait."""
    with running_server(tmp_path_factory.mktemp("batching"), ["--engine-threads", "1"]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[gr.Client]:
    with gr.connect(server.target) as connected:
        yield connected


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target) as opened:
        yield opened


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CLIENTS) as executor:
        yield executor


def compiled(client: Any, graph: gr.Graph, **words: Any) -> gr.Program:
    words = {"fetches": ["y"], "ys": ["y"], "xs": ["x"], "batching": gr.Batching(axis=0), **words}
    program: gr.Program = client.compile(graph, **words)
    return program


def answers(threads: ThreadPoolExecutor, call: Callable[[np.ndarray], Any], feeds: Sequence[np.ndarray]) -> list[Any]:
    return list(threads.map(call, feeds))


def examples(count: int = CLIENTS, rows: int = 1) -> list[np.ndarray]:
    return [_rng.normal(size=(rows, 64)).astype(np.float32) for _ in range(count)]


def repeat_until_together(
    threads: ThreadPoolExecutor, call: Callable[[np.ndarray], Any]
) -> list[tuple[np.ndarray, Any]]:
    """Sends rounds of 64 concurrent calls until calls ran together; returns the last round."""
    for _ in range(_MOST_ROUNDS):
        feeds = examples()
        results = answers(threads, call, feeds)
        if max(result.batch_size for result in results) > 1:
            return list(zip(feeds, results, strict=True))
    raise AssertionError("no calls ran together")


def test_concurrent_clients_get_the_same_answers_as_alone(client: Any, threads: ThreadPoolExecutor) -> None:
    program = compiled(client, perceptron(), overrides={"Relu": "guided_relu"})
    for x, result in repeat_until_together(threads, lambda x: program(x=x)):
        y, gradient = expected(x)
        np.testing.assert_allclose(result.outputs["y"], y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.gradients["x"], gradient, rtol=1e-4, atol=1e-5)
        alone = program(x=x)
        assert alone.batch_size == 0
        np.testing.assert_allclose(result.gradients["x"], alone.gradients["x"], rtol=1e-5, atol=1e-6)


def test_calls_of_several_examples_run_together(client: Any, threads: ThreadPoolExecutor) -> None:
    program = compiled(client, perceptron())
    repeat_until_together(threads, lambda x: program(x=x))
    feeds = [example for rows in range(1, 9) for example in examples(8, rows)]
    results = answers(threads, lambda x: program(x=x), feeds)
    for x, result in zip(feeds, results, strict=True):
        np.testing.assert_allclose(result.outputs["y"], expected(x)[0], rtol=1e-4, atol=1e-5)
    assert all(result.batch_size in (0, *range(2, 65)) for result in results)


def test_invalid_call_in_a_batch_gets_its_own_error(client: Any, threads: ThreadPoolExecutor) -> None:
    program = compiled(client, perceptron())
    repeat_until_together(threads, lambda x: program(x=x))

    def call(x: np.ndarray) -> Any:
        try:
            return program(x=x)
        except gr.errors.GradruleError as cause:
            return cause

    feeds = [np.zeros((1, 63), np.float32) if index % 8 == 0 else x for index, x in enumerate(examples())]
    for x, result in zip(feeds, answers(threads, call, feeds), strict=True):
        if x.shape == (1, 63):
            assert isinstance(result, gr.errors.FeedShapeError)
        else:
            np.testing.assert_allclose(result.outputs["y"], expected(x)[0], rtol=1e-4, atol=1e-5)


def test_calls_run_together_again_after_a_batch_failed(client: Any, threads: ThreadPoolExecutor) -> None:
    """A batch with only one call left says nothing about the program."""
    program = compiled(client, perceptron())
    for _ in range(3):
        feeds = [x if index % 2 else np.zeros((1, 63), np.float32) for index, x in enumerate(examples(8))]
        for future in [threads.submit(program, x=x) for x in feeds]:
            future.exception()
    repeat_until_together(threads, lambda x: program(x=x))


def test_program_that_does_not_declare_batching_runs_its_calls_alone(client: Any, threads: ThreadPoolExecutor) -> None:
    program = compiled(client, perceptron(), batching=None)
    for _ in range(3):
        assert {result.batch_size for result in answers(threads, lambda x: program(x=x), examples())} == {0}
    assert program.name != compiled(client, perceptron()).name


def test_call_with_batching_off_runs_alone(client: Any, channel: Any, threads: ThreadPoolExecutor) -> None:
    program = compiled(client, perceptron())
    repeat_until_together(threads, lambda x: program(x=x))
    method = channel.unary_unary("/gradrule.v1.GradientService/Evaluate")

    def call(x: np.ndarray) -> evaluate_pb2.EvaluateResponse:
        request = evaluate_pb2.EvaluateRequest(program=program.name)
        request.batching.allowed = False
        feed = request.feeds.add(name="x").value.inline_tensor
        feed.dtype = tensor_pb2.Dt.DT_FLOAT
        feed.tensor_content = x.tobytes()
        for size in x.shape:
            feed.tensor_shape.dim.add(size=size)
        return evaluate_pb2.EvaluateResponse.FromString(method(request.SerializeToString()))

    assert {answer.batch_size for answer in answers(threads, call, examples())} == {0}


def test_inline_call_with_batching_off_runs_alone(channel: Any, threads: ThreadPoolExecutor) -> None:
    method = channel.unary_unary("/gradrule.v1.GradientService/Evaluate")
    graph = perceptron().to_bytes()

    def call(x: np.ndarray, is_allowed: bool) -> evaluate_pb2.EvaluateResponse:
        request = evaluate_pb2.EvaluateRequest()
        request.spec.graph.serialized = graph
        request.spec.fetches.append("y")
        request.spec.batching.axis = 0
        request.batching.allowed = is_allowed
        feed = request.feeds.add(name="x").value.inline_tensor
        feed.dtype = tensor_pb2.Dt.DT_FLOAT
        feed.tensor_content = x.tobytes()
        for size in x.shape:
            feed.tensor_shape.dim.add(size=size)
        return evaluate_pb2.EvaluateResponse.FromString(method(request.SerializeToString()))

    repeat_until_together(threads, lambda x: call(x, True))
    assert {answer.batch_size for answer in answers(threads, lambda x: call(x, False), examples())} == {0}


def test_program_whose_merged_runs_differ_runs_its_calls_alone(
    client: Any, server: RunningServer, threads: ThreadPoolExecutor
) -> None:
    g = perceptron()
    y = g.tensor("y")
    g.op_output("Sub", y, g.op_output("Mean", y, g.constant(np.array([0], np.int32)), keep_dims=True), name="centred")
    program = compiled(client, g, fetches=["centred"], ys=["centred"])
    for _ in range(_MOST_ROUNDS):
        for result in answers(threads, lambda x: program(x=x), examples(rows=2)):
            assert result.batch_size == 0
            assert abs(result.outputs["centred"].sum(axis=0)).max() < 1e-4
        if "are not run together: output 'centred' differs when calls run together" in server.log.read_text():
            return
    raise AssertionError("no merged run was compared")


def test_declaration_that_is_known_to_be_wrong_is_refused(client: Any) -> None:
    g = perceptron()
    g.reduce_sum(g.tensor("y"), axis=[0, 1], name="loss")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("output 'loss' has the shape ()", {"fetches": ["loss"]}),
        ("'gradient_normalize' is not per sample", {"overrides": {"Relu": "gradient_normalize"}}),
    ]
    for reason, words in cases:
        with pytest.raises(gr.errors.UnsupportedError, match=reason.replace("(", r"\(").replace(")", r"\)")) as caught:
            compiled(client, g, **words)
        assert caught.value.details[0].field == "spec.batching"
    # A scalar that is only differentiated is no result.
    assert compiled(client, g, ys=["loss"])(x=examples(1)[0]).batch_size == 0


@pytest.mark.parametrize("batching", [True, False, 0, "x"])
def test_batching_that_is_no_declaration_is_refused(client: Any, batching: Any) -> None:
    with pytest.raises(gr.errors.InvalidParamError, match="Batching"):
        compiled(client, perceptron(), batching=batching)


@pytest.mark.parametrize("axis", [1, -1, None, False, 0.0, "0"])
def test_batching_along_another_axis_is_refused(axis: Any) -> None:
    with pytest.raises(gr.errors.InvalidParamError, match="axis of batching is 0"):
        gr.Batching(axis=axis)


def test_axis_in_a_call_is_refused(client: Any, channel: Any) -> None:
    request = evaluate_pb2.EvaluateRequest(program=compiled(client, perceptron()).name)
    request.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(examples(1)[0]))
    request.batching.axis = 0
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/gradrule.v1.GradientService/Evaluate")(request.SerializeToString())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "spec.batching.axis" in str(caught.value.details())
