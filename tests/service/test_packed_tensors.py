"""Packed tensors in every kind of request give the same results as unpacked ones."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import zstandard

import gradrule as gr
from gradrule import optimizers
from gradrule.common import fast_paths
from gradrule.v1 import evaluate_pb2, evaluate_pb2_grpc, tensor_pb2
from tests.service import blocking, raw
from tests.service.answers import refused_raw
from tests.service.servers import RunningServer

Transfers = {
    "zstd": gr.Transfer(compression="zstd"),
    "bfloat16": gr.Transfer(wire_dtype="bfloat16"),
    "both": gr.Transfer(compression="zstd", wire_dtype="bfloat16"),
    "gzip": gr.Transfer(compression="gzip"),
    "gzip and bfloat16": gr.Transfer(compression="gzip", wire_dtype="bfloat16"),
}
WIDTH = 600


def graph() -> gr.Graph:
    """Makes tanh, whose results are no bfloat16 numbers, and a gather, whose gradient is sparse."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, WIDTH])
    y = g.tanh(x, name="y")
    table = g.placeholder("table", "float32", [None, WIDTH])
    rows = g.placeholder("rows", "int32", [None])
    g.op("GatherV2", table, rows, g.constant(0, dtype="int32"), name="found")
    g.reduce_sum(g.square(y), name="loss")
    g.reduce_sum(g.tanh(g.tensor("found")), name="found_loss")
    return g


def values(rows: int = 3) -> np.ndarray[Any, Any]:
    # Few distinct values, so that zstd compresses them.
    return np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32).repeat(rows, 0)


FEEDS = {"x": values(), "table": values(4), "rows": np.array([2, 0, 2], np.int32)}
WORDS = {"fetches": ["y", "loss", "found"], "ys": ["loss", "found_loss"], "xs": ["x", "table"]}


@pytest.fixture(params=list(Transfers))
def transfer(request: pytest.FixtureRequest) -> gr.Transfer:
    return Transfers[request.param]


@pytest.fixture(params=["sync", "async"])
def packing(request: pytest.FixtureRequest, server: RunningServer, transfer: gr.Transfer) -> Iterator[Any]:
    """Returns a client that packs its tensors."""
    if request.param == "sync":
        with gr.connect(server.target, transfer=transfer) as client:
            yield client
        return
    loop = blocking.LoopThread()
    with blocking.connect(server.target, loop, transfer=transfer) as client:
        yield client
    loop.close()


def rounded(value: Any) -> Any:
    array = np.asarray(value)
    return array.astype(ml_dtypes.bfloat16).astype(np.float32) if array.dtype == np.float32 else array


def check(ask: Callable[..., Any], plain: Callable[..., Any], transfer: gr.Transfer, **feeds: Any) -> None:
    """Compares the results of a packing client with those of a plain one for the same rounded values."""
    travel = rounded if transfer.wire_dtype else np.asarray
    found, expected = ask(feeds), plain({name: travel(value) for name, value in feeds.items()})
    compare(found, expected, travel)


def compare(found: Any, expected: Any, travel: Callable[[Any], Any]) -> None:
    if isinstance(expected, gr.Result):
        compare(dict(found.outputs), dict(expected.outputs), travel)
        compare(dict(found.gradients), dict(expected.gradients), travel)
    elif isinstance(expected, gr.Sparse):
        for part in ("values", "indices", "dense_shape"):
            compare(getattr(found, part), getattr(expected, part), travel)
    elif hasattr(expected, "items"):
        assert list(found) == list(expected)
        for name in expected:
            compare(found[name], expected[name], travel)
    else:
        assert found.dtype == np.asarray(expected).dtype
        np.testing.assert_array_equal(found, travel(expected))
        assert found.flags.writeable >= np.asarray(expected).flags.writeable


def test_inline_programs_with_packed_tensors(packing: Any, client: Any, transfer: gr.Transfer) -> None:
    check(
        lambda feeds: packing.evaluate(graph(), feeds, **WORDS),
        lambda feeds: client.evaluate(graph(), feeds, **WORDS),
        transfer,
        **FEEDS,
    )


def test_programs_unary_over_the_stream_and_in_chunks(packing: Any, client: Any, transfer: gr.Transfer) -> None:
    plain = client.compile(graph(), **WORDS)
    program = packing.program(plain.name)
    for _ in range(6):
        check(program.evaluate, plain.evaluate, transfer, **FEEDS)
    sender = (packing if isinstance(packing, gr.Client) else packing.target)._sender
    assert sender._stream.is_open == fast_paths.is_enabled("streams")
    sender._routes._max_whole_bytes = 1000
    random = np.random.default_rng(1).standard_normal((2000, WIDTH)).astype(np.float32)
    check(program.evaluate, plain.evaluate, transfer, **FEEDS | {"x": random})
    results = list(program.map([FEEDS] * 3))
    assert len(results) == 3
    for result in results:
        compare(result.outputs["loss"], program.evaluate(FEEDS).outputs["loss"], np.asarray)


