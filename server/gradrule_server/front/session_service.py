"""`SessionService`: the messages of one session, in order."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from gradrule.v1 import errors_pb2, session_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller, StreamTable, Write
from gradrule_server.front.handlers import Door
from gradrule_server.front.status import status_of
from gradrule_server.front.streams import incoming
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.sessions import Session

SESSION_SERVICE = "gradrule.v1.SessionService"

MessageT = TypeVar("MessageT", bound=Message)

_ANSWERS = {"start": "started"}
"""Field of the answer by that of the request, where they differ."""


class SessionServicer:
    """`SessionService`."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def streams(self) -> StreamTable:
        return {"RunSession": self.run}

    async def run(self, caller: Caller, requests: AsyncIterator[bytes], write: Write) -> None:
        """Serves one session, from the first message of the stream to its end. Reports a lost session once, unasked."""
        session = Session(caller.tenant.sessions)
        started = is_loss_told = False

        async def tell_loss(cause: GradruleError) -> None:
            if not is_loss_told:
                await write(session_pb2.RunSessionResponse(status=status_of(cause)).SerializeToString())

        try:
            async for raw in incoming(requests, self._door.draining, session.loss, tell_loss):
                response = session_pb2.RunSessionResponse()
                try:
                    await self._answer(caller, raw, session, response, started=started)
                    started = True
                except GradruleError as cause:
                    if not started:
                        raise
                    is_loss_told = is_loss_told or cause.reason == errors_pb2.ERROR_REASON_SESSION_LOST
                    response.status.CopyFrom(status_of(cause))
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
            return await self._door.read(request_type, part, caller)

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
        with self._door.observer.part(kind) as observed:
            observed.request.bytes_in = len(raw)
            answer = await self._door.run(caller, run, remaining, len(raw))
            observed.request.bytes_out = len(answer)
        getattr(response, _ANSWERS.get(kind, kind)).MergeFromString(answer)
