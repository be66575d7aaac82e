"""Compiles, checks, stores and runs the programs of a tenant.

Everything runs on one asyncio loop; slow work runs in threads. Callers cancel their calls at the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.call_parts import find_parts
from gradrule_server.link.engine import Engine
from gradrule_server.link.messages import CallShape, sampled_gradient
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import CallPath, record_path, timing_compilation
from gradrule_server.policy import Limits
from gradrule_server.programs.cache import InlineKey, ProgramCache, ProgramKey, SessionKey
from gradrule_server.programs.call_requests import EvaluateCall, ReadMessage, translate
from gradrule_server.programs.compile_tasks import CompileTasks
from gradrule_server.programs.compiler import Compiler, RunnableProgram
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.programs.preparer import Preparer, RegistryLookup
from gradrule_server.programs.runner import (
    ForwardRun,
    ProgramRunner,
    RunForward,
    RunMode,
    RunOnce,
    run_limit_s,
    turn_ends_at,
)
from gradrule_server.programs.stored_programs import StoredPrograms
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rules import RuleRegistry

MAX_FINDINGS = 100

_INPUT = re.compile(r"x([0-9]*)")


class ProgramService:
    """Compiles, stores and runs the programs of one tenant.

    Args:
        rules: The tenant's rules.
        programs: The tenant's stored programs.
        pool: The engines of all tenants.
        loaded: The programs that engines hold, of all tenants.
        limits: The limits on graphs.
        blobs: The tenant's blobs.
        capacity: Most programs in the cache.
        capacity_bytes: Most bytes in the cache.
        owner: The tenant.
        has_known_calls: Whether calls whose header is known skip all decisions.
    """

    def __init__(
        self,
        rules: RuleRegistry,
        programs: ProgramRegistry,
        pool: EnginePool,
        loaded: LoadedPrograms,
        limits: Limits,
        blobs: BlobStore,
        *,
        capacity: int,
        capacity_bytes: int,
        owner: str,
        has_known_calls: bool = True,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.blobs = blobs
        self._rules = rules
        self._loaded = loaded
        self.owner = owner
        self.cache = ProgramCache(capacity, capacity_bytes)
        """The programs that were used last, by calls and sessions."""
        self.preparer = Preparer(pool, loaded.crash_history, limits, blobs, owner)
        """Gives tasks to compile workers."""
        self.runner = ProgramRunner(loaded, blobs)
        """Runs compiled programs."""
        self._compiler = Compiler(loaded, self.preparer, limits, blobs, owner)
        self.compile_tasks = CompileTasks(self.cache, lambda: pool.is_kept_waiting_by(owner))
        """The compilations that run now."""
        self.stored = StoredPrograms(programs, rules, self._compiler, self.cache, self.compile_tasks)
        self._has_known_calls = has_known_calls

    async def evaluate(
        self,
        raw: bytes,
        parse: ReadMessage,
        received_ns: int,
        ends_at: float,
        used: Callable[[evaluate_pb2.SharedMemoryUse], AbstractContextManager[MemoryUse]],
    ) -> bytes:
        """Runs a program once; returns the bytes of an `EvaluateResponse`.

        Args:
            raw: The request's bytes.
            parse: Parses a message.
            received_ns: When the request was received, CLOCK_MONOTONIC.
            ends_at: Loop time of the deadline.
            used: Returns a context within which a call uses a client's shared memory.
        """
        parts = find_parts(raw)
        if parts is not None:
            call, header, shared_memory = None, parts.header, parts.shared_memory
        else:
            call = translate(await parse(link_pb2.RawEvaluateRequest, raw))
            header, shared_memory = call.header_bytes, call.shared_memory
        with contextlib.nullcontext() if shared_memory is None else used(shared_memory) as memory:
            mode = RunOnce(ends_at, memory=memory)
            plan = (
                self.cache.find_plan(header) if self._has_known_calls and (call is None or call.spec is None) else None
            )
            if plan is not None:
                record_path(CallPath.KNOWN)
                values = (raw,) if call is None else call.values
                return await self.runner.run(plan, values, received_ns, time.monotonic_ns(), mode)
            record_path(CallPath.GENERAL)
            if call is None:
                parsed = await parse(evaluate_pb2.EvaluateHeader, header)
                call = EvaluateCall(parsed, shared_memory=shared_memory, raw=raw)
            return await self._evaluate(call, call.shape, received_ns, mode, header)

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines that may keep forward runs."""
        return self.pool.engines_for(self.owner)

    async def forward(self, call: EvaluateCall, handle: str, received_ns: int, ends_at: float) -> ForwardRun:
        """Runs the forward part; the engine keeps what the backward part needs, under the name `handle`."""
        await self.pool.wait_to_keep(self.owner, turn_ends_at(ends_at, run_limit_s(call.header)))
        mode = RunForward(ends_at, handle)
        answer = await self._evaluate(call, replace(call.shape, split=True), received_ns, mode)
        assert mode.kept is not None
        return mode.kept._replace(answer=answer)

    def unload_idle(self, engine: Engine) -> bool:
        """Unloads all programs that no call uses from an engine without memory. Returns whether there were any."""
        return self._loaded.unload_idle(engine)

    async def find_for_session(
        self, key: SessionKey, spec: Callable[[], bytes], size: int, mode: RunMode
    ) -> tuple[RunnableProgram, bool]:
        """Returns a program for a session, and whether it was compiled and loaded into the session's engine now.

        Args:
            key: Its key.
            spec: Returns bytes of the `ProgramSpec` with the graph, which `key` lacks.
            size: How many, about.
            mode: How it will run.
        """

        async def compile(recovery: CallRecovery[Engine]) -> RunnableProgram:
            shape = replace(key.call, session=True)
            return (await self._compiler.compile(spec(), RegistryLookup(self._rules), shape, recovery))[0]

        return await self.compile_tasks.find(key, self.runner.recovery(mode.ends_at, mode.pinned), compile, size)

    def end_session(self, name: str) -> None:
        """Drops the programs of a session that has ended, and those that are being compiled for it."""
        self.cache.remove(lambda key: isinstance(key, SessionKey) and key.session == name)
        self.compile_tasks.cancel(lambda key: isinstance(key, SessionKey) and key.session == name)

    async def run_inline(self, call: EvaluateCall, received_ns: int, mode: RunMode) -> bytes:
        """Runs the program that a call holds; returns the bytes of an `EvaluateResponse`."""
        return await self._evaluate(call, call.shape, received_ns, mode)

    async def sample_rule(
        self, request: link_pb2.RawSampleRuleRequest, raw: bytes, received_ns: int, ends_at: float
    ) -> rule_pb2.SampleRuleResponse:
        """Runs a rule on tensors, without a graph.

        Raises MISSING_FEED for a needed value that is neither given nor computed by `op_type`.
        """
        evaluation = await self.preparer.sample(raw, RegistryLookup(self._rules), ends_at)
        answer = await self.run_inline(translate(evaluation), received_ns, RunOnce(ends_at))
        # Broadcasting may make large tensors.
        return await asyncio.to_thread(
            _sample_response, evaluate_pb2.EvaluateResponse.FromString(answer), _sampled_inputs(request)
        )

    async def _evaluate(
        self, call: EvaluateCall, shape: CallShape, received_ns: int, mode: RunMode, header: bytes = b""
    ) -> bytes:
        """Finds or compiles the program of a call and runs it; returns the bytes of an `EvaluateResponse`.

        Args:
            call: The call.
            shape: Its shape.
            received_ns: When the request was received, CLOCK_MONOTONIC.
            mode: How the engine runs the program.
            header: The bytes of the call's header; later calls with these bytes are known. Empty: none are.
        """
        started_ns = time.monotonic_ns()
        recovery = self.runner.recovery(mode.ends_at, mode.pinned, run_limit_s(call.header))
        key: ProgramKey
        if call.spec is not None:
            key, program, is_new = await self._find_inline(call.spec, shape, recovery)
        elif call.header.program:
            key, program, is_new = await self.stored.find(call.header.program, shape, recovery)
        else:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the request names no program and holds none", field="target"
            )
        plan = self.runner.plan(program, call.header, describes=call.spec is not None)
        blobs = call.blobs
        answer = await self.runner.run(plan, call.values, received_ns, started_ns, mode, is_new=is_new, blobs=blobs)
        if header and call.spec is None and not blobs:
            self.cache.add_plan(header, key, plan)
        return answer

    async def compile(self, spec: bytes, program_id: str, ends_at: float = 0.0) -> program_pb2.Program:
        """Compiles and stores a program. `spec`: Bytes of a `ProgramSpec`. `program_id`: Empty: one is derived."""
        return await self.stored.create(spec, program_id, self.runner.recovery(ends_at))

    async def load_stored(self, name: str, call: CallShape, ends_at: float) -> None:
        """Compiles a stored program and loads it into an engine, before a call of this shape needs it.

        `ends_at`: loop time until which it waits for that.
        """
        await self.stored.find(name, call, self.runner.recovery(ends_at), is_used=False)

    async def check(self, spec: bytes, ends_at: float = 0.0) -> tuple[bytes | None, list[Finding]]:
        """Describes a program without storing it; returns the bytes of a `Program`, or what is wrong with the spec.

        `spec`: Bytes of a `ProgramSpec`.
        """
        try:
            with timing_compilation():
                program, _ = await self._compiler.compile(
                    spec, RegistryLookup(self._rules), CallShape(), self.runner.recovery(ends_at), describes=True
                )
        except GradruleError as cause:
            if cause.reason in _NOT_FINDINGS:
                raise
            return None, list(cause.findings[:MAX_FINDINGS])
        return program.compiled.program, []

    async def _find_inline(
        self, spec: bytes, call: CallShape, recovery: CallRecovery[Engine]
    ) -> tuple[InlineKey, RunnableProgram, bool]:
        """Returns the key and the program of a spec, and whether it was compiled now."""
        key = InlineKey(hashlib.sha256(spec).digest(), self._rules.revision, call)

        async def compile(recovery: CallRecovery[Engine]) -> RunnableProgram:
            return (await self._compiler.compile(spec, RegistryLookup(self._rules), call, recovery))[0]

        return key, *await self.compile_tasks.find(key, recovery, compile, len(spec))


