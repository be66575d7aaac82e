"""The connection to the server."""

from __future__ import annotations

from gradrule_gateway.upstream import OPTIONS


def test_a_server_that_returns_is_found_within_seconds() -> None:
    assert dict(OPTIONS)["grpc.max_reconnect_backoff_ms"] <= 2000
