"""The Node client's own tests, with README and example, against a real server."""

from __future__ import annotations

from pathlib import Path

from tests.node_client import exclusive_use, npm
from tests.service.guarded import Guarded
from tests.service.servers import running_server


def test_node_client_passes_its_tests_against_real_servers(tmp_path: Path, guarded: Guarded) -> None:
    with running_server(tmp_path) as server, exclusive_use():
        npm(
            "test",
            GRADRULE_TARGET=server.target,
            GRADRULE_TEST_TLS_TARGET=guarded.running.target,
            GRADRULE_TEST_TLS_CA=str(guarded.authority.file),
            GRADRULE_TEST_TOKENS=",".join(guarded.new_token(f"node {number}") for number in range(2)),
        )


def test_generated_code_is_current() -> None:
    npm("run", "proto:check")
