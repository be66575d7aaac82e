"""What every call goes through: admission, parsing, deadline; against a context that notes how the call ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import rule_pb2
from gradrule_server.front.handlers import Call, Door, Method


class Aborted(Exception):
    """The call ended with a status."""


class Context:
    """A caller that waits `remaining` seconds, or as long as the server likes."""

    def __init__(self, remaining: float | None = None) -> None:
        self.remaining = remaining
        self.reason = ""
        self.code = grpc.StatusCode.OK
        self.trailers: dict[str, str | bytes] = {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:192.0.2.1:1234"

    def set_trailing_metadata(self, trailers: tuple[tuple[str, str], ...]) -> None:
        self.trailers = dict(trailers)

    def time_remaining(self) -> float | None:
        return self.remaining

    async def abort(self, code: grpc.StatusCode, _: str, trailing_metadata: tuple[tuple[str, bytes], ...]) -> None:
        info = error_details_pb2.ErrorInfo()
        status_pb2.Status.FromString(trailing_metadata[0][1]).details[0].Unpack(info)
        self.code, self.reason = code, info.reason
        self.trailers = dict(trailing_metadata)
        raise Aborted


async def call(door: Door, method: Method[Any], context: Context, raw: bytes = b"") -> bytes:
    service = door.service("s", {"m": (rule_pb2.GetRuleRequest, method)})
    handler: Any = service.service(SimpleNamespace(method="/s/m", invocation_metadata=()))
    answer: bytes = await handler.unary_unary(raw, context)
    return answer


async def test_a_call_that_takes_too_long_is_cancelled_and_says_so() -> None:
    ends: list[str] = []

    async def slow(_: Call[Any]) -> bytes:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return b""

    door = Door(1, default_deadline_s=0.02, max_deadline_s=0.03)
    for remaining in (None, 0.01, 600.0):
        context = Context(remaining)
        with pytest.raises(Aborted):
            await call(door, slow, context)
        assert (context.reason, context.code) == ("DEADLINE_EXCEEDED", grpc.StatusCode.DEADLINE_EXCEEDED)
    assert ends == ["cancelled"] * 3


async def test_a_fault_of_a_method_s_own_is_not_taken_for_a_deadline() -> None:
    async def broken(_: Call[Any]) -> bytes:
        raise TypeError

    context = Context()
    with pytest.raises(Aborted):
        await call(Door(1, 1.0, 1.0), broken, context)
    assert context.reason == "INTERNAL"


async def test_no_more_than_so_many_at_a_time() -> None:
    gate = asyncio.Event()

    async def waits(_: Call[Any]) -> bytes:
        await gate.wait()
        return b"done"

    door = Door(1, 10.0, 10.0)
    first = asyncio.create_task(call(door, waits, Context()))
    await asyncio.sleep(0)
    refused = Context()
    with pytest.raises(Aborted):
        await call(door, waits, refused)
    assert refused.reason == "OVERLOADED"
    gate.set()
    assert await first == b"done"
    assert await call(door, waits, Context()) == b"done"


async def test_bytes_that_are_no_request() -> None:
    async def never(_: Call[Any]) -> bytes:
        raise AssertionError

    context = Context()
    with pytest.raises(Aborted):
        await call(Door(1, 1.0, 1.0), never, context, b"\xff\xff")
    assert context.reason == "MALFORMED_REQUEST"