_NOT_FINDINGS = frozenset(
    {
        errors_pb2.ERROR_REASON_ENGINE_CRASHED,
        errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE,
        errors_pb2.ERROR_REASON_MEMORY_EXCEEDED,
        errors_pb2.ERROR_REASON_QUARANTINED,
        errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
        errors_pb2.ERROR_REASON_INTERNAL,
        errors_pb2.ERROR_REASON_BLOB_NOT_FOUND,
    }
)


def _sampled_inputs(request: link_pb2.RawSampleRuleRequest) -> list[tensor_pb2.Tensor]:
    """Returns the values of x, x1, …, which a worker has checked."""
    found = {
        int(match[1] or 0): item.value.inline_tensor
        for item in request.values
        if (match := _INPUT.fullmatch(item.name))
    }
    return [found[index] for index in sorted(found)]


def _sample_response(answer: evaluate_pb2.EvaluateResponse, xs: list[tensor_pb2.Tensor]) -> rule_pb2.SampleRuleResponse:
    """Returns gradients as `dx`, `dx1`, …, and outputs as `y`, `y1`, …"""
    response = rule_pb2.SampleRuleResponse()
    found: dict[str, tensor_pb2.Tensor] = {}
    for gradient in answer.gradients:
        if gradient.WhichOneof("value") == "dense":
            found[sampled_gradient(int(gradient.x[1:]))] = gradient.dense
    for output in answer.outputs:
        if output.name.startswith("op:"):
            index = int(output.name.removeprefix("op:"))
            response.outputs.add(name=f"y{index or ''}").value.inline_tensor.CopyFrom(output.value.inline_tensor)
        else:
            found[output.name] = output.value.inline_tensor
    for index, x in enumerate(xs):
        entry = response.gradients.add(name=f"dx{index or ''}")
        value = found.get(sampled_gradient(index))
        if value is not None:
            entry.value.inline_tensor.CopyFrom(_shaped_like(value, x, index))
    return response


def _shaped_like(gradient: tensor_pb2.Tensor, x: tensor_pb2.Tensor, index: int) -> tensor_pb2.Tensor:
    """Returns the gradient in its input's shape; broadcasts rank 0, as nodes do. Raises RULE_OUTPUT."""
    shape, wanted = ([dim.size for dim in tensor.tensor_shape.dim] for tensor in (gradient, x))
    if shape == wanted:
        return gradient
    if not shape:
        return tensor_codec.to_message(np.broadcast_to(tensor_codec.to_numpy(gradient), wanted))
    raise error(
        errors_pb2.ERROR_REASON_RULE_OUTPUT,
        f"the gradient of x{index} has shape {shape}, but x{index} has {wanted}: do the given values have shapes that "
        f"fit? Only rank 0 is broadcast, sum_to(v, x{index}) sums down to the input's shape",
        field="values",
    )
