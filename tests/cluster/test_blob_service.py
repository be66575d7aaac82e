"""Runs the tests of blobs at a real server with an object store: a shared folder, and S3."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import blob_pb2_grpc
from tests.cluster.s3 import SECRET, S3Server
from tests.service import blocking
from tests.service.conftest import same_engine  # noqa: F401
from tests.service.servers import RunningServer, running_server, serve_command, server_environment
from tests.service.test_blobs import (  # noqa: F401
    ON_DISK,
    WEIGHTS,
    X,
    model,
    test_array_fed_again_is_uploaded_once,
    test_blob_can_be_a_feed_and_a_graph,
    test_client_uploads_large_values_and_graphs_by_itself,
    test_invalid_uploads_are_refused,
    test_programs_share_tensors_of_blobs_and_inline_constants,
    test_unknown_blobs_are_refused,
    test_upload_and_find,
    test_upload_that_differs_from_its_hash_is_refused,
)


@pytest.fixture(scope="module", params=["folder", "s3"])
def object_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> str:
    """Returns the URL of an empty object store."""
    return tmp_path_factory.mktemp("objects").as_uri() if request.param == "folder" else f"s3://{s3.create_bucket()}/x"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, object_store: str, s3: S3Server) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), ("--blobs", object_store), s3.environment) as running:
        yield running
        log = running.log.read_text()
        assert SECRET not in log
        assert "Traceback" not in log


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Any]:
    with gr.connect(server.target) as connected:
        yield connected


@pytest.fixture(scope="module")
def aio_client(server: RunningServer) -> Iterator[Any]:
    loop = blocking.LoopThread()
    connected = blocking.connect(server.target, loop)
    yield connected
    connected.close()
    loop.close()


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target) as opened:
        yield opened


@pytest.fixture
def blobs(channel: grpc.Channel) -> Any:
    return blob_pb2_grpc.BlobServiceStub(channel)


def test_session_trains_with_weights_from_a_blob(client: Any) -> None:
    blob = gr.Blob(WEIGHTS)
    with client.session(model(), variables={"w": blob}) as session:
        np.testing.assert_array_equal(session.read(["w"])["w"], WEIGHTS)


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_weights_that_are_not_in_the_cache_are_fetched_for_restarts_and_new_engines(
    tmp_path: Path, s3: S3Server, kind: str
) -> None:
    (tmp_path / "objects").mkdir()
    url = (tmp_path / "objects").as_uri() if kind == "folder" else f"s3://{s3.create_bucket()}"
    flags = ("--blobs", url, "--blob-cache-bytes", str(ON_DISK), "--max-blob-bytes", str(5 * ON_DISK))
    with running_server(tmp_path / "server", flags, s3.environment) as running, gr.connect(running.target) as client:
        first = client.compile(model(), fetches=["y"], name="kept").evaluate({"x": X}).outputs["y"]
        for number in range(3):
            # Other blobs displace it from the cache.
            client.evaluate(model(WEIGHTS + 1 + number), feeds={"x": X}, fetches=["y"])
        cached = [path for path in (tmp_path / "server" / "registry" / "blob-cache").iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in cached) <= ON_DISK
    with running_server(tmp_path / "server", flags, s3.environment) as running, gr.connect(running.target) as client:
        # This client has never seen the weights, so it cannot upload them.
        assert client.program("kept").evaluate({"x": X}).outputs["y"] == first
        [tenant] = client.server_status().tenants
        assert tenant.blob_bytes.used == 4 * ON_DISK
        client.evaluate(model(WEIGHTS + 9), feeds={"x": X}, fetches=["y"])
        engine = running.wait_for_engine()
        os.kill(engine, signal.SIGKILL)
        running.wait_for_engine(engine)
        client.wait_ready()
        assert client.program("kept").evaluate({"x": X}).outputs["y"] == first


def refusal(tmp_path: Path, url: str, environment: dict[str, str]) -> str:
    """Returns what a server prints that refuses to start."""
    command = serve_command("--port", "0", "--data-dir", str(tmp_path / "data"), "--blobs", url)
    done = subprocess.run(
        command, env=server_environment(environment), capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert SECRET not in done.stderr
    return done.stderr.splitlines()[-1]


def test_server_without_bucket_or_credentials_refuses_to_start(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    without = {name: value for name, value in s3.environment.items() if "KEY" not in name}
    assert "does not exist; create it" in refusal(tmp_path, "s3://no-such-bucket/x", s3.environment)
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in refusal(tmp_path, f"s3://{bucket}", without)
    with s3.proxy.stopped():
        message = refusal(tmp_path, f"s3://{bucket}", s3.environment)
        assert f"--blobs s3://{bucket} cannot be used: Could not connect to the endpoint URL" in message
    assert "does not exist; create it" in refusal(tmp_path, "file:///does/not/exist", {})
    assert SECRET not in refusal(tmp_path, f"s3://key:{SECRET}@{bucket}/x", s3.environment)
