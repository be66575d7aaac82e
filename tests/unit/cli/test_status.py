"""Tests which server `gradrule status` shows if its target has several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from gradrule.cli.main import main
from gradrule.v1 import admin_pb2
from tests.unit.client.answering import Answering

UPDATES = 4


class Reporting(Answering):
    """Counts the requests for its status."""

    requests = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        assert details.method.endswith("/GetServerStatus")
        return grpc.unary_unary_rpc_method_handler(self._report)

    def _report(self, _: bytes, context: Any) -> bytes:
        self.requests += 1
        return admin_pb2.GetServerStatusResponse(status=admin_pb2.ServerStatus(host="one")).SerializeToString()


@pytest.fixture
def servers() -> Iterator[list[Reporting]]:
    made = [Reporting(address="127.0.0.1:0") for _ in range(2)]
    yield made
    for server in made:
        server.stop()


def test_live_table_stays_with_one_server(
    servers: list[Reporting], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    sleeps = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) > UPDATES:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    main(["status", "--interval", "0.25", "--target", "ipv4:" + ",".join(server.target for server in servers)])
    assert sleeps == [0.25] * (UPDATES + 1)
    assert sorted(server.requests for server in servers) == [0, UPDATES + 1]
    assert "on one" in capsys.readouterr().out
