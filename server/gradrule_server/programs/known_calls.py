"""Runs calls of stored programs whose header is known: it is not parsed, and nothing is decided again."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from gradrule.v1 import evaluate_pb2
from gradrule_server.errors import NoMemoryLeft
from gradrule_server.link.batching import BatchKey
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import RunTemplate
from gradrule_server.link.request_scheduler import ConnectionLost
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.operations.request_record import CallPath, record_known_call, record_path
from gradrule_server.programs.cache import ProgramCache, StoredKey
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import Load, LoadedPrograms
from gradrule_server.programs.runner import may_batch, run_limit_error, run_limit_s
from gradrule_server.recovery.crash_history import OutcomeRecorder
from gradrule_server.recovery.endings import EngineLost, ProgramNotLoaded

_MAX_CALLS = 1024
# Headers mostly have a hundred bytes. A longer one is rare, and must not fill the memory.
_MAX_HEADER_BYTES = 16 << 10
# Each known call is marked as used at most this often.
_MARK_INTERVAL_S = 0.5


@dataclass(slots=True, eq=False)
class KnownCall:
    """What running a stored program for calls with one header needs.

    Attributes:
        key: The program's key in the cache.
        program: The program.
        template: Builds the messages to engines.
        recorder: Records what the program does to engines.
        is_batched: Whether such calls may run together with others.
        run_limit_s: Seconds from the arrival of such a call until its run must end; infinity: only its deadline counts.
        used_at: Loop time at which the use was last recorded.
        load: The program in the engine that ran the last call; `template` and `batch_key` belong to it.
        batch_key: Key of the calls that it may run together with; None: it runs alone.
    """

    key: StoredKey
    program: RunnableProgram
    template: RunTemplate
    recorder: OutcomeRecorder
    is_batched: bool = False
    run_limit_s: float = math.inf
    used_at: float = 0.0
    load: Load | None = None
    batch_key: BatchKey | None = None

    def set_load(self, load: Load) -> None:
        """Sets the engine that runs the next calls."""
        self.load = load
        self.template.set_key(load.engine_key)
        self.batch_key = BatchKey(load.engine_key, self.template.settings) if self.is_batched else None


class KnownCalls:
    """Runs calls of one tenant whose program is compiled and loaded, and whose settings are known.

    `ProgramService` runs all other calls; the answers are the same. A call is known until the cache drops its program.
    """

    def __init__(self, cache: ProgramCache, loaded: LoadedPrograms) -> None:
        self._cache = cache
        self._loaded = loaded
        self._calls: OrderedDict[bytes, KnownCall] = OrderedDict()
        self._headers: dict[StoredKey, set[bytes]] = {}
        cache.on_removed = self._remove_program

    def add(
        self,
        header: bytes,
        settings: evaluate_pb2.EvaluateHeader,
        key: StoredKey,
        program: RunnableProgram,
        template: RunTemplate,
    ) -> None:
        """Adds the header of a call that was run; drops the least recently used calls.

        Args:
            header: The bytes of the header.
            settings: The header.
            key: The program's key in the cache.
            program: The program.
            template: The template of the run.
        """
        if len(header) > _MAX_HEADER_BYTES or self._cache.get(key, is_counted=False) is not program:
            return
        self._remove(header)
        recorder = OutcomeRecorder(self._loaded.crash_history, program.loadable.workload)
        is_batched = may_batch(program, settings)
        self._calls[header] = KnownCall(key, program, template, recorder, is_batched, run_limit_s(settings))
        self._headers.setdefault(key, set()).add(header)
        if len(self._calls) > _MAX_CALLS:
            self._remove(next(iter(self._calls)))

    async def run(
        self, header: bytes, values: Sequence[bytes], received_ns: int, ends_at: float, memory: MemoryUse | None = None
    ) -> bytes | EngineLost | None:
        """Runs a call; returns the bytes of an `EvaluateResponse`.

        Returns None if `ProgramService` must run the call, and `EngineLost` if the engine ended while the call ran, so
        that `ProgramService` must run it again.

        Args:
            header: The bytes of the header.
            values: The bytes of an `EvaluateRequest` with this header, in parts.
            received_ns: When it was received, CLOCK_MONOTONIC.
            ends_at: Loop time of the deadline.
            memory: The client's shared memory that the call uses.

        Raises DEADLINE_EXCEEDED after the call's `run_timeout`.
        """
        call = self._calls.get(header)
        now = asyncio.get_running_loop().time()
        if call is None or now >= ends_at:
            return None
        load = call.load
        if load is None or not load.is_available or not load.engine.has_room:
            load = self._loaded.find_loaded(call.program.loadable)
            if load is None:
                return None
            if load is not call.load:
                call.set_load(load)
        # The loop's clock is CLOCK_MONOTONIC, as that of `received_ns`.
        limit_at = received_ns / 1e9 + call.run_limit_s
        # The first run also compiles, so `ProgramRunner` limits it in another way.
        if not load.has_run or now >= limit_at:
            return None
        record_path(CallPath.KNOWN)
        self._loaded.crash_history.check(call.recorder.workload)
        payload = call.template.payload(received_ns, values)
        # A held program is not dropped.
        load.holders += 1
        try:
            suffix = call.program.compiled.digests_tail
            work = load.engine.submit(Kind.RUN, payload, call.recorder, suffix, call.batch_key, memory)
            try:
                async with asyncio.timeout_at(limit_at if limit_at < ends_at else None):
                    answer = await work.answer
            except TimeoutError:
                load.engine.abandon(work, limit_at)
                raise run_limit_error(call.run_limit_s) from None
            except asyncio.CancelledError:
                load.engine.abandon(work, ends_at)
                raise
            except ConnectionLost as gone:
                return await load.engine.loss_error(work, gone)
        except EngineLost as lost:
            return lost
        except ProgramNotLoaded:
            self._loaded.forget(load)
            return None
        except NoMemoryLeft as full:
            self._loaded.make_room(load, full, now)
            return None
        finally:
            load.holders -= 1
        if now >= call.used_at + _MARK_INTERVAL_S:
            self._mark_used(header, call, load, now)
        record_known_call(answer, received_ns)
        return answer

    def _mark_used(self, header: bytes, call: KnownCall, load: Load, now: float) -> None:
        """Marks call, program and load as used, because the least recently used ones are dropped first."""
        call.used_at = now
        if self._calls.get(header) is call:
            self._calls.move_to_end(header)
            self._cache.mark_used(call.key)
        if load.is_available:
            self._loaded.mark_used(load)

    def _remove_program(self, key: StoredKey) -> None:
        """Removes the calls of a program."""
        for header in list(self._headers.get(key, ())):
            self._remove(header)

    def _remove(self, header: bytes) -> None:
        call = self._calls.pop(header, None)
        if call is not None:
            same = self._headers[call.key]
            same.remove(header)
            if not same:
                del self._headers[call.key]
