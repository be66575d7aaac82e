"""Every reason has a class with a help text, and failed calls become the right one."""

from __future__ import annotations

import asyncio
import re
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import gradrule as gr
from gradrule import errors
from gradrule._messages.error_status import error_of
from gradrule.v1.errors_pb2 import ErrorReason

ROOT = Path(__file__).resolve().parents[3]
REASONS = [name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys() if not name.endswith("_UNSPECIFIED")]  # noqa: SIM118


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_a_class_with_a_help_text(reason: str) -> None:
    subclass = errors.BY_REASON[reason]
    assert reason == subclass.REASON
    assert subclass.__doc__ is not None
    assert len(subclass.__doc__) > 30
    assert subclass.__name__ == errors.class_name(reason)


def test_no_class_is_without_a_reason() -> None:
    assert {subclass.REASON for subclass in errors.GradruleError.__subclasses__()} == set(REASONS)


def test_codes_are_those_that_the_proto_documents() -> None:
    text = (ROOT / "protos/gradrule/v1/errors.proto").read_text()
    documented = {}
    for comment, reason in re.findall(r"((?:  //.*\n)+)  ERROR_REASON_(\w+) = \d+;", text):
        if code := re.search(r"\[(\w+)\]", comment):
            documented[reason] = code[1]
    assert documented == {reason: errors.BY_REASON[reason]("").code.name for reason in REASONS}


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        self._answer = (code, details, trailers)

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]

    def trailing_metadata(self) -> Any:
        return self._answer[2]


def status(*details: Any) -> Any:
    message = status_pb2.Status(code=3, message="wrong")
    for detail in details:
        message.details.add().Pack(detail)
    return (("other", b"x"), ("grpc-status-details-bin", message.SerializeToString()))


def test_details_are_read() -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="overrides[0]", description="wrong", reason="UNKNOWN_RULE")
    bad.field_violations.add(field="node:a/b", description="also", reason="NO_GRADIENT")
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    info = error_details_pb2.ErrorInfo(reason="UNKNOWN_RULE", domain="gradrule", metadata={"findings_total": "7"})
    error = error_of(Failed(grpc.StatusCode.NOT_FOUND, "wrong", status(info, bad, retry)), "localhost:1")
    assert type(error) is gr.errors.UnknownRuleError
    assert (error.reason, error.code, error.retry_delay) == ("UNKNOWN_RULE", grpc.StatusCode.NOT_FOUND, 1.5)
    assert error.details == [
        errors.Detail("UNKNOWN_RULE", "wrong", field="overrides[0]"),
        errors.Detail("NO_GRADIENT", "also", node="a/b"),
    ]
    assert str(error) == "UNKNOWN_RULE: wrong\n  - NO_GRADIENT: also\n  … and 5 more"


def test_a_reason_of_a_newer_server_is_kept() -> None:
    info = error_details_pb2.ErrorInfo(reason="NOT_YET_KNOWN", domain="gradrule")
    error = error_of(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "wrong", status(info)), "localhost:1")
    assert type(error) is gr.errors.GradruleError
    assert (error.reason, error.code) == ("NOT_YET_KNOWN", grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    "trailers", [(), (("grpc-status-details-bin", b"\xff"),), status()], ids=["none", "bad", "empty"]
)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ("CANCELLED", "CANCELLED"),
        ("UNAVAILABLE", "UNAVAILABLE"),
        ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE"),
        ("UNIMPLEMENTED", "UNSUPPORTED"),
        ("UNKNOWN", "INTERNAL"),
        ("INTERNAL", "INTERNAL"),
    ],
)
def test_codes_without_details(code: str, reason: str, trailers: Any) -> None:
    error = error_of(Failed(grpc.StatusCode[code], "text", trailers), "localhost:1")
    assert type(error) is errors.BY_REASON[reason]
    assert error.code.name == code
    assert "text" in str(error)


def test_an_unreachable_server_is_unavailable() -> None:
    with gr.connect("localhost:1", timeout=5) as client:
        with pytest.raises(gr.errors.UnavailableError):
            client.get_rule("ste")
        with pytest.raises(gr.errors.UnavailableError, match="localhost:1"):
            client.wait_ready(timeout=0.3)


def test_a_server_that_never_answers() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with gr.connect(f"127.0.0.1:{port}", timeout=60) as client, pytest.raises(gr.errors.UnsupportedError):
            client.get_rule("ste")
    finally:
        server.stop(None).wait()


def test_a_closed_client() -> None:
    client = gr.connect("localhost:1")
    client.close()
    with pytest.raises(gr.errors.UnavailableError, match="closed"):
        client.get_rule("ste")


def test_a_closed_async_client() -> None:
    async def run() -> None:
        client = gr.aio.connect("localhost:1")
        await client.close()
        with pytest.raises(gr.errors.UnavailableError, match="closed"):
            await client.get_rule("ste")
        with pytest.raises(gr.errors.UnavailableError, match="closed"):
            await client.wait_ready(timeout=1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            "failed to connect to all addresses; last error: Connection refused",
            "no server listens at front:1; start one",
        ),
        ("Received http2 header with status: 502", "the proxy at front:1 reaches no server (HTTP status 502)"),
        ("Received http2 header with status: 401", "Received http2 header with status: 401"),
        # What a proxy says of its own connection to a server.
        ("upstream: failed to connect to all addresses; last error: Connection refused", "upstream: failed to connect"),
    ],
)
def test_proxy_without_a_server_is_not_taken_for_a_wrong_address(said: str, says: str) -> None:
    assert says in str(error_of(Failed(grpc.StatusCode.UNAVAILABLE, said, ()), "front:1"))
