"""Handles calls of the services: each method decodes a request, calls the tenant's objects, and encodes the response.

The protos document the methods.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from gradrule.common import wire_format
from gradrule.v1 import admin_pb2, blob_pb2, errors_pb2, evaluate_pb2, program_pb2, rule_pb2, session_pb2
from gradrule_server.concurrency import run_in_own_thread
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Call, Caller, MethodTable, StreamTable, Upload, UploadTable, to_status
from gradrule_server.front.evaluate_stream import EvaluateStream
from gradrule_server.front.open_streams import Stream
from gradrule_server.front.request_pipeline import RequestPipeline
from gradrule_server.front.shared_memory import SharedMemoryServer
from gradrule_server.identity import require_admin
from gradrule_server.link.messages import finding_message
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.call_requests import EvaluateCall
from gradrule_server.programs.forward_handles import StreamHandles
from gradrule_server.programs.sessions import Session
from gradrule_server.registry.rule_entries import preset_message, rule_message
from gradrule_server.rules import has_graph
from gradrule_server.rules.catalogue.presets import PRESETS

RULE_SERVICE = "gradrule.v1.RuleService"
PROGRAM_SERVICE = "gradrule.v1.ProgramService"
GRADIENT_SERVICE = "gradrule.v1.GradientService"
BLOB_SERVICE = "gradrule.v1.BlobService"
ADMIN_SERVICE = "gradrule.v1.AdminService"

SESSION_SERVICE = "gradrule.v1.SessionService"

MessageT = TypeVar("MessageT", bound=Message)

_MAX_BLOB_NAMES = 10_000
_SESSION_KINDS = [
    field.name
    for field in session_pb2.RunSessionRequest.DESCRIPTOR.oneofs_by_name["request"].fields
    if field.name != "start"
]
# Name of a session's response field, where it differs from that of the request.
_RESPONSE_FIELDS = {"start": "started", "call": "evaluate"}


class RuleServicer:
    """Implements `RuleService`."""

    def methods(self) -> MethodTable:
        return {
            "CreateRule": (link_pb2.RawCreateRuleRequest, self.create),
            "GetRule": (rule_pb2.GetRuleRequest, self.get),
            "ListRules": (rule_pb2.ListRulesRequest, self.list),
            "DeleteRule": (rule_pb2.DeleteRuleRequest, self.delete),
            "SampleRule": (link_pb2.RawSampleRuleRequest, self.sample),
            "ListPresets": (rule_pb2.ListPresetsRequest, self.list_presets),
        }

    async def create(self, call: Call[link_pb2.RawCreateRuleRequest]) -> rule_pb2.CreateRuleResponse:
        rule = call.request.rule
        if not rule.HasField("definition"):
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the rule has no definition", field="rule.definition"
            )
        tenant = call.tenant
        definition = await asyncio.to_thread(tenant.rules.read_definition, rule.name, rule.definition, rule.description)
        is_checked = has_graph(definition)
        if is_checked:
            definition = await tenant.program_service.preparer.rule(definition, call.ends_at)

        def make() -> rule_pb2.CreateRuleResponse:
            entry = tenant.rules.create(
                rule.name,
                definition,
                rule.description,
                is_checked=is_checked,
                may_replace=call.request.replace,
            )
            return rule_pb2.CreateRuleResponse(rule=rule_message(entry))

        return await asyncio.to_thread(make)

    async def get(self, call: Call[rule_pb2.GetRuleRequest]) -> rule_pb2.GetRuleResponse:
        # In a thread, since the content of a large rule is read from the database.
        return await asyncio.to_thread(
            lambda: rule_pb2.GetRuleResponse(rule=rule_message(call.tenant.rules.get(call.request.name)))
        )

    async def list(self, call: Call[rule_pb2.ListRulesRequest]) -> rule_pb2.ListRulesResponse:
        request = call.request

        def page() -> rule_pb2.ListRulesResponse:
            call.tenant.rules.refresh()
            entries, token = call.tenant.rules.list(request.kind, request.page_size, request.page_token)
            return rule_pb2.ListRulesResponse(rules=map(rule_message, entries), next_page_token=token)

        # In a thread, since a page may hold megabytes of rules.
        return await asyncio.to_thread(page)

    async def delete(self, call: Call[rule_pb2.DeleteRuleRequest]) -> rule_pb2.DeleteRuleResponse:
        await asyncio.to_thread(call.tenant.rules.delete, call.request.name)
        return rule_pb2.DeleteRuleResponse()

    async def sample(self, call: Call[link_pb2.RawSampleRuleRequest]) -> rule_pb2.SampleRuleResponse:
        return await call.tenant.program_service.sample_rule(call.request, call.raw, call.received_ns, call.ends_at)

    async def list_presets(self, call: Call[rule_pb2.ListPresetsRequest]) -> rule_pb2.ListPresetsResponse:
        return rule_pb2.ListPresetsResponse(presets=map(preset_message, PRESETS))


class ProgramServicer:
    """Implements `ProgramService`."""

    def methods(self) -> MethodTable:
        return {
            "CompileProgram": (link_pb2.RawCompileProgramRequest, self.compile),
            "GetProgram": (program_pb2.GetProgramRequest, self.get),
            "ListPrograms": (program_pb2.ListProgramsRequest, self.list),
            "DeleteProgram": (program_pb2.DeleteProgramRequest, self.delete),
            "DescribeGraph": (None, self.describe_graph),
        }

    async def compile(
        self, call: Call[link_pb2.RawCompileProgramRequest]
    ) -> program_pb2.CompileProgramResponse | bytes:
        request = call.request
        if not request.validate_only:
            program = await call.tenant.program_service.compile(request.spec, request.program_id, call.ends_at)
            return program_pb2.CompileProgramResponse(program=program)
        checked, findings = await call.tenant.program_service.check(request.spec, call.ends_at)
        if checked is not None:
            # Not parsed, since it may be large.
            return b"".join(wire_format.wrapped(program_pb2.CompileProgramResponse.PROGRAM_FIELD_NUMBER, (checked,)))
        return program_pb2.CompileProgramResponse(findings=map(finding_message, findings))

    async def get(self, call: Call[program_pb2.GetProgramRequest]) -> program_pb2.GetProgramResponse:
        return program_pb2.GetProgramResponse(program=await call.tenant.program_service.stored.get(call.request.name))

    async def list(self, call: Call[program_pb2.ListProgramsRequest]) -> program_pb2.ListProgramsResponse:
        programs, token = await call.tenant.program_service.stored.list(call.request.page_size, call.request.page_token)
        return program_pb2.ListProgramsResponse(programs=programs, next_page_token=token)

    async def delete(self, call: Call[program_pb2.DeleteProgramRequest]) -> program_pb2.DeleteProgramResponse:
        await call.tenant.program_service.stored.delete(call.request.name)
        return program_pb2.DeleteProgramResponse()

    async def describe_graph(self, call: Call[Empty]) -> bytes:
        # The request has the field of a ProgramSpec that has the graph.
        return await call.tenant.program_service.preparer.describe_graph(call.raw, call.ends_at)


class GradientServicer:
    """Implements `GradientService`."""

    def __init__(self, pipeline: RequestPipeline, shared_memory: SharedMemoryServer) -> None:
        self._pipeline = pipeline
        self._shared_memory = shared_memory

    def methods(self) -> MethodTable:
        return {
            "Evaluate": (None, self.evaluate),
            "ShareMemory": (evaluate_pb2.ShareMemoryRequest, self.share_memory),
        }

    def streams(self) -> StreamTable:
        return {"StreamEvaluate": self.stream}

    def evaluate(self, call: Call[Empty]) -> Awaitable[bytes]:
        caller = call.caller
        parse = functools.partial(self._pipeline.parse, caller=caller)
        used = functools.partial(self._shared_memory.use, caller=caller)
        return caller.tenant.program_service.evaluate(call.raw, parse, call.received_ns, call.ends_at, used)

    async def share_memory(self, call: Call[evaluate_pb2.ShareMemoryRequest]) -> evaluate_pb2.ShareMemoryResponse:
        return self._shared_memory.issue_keys(call.caller)

    async def stream(self, stream: Stream) -> None:
        caller = stream.caller
        handles = StreamHandles(caller.tenant.program_service, caller.tenant.quotas, caller.tenant.handle_ttl_s)
        parse = functools.partial(self._pipeline.parse, caller=caller)

        async def forward(call: Call[link_pb2.RawForwardRequest]) -> bytes:
            evaluation = await EvaluateCall.read(call.request.evaluate, parse)
            return await handles.forward(call.request, evaluation, call.received_ns, call.ends_at)

        async def pull_back(call: Call[evaluate_pb2.PullBackRequest]) -> bytes:
            return await handles.pull_back(call.request, call.received_ns, call.ends_at)

        async def close(call: Call[evaluate_pb2.CloseHandleRequest]) -> evaluate_pb2.CloseHandleResponse:
            handles.close(call.request.handle)
            return evaluate_pb2.CloseHandleResponse()

        methods: MethodTable = {
            "evaluate": (None, self.evaluate),
            "forward": (link_pb2.RawForwardRequest, forward),
            "pull_back": (evaluate_pb2.PullBackRequest, pull_back),
            "close_handle": (evaluate_pb2.CloseHandleRequest, close),
        }
        try:
            await EvaluateStream(self._pipeline, stream, methods).run()
        finally:
            handles.close_all()


class BlobServicer:
    """Implements `BlobService`: stores bytes under their SHA-256."""

    def methods(self) -> MethodTable:
        return {"FindMissingBlobs": (blob_pb2.FindMissingBlobsRequest, self.find_missing)}

    def uploads(self) -> UploadTable:
        return {"UploadBlob": (blob_pb2.UploadBlobRequest, self.upload)}

    async def find_missing(self, call: Call[blob_pb2.FindMissingBlobsRequest]) -> blob_pb2.FindMissingBlobsResponse:
        names, blobs = call.request.sha256, call.tenant.blobs
        if len(names) > _MAX_BLOB_NAMES:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
                f"{len(names)} hashes are more than the {_MAX_BLOB_NAMES} that one request may hold",
                field="sha256",
            )
        return blob_pb2.FindMissingBlobsResponse(missing=await blobs.look_up(lambda: blobs.missing(names)))

    async def upload(self, call: Upload[blob_pb2.UploadBlobRequest]) -> blob_pb2.UploadBlobResponse:
        first = await anext(call.messages, None)
        if first is None:
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the stream holds no message", field="sha256")
        name = first.sha256
        creating = asyncio.ensure_future(asyncio.to_thread(call.tenant.blobs.upload, name))
        try:
            upload = await asyncio.shield(creating)
        except asyncio.CancelledError:
            # The thread still creates the upload, so close it.
            (await creating).close()
            raise
        try:
            await asyncio.to_thread(upload.write, first.data)
            async for message in call.messages:
                if message.sha256 not in ("", name):
                    raise error(
                        errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
                        f"the stream is that of blob {name}, but a message names {message.sha256[:80]!r}",
                        field="sha256",
                    )
                await asyncio.to_thread(upload.write, message.data)
            size = await call.tenant.blobs.finish_upload(upload)
        finally:
            # Where the caller has given up a thread may still write; `close` waits for it.
            await asyncio.shield(run_in_own_thread("close-upload", upload.close))
        return blob_pb2.UploadBlobResponse(sha256=name, size_bytes=size)


class SessionServicer:
    """Implements `SessionService`: runs the requests of one session in order."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    def streams(self) -> StreamTable:
        return {"RunSession": self.run}

    async def run(self, stream: Stream) -> None:
        """Serves the session of one stream. Reports a lost session once, without waiting for a request."""
        tenant = stream.caller.tenant
        session = Session(
            tenant.program_service, tenant.quotas, idle_s=tenant.session_idle_s, handle_ttl_s=tenant.handle_ttl_s
        )
        started = is_loss_reported = False
        reading = asyncio.ensure_future(stream.read())
        try:
            while True:
                if not is_loss_reported:
                    waited: set[asyncio.Future[Any]] = {reading, session.loss}
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    if session.loss.done():
                        is_loss_reported = True
                        status = to_status(session.loss.result())
                        await stream.write(session_pb2.RunSessionResponse(status=status).SerializeToString())
                raw = await reading
                if raw is None:
                    return
                response = session_pb2.RunSessionResponse()
                try:
                    with session.working():
                        await self._answer(stream.caller, raw, session, response, started=started)
                    started = True
                except GradruleError as cause:
                    if not started:
                        raise
                    is_loss_reported = is_loss_reported or cause.reason == errors_pb2.ERROR_REASON_SESSION_LOST
                    response.status.CopyFrom(to_status(cause))
                await stream.write(response.SerializeToString())
                reading = asyncio.ensure_future(stream.read())
        finally:
            reading.cancel()
            session.close()

    async def _answer(
        self, caller: Caller, raw: bytes, session: Session, response: session_pb2.RunSessionResponse, *, started: bool
    ) -> None:
        try:
            request = link_pb2.RawSessionRequest.FromString(raw)
        except DecodeError as cause:
            name = session_pb2.RunSessionRequest.DESCRIPTOR.full_name
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"the bytes are no {name}") from cause
        kind = request.WhichOneof("request")
        if kind is None or (kind == "start") == started:
            expected = f"one of {', '.join(_SESSION_KINDS)}" if started else "start"
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"expected {expected}, not {kind or 'nothing'}")

        part = getattr(request, kind)
        packing = request.answer_packing if request.HasField("answer_packing") else None

        parse = functools.partial(self._pipeline.parse, caller=caller)

        async def read(request_type: type[MessageT]) -> MessageT:
            return await parse(request_type, part)

        async def run(admitted: Call[Empty]) -> Message | bytes:
            received_ns, ends_at = admitted.received_ns, admitted.ends_at
            match kind:
                case "start":
                    return await session.start(await read(link_pb2.RawStartSession), received_ns, ends_at, request)
                case "step":
                    return await session.step(await read(session_pb2.StepRequest), received_ns, ends_at, request)
                case "evaluate":
                    evaluation = await read(session_pb2.SessionEvaluateRequest)
                    return await session.evaluate(evaluation, received_ns, ends_at, request)
                case "call":
                    call = await EvaluateCall.read(part, parse)
                    return await session.call(call, received_ns, ends_at, request)
                case "forward":
                    forward = await read(link_pb2.RawForwardRequest)
                    call = await EvaluateCall.read(forward.evaluate, parse)
                    return await session.keep_forward(forward, call, received_ns, ends_at, request)
                case "pull_back":
                    pull_back = await read(evaluate_pb2.PullBackRequest)
                    return await session.pull_back(pull_back, received_ns, ends_at, packing)
                case "close_handle":
                    session.close_handle((await read(evaluate_pb2.CloseHandleRequest)).handle)
                    return evaluate_pb2.CloseHandleResponse()
                case "read":
                    return await session.read(await read(session_pb2.ReadRequest), ends_at, packing)
                case _:
                    return await session.assign(await read(session_pb2.AssignRequest), ends_at)

        remaining = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
        with self._pipeline.observer.part(kind) as observed:
            answer = await self._pipeline.run(caller, observed.request, remaining, raw, run)
        self._pipeline.release_answer(caller, len(answer))
        getattr(response, _RESPONSE_FIELDS.get(kind, kind)).MergeFromString(answer)


class AdminServicer:
    """Implements `AdminService`, for administrators only. `status` returns the state of the server."""

    def __init__(self, status: Callable[[], admin_pb2.ServerStatus]) -> None:
        self._status = status

    def methods(self) -> MethodTable:
        return {"GetServerStatus": (admin_pb2.GetServerStatusRequest, self.status)}

    async def status(self, call: Call[admin_pb2.GetServerStatusRequest]) -> admin_pb2.GetServerStatusResponse:
        require_admin(call.principal)
        return admin_pb2.GetServerStatusResponse(status=self._status())
