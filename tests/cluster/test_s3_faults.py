"""Faults of an object store, at a real server: away, slow, hanging, damaged, and a server killed during an upload."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule._builder import blob_values
from gradrule.v1 import blob_pb2, blob_pb2_grpc, tensor_pb2
from tests.cluster.s3 import SECRET, S3Server
from tests.service import raw
from tests.service.answers import refused_raw
from tests.service.servers import RunningServer, running_server
from tests.service.test_blobs import blob_name, pieces
from tests.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path, s3: S3Server, bucket: str) -> Iterator[RunningServer]:
    with running_server(tmp_path, ("--blobs", f"s3://{bucket}"), s3.environment) as running:
        yield running
    assert SECRET not in running.log.read_text()


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target) as opened:
        yield opened


@pytest.fixture
def blobs(channel: grpc.Channel) -> Any:
    return blob_pb2_grpc.BlobServiceStub(channel)


def remove_from_cache(server: RunningServer, data: bytes) -> None:
    (server.data_dir / "registry" / "blob-cache" / blob_name(data)).unlink()


def values(number: float) -> bytes:
    return np.full(1024, number, np.float32).tobytes()


def evaluate(channel: grpc.Channel, data: bytes, timeout: float = 30.0) -> float:
    """Returns the sign of the first value in a blob, computed by the server."""
    message = raw.request(raw.sign_graph(), {})
    message.feeds.add(name="x", value=blob_values.source(blob_name(data), tensor_pb2.DT_FLOAT, [1024]))
    answer = raw.evaluate(channel, message, timeout=timeout)
    return float(np.frombuffer(answer.outputs[0].value.inline_tensor.tensor_content, np.float32)[0])


def missing(blobs: Any, *data: bytes) -> list[str]:
    names = [blob_name(item) for item in data]
    return list(blobs.FindMissingBlobs(blob_pb2.FindMissingBlobsRequest(sha256=names)).missing)


def test_calls_with_cached_blobs_go_on_without_the_object_store(
    s3: S3Server, server: RunningServer, blobs: Any, channel: grpc.Channel
) -> None:
    away, cached = values(-1.0), values(2.0)
    for data in (away, cached):
        blobs.UploadBlob(pieces(data))
    remove_from_cache(server, away)
    assert evaluate(channel, cached) == 1.0
    with s3.proxy.stopped():
        assert evaluate(channel, cached) == 1.0
        for _ in range(2):
            with refused_raw("UNAVAILABLE") as refusal:
                evaluate(channel, away)
            refusal.says("object store that holds its blobs", "try again")
        with refused_raw("UNAVAILABLE"):
            blobs.UploadBlob(pieces(values(3.0)))
        assert missing(blobs, cached) == []
        # Only the object store knows.
        for data in (away, values(3.0)):
            with refused_raw("UNAVAILABLE") as refusal:
                missing(blobs, cached, data)
            refusal.says("object store that holds its blobs", "try again")
    assert missing(blobs, away, cached, values(3.0)) == [blob_name(values(3.0))]
    assert evaluate(channel, away) == -1.0
    blobs.UploadBlob(pieces(values(3.0)))
    assert evaluate(channel, values(3.0)) == 1.0


def test_call_keeps_its_deadline_while_the_object_store_hangs(
    s3: S3Server, server: RunningServer, blobs: Any, channel: grpc.Channel
) -> None:
    away, cached = values(-1.0), values(2.0)
    for data in (away, cached):
        blobs.UploadBlob(pieces(data))
    remove_from_cache(server, away)
    with s3.proxy.frozen():
        for _ in range(20):
            with pytest.raises(grpc.RpcError) as caught:
                evaluate(channel, away, timeout=0.1)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        # More uploads than Python has threads for short work: others must not wait for them.
        uploads = [blobs.UploadBlob.future(pieces(values(10.0 + number)), timeout=20) for number in range(12)]
        cache = server.data_dir / "registry" / "blob-cache"
        assert evaluate(channel, cached) == 1.0
        assert missing(blobs, cached) == []
        for upload in uploads:
            upload.cancel()
    assert evaluate(channel, away) == -1.0
    wait_until(lambda: not list(cache.glob(".upload-*")) or None, "removal of unfinished files")


def test_slow_object_store_only_delays(s3: S3Server, server: RunningServer, blobs: Any, channel: grpc.Channel) -> None:
    first = values(-1.0)
    s3.proxy.delay_s = 0.2
    try:
        blobs.UploadBlob(pieces(first))
        remove_from_cache(server, first)
        results: list[float] = []
        threads = [threading.Thread(target=lambda: results.append(evaluate(channel, first))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [-1.0] * 4
    finally:
        s3.proxy.delay_s = 0.0


def test_damaged_object_is_uploaded_again_by_the_client(
    s3: S3Server, bucket: str, server: RunningServer, blobs: Any, channel: grpc.Channel
) -> None:
    damaged = values(-1.0)
    blobs.UploadBlob(pieces(damaged))
    [key] = [key for key in s3.keys(bucket) if blob_name(damaged) in key]
    s3.client.put_object(Bucket=bucket, Key=key, Body=values(-2.0))
    remove_from_cache(server, damaged)
    with refused_raw("BLOB_NOT_FOUND"):
        evaluate(channel, damaged)
    assert missing(blobs, damaged) == [blob_name(damaged)]
    assert f"{key} in s3://{bucket} is damaged" in server.log.read_text()
    g = gr.Graph()
    g.op("Sum", g.placeholder("x", "float32", [None]), [0], name="y")
    with gr.connect(server.target) as client:
        blob = gr.Blob(np.full(1024, -1.0, np.float32))
        assert client.evaluate(g, feeds={"x": blob}, fetches=["y"]).outputs["y"] == -1024
    assert s3.client.get_object(Bucket=bucket, Key=key)["Body"].read() == damaged


def test_server_killed_during_an_upload_leaves_nothing_visible(
    tmp_path: Path, s3: S3Server, bucket: str, server: RunningServer, blobs: Any
) -> None:
    data = values(5.0)
    before = s3.keys(bucket)
    with s3.proxy.frozen():
        upload = blobs.UploadBlob.future(pieces(data), timeout=60)
        wait_until(lambda: s3.proxy.held or None, "an upload that is held up")
        server.kill()
    with pytest.raises(grpc.RpcError):
        upload.result()
    assert s3.keys(bucket) == before
    flags = ("--blobs", f"s3://{bucket}")
    with running_server(tmp_path, flags, s3.environment) as again, grpc.insecure_channel(again.target) as channel:
        stub = blob_pb2_grpc.BlobServiceStub(channel)
        assert missing(stub, data) == [blob_name(data)]
        stub.UploadBlob(pieces(data))
        assert evaluate(channel, data) == 1.0
        assert not list((again.data_dir / "registry" / "blob-cache").glob(".upload-*"))
