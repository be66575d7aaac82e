"""Blobs at a real server: uploads, references by hash, and blobs that the server has lost."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule._builder import blob_values
from gradrule.v1 import blob_pb2, blob_pb2_grpc, program_pb2, rule_pb2, tensor_pb2
from tests.service import raw
from tests.service.answers import keeps_engine, provokes, refused_raw
from tests.service.servers import RunningServer, running_server

WEIGHTS = np.arange(6000, dtype=np.float32).reshape(2, 3000) / 1000
ON_DISK = -(-WEIGHTS.nbytes // 4096) * 4096
X = np.array([[1.0, -2.0]], np.float32)


def model(weights: Any = WEIGHTS) -> gr.Graph:
    """Makes y = sum(x · w); its gradient with respect to x is the row sums of w."""
    g = gr.Graph()
    w = g.variable("w", weights)
    g.op("Sum", g.op("MatMul", g.placeholder("x", "float32", [None, 2]), w), [0, 1], name="y")
    return g


def blob_name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pieces(data: bytes, name: str | None = None) -> Iterator[blob_pb2.UploadBlobRequest]:
    yield blob_pb2.UploadBlobRequest(sha256=blob_name(data) if name is None else name, data=data[:5])
    yield blob_pb2.UploadBlobRequest(data=data[5:])


@pytest.fixture
def blobs(channel: grpc.Channel) -> Any:
    return blob_pb2_grpc.BlobServiceStub(channel)


@keeps_engine
def test_upload_and_find(blobs: Any) -> None:
    data = b"some bytes that nobody else has"
    name = blob_name(data)
    assert blobs.FindMissingBlobs(blob_pb2.FindMissingBlobsRequest(sha256=[name, name])).missing == [name]
    for _ in range(2):
        answer = blobs.UploadBlob(pieces(data))
        assert (answer.sha256, answer.size_bytes) == (name, len(data))
    assert not blobs.FindMissingBlobs(blob_pb2.FindMissingBlobsRequest(sha256=[name])).missing


@provokes("BLOB_MISMATCH")
@keeps_engine
def test_upload_that_differs_from_its_hash_is_refused(blobs: Any) -> None:
    with refused_raw("BLOB_MISMATCH") as refusal:
        blobs.UploadBlob(pieces(b"these bytes", "0" * 64))
    refusal.says(blob_name(b"these bytes"))


@keeps_engine
def test_invalid_uploads_are_refused(blobs: Any, channel: grpc.Channel) -> None:
    with refused_raw("MALFORMED_REQUEST"):
        blobs.UploadBlob(iter(()))
    with refused_raw("MALFORMED_REQUEST"):
        blobs.UploadBlob(pieces(b"bytes", "../../etc/passwd"))
    with refused_raw("MALFORMED_REQUEST"):
        blobs.UploadBlob(iter([*pieces(b"some bytes"), *pieces(b"other bytes")]))
    with refused_raw("MALFORMED_REQUEST"):
        channel.stream_unary("/gradrule.v1.BlobService/UploadBlob")(iter([b"\xff\xff"]))
    with refused_raw("MALFORMED_REQUEST"):
        blobs.FindMissingBlobs(blob_pb2.FindMissingBlobsRequest(sha256=["0" * 64] * 10_001))
    with refused_raw("MALFORMED_REQUEST"):
        blobs.FindMissingBlobs(blob_pb2.FindMissingBlobsRequest(sha256=["w"]))


@keeps_engine
def test_aborted_upload_leaves_nothing(server: RunningServer, blobs: Any) -> None:
    folder = server.data_dir / "registry" / "blobs"

    def forever() -> Iterator[blob_pb2.UploadBlobRequest]:
        yield blob_pb2.UploadBlobRequest(sha256="0" * 64, data=b"x" * 1000)
        while True:
            yield blob_pb2.UploadBlobRequest(data=b"x")

    with pytest.raises(grpc.RpcError) as caught:
        blobs.UploadBlob(forever(), timeout=0.3)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    async def until_clean() -> None:
        while list(folder.glob(".upload-*")):
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(until_clean(), 20))


def _blob_tensor(data: bytes, shape: list[int], dtype: Any = tensor_pb2.DT_FLOAT) -> tensor_pb2.TensorSource:
    return blob_values.source(blob_name(data), dtype, shape)


@provokes("BLOB_NOT_FOUND")
@keeps_engine
def test_unknown_blobs_are_refused(channel: grpc.Channel) -> None:
    message = raw.request(raw.sign_graph(), {})
    names = [blob_name(f"never {number}".encode()) for number in range(2)]
    message.feeds.add(name="x", value=blob_values.source(names[0], tensor_pb2.DT_FLOAT, [1]))
    with refused_raw("BLOB_NOT_FOUND") as refusal:
        raw.evaluate(channel, message)
    refusal.says(names[0])
    message = raw.request(raw.sign_graph())
    message.spec.graph.CopyFrom(rule_pb2.GraphSource(blob_sha256=names[1]))
    with refused_raw("BLOB_NOT_FOUND") as refusal:
        raw.evaluate(channel, message)
    refusal.says(names[1])


@keeps_engine
def test_blob_can_be_a_feed_and_a_graph(blobs: Any, channel: grpc.Channel) -> None:
    values = np.array([-1.0, 2.0, 0.0], np.float32)
    graph = raw.sign_graph().SerializeToString()
    for data in (values.tobytes(), graph):
        blobs.UploadBlob(pieces(data))
    message = raw.request(b"", {})
    message.spec.graph.CopyFrom(rule_pb2.GraphSource(blob_sha256=blob_name(graph)))
    message.feeds.add(name="x", value=_blob_tensor(values.tobytes(), [3]))
    answer = raw.evaluate(channel, message)
    assert np.frombuffer(answer.outputs[0].value.inline_tensor.tensor_content, np.float32).tolist() == [-1.0, 1.0, 0.0]
    assert answer.digests.graph == blob_name(graph)
    for shape, dtype, reason in (
        ([2], tensor_pb2.DT_FLOAT, "INVALID_TENSOR"),
        ([2**40, 2**40], tensor_pb2.DT_FLOAT, "INVALID_TENSOR"),
        ([-1], tensor_pb2.DT_FLOAT, "INVALID_TENSOR"),
        ([3], tensor_pb2.DT_STRING, "FEED_DTYPE"),
        ([3], tensor_pb2.DT_INT32, "FEED_DTYPE"),
    ):
        message.feeds[0].value.CopyFrom(_blob_tensor(values.tobytes(), shape, dtype))
        with refused_raw(reason):
            raw.evaluate(channel, message)


@keeps_engine
def test_graph_of_a_rule_cannot_be_a_blob(channel: grpc.Channel) -> None:
    definition = rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource(blob_sha256="0" * 64))
    rule = rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(name="rules/Blob", definition=definition))
    with refused_raw("UNSUPPORTED"):
        raw.send(channel, "RuleService/CreateRule", rule.SerializeToString())


@keeps_engine
def test_client_uploads_large_values_and_graphs_by_itself(either: Any) -> None:
    weights = WEIGHTS + (1.0 if type(either).__name__ == "Client" else 2.0)
    g = model(weights)
    g.constant(np.random.default_rng(0).normal(size=300_000).astype(np.float32), name="ballast")
    assert len(g.to_bytes()) > 1 << 20
    for _ in range(2):
        answer = either.evaluate(g, feeds={"x": X}, fetches=["y"], ys=["y"], xs=["x", "w"])
        np.testing.assert_allclose(answer.outputs["y"], (X @ weights).sum(), rtol=1e-4)
        np.testing.assert_allclose(answer.gradients["w"], np.repeat(X.T, 3000, 1))
    program = either.compile(g, fetches=["y"], ys=["y"], xs=["x"])
    np.testing.assert_allclose(program.evaluate({"x": X}).gradients["x"], [weights.sum(1)], rtol=1e-4)
    assert either.explain(g, ys=["y"], xs=["w"]).findings == []


@keeps_engine
def test_array_fed_again_is_uploaded_once(either: Any) -> None:
    g = gr.Graph()
    g.op("Sum", g.placeholder("x", "float32", [None]), [0], name="y")
    values = np.random.default_rng(3).normal(size=10_000).astype(np.float32)
    blob = gr.Blob(values)
    program = either.compile(g, fetches=["y"])
    results = [program.evaluate({"x": blob}), either.evaluate(g, feeds={"x": blob}, fetches=["y"])]
    for result in results:
        np.testing.assert_allclose(result.outputs["y"], values.sum(), rtol=1e-4)
    assert either.find_missing_blobs([blob.sha256, "0" * 64]) == ["0" * 64]
    assert either.upload(values) == either.upload(values.tobytes()) == blob.sha256
    with pytest.raises(gr.errors.FeedDtypeError):
        program.evaluate({"x": gr.Blob(np.zeros(3))})


@pytest.mark.parametrize("accident", ["changed", "removed"])
def test_blob_changed_on_disk_is_uploaded_again(server: RunningServer, client: gr.Client, accident: str) -> None:
    g = gr.Graph()
    g.op("Sum", g.placeholder("x", "float32", [None]), [0], name="y")
    blob = gr.Blob(np.full(5_000, len(accident), np.float32))
    client.evaluate(g, feeds={"x": blob}, fetches=["y"])
    [file] = (server.data_dir / "registry" / "blobs").rglob(blob.sha256)
    if accident == "changed":
        file.write_bytes(np.full(5_000, 3.0, np.float32).tobytes())
    else:
        file.unlink()
    assert client.evaluate(g, feeds={"x": blob}, fetches=["y"]).outputs["y"] == 5_000 * len(accident)
    assert blob_name(file.read_bytes()) == blob.sha256
    if accident == "changed":
        assert f"{blob.sha256} is damaged" in server.log.read_text()


def test_programs_share_tensors_of_blobs_and_inline_constants(client: Any, channel: grpc.Channel) -> None:
    small = np.array([[1.0], [2.0]], np.float32)
    by_value = client.compile(model(small), fetches=["y"])
    words = {"no_gradient": program_pb2.NO_GRADIENT_ERROR}
    message = raw.request(model(small).to_bytes(), {"x": raw.tensor([[1.0, 1.0]])}, **words)
    client.upload(small)
    message.spec.variables.add(name="w", value=_blob_tensor(small.tobytes(), [2, 1]))
    assert raw.evaluate(channel, message).digests.program == by_value.digests.program
    message.spec.variables[0].value.CopyFrom(_blob_tensor((small * 2).tobytes(), [2, 1]))
    client.upload(small * 2)
    assert raw.evaluate(channel, message).digests.program != by_value.digests.program


# Servers that lose blobs, restart or are full.


def test_client_uploads_again_what_a_server_lost(tmp_path: Path) -> None:
    g = model()
    with running_server(tmp_path) as server, gr.connect(server.target) as client:
        first = client.evaluate(g, feeds={"x": X}, fetches=["y"]).outputs["y"]
    shutil.rmtree(tmp_path / "registry")
    with running_server(tmp_path) as server, gr.connect(server.target) as client:
        assert client.evaluate(g, feeds={"x": X}, fetches=["y"]).outputs["y"] == first


def test_stored_program_runs_after_a_restart_and_keeps_its_weights(tmp_path: Path) -> None:
    room = ON_DISK * 2
    flags = ("--max-blob-bytes", str(room))
    with running_server(tmp_path, flags) as server, gr.connect(server.target) as client:
        program = client.compile(model(), fetches=["y"], name="kept")
        first = program.evaluate({"x": X}).outputs["y"]
    for _ in range(2):
        with running_server(tmp_path, flags) as server, gr.connect(server.target) as client:
            # Other blobs are uploaded and evicted meanwhile.
            for number in range(3):
                client.evaluate(model(WEIGHTS + 1 + number), feeds={"x": X}, fetches=["y"])
            assert client.program("kept").evaluate({"x": X}).outputs["y"] == first


@provokes("QUOTA_EXCEEDED")
def test_total_size_of_blobs_is_limited(tmp_path: Path) -> None:
    flags = ("--max-blob-bytes", str(ON_DISK))
    with running_server(tmp_path, flags) as server, gr.connect(server.target) as client:
        client.compile(model(), fetches=["y"], name="kept")
        with grpc.insecure_channel(server.target) as channel, refused_raw("QUOTA_EXCEEDED") as refusal:
            blob_pb2_grpc.BlobServiceStub(channel).UploadBlob(pieces(b"x" * 200))
        refusal.says("--max-blob-bytes")
        with pytest.raises(gr.errors.QuotaExceededError):
            client.evaluate(model(WEIGHTS + 1), feeds={"x": X}, fetches=["y"])
        client.delete_program("kept")
        for number in range(3):
            answer = client.evaluate(model(WEIGHTS + number), feeds={"x": X}, fetches=["y"])
            np.testing.assert_allclose(answer.outputs["y"], (X @ (WEIGHTS + number)).sum(), rtol=1e-4)
        stored = sum(path.stat().st_size for path in (tmp_path / "registry" / "blobs").iterdir())
        assert stored <= ON_DISK


def test_program_with_evicted_weights_is_loaded_again_after_they_are_uploaded(tmp_path: Path) -> None:
    import os
    import signal

    flags = ("--max-blob-bytes", str(ON_DISK))
    g = model()
    with running_server(tmp_path, flags) as server, gr.connect(server.target) as client:
        first = client.evaluate(g, feeds={"x": X}, fetches=["y"]).outputs["y"]
        client.evaluate(model(WEIGHTS + 1), feeds={"x": X}, fetches=["y"])
        # A loaded program does not need its blobs.
        assert client.evaluate(g, feeds={"x": X}, fetches=["y"]).outputs["y"] == first
        engine = server.wait_for_engine()
        os.kill(engine, signal.SIGKILL)
        server.wait_for_engine(engine)
        client.wait_ready()
        assert client.evaluate(g, feeds={"x": X}, fetches=["y"]).outputs["y"] == first