def test_forward_and_pull_back_with_packed_tensors(packing: Any, client: Any, transfer: gr.Transfer) -> None:
    travel = rounded if transfer.wire_dtype else np.asarray
    plain = client.compile(graph(), fetches=["y"], ys=["y"], xs=["x"])
    program = packing.program(plain.name)
    feeds, given = {"x": values()}, {"x": travel(values())}
    with program.forward(feeds) as handle, plain.forward(given) as expected:
        compare(dict(handle.outputs), dict(expected.outputs), travel)
        grad = np.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH).astype(np.float32)
        compare(dict(handle.vjp({"y": grad})), dict(expected.vjp({"y": travel(grad)})), travel)


def test_other_derivatives_with_packed_tensors(packing: Any, client: Any, transfer: gr.Transfer) -> None:
    plain = client.compile(graph(), ys=["loss"], xs=["x"])
    program = packing.program(plain.name)
    travel = rounded if transfer.wire_dtype else np.asarray
    x = {"x": values()}
    given = {"x": travel(values())}
    compare(dict(program.jvp(x, x)), dict(plain.jvp(given, given)), travel)
    compare(dict(program.hvp(x, x)), dict(plain.hvp(given, given)), travel)
    compare(dict(program.jacobian(x)), dict(plain.jacobian(given)), travel)
    found = packing.jvp(graph(), x, x, ys=["loss"], xs=["x"])
    compare(dict(found), dict(client.jvp(graph(), given, given, ys=["loss"], xs=["x"])), travel)


def test_sessions_with_packed_tensors(server: RunningServer, client: Any, transfer: gr.Transfer) -> None:
    travel = rounded if transfer.wire_dtype else np.asarray

    def trained(of: Any, change: Callable[[Any], Any]) -> list[Any]:
        g = gr.Graph()
        w = g.variable("w", np.full((WIDTH, 1), 0.1, np.float32))
        g.reduce_sum(g.square(g.matmul(g.placeholder("x", "float32", [None, WIDTH]), w)), name="loss")
        with of.session(g) as session:
            feeds = {"x": change(values())}
            step = session.step(feeds, "loss", optimizers.SGD(1e-4))
            result = session.evaluate(feeds, ["loss"], ys=["loss"], xs=["w"])
            read = dict(session.read())
            session.assign({"w": np.zeros((WIDTH, 1), np.float32)})
            return [step.loss, result, read, dict(session.read())]

    with gr.connect(server.target, transfer=transfer) as packing:
        for found, expected in zip(trained(packing, np.asarray), trained(client, travel), strict=True):
            compare(found, expected, travel)


def test_call_may_override_the_packing_of_its_client(client: Any) -> None:
    program = client.compile(graph(), **WORDS)
    expected = program.evaluate(FEEDS)
    zstd = program.evaluate(FEEDS, transfer=Transfers["zstd"])
    compare(zstd, expected, np.asarray)
    kept = program.evaluate(FEEDS, transfer=gr.Transfer(wire_dtype="bfloat16", keep_wire_dtype=True))
    assert kept.outputs["y"].dtype == ml_dtypes.bfloat16
    assert kept.gradients["table"].values.dtype == ml_dtypes.bfloat16
    assert kept.gradients["table"].indices.dtype == np.int32
    widened = program.evaluate(FEEDS, transfer=gr.Transfer(wire_dtype="bfloat16"))
    np.testing.assert_array_equal(kept.outputs["y"].astype(np.float32), widened.outputs["y"])
    with gr.connect(client.target, transfer=gr.Transfer(wire_dtype="bfloat16", keep_wire_dtype=True)) as keeping:
        with keeping.program(program.name).forward(FEEDS) as handle:
            assert handle.outputs["y"].dtype == ml_dtypes.bfloat16
            assert handle.vjp()["x"].dtype == ml_dtypes.bfloat16
        again = keeping.program(program.name).evaluate(FEEDS, transfer=gr.Transfer())
        compare(again, expected, np.asarray)
    with pytest.raises(gr.errors.InvalidParamError, match="give it to connect"):
        program.evaluate(FEEDS, transfer=gr.Transfer(compression="gzip"))


