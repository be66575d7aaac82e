"""`SessionService`: runs the requests of one session in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from gradrule.v1 import errors_pb2, session_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller, StreamTable, Write
from gradrule_server.front.error_status import to_status
from gradrule_server.front.request_pipeline import RequestPipeline
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.sessions import Session

SESSION_SERVICE = "gradrule.v1.SessionService"

MessageT = TypeVar("MessageT", bound=Message)

# Name of the response field, where it differs from that of the request.
_RESPONSE_FIELDS = {"start": "started"}


class SessionServicer:
    """Implements `SessionService`."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    def streams(self) -> StreamTable:
        return {"RunSession": self.run}

    async def run(self, caller: Caller, requests: AsyncIterator[bytes], write: Write) -> None:
        """Serves the session of one stream. Reports a lost session once, without waiting for a request."""
        session = Session(caller.tenant.sessions)
        started = is_loss_reported = False

        async def report_loss(cause: GradruleError) -> None:
            if not is_loss_reported:
                await write(session_pb2.RunSessionResponse(status=to_status(cause)).SerializeToString())

        try:
            async for raw in _messages(requests, self._pipeline.draining, session.loss, report_loss):
                response = session_pb2.RunSessionResponse()
                try:
                    await self._answer(caller, raw, session, response, started=started)
                    started = True
                except GradruleError as cause:
                    if not started:
                        raise
                    is_loss_reported = is_loss_reported or cause.reason == errors_pb2.ERROR_REASON_SESSION_LOST
                    response.status.CopyFrom(to_status(cause))
                await write(response.SerializeToString())
        finally:
            session.close()

    async def _answer(
        self, caller: Caller, raw: bytes, session: Session, response: session_pb2.RunSessionResponse, *, started: bool
    ) -> None:
        received_ns = time.monotonic_ns()
        try:
            request = link_pb2.RawSessionRequest.FromString(raw)
        except DecodeError as cause:
            name = session_pb2.RunSessionRequest.DESCRIPTOR.full_name
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"the bytes are no {name}") from cause
        kind = request.WhichOneof("request")
        if kind is None or (kind == "start") == started:
            expected = "step, evaluate, read or assign" if started else "start"
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"expected {expected}, not {kind or 'nothing'}")

        part = getattr(request, kind)
        packing = request.answer_packing if request.HasField("answer_packing") else None

        async def read(request_type: type[MessageT]) -> MessageT:
            return await self._pipeline.parse(request_type, part, caller)

        async def run(ends_at: float) -> Message:
            match kind:
                case "start":
                    return await session.start(await read(link_pb2.RawStartSession), received_ns, ends_at)
                case "step":
                    return await session.step(await read(session_pb2.StepRequest), received_ns, ends_at, packing)
                case "evaluate":
                    evaluation = await read(session_pb2.SessionEvaluateRequest)
                    return await session.evaluate(evaluation, received_ns, ends_at, packing)
                case "read":
                    return await session.read(await read(session_pb2.ReadRequest), ends_at, packing)
                case _:
                    return await session.assign(await read(session_pb2.AssignRequest), ends_at)

        remaining = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
        with self._pipeline.observer.part(kind) as observed:
            observed.request.bytes_in = len(raw)
            answer = await self._pipeline.run(caller, run, remaining, len(raw))
            observed.request.bytes_out = len(answer)
        getattr(response, _RESPONSE_FIELDS.get(kind, kind)).MergeFromString(answer)


async def _messages(
    requests: AsyncIterator[bytes],
    draining: asyncio.Event,
    loss: asyncio.Future[GradruleError],
    on_loss: Callable[[GradruleError], Awaitable[None]],
) -> AsyncIterator[bytes]:
    """Yields the messages of a stream until the client has sent its last. UNAVAILABLE once the server stops.

    Calls `on_loss` once `loss` is set, between two messages.
    """
    is_reported = False
    drained = asyncio.ensure_future(draining.wait())
    try:
        while True:
            arriving = asyncio.ensure_future(anext(requests, None))
            try:
                if not is_reported:
                    waited: set[asyncio.Future[Any]] = {arriving, drained, loss}
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    if loss.done():
                        await on_loss(loss.result())
                        is_reported = True
                await asyncio.wait({arriving, drained}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not arriving.done():
                    arriving.cancel()
            if not arriving.done():
                raise error(errors_pb2.ERROR_REASON_UNAVAILABLE, "the server is going away", retry_after_s=0.0)
            raw = arriving.result()
            if raw is None:
                return
            yield raw
    finally:
        drained.cancel()
