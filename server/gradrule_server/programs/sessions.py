"""Runs sessions: an engine holds variables for as long as one stream lasts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2, session_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import release_payload, with_values
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import SMALL_BYTES
from gradrule_server.programs.cache import SessionKey
from gradrule_server.programs.call_requests import EvaluateCall, translate
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.forward_handles import StreamHandles
from gradrule_server.programs.runner import ForwardRun, ProcessRef, Run, run_limit_s, turn_ends_at
from gradrule_server.programs.service import ProgramService
from gradrule_server.programs.session_requests import SessionVariables, apply_settings, blob_name, read_spec
from gradrule_server.quotas import Quota
from gradrule_server.recovery.endings import EngineLost

# Errors that may mean that the engine which held the session has ended.
_LOST_REASONS = frozenset({errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE, errors_pb2.ERROR_REASON_HANDLE_EXPIRED})


@dataclass(slots=True)
class RunInSession:
    """Runs with the variables of a session.

    Attributes:
        session: The session.
        ends_at: Loop time of the deadline.
        store: Variables that get the outputs as values.
        optimizer: Applies the gradients of `loss`.
        loss: The loss.
        handle: Under this name the engine keeps a forward run.
        describes: Whether the answer describes the program.
        reply: Size and steps of the session; set by `run`.
        kept: What the engine keeps under `handle`, without the answer; set by `run`.
    """

    session: Session
    ends_at: float
    store: tuple[str, ...] = ()
    optimizer: session_pb2.Optimizer | None = None
    loss: str = ""
    handle: str = ""
    describes: bool = False
    reply: link_pb2.SessionReply | None = None
    kept: ForwardRun | None = None
    undo: Callable[[Engine], None] | None = None

    @property
    def pinned(self) -> Engine | None:
        return self.session.process.engine

    async def run(self, run: Run) -> bytes:
        action = link_pb2.SessionRun(
            run=run.request, store=self.store, optimizer=self.optimizer, handle=self.handle, loss=self.loss
        )
        quota = self.session.handles.bytes_quota
        action.max_kept_bytes, action.max_kept_bytes_setting = quota.available, quota.limiting_setting
        request = link_pb2.SessionRequest(run=action)
        reply = await self.session.send(request, run.ends_at, run)
        self.reply = reply
        self.kept = ForwardRun(b"", reply.kept_bytes, self.session.process, run.plan.recorder, True)
        return reply.response + run.plan.suffix


class Session:
    """One session. Its methods are called one after the other, but `close` at any time.

    Args:
        service: The programs of the tenant.
        quotas: The tenant's quotas: `sessions` limits the number of its sessions, `session_bytes` the bytes of their
            variables and optimizers; those of `StreamHandles`.
        idle_s: How long it may get no message, seconds; 0: no limit.
        handle_ttl_s: As `StreamHandles.ttl_s`.
    """

    def __init__(
        self, service: ProgramService, quotas: Mapping[str, Quota], *, idle_s: float, handle_ttl_s: float
    ) -> None:
        self._service = service
        self._quota = quotas["sessions"]
        self._bytes_quota = quotas["session_bytes"]
        self._bytes = 0
        self._idle_s = idle_s
        self.handles = StreamHandles(service, quotas, handle_ttl_s, self)
        """Its forward handles."""
        self._name = ""
        self._process: ProcessRef | None = None
        self._graph = b""
        self._overrides = b""
        self._variables = SessionVariables((), service.blobs, service.limits)
        self._pinned_blobs = contextlib.ExitStack()
        self._steps = 0
        self._watching: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self.loss: asyncio.Future[GradruleError] = asyncio.get_running_loop().create_future()
        """Gets SESSION_LOST as its result when the session ends before its stream."""

    async def start(
        self, request: link_pb2.RawStartSession, received_ns: int, ends_at: float, settings: link_pb2.RawSessionRequest
    ) -> session_pb2.SessionStarted:
        """Starts the session and sets the first values of its variables. `settings`: As in `step`."""
        # These bytes are parts of a ProgramSpec: concatenating messages merges them.
        spec = link_pb2.RawProgramSpec(graph=request.graph, no_gradient=request.no_gradient)
        self._graph = spec.SerializeToString()
        self._overrides = link_pb2.RawProgramSpec(overrides=request.overrides).SerializeToString()
        blob = blob_name(request.graph)
        if blob:
            # Each kind of step compiles the graph again.
            await self._service.blobs.acquire([blob])
            self._pinned_blobs.callback(self._service.blobs.unpin, [blob])
        found = await self._service.preparer.variables(self._graph, ends_at)
        self._variables = SessionVariables(found, self._service.blobs, self._service.limits)
        given = await self._variables.check_values(request.variables, "start.variables")
        self._quota.reserve()
        # Engines find sessions of all tenants by these names, so no tenant may guess one.
        self._name = f"s{secrets.token_hex(8)}"
        engine = await self._service.pool.session_engine(
            self._service.owner, turn_ends_at(ends_at, run_limit_s(settings))
        )
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
            spec_bytes = first.SerializeToString() + graph.SerializeToString()
            call = EvaluateCall(evaluate_pb2.EvaluateHeader(), spec=spec_bytes)
            mode = RunInSession(self, ends_at, store=tuple(computed))
            async with self._reporting_loss():
                await self._service.run_inline(call, received_ns, mode)
            reply = mode.reply or reply
        if request.HasField("optimizer_state"):
            reply = await self._restore(request.optimizer_state, ends_at)
        specs = [
            tensor_pb2.TensorSpec(
                name=item.names[0],
                dtype=item.dtype,
                shape=item.shape,
                optional=item.initialised or item.names[0] in has_value,
            )
            for item in self._variables.items
        ]
        return session_pb2.SessionStarted(variables=specs, size_bytes=reply.bytes, step=reply.step)

    async def step(
        self,
        request: session_pb2.StepRequest,
        received_ns: int,
        ends_at: float,
        settings: link_pb2.RawSessionRequest,
    ) -> session_pb2.StepResponse:
        """Minimizes a loss by one update. `settings`: The message, for the packing and the time limit of the run."""
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
        # The engine checks that the loss has one element.
        is_added = request.loss not in request.fetches
        fetches = [*request.fetches, *([request.loss] if is_added else [])]
        spec = program_pb2.ProgramSpec(fetches=fetches, vjp=vjp)
        call = translate(link_pb2.RawEvaluateRequest(feeds=request.feeds, params=request.params))
        mode = RunInSession(self, ends_at, optimizer=request.optimizer, loss=request.loss)
        apply_settings(call.header, settings)
        answer, program, is_new = await self._run(spec, call, received_ns, mode)
        done = evaluate_pb2.EvaluateResponse.FromString(answer)
        return session_pb2.StepResponse(
            outputs=done.outputs[:-1] if is_added else done.outputs,
            timings=done.timings,
            step=mode.reply.step if mode.reply is not None else 0,
            overrides=program.compiled.message.overrides if is_new else (),
        )

    async def evaluate(
        self,
        request: session_pb2.SessionEvaluateRequest,
        received_ns: int,
        ends_at: float,
        settings: link_pb2.RawSessionRequest,
    ) -> evaluate_pb2.EvaluateResponse:
        """Evaluates, and stores the values that the graph assigns. `settings`: As in `step`."""
        vjp = request.vjp if request.HasField("vjp") else None
        call = link_pb2.RawEvaluateRequest(
            spec=program_pb2.ProgramSpec(fetches=request.fetches, vjp=vjp).SerializeToString(),
            feeds=request.feeds,
            grad_ys=request.grad_ys,
            params=request.params,
        )
        return evaluate_pb2.EvaluateResponse.FromString(
            await self.call(translate(call), received_ns, ends_at, settings)
        )

    async def call(
        self,
        call: EvaluateCall,
        received_ns: int,
        ends_at: float,
        settings: link_pb2.RawSessionRequest,
    ) -> bytes:
        """Evaluates and differentiates, and stores the values that the graph assigns.

        Returns the bytes of an `EvaluateResponse`. `settings`: As in `step`.
        """
        apply_settings(call.header, settings)
        spec = await self._read_spec(call)
        answer, _, _ = await self._run(spec, call, received_ns, RunInSession(self, ends_at, describes=True))
        return answer

    async def keep_forward(
        self,
        request: link_pb2.RawForwardRequest,
        call: EvaluateCall,
        received_ns: int,
        ends_at: float,
        settings: link_pb2.RawSessionRequest,
    ) -> bytes:
        """Runs forward and keeps a handle; returns the bytes of a `ForwardResponse`.

        `call`: The evaluation of the request. `settings`: As in `step`.
        """
        apply_settings(call.header, settings)
        return await self.handles.forward(request, call, received_ns, ends_at)

    async def pull_back(
        self,
        request: evaluate_pb2.PullBackRequest,
        received_ns: int,
        ends_at: float,
        packing: tensor_pb2.Packing | None,
    ) -> bytes:
        """Returns gradients, as the bytes of a `PullBackResponse`. Raises HANDLE_EXPIRED. `packing`: As in `read`."""
        if packing is not None:
            request.answer_packing.CopyFrom(packing)
        async with self._reporting_loss():
            return await self.handles.pull_back(request, received_ns, ends_at)

    def close_handle(self, handle: str) -> None:
        """Closes a handle, if it exists."""
        self.handles.close(handle)

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
        action = link_pb2.SessionRead(
            variables=names or [item.names[0] for item in self._variables.items],
            packing=packing,
            optimizer_state=request.optimizer_state,
        )
        async with self._reporting_loss():
            reply = await self.send(link_pb2.SessionRequest(read=action), ends_at)
        asked = list(request.variables) or [item.name for item in reply.variables]
        return session_pb2.ReadResponse(
            variables=[
                tensor_pb2.NamedTensor(name=name, value=item.value)
                for name, item in zip(asked, reply.variables, strict=True)
            ],
            optimizer_state=reply.optimizer_state if reply.HasField("optimizer_state") else None,
        )

    async def assign(self, request: session_pb2.AssignRequest, ends_at: float) -> session_pb2.AssignResponse:
        """Sets values of variables, all or none."""
        await self._assign(await self._variables.check_values(request.variables, "assign.variables"), ends_at)
        return session_pb2.AssignResponse()

    async def _watch(self, engine: Engine) -> None:
        ending = await engine.wait_lost()
        self.loss.set_result(self._lost("" if ending is None else str(ending)))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Stops the idle time for this context, and starts it anew afterwards."""
        self._stop_idle_timer()
        try:
            yield
        finally:
            if self._name and self._idle_s:
                loop = asyncio.get_running_loop()
                self._idle_timer = loop.call_later(self._idle_s, self._end_idle)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _end_idle(self) -> None:
        """Ends the session, so that its engine is free for other tenants."""
        if not self.loss.done():
            cause = f"the server ended the session, because it got no message for {self._idle_s:g} s"
            remedy = "save a session before a pause (`save`), and start another session with what it returned"
            self.loss.set_result(self._lost_because(f"{cause} (--session-idle-s)", remedy))
        self.close()

    def close(self) -> None:
        """Ends the session and frees its variables."""
        self._stop_idle_timer()
        if self._watching is not None:
            self._watching.cancel()
        self.handles.close_all()
        if self._name:
            self._bytes_quota.release(self._bytes)
            self._quota.release()
            self._service.end_session(self._name)
            if self._process is not None and not self._process.is_gone:
                self._process.engine.notify(Kind.END_SESSION, release_payload(self._name))
                self._process.engine.add_kept(self._process.generation, -1)
            self._name = ""
        self._pinned_blobs.close()

    @property
    def process(self) -> ProcessRef:
        """The process that holds the session."""
        if self._process is None:
            raise AssertionError("the session has not started")
        return self._process

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines that may keep forward runs: the one that holds the session."""
        return [] if self._process is None or self._process.is_gone else [self._process.engine]

    async def forward(self, call: EvaluateCall, handle: str, received_ns: int, ends_at: float) -> ForwardRun:
        """Runs the forward part of a program; the engine keeps what the backward part needs; see `ForwardRunner`."""
        mode = RunInSession(self, ends_at, handle=handle)
        answer, _, _ = await self._run(await self._read_spec(call), call, received_ns, mode)
        assert mode.kept is not None
        return mode.kept._replace(answer=answer)

    async def send(
        self,
        request: link_pb2.SessionRequest,
        ends_at: float,
        run: Run | None = None,
    ) -> link_pb2.SessionReply:
        """Sends a message to the engine that holds the session, and returns the reply.

        Args:
            request: The message with its action; the other fields are set here.
            ends_at: Loop time of the deadline.
            run: The run, if the action is one.

        Raises:
            EngineLost: The engine ended meanwhile.
            GradruleError: SESSION_LOST, if the engine had ended before.
        """
        await self._check_process()
        left_s = ends_at - asyncio.get_running_loop().time()
        request.session = self._name
        # Sessions that grow at the same moment may together exceed the quota, since each gets all that is free.
        request.max_bytes = self._bytes_quota.available + self._bytes
        request.max_bytes_setting = self._bytes_quota.limiting_setting
        request.blob_folder = self._service.blobs.folder_name
        request.deadline_ns = time.monotonic_ns() + int(left_s * 1e9)
        received_ns, values = (0, ()) if run is None else (run.received_ns, run.values)
        recorder, least_run_s = (None, 0.0) if run is None else (run.plan.recorder, run.least_run_s)
        payload = with_values(request.SerializeToString(), received_ns, values)
        answer = await self.process.engine.call(Kind.SESSION, payload, ends_at, recorder, least_run_s=least_run_s)
        reply = link_pb2.SessionReply.FromString(answer)
        self._steps = max(self._steps, reply.step)
        if self._name:
            self._bytes_quota.adjust(reply.bytes - self._bytes)
            self._bytes = reply.bytes
        return reply

    async def _check_process(self) -> None:
        """Raises SESSION_LOST if the session or its engine has ended; waits until the reason is known."""
        if self.loss.done() or (self._process is not None and self._process.is_gone):
            raise await asyncio.shield(self.loss)

    @contextlib.asynccontextmanager
    async def _reporting_loss(self) -> AsyncIterator[None]:
        """Raises SESSION_LOST if the engine ends within this context."""
        try:
            yield
        except EngineLost as lost:
            raise self._lost(str(lost.engine_end)) from lost
        except GradruleError as cause:
            if cause.reason in _LOST_REASONS:
                await self._check_process()
            raise

    def _lost(self, cause: str) -> GradruleError:
        because = f" ({cause})" if cause else ""
        return self._lost_because(
            f"the engine that held the session has ended{because}",
            "start another session with the values that you read last",
        )

    def _lost_because(self, cause: str, remedy: str) -> GradruleError:
        return error(
            errors_pb2.ERROR_REASON_SESSION_LOST,
            f"{cause}, so its variables are lost; the last complete step is {self._steps}; {remedy}",
        )

    async def _assign(
        self, given: Sequence[link_pb2.BoundVariable], ends_at: float, *, opens: bool = False
    ) -> link_pb2.SessionReply:
        held = [item.value.blob.sha256 for item in given if item.value.HasField("blob")]
        action = link_pb2.SessionAssign(variables=given, opens=opens)
        async with self._service.blobs.acquired(held), self._reporting_loss():
            return await self.send(link_pb2.SessionRequest(assign=action), ends_at)

    async def _restore(self, state: session_pb2.OptimizerState, ends_at: float) -> link_pb2.SessionReply:
        """Creates the optimizer with the slots of an earlier session."""
        field = "start.optimizer_state"
        names = [
            self._variables.find(name, f"{field}.variables[{number}]") for number, name in enumerate(state.variables)
        ]
        slots = await self._variables.check_slots(state, field)
        held = [item.value.blob.sha256 for item in slots if item.value.HasField("blob")]
        action = link_pb2.SessionRestore(optimizer=state.optimizer, step=state.step, variables=names, slots=slots)
        async with self._service.blobs.acquired(held), self._reporting_loss():
            return await self.send(link_pb2.SessionRequest(restore=action), ends_at)

    async def _read_spec(self, call: EvaluateCall) -> program_pb2.ProgramSpec:
        if len(call.spec or b"") <= SMALL_BYTES:
            return read_spec(call.spec, self._service.limits)
        return await asyncio.to_thread(read_spec, call.spec, self._service.limits)

    async def _run(
        self,
        own_spec: program_pb2.ProgramSpec,
        call: EvaluateCall,
        received_ns: int,
        mode: RunInSession,
    ) -> tuple[bytes, RunnableProgram, bool]:
        """Returns the answer's bytes, the program, and whether it was compiled now.

        `own_spec`: The spec of the call, which has no graph.
        """
        await self._check_process()
        started_ns = time.monotonic_ns()
        shape = replace(call.shape, split=bool(mode.handle))
        key = SessionKey(self._name, own_spec.SerializeToString(deterministic=True), shape)
        overrides = self._overrides if own_spec.WhichOneof("derivative") else b""

        def spec() -> bytes:
            return own_spec.SerializeToString() + self._graph + overrides

        runner = self._service.runner
        async with self._reporting_loss():
            program, is_new = await self._service.find_for_session(key, spec, len(self._graph), mode)
            plan = runner.plan(program, call.header, describes=mode.describes)
            answer = await runner.run(plan, call.values, received_ns, started_ns, mode, is_new=is_new, blobs=call.blobs)
        return answer, program, is_new
