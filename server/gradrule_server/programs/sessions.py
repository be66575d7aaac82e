"""Runs sessions: an engine holds variables for as long as one stream lasts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2, session_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import release_payload, session_assign, session_payload, session_read, session_run
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.programs.cache import SessionKey
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.known_calls import call_shape
from gradrule_server.programs.runner import ProcessRef, RunInSession
from gradrule_server.programs.service import ProgramService
from gradrule_server.programs.session_variables import SessionVariables
from gradrule_server.quotas import Quota
from gradrule_server.recovery.crash_history import OutcomeRecorder
from gradrule_server.recovery.endings import EngineLost
from gradrule_server.registry.blobs import BlobStore

# The most slots of an optimizer for each variable that it updates.
_MAX_SLOTS = 3


class SessionManager:
    """Limits the number and bytes of a tenant's sessions. Belongs to one asyncio loop."""

    def __init__(
        self,
        program_service: ProgramService,
        blobs: BlobStore,
        limits: Limits,
        *,
        quota: Quota,
        bytes_quota: Quota,
    ) -> None:
        self.program_service = program_service
        self.blobs = blobs
        self.limits = limits
        self._quota = quota
        self._bytes_quota = bytes_quota
        self._bytes: dict[str, int] = {}

    def open(self) -> str:
        """Adds a session and returns its name. Raises QUOTA_EXCEEDED if there are too many."""
        self._quota.reserve()
        # Engines find sessions of all tenants by these names, so no tenant may guess one.
        name = f"s{secrets.token_hex(8)}"
        self._bytes[name] = 0
        return name

    def available_bytes(self, name: str) -> int:
        """Returns the most bytes that a session may have."""
        return self._bytes_quota.available + self._bytes.get(name, 0)

    @property
    def limiting_setting(self) -> str:
        """The flag of the setting that limits `available_bytes`."""
        return self._bytes_quota.limiting_setting

    @contextlib.contextmanager
    def reserve_growth(self, name: str, more: int) -> Iterator[None]:
        """Counts the bytes that a session may grow by, within this context, so that others cannot use them."""
        before = self._bytes.get(name, 0)
        self.set_bytes(name, before + more)
        try:
            yield
        finally:
            if self._bytes.get(name) == before + more:
                self.set_bytes(name, before)

    def set_bytes(self, name: str, size: int) -> None:
        """Sets the size of a session."""
        if name in self._bytes:
            self._bytes_quota.adjust(size - self._bytes[name])
            self._bytes[name] = size

    def close(self, name: str) -> None:
        """Removes a session."""
        if name in self._bytes:
            self.set_bytes(name, 0)
            del self._bytes[name]
            self._quota.release()