@pytest.mark.fast_path("batching")
def test_calls_with_different_packing_run_together(client: Any) -> None:
    g = gr.Graph()
    g.tanh(g.placeholder("x", "float32", [None, WIDTH]), name="y")
    program = client.compile(g, fetches=["y"], ys=["y"], xs=["x"], batching=gr.Batching(axis=0))
    ways = [gr.Transfer(), *(Transfers[name] for name in ("zstd", "bfloat16", "both"))]

    def ask(number: int) -> tuple[int, gr.Result]:
        x = {"x": values(1) + np.float32(number)}
        return number, program.evaluate(x, transfer=ways[number % len(ways)])

    # Many more calls than an engine runs at once, so that some wait; how many depends on the machine.
    with ThreadPoolExecutor(64) as pool:
        rounds = (list(pool.map(ask, range(200))) for _ in range(20))
        found = next(answers for answers in rounds if any(result.batch_size > 1 for _, result in answers))
    for number, result in found:
        x = values(1) + np.float32(number)
        if ways[number % len(ways)].wire_dtype:
            np.testing.assert_allclose(result.outputs["y"], np.tanh(rounded(x)), rtol=2**-8)
        else:
            np.testing.assert_allclose(result.outputs["y"], np.tanh(x), rtol=1e-6)


def packed(array: np.ndarray[Any, Any], **changes: Any) -> tensor_pb2.Tensor:
    plain = raw.tensor(array)
    content = zstandard.ZstdCompressor().compress(plain.tensor_content)
    message = {
        "dtype": tensor_pb2.DT_FLOAT,
        "shape": plain.tensor_shape,
        "compression": tensor_pb2.COMPRESSION_ZSTD,
        "content": content,
    }
    return tensor_pb2.Tensor(packed=tensor_pb2.PackedTensor(**message | changes))


def shape(*sizes: int) -> tensor_pb2.TensorShape:
    return tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in sizes])


