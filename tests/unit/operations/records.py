"""Makes request records for tests, as the front end makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.operations.request_record import Observer, RequestRecord, Sink


def peer() -> str:
    return "ipv4:192.0.2.1:50000"


def refusal(reason: str, message: str = "no") -> GradruleError:
    return error(errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"), message)


def make(
    *sinks: Sink,
    rpc: str = "RuleService/GetRule",
    tenant: str | None = "default",
    fails: BaseException | None = None,
    metadata: tuple[tuple[str, str | bytes], ...] = (),
    within: Callable[[RequestRecord], Any] = lambda request: None,
) -> RequestRecord:
    """Records one request from start to end; calls `within` meanwhile. Without a tenant its caller stays unknown."""
    observed = Observer(sinks).rpc(rpc, metadata, peer)
    try:
        with observed:
            if tenant is not None:
                observed.request.tenant = tenant
            within(observed.request)
            if fails is not None:
                raise fails
    except BaseException as cause:
        assert cause is fails
    return observed.request