class Session:
    """One session. Its methods are called one after the other, but `close` at any time."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._name = ""
        self._process: ProcessRef | None = None
        self._graph = b""
        self._overrides = b""
        self._variables = SessionVariables((), manager.blobs, manager.limits)
        self._used_optimizers: set[str] = {""}
        self._pinned_blobs = contextlib.ExitStack()
        self._steps = 0
        self._watching: asyncio.Task[None] | None = None
        self.loss: asyncio.Future[GradruleError] = asyncio.get_running_loop().create_future()
        """Gets SESSION_LOST as its result when the engine that holds the session ends."""

    async def start(
        self, request: link_pb2.RawStartSession, received_ns: int, ends_at: float
    ) -> session_pb2.SessionStarted:
        """Starts the session and sets the first values of its variables."""
        # These bytes are parts of a ProgramSpec: concatenating messages merges them.
        spec = link_pb2.RawProgramSpec(graph=request.graph, no_gradient=request.no_gradient)
        self._graph = spec.SerializeToString()
        self._overrides = link_pb2.RawProgramSpec(overrides=request.overrides).SerializeToString()
        blob = _blob_name(request.graph)
        if blob:
            # Each kind of step compiles the graph again.
            await asyncio.to_thread(self._manager.blobs.verify, [blob])
            self._pinned_blobs.enter_context(self._manager.blobs.pinned([blob]))
        found = await self._manager.program_service.preparer.variables(self._graph, ends_at)
        self._variables = SessionVariables(found, self._manager.blobs, self._manager.limits)
        given = await asyncio.to_thread(self._variables.check_values, request.variables, "start.variables")
        self._name = self._manager.open()
        engine = await self._manager.program_service.pool.session_engine(self._manager.program_service.owner)
        self._process = ProcessRef(engine, engine.generation)
        engine.add_kept(engine.generation, 1)
        self._watching = asyncio.create_task(self._watch(engine), name="session-watch")
        reply = await self._assign(given, ends_at, opens=True)
        has_value = {item.spec.name for item in given}
        computed = [
            item.names[0] for item in self._variables.items if item.initialised and item.names[0] not in has_value
        ]
        if computed:
            # A first value may be computed from first values of other variables, also from given ones.
            first = program_pb2.ProgramSpec(fetches=computed, variables=request.variables)
            graph = link_pb2.RawProgramSpec(graph=request.graph)
            call = link_pb2.RawEvaluateRequest(spec=first.SerializeToString() + graph.SerializeToString())
            mode = RunInSession(self, ends_at, store=tuple(computed))
            async with self._reporting_loss():
                await self._manager.program_service.run_inline(call, received_ns, mode)
            reply = mode.reply or reply
        specs = [
            tensor_pb2.TensorSpec(
                name=item.names[0],
                dtype=item.dtype,
                shape=item.shape,
                optional=item.initialised or item.names[0] in has_value,
            )
            for item in self._variables.items
        ]
        return session_pb2.SessionStarted(variables=specs, size_bytes=reply.bytes)

    async def step(
        self, request: session_pb2.StepRequest, received_ns: int, ends_at: float, packing: tensor_pb2.Packing | None
    ) -> session_pb2.StepResponse:
        """Minimizes a loss by one update. `packing`: How tensors of the answer are encoded."""
        if not request.loss:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "a step minimises a loss: name one", field="step.loss"
            )
        if not request.HasField("optimizer"):
            raise error(errors_pb2.ERROR_REASON_INVALID_OPTIMIZER, "a step needs an optimiser", field="step.optimizer")
        if request.variables:
            xs = [
                self._variables.find(name, f"step.variables[{number}]") for number, name in enumerate(request.variables)
            ]
        else:
            xs = [item.names[0] for item in self._variables.items if item.differentiable]
        if not xs:
            raise error(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                "the graph has no variables of a float type, so there is nothing to update",
                field="step.variables",
            )
        vjp = program_pb2.Vjp(ys=[request.loss], xs=dict.fromkeys(xs))
        call = link_pb2.RawEvaluateRequest(feeds=request.feeds, params=request.params, answer_packing=packing)
        mode = RunInSession(self, ends_at, optimizer=request.optimizer)
        answer, program, is_new = await self._run(call, request.fetches, vjp, received_ns, mode)
        done = evaluate_pb2.EvaluateResponse.FromString(answer)
        return session_pb2.StepResponse(
            outputs=done.outputs,
            timings=done.timings,
            step=mode.reply.step if mode.reply is not None else 0,
            overrides=program.compiled.message.overrides if is_new else (),
        )

    async def evaluate(
        self,
        request: session_pb2.SessionEvaluateRequest,
        received_ns: int,
        ends_at: float,
        packing: tensor_pb2.Packing | None,
    ) -> evaluate_pb2.EvaluateResponse:
        """Evaluates, and stores the values that the graph assigns. `packing`: How tensors of the answer are encoded."""
        call = link_pb2.RawEvaluateRequest(
            feeds=request.feeds, grad_ys=request.grad_ys, params=request.params, answer_packing=packing
        )
        vjp = request.vjp if request.HasField("vjp") else None
        mode = RunInSession(self, ends_at)
        answer, program, _ = await self._run(call, request.fetches, vjp, received_ns, mode)
        return evaluate_pb2.EvaluateResponse.FromString(answer + program.compiled.tail)

    async def read(
        self, request: session_pb2.ReadRequest, ends_at: float, packing: tensor_pb2.Packing | None
    ) -> session_pb2.ReadResponse:
        """Returns values of variables. `packing`: How tensors of the answer are encoded."""
        if len(request.variables) > len(self._variables.names):
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
                f"{len(request.variables)} names are requested, but the graph's variables have "
                f"{len(self._variables.names)}",
                field="read.variables",
            )
        names = [
            self._variables.find(name, f"read.variables[{number}]") for number, name in enumerate(request.variables)
        ]
        action = session_read(names or [item.names[0] for item in self._variables.items], packing)
        async with self._reporting_loss():
            reply = await self._send(action, 0, ends_at)
        asked = list(request.variables) or [item.name for item in reply.variables]
        return session_pb2.ReadResponse(
            variables=[
                tensor_pb2.NamedTensor(name=name, value=item.value)
                for name, item in zip(asked, reply.variables, strict=True)
            ]
        )

    async def assign(self, request: session_pb2.AssignRequest, ends_at: float) -> session_pb2.AssignResponse:
        """Sets values of variables, all or none."""
        await self._assign(
            await asyncio.to_thread(self._variables.check_values, request.variables, "assign.variables"), ends_at
        )
        return session_pb2.AssignResponse()

    async def _watch(self, engine: Engine) -> None:
        ending = await engine.wait_lost()
        self.loss.set_result(self._lost("" if ending is None else str(ending)))

    def close(self) -> None:
        """Ends the session and frees its variables."""
        if self._watching is not None:
            self._watching.cancel()
        if self._name:
            self._manager.close(self._name)
            self._manager.program_service.cache.remove_session(self._name)
            if self._process is not None and not self._process.is_gone:
                self._process.engine.notify(Kind.END_SESSION, release_payload(self._name))
                self._process.engine.add_kept(self._process.generation, -1)
            self._name = ""
        self._pinned_blobs.close()

    @property
    def engine(self) -> Engine:
        """The engine that holds the session."""
        if self._process is None:
            raise AssertionError("the session has not started")
        return self._process.engine

    async def run(
        self,
        run: Sequence[bytes],
        store: Sequence[str],
        optimizer: session_pb2.Optimizer | None,
        ends_at: float,
        recorder: OutcomeRecorder,
    ) -> link_pb2.SessionReply:
        """Runs a program; see `SessionChannel`."""
        name = optimizer.name if optimizer is not None else ""
        if name:
            growth = 0 if name in self._used_optimizers else _MAX_SLOTS * self._variables.known_bytes()
        else:
            growth = self._variables.known_bytes(set(store))
        reply = await self._send(session_run(run, store, optimizer), growth, ends_at, recorder)
        self._used_optimizers.add(name)
        return reply

    async def _send(
        self, action: Sequence[bytes], growth: int, ends_at: float, recorder: OutcomeRecorder | None = None
    ) -> link_pb2.SessionReply:
        """Sends a message to the engine that holds the session, and returns the reply.

        Args:
            action: The part of a `SessionRequest` with the action.
            growth: Bytes that the action may add to the session, as far as shapes tell.
            ends_at: Loop time of the deadline.
            recorder: Records what the action does to the engine.

        Raises:
            EngineLost: The engine ended meanwhile.
            GradruleError: SESSION_LOST, if the engine had ended before.
        """
        await self._check_process()
        left_s = ends_at - asyncio.get_running_loop().time()
        payload = session_payload(
            self._name,
            action,
            max_bytes=self._manager.available_bytes(self._name),
            max_bytes_setting=self._manager.limiting_setting,
            blob_folder=self._manager.blobs.folder_name,
            deadline_ns=time.monotonic_ns() + int(left_s * 1e9),
        )
        with self._manager.reserve_growth(self._name, growth):
            reply = link_pb2.SessionReply.FromString(await self.engine.call(Kind.SESSION, payload, ends_at, recorder))
        self._steps = max(self._steps, reply.step)
        self._manager.set_bytes(self._name, reply.bytes)
        return reply

    async def _check_process(self) -> None:
        """Raises SESSION_LOST if the engine has ended; waits until the reason is known."""
        if self._process is not None and self._process.is_gone:
            raise await asyncio.shield(self.loss)

    @contextlib.asynccontextmanager
    async def _reporting_loss(self) -> AsyncIterator[None]:
        """Raises SESSION_LOST if the engine ends within this context."""
        try:
            yield
        except EngineLost as lost:
            raise self._lost(str(lost.engine_end)) from lost
        except GradruleError as cause:
            if cause.reason == errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE:
                await self._check_process()
            raise

    def _lost(self, cause: str) -> GradruleError:
        because = f" ({cause})" if cause else ""
        return error(
            errors_pb2.ERROR_REASON_SESSION_LOST,
            f"the engine that held the session has ended{because}, so its variables are lost; the last complete step "
            f"is {self._steps}; start another session with the values that you read last",
        )

    async def _assign(
        self, given: Sequence[link_pb2.BoundVariable], ends_at: float, *, opens: bool = False
    ) -> link_pb2.SessionReply:
        held = [item.value.blob.sha256 for item in given if item.value.HasField("blob")]
        with self._manager.blobs.pinned(held):
            growth = self._variables.known_bytes({item.spec.name for item in given})
            async with self._reporting_loss():
                return await self._send(session_assign(given, opens=opens), growth, ends_at)

    async def _run(
        self,
        call: link_pb2.RawEvaluateRequest,
        fetches: Iterable[str],
        vjp: program_pb2.Vjp | None,
        received_ns: int,
        mode: RunInSession,
    ) -> tuple[bytes, RunnableProgram, bool]:
        """Returns the answer's bytes, the program, and whether it was compiled now."""
        await self._check_process()
        compile_started = time.monotonic_ns()
        own_spec = program_pb2.ProgramSpec(fetches=fetches, vjp=vjp)
        key = SessionKey(self._name, own_spec.SerializeToString(deterministic=True), call_shape(call))
        program = self._manager.program_service.cache.get(key)
        is_new = program is None
        if program is None:
            spec = own_spec.SerializeToString() + self._graph + (self._overrides if vjp is not None else b"")
            async with self._reporting_loss():
                program = await self._manager.program_service.compile_for_session(spec, key.call, mode)
            if self._name:
                self._manager.program_service.cache.put(key, program)
        async with self._reporting_loss():
            result = await self._manager.program_service.runner.run(
                program, call, received_ns, compile_started, mode, is_new=is_new
            )
        return result.answer, program, is_new


def _blob_name(graph: bytes) -> str:
    """Returns the blob of a `GraphSource`, empty if it has none. Raises MALFORMED_REQUEST."""
    try:
        return link_pb2.RawGraphSource.FromString(graph).blob_sha256
    except DecodeError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            "the bytes are not a valid gradrule.v1.GraphSource",
            field="start.graph",
        ) from cause