def frame(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(array.tobytes())


ONES = np.ones((2, WIDTH), np.float32)
GIB = 1 << 30
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "cut off": ("INVALID_TENSOR", {"content": frame(ONES)[:-3]}, "no zstd frame"),
    "not a frame": ("INVALID_TENSOR", {"content": b"nothing of the kind"}, "no zstd frame"),
    "damaged": (
        "INVALID_TENSOR",
        {"content": frame(np.random.default_rng(0).integers(0, 9, (2, WIDTH)).astype("f"))[:-40] + bytes(40)},
        "no zstd frame",
    ),
    "empty": ("INVALID_TENSOR", {"content": b""}, "zstd frame"),
    "too few bytes": (
        "INVALID_TENSOR",
        {"content": frame(ONES[:1])},
        "has 2400 bytes unpacked; the tensor takes 4800",
    ),
    "too many bytes": ("INVALID_TENSOR", {"content": frame(np.ones((4096, WIDTH), "f"))}, "the tensor takes 4800"),
    "no content size": (
        "INVALID_TENSOR",
        {"content": frame(ONES, write_content_size=False)},
        "does not state how many bytes it has",
    ),
    "bytes behind the frame": ("INVALID_TENSOR", {"content": frame(ONES) + b"more"}, "no zstd frame"),
    "unknown compression": ("INVALID_TENSOR", {"compression": 7}, "the compression 7 is unknown"),
    "unknown content type": ("INVALID_TENSOR", {"content_dtype": tensor_pb2.DT_HALF}, "float32 can have bfloat16"),
    "other type": ("FEED_DTYPE", {"dtype": tensor_pb2.DT_DOUBLE}, "is float64, but the tensor is float32"),
    "unknown type": ("FEED_DTYPE", {"dtype": 99}, "type 99"),
    "other shape": ("FEED_SHAPE", {"shape": shape(2, 5)}, "has shape (2, 5), but the tensor has (None, 600)"),
    "negative size": ("INVALID_TENSOR", {"shape": shape(-1, WIDTH)}, "shape must be known"),
    # 512 MiB in 16 KiB.
    "bomb": (
        "LIMIT_EXCEEDED",
        {
            "shape": shape(GIB // 2 // 4 // WIDTH, WIDTH),
            "content": frame(np.zeros((GIB // 2 // 4 // WIDTH, WIDTH), np.float32)),
        },
        "--max-unpacking",
    ),
    "more than there is": ("LIMIT_EXCEEDED", {"shape": shape(1 << 50, WIDTH)}, "--max-unpacking"),
}


@pytest.mark.parametrize("case", list(BAD))
@pytest.mark.usefixtures("same_engine")
def test_wrong_packed_tensors_are_refused(case: str, channel: grpc.Channel, client: Any) -> None:
    reason, changes, words = BAD[case]
    g = gr.Graph()
    g.tanh(g.placeholder("x", "float32", [None, WIDTH]), name="y")
    program = client.compile(g, fetches=["y"])
    stub = evaluate_pb2_grpc.GradientServiceStub(channel)
    request = evaluate_pb2.EvaluateRequest(program=program.name, feeds=raw.feeds({"x": packed(ONES, **changes)}))
    with refused_raw(reason) as refusal:
        stub.Evaluate(request, timeout=30)
    refusal.says(words)
    request.feeds[0].CopyFrom(raw.feeds({"x": packed(ONES)})[0])
    assert stub.Evaluate(request, timeout=30).outputs[0].value.inline_tensor.tensor_content == np.tanh(ONES).tobytes()


def test_unknown_packing_of_the_answer_is_refused(channel: grpc.Channel, client: Any) -> None:
    g = gr.Graph()
    g.tanh(g.placeholder("x", "float32", [None, WIDTH]), name="y")
    program = client.compile(g, fetches=["y"])
    stub = evaluate_pb2_grpc.GradientServiceStub(channel)
    request = evaluate_pb2.EvaluateRequest(program=program.name, feeds=raw.feeds({"x": packed(ONES)}))
    request.answer_packing.compression = 7  # type: ignore[assignment]
    with refused_raw("MALFORMED_REQUEST") as refusal:
        stub.Evaluate(request, timeout=30)
    refusal.says("the compression 7 is unknown")
    request.answer_packing.compression = tensor_pb2.COMPRESSION_ZSTD
    found = stub.Evaluate(request, timeout=30).outputs[0].value.inline_tensor.packed
    assert zstandard.ZstdDecompressor().decompress(found.content) == np.tanh(ONES).tobytes()


def test_constants_cannot_be_packed(channel: grpc.Channel) -> None:
    constant = raw.node("x", "Const")
    constant.attr["dtype"].type = tensor_pb2.DT_FLOAT
    constant.attr["value"].tensor.CopyFrom(packed(ONES))
    stub = evaluate_pb2_grpc.GradientServiceStub(channel)
    request = raw.request(raw.graph(constant, raw.node("y", "Sign", "x")), {})
    with refused_raw("INVALID_TENSOR") as refusal:
        stub.Evaluate(request, timeout=30)
    refusal.says("is packed; only values of calls")


LONG = values(120)


class CountingProxy:
    """Forwards one connection to a server and counts the bytes that come back."""

    def __init__(self, target: str) -> None:
        self.received = 0
        host, _, port = target.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = socket.create_connection((host or "127.0.0.1", int(port)))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            self._client, _ = self._listener.accept()
        except OSError:
            return
        Thread(target=self._pass_on, args=(self._client, self._server), daemon=True).start()
        self._pass_on(self._server, self._client, counts=True)

    def _pass_on(self, source: socket.socket, sink: socket.socket, *, counts: bool = False) -> None:
        # Either side may close its connection at any time.
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.received += len(data) if counts else 0
                sink.sendall(data)
        for end in (source, sink):
            end.close()

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_compressed_on_request(server: RunningServer, is_async: bool, stream: bool) -> None:
    sizes: dict[str | None, int] = {}
    loop = blocking.LoopThread()
    for transfer in (gr.Transfer(), Transfers["gzip"], Transfers["zstd"], Transfers["bfloat16"]):
        proxy = CountingProxy(server.target)
        connect = functools.partial(blocking.connect, loop=loop) if is_async else gr.connect
        with connect(proxy.target, transfer=transfer, stream=stream) as client:
            program = client.compile(graph(), fetches=["y"])
            feeds = {"x": values(100)}
            for _ in range(4):
                program.evaluate(feeds)
            before = proxy.received
            program.evaluate(feeds)
            sizes[transfer.compression or transfer.wire_dtype] = proxy.received - before
            if transfer.compression == "gzip":
                before = proxy.received
                program.evaluate({"x": LONG})
                sizes["long"] = proxy.received - before
        proxy.close()
    loop.close()
    raw_bytes = values(100).nbytes
    assert sizes[None] > raw_bytes
    assert sizes["gzip"] < raw_bytes / 4
    # gRPC would block all other calls while it compresses them.
    assert sizes["long"] > LONG.nbytes
    assert sizes["zstd"] < raw_bytes / 4
    assert raw_bytes / 2 < sizes["bfloat16"] < raw_bytes * 0.6


def test_unpacked_size_of_messages_is_limited(channel: grpc.Channel) -> None:
    call: Any = channel.unary_unary("/gradrule.v1.GradientService/Evaluate")
    with pytest.raises(grpc.RpcError) as refusal:
        call(bytes(65 << 20), compression=grpc.Compression.Gzip, timeout=60)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
