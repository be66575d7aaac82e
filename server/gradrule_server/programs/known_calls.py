"""Runs calls of stored programs whose structure is known: they are not parsed, and nothing is decided again."""

from __future__ import annotations

import asyncio

from gradrule.common import wire_format
from gradrule_server.link.engine_request import ConnectionLost
from gradrule_server.link.framing import Kind
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_known_call
from gradrule_server.programs.cache import KnownCall, ProgramCache, StoredKey
from gradrule_server.programs.call_structure import CallStructure
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import Load, LoadedPrograms
from gradrule_server.programs.run_modes import settings_of
from gradrule_server.recovery.crash_history import HistoryRecorder
from gradrule_server.recovery.endings import EngineLost, ProgramNotLoaded

# Each known call is marked as used at most this often.
_MARK_INTERVAL_S = 0.5
_REQUEST = link_pb2.RunRequest.REQUEST_FIELD_NUMBER


class KnownCalls:
    """Runs calls of one tenant whose program is compiled and loaded, and whose settings are known.

    `ProgramService` runs all other calls; the answers are the same.
    """

    def __init__(self, cache: ProgramCache, loaded: LoadedPrograms) -> None:
        self._cache = cache
        self._loaded = loaded

    def add(
        self,
        structure: CallStructure,
        key: StoredKey,
        program: RunnableProgram,
        run: link_pb2.RunRequest,
        may_batch: bool,
    ) -> None:
        """Adds the structure of a call that was run. `may_batch`: Whether such calls may run together with others."""
        if self._cache.get(key, is_counted=False) is program:
            settings = settings_of(run)
            recorder = HistoryRecorder(self._loaded.crash_history, program.loadable.workload)
            self._cache.put_call(structure, KnownCall(key, program, settings, recorder, may_batch))

    async def run(
        self, structure: CallStructure, raw: bytes, received_ns: int, ends_at: float, memory: MemoryUse | None = None
    ) -> bytes | EngineLost | None:
        """Runs a call; returns the bytes of an `EvaluateResponse`.

        Returns None if `ProgramService` must run the call, and `EngineLost` if the engine ended while the call ran, so
        that `ProgramService` must run it again.

        Args:
            structure: The request's structure.
            raw: The request's bytes.
            received_ns: When it was received, CLOCK_MONOTONIC.
            ends_at: Loop time of the deadline.
            memory: The client's shared memory that the call uses.
        """
        call = self._cache.get_call(structure)
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
        self._loaded.crash_history.check(call.recorder.workload)
        if call.request_size != len(raw):
            call.request_size, call.prefix = len(raw), wire_format.prefix(_REQUEST, len(raw))
        received = link_pb2.RunRequest(received_ns=received_ns).SerializeToString()
        payload = (call.head, received, call.prefix, raw)
        # A held program is not dropped.
        load.holders += 1
        try:
            suffix = call.program.compiled.digests_tail
            work = load.engine.submit(Kind.RUN, payload, call.recorder, suffix, call.batch_key, memory)
            try:
                answer = await work.answer
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
        finally:
            load.holders -= 1
        if now >= call.used_at + _MARK_INTERVAL_S:
            self._mark_used(structure, call, load, now)
        record_known_call(answer, received_ns)
        return answer

    def _mark_used(self, structure: CallStructure, call: KnownCall, load: Load, now: float) -> None:
        """Marks call, program and load as used in the caches, which drop the least recently used entries."""
        call.used_at = now
        if self._cache.get_call(structure) is call:
            self._cache.mark_call_used(structure, call)
        if load.is_available:
            self._loaded.mark_used(load)
        self._loaded.crash_history.record_success(call.recorder.workload)
