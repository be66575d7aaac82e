"""deploy/compose.ha.yaml: the program that creates the bucket, and clients that spread calls over both servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import gradrule as gr
from tests.cluster.manifests import DEPLOY
from tests.cluster.s3 import S3Server
from tests.service.servers import running_server

SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.ha.yaml").read_text().replace("!override", ""))["services"]


def test_the_bucket_is_created_once(s3: S3Server) -> None:
    service = SERVICES["bucket"]
    program, *arguments = service["entrypoint"]
    assert program == "python3"
    assert service["environment"].keys() <= s3.environment.keys()
    bucket = SERVICES["gradrule"]["environment"]["GRADRULE_BLOBS"].split("/")[2]
    # The second time, as after `docker compose up` again, the bucket exists.
    for _ in range(2):
        subprocess.run([sys.executable, *arguments], env=os.environ | s3.environment, check=True, timeout=60)
        assert s3.keys(bucket) == []


def test_calls_of_one_client_go_to_both_servers(tmp_path: Path) -> None:
    graph = gr.Graph()
    graph.op("Neg", graph.placeholder("x", "float32", []), name="y")
    with running_server(tmp_path / "1") as first, running_server(tmp_path / "2") as second:
        # README.md: ipv4:127.0.0.1:8470,127.0.0.1:8471
        target = "ipv4:" + ",".join(server.target.replace("localhost", "127.0.0.1") for server in (first, second))
        with gr.connect(target, stream=False) as client:
            client.wait_ready()
            for number in range(8):
                assert client.evaluate(graph, {"x": float(number)}, fetches=["y"]).outputs["y"] == -number
        for server in (first, second):
            with gr.connect(server.target) as own:
                (tenant,) = own.server_status().tenants
                assert tenant.name == "default"
                assert sum(engine.programs for engine in own.server_status().engines) == 1
