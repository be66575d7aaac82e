"""All programs: prepared, compiled by the engine, cached, and run.

Everything here happens on one asyncio loop; what takes long goes to a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule_server import graphs
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.compiled import Compiled, compiled
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.programs.prepare import CallShape, Prepared, canonical, override_values, prepare
from gradrule_server.programs.rule_lookup import RegistryLookup, RuleLookup, SnapshotLookup
from gradrule_server.registry.programs import ProgramRegistry, StoredProgram
from gradrule_server.registry.rules import RuleRegistry

MAX_FINDINGS = 100


class ProgramHouse:
    """Compiles programs, keeps those that are to be kept, and runs them on an engine."""

    def __init__(
        self,
        rules: RuleRegistry,
        programs: ProgramRegistry,
        engine: Engine,
        limits: graphs.Limits,
        *,
        capacity: int,
        capacity_bytes: int,
    ) -> None:
        self._rules = rules
        self._programs = programs
        self._engine = engine
        self._limits = limits
        self._loaded = LoadedPrograms(engine, capacity, capacity_bytes)
        self._compiled: OrderedDict[Hashable, Compiled] = OrderedDict()
        self._capacity = capacity

    async def evaluate(
        self, request: evaluate_pb2.EvaluateRequest, raw: bytes, received_ns: int, ends_at: float
    ) -> bytes:
        """Runs once; returns an `EvaluateResponse`'s bytes.

        `raw`: the request's bytes; `ends_at`: loop time of the deadline.
        """
        target = request.WhichOneof("target")
        if target is None:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the request names no program and holds none", field="target"
            )
        call = _call_shape(request)
        compile_started = time.monotonic_ns()
        if target == "program":
            program, is_new = await self._named(request.program, call, ends_at)
            payload = raw
        else:
            program, is_new = await self._inline(request.spec, call, ends_at)
            payload = evaluate_pb2.EvaluateRequest(feeds=request.feeds, grad_ys=request.grad_ys).SerializeToString()
        settings = program.settings(request.params)
        run = link_pb2.RunRequest(request=payload, params=settings)
        try:
            answer, is_loaded_now = await self._run(program, run, received_ns, compile_started, ends_at)
        except GradruleError as cause:
            if cause.reason != errors_pb2.ERROR_REASON_ENGINE_CRASHED:
                raise
            # Most likely another call's engine-killer: evaluation is pure, so it is run again, once.
            await self._engine.wait_ready(_left(ends_at))
            answer, is_loaded_now = await self._run(program, run, received_ns, compile_started, ends_at)
        compile_ns = run.received_ns - received_ns if is_new or is_loaded_now else 0
        # Concatenating messages merges them, so an answer of any size is not parsed again here.
        tail = evaluate_pb2.EvaluateResponse()
        if compile_ns:
            tail.timings.compile.FromNanoseconds(compile_ns)
        return answer + program.digests_tail + tail.SerializeToString() + (program.tail if target == "spec" else b"")

    async def compile(self, spec: program_pb2.ProgramSpec, program_id: str, ends_at: float) -> program_pb2.Program:
        """Compiles and keeps a program."""
        lookup = RegistryLookup(self._rules)
        program = await self._compile(spec, CallShape(), lookup, ends_at)
        stored = await asyncio.to_thread(
            self._programs.create,
            program_id or None,
            spec,
            lookup.snapshot(),
            program.message,
            override_values(program.prepared.table),
        )
        self._remember(("program", stored.program.name, CallShape()), program)
        return stored.program

    async def check(
        self, spec: program_pb2.ProgramSpec, ends_at: float
    ) -> tuple[program_pb2.Program | None, list[Finding]]:
        """Compiles without keeping anything; what is wrong is returned, not raised."""
        try:
            program = await self._compile(spec, CallShape(), RegistryLookup(self._rules), ends_at)
        except GradruleError as cause:
            if cause.reason in _NOT_FINDINGS:
                raise
            return None, list(cause.findings[:MAX_FINDINGS])
        return program.message, []

    async def get(self, name: str) -> program_pb2.Program:
        """A kept program."""
        return (await asyncio.to_thread(self._programs.get, name)).program

    async def list(self, page_size: int, page_token: str) -> tuple[list[program_pb2.Program], str]:
        """A page of kept programs, and the next page's token."""
        stored, token = await asyncio.to_thread(self._programs.list, page_size, page_token)
        return [item.program for item in stored], token

    async def delete(self, name: str) -> None:
        """Forgets a kept program."""
        stored = await asyncio.to_thread(self._programs.get, name)
        await asyncio.to_thread(self._programs.delete, name)
        for key in [key for key in self._compiled if isinstance(key, tuple) and key[1] == stored.program.name]:
            del self._compiled[key]

    async def _run(
        self, program: Compiled, run: link_pb2.RunRequest, received_ns: int, compile_started_ns: int, ends_at: float
    ) -> tuple[bytes, bool]:
        """Runs on the engine as it is now; tells also whether the program had to be loaded first."""
        run.key, is_loaded_now = await self._loaded.key_of(program.prepared, ends_at)
        # Queueing is counted from here: what came before is compiling.
        run.received_ns = received_ns + time.monotonic_ns() - compile_started_ns
        with self._loaded.in_use(program.key):
            return await self._engine.call(Kind.RUN, run.SerializeToString(), _left(ends_at)), is_loaded_now

    async def _named(self, name: str, call: CallShape, ends_at: float) -> tuple[Compiled, bool]:
        """The program for this call, and whether it was made just now."""
        full = name if name.startswith("programs/") else f"programs/{name}"
        base, is_new = await self._cached(
            ("program", full, CallShape()), lambda: self._from_store(full, CallShape(), ends_at)
        )
        variant = CallShape(call.feeds - base.placeholders, call.grad_ys)
        if variant == CallShape():
            return base, is_new
        return await self._cached(("program", full, variant), lambda: self._from_store(full, variant, ends_at))

    async def _from_store(self, name: str, call: CallShape, ends_at: float) -> Compiled:
        stored: StoredProgram = await asyncio.to_thread(self._programs.get, name)
        spec, snapshot = await asyncio.to_thread(self._programs.content, stored)
        return await self._compile(spec, call, SnapshotLookup(snapshot), ends_at)

    async def _inline(self, spec: program_pb2.ProgramSpec, call: CallShape, ends_at: float) -> tuple[Compiled, bool]:
        spec_hash = hashlib.sha256(spec.SerializeToString(deterministic=True)).digest()
        key = ("inline", spec_hash, self._rules.revision, call)
        return await self._cached(key, lambda: self._compile(spec, call, RegistryLookup(self._rules), ends_at))

    async def _compile(
        self, spec: program_pb2.ProgramSpec, call: CallShape, lookup: RuleLookup, ends_at: float
    ) -> Compiled:
        prepared: Prepared = await asyncio.to_thread(prepare, spec, call, lookup, self._limits)
        reply = await self._loaded.load(prepared, ends_at)
        return compiled(prepared, reply, self._engine.greeting.device)

    async def _cached(self, key: Hashable, make: Callable[[], Awaitable[Compiled]]) -> tuple[Compiled, bool]:
        """The program, and whether it was made just now."""
        found = self._compiled.get(key)
        if found is not None:
            self._compiled.move_to_end(key)
            return found, False
        program = await make()
        self._remember(key, program)
        return program, True

    def _remember(self, key: Hashable, program: Compiled) -> None:
        self._compiled[key] = program
        while len(self._compiled) > self._capacity:
            self._compiled.popitem(last=False)


_NOT_FINDINGS = frozenset(
    {
        errors_pb2.ERROR_REASON_ENGINE_CRASHED,
        errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE,
        errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
        errors_pb2.ERROR_REASON_INTERNAL,
    }
)


def _call_shape(request: evaluate_pb2.EvaluateRequest) -> CallShape:
    feeds = [canonical(item.name) for item in request.feeds]
    grad_ys = [canonical(item.name) for item in request.grad_ys]
    shape = CallShape(frozenset(feeds), frozenset(grad_ys))
    for names, unique, field in ((feeds, shape.feeds, "feeds"), (grad_ys, shape.grad_ys, "grad_ys")):
        if len(names) != len(unique):
            twice = next(name for name in names if names.count(name) > 1)
            raise error(errors_pb2.ERROR_REASON_UNKNOWN_FEED, f"{field} name {twice!r} twice", node=twice, field=field)
    return shape


def _left(ends_at: float) -> float:
    return max(0.001, ends_at - asyncio.get_running_loop().time())
