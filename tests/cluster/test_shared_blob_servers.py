"""Tests two real servers that share a registry in PostgreSQL and blobs in S3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import blob_pb2_grpc
from tests.cluster.s3 import SECRET, S3Server
from tests.service.answers import refused_raw
from tests.service.servers import RunningServer, running_server
from tests.service.test_blobs import ON_DISK, WEIGHTS, X, blob_name, model, pieces
from tests.waiting import wait_until

ROOM = 3


@dataclass
class Pair:
    """Two servers, and a client of each.

    Attributes:
        flags: The flags of both.
        data_dirs: Their data folders.
    """

    servers: list[RunningServer]
    clients: list[gr.Client]
    flags: tuple[str, ...]
    data_dirs: list[Path]

    def cached(self, number: int) -> set[str]:
        """Returns the names of the files in the cache of a server."""
        folder = self.data_dirs[number] / "registry" / "blob-cache"
        return {path.name for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def pair(tmp_path: Path, s3: S3Server, bucket: str, database_url: str) -> Iterator[Pair]:
    """Returns two servers with room for three blobs of weights."""
    flags = ("--blobs", f"s3://{bucket}", "--registry", database_url, "--max-blob-bytes", str(ROOM * ON_DISK))
    data_dirs = [tmp_path / "one", tmp_path / "two"]
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(path, flags, s3.environment)) for path in data_dirs]
        clients = [stack.enter_context(gr.connect(server.target)) for server in servers]
        yield Pair(servers, clients, flags, data_dirs)
    for server in servers:
        log = server.log.read_text()
        assert "Traceback" not in log
        assert SECRET not in log


def stub(server: RunningServer, stack: ExitStack) -> Any:
    return blob_pb2_grpc.BlobServiceStub(stack.enter_context(grpc.insecure_channel(server.target)))


def test_weights_uploaded_at_one_server_are_used_at_the_other(pair: Pair) -> None:
    one, two = pair.clients
    blob = gr.Blob(WEIGHTS)
    one.upload(blob.data)
    assert two.find_missing_blobs([blob.sha256, "0" * 64]) == ["0" * 64]
    program = one.compile(model(), fetches=["y"], ys=["y"], xs=["x"], name="shared")
    assert pair.cached(1) == set()
    # A client of the other server that has never had the weights.
    result = two.program("shared").evaluate({"x": X})
    np.testing.assert_allclose(result.outputs["y"], (X @ WEIGHTS).sum(), rtol=1e-5)
    np.testing.assert_allclose(result.gradients["x"], [WEIGHTS.sum(1)], rtol=1e-5)
    assert pair.cached(1) == {blob.sha256}
    assert program.evaluate({"x": X}).outputs["y"] == result.outputs["y"]


def test_limits_and_programs_count_across_servers(pair: Pair, s3: S3Server, bucket: str) -> None:
    one, two = pair.clients
    kept = one.compile(model(), fetches=["y"], name="kept")
    first = kept.evaluate({"x": X}).outputs["y"]
    names = [two.upload((WEIGHTS + number).tobytes()) for number in range(1, ROOM)]
    assert one.find_missing_blobs([blob_name(WEIGHTS.tobytes()), *names]) == []
    assert len(s3.keys(bucket)) == ROOM + 1
    with ExitStack() as stack, refused_raw("QUOTA_EXCEEDED") as refusal:
        stub(pair.servers[0], stack).UploadBlob(pieces(b"more"))
    refusal.says("--max-blob-bytes", "gradrule registry gc")
    assert two.program("kept").evaluate({"x": X}).outputs["y"] == first


def test_killed_server_loses_no_blob_and_its_upload_is_cleaned_up(pair: Pair, s3: S3Server) -> None:
    name = pair.clients[0].upload(WEIGHTS.tobytes())
    half = (WEIGHTS + 1).tobytes()
    with ExitStack() as stack, s3.proxy.frozen():
        upload = stub(pair.servers[0], stack).UploadBlob.future(pieces(half), timeout=60)
        wait_until(lambda: s3.proxy.held or None, "an upload that is held up")
        pair.servers[0].kill()
        with pytest.raises(grpc.RpcError):
            upload.result()
    two = pair.clients[1]
    assert two.find_missing_blobs([name, blob_name(half)]) == [blob_name(half)]
    assert two.upload(half) == blob_name(half)
    two.compile(model(WEIGHTS + 1), fetches=["y"], name="after")
    with running_server(pair.data_dirs[0], pair.flags, s3.environment) as again, gr.connect(again.target) as one:
        assert one.program("after").evaluate({"x": X}).outputs["y"] == pytest.approx((X @ (WEIGHTS + 1)).sum(), 1e-4)
        assert one.find_missing_blobs([name, blob_name(half)]) == []
