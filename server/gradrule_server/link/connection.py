"""The front end's end of the socket to an engine: requests out, answers matched by id, on an asyncio loop."""

from __future__ import annotations

import asyncio
import itertools
from typing import cast

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.link.framing import HEADER_BYTES, Kind, pack_header, unpack_header
from gradrule_server.link.v1 import link_pb2


class EngineGone(Exception):
    """The engine closed its end, or died, before it answered."""


class Connection(asyncio.Protocol):
    """Frames over a stream. Not thread-safe: everything happens on the loop that made it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._closed = False
        self.greeting: asyncio.Future[link_pb2.Greeting] = asyncio.get_running_loop().create_future()

    @property
    def in_flight(self) -> int:
        """Requests that wait for their answer."""
        return len(self._waiting)

    async def request(self, kind: Kind, payload: bytes) -> bytes:
        """Sends a frame and waits for its answer's payload; a FAULT is raised as `GradruleError`."""
        if self._closed or self._transport is None:
            raise EngineGone
        request_id = next(self._ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        try:
            self._write(kind, request_id, payload)
            return await answer
        finally:
            self._waiting.pop(request_id, None)

    def tell(self, kind: Kind, payload: bytes) -> None:
        """Sends a frame that has no answer."""
        if not self._closed:
            self._write(kind, 0, payload)

    def close(self) -> None:
        """Closes the socket, upon which the engine ends."""
        if self._transport is not None:
            self._transport.close()

    def _write(self, kind: Kind, request_id: int, payload: bytes) -> None:
        if self._transport is None:
            raise EngineGone
        self._transport.writelines([pack_header(kind, request_id, len(payload)), payload])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        position = 0
        while len(buffer) - position >= HEADER_BYTES:
            length, kind, request_id = unpack_header(memoryview(buffer)[position : position + HEADER_BYTES])
            end = position + HEADER_BYTES + length
            if len(buffer) < end:
                break
            self._deliver(kind, request_id, bytes(memoryview(buffer)[position + HEADER_BYTES : end]))
            position = end
        if position:
            del buffer[:position]

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EngineGone())
        if not self.greeting.done():
            self.greeting.set_exception(EngineGone())
        # A greeting that nobody waits for must not be reported as an exception that was never retrieved.
        if self.greeting.done() and not self.greeting.cancelled():
            self.greeting.exception()

    def _deliver(self, kind: Kind, request_id: int, payload: bytes) -> None:
        if kind is Kind.GREETING:
            self.greeting.set_result(link_pb2.Greeting.FromString(payload))
            return
        answer = self._waiting.get(request_id)
        if answer is None or answer.done():
            return  # The caller gave up: its deadline passed, or it cancelled.
        if kind is Kind.FAULT:
            answer.set_exception(_error_of(link_pb2.Fault.FromString(payload)))
        else:
            answer.set_result(payload)


def _error_of(fault: link_pb2.Fault) -> GradruleError:
    findings = [
        Finding(errors_pb2.ErrorReason.Value(f"ERROR_REASON_{item.reason}"), item.message, item.node, item.field)
        for item in fault.findings
    ]
    return GradruleError(findings or [Finding(fault.reason, fault.message)])
