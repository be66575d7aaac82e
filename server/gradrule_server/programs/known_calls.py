"""Calls of stored programs whose structure was seen before: nothing of them is parsed, and nothing is decided anew."""

from __future__ import annotations

import asyncio

from gradrule import _wire
from gradrule_server.link.batching import BatchKey
from gradrule_server.link.connection import EngineGone
from gradrule_server.link.faults import EngineLost, NotLoaded
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_run
from gradrule_server.programs.cache import KnownCall, Named, ProgramCache, Runnable
from gradrule_server.programs.call_structure import CallStructure
from gradrule_server.programs.conduct import Charge, suspect_of
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.programs.running import settings_of

_REQUEST = link_pb2.RunRequest.REQUEST_FIELD_NUMBER


class KnownCalls:
    """Runs calls the short way, of one tenant: the program is compiled and loaded, and its settings are known.

    Whatever else there is to do, `ProgramHouse` does; this only leaves out what would come to the same again.
    """

    def __init__(self, cache: ProgramCache, loaded: LoadedPrograms) -> None:
        self._cache = cache
        self._loaded = loaded

    def note(self, structure: CallStructure, key: Named, program: Runnable, run: link_pb2.RunRequest) -> None:
        """Notes how a call of this structure was run."""
        if self._cache.get(key) is program:
            settings = settings_of(run)
            account = Charge(self._loaded.conduct, suspect_of(program.loadable))
            self._cache.put_call(structure, KnownCall(key, program, settings, account))

    async def run(
        self, structure: CallStructure, raw: bytes, received_ns: int, ends_at: float
    ) -> bytes | EngineLost | None:
        """Runs a call; returns an `EvaluateResponse`'s bytes.

        Returns None where the call must go the long way, and `EngineLost` where it must go on from there: its engine
        ended while it ran.

        Args:
            structure: Of the request.
            raw: The request's bytes.
            received_ns: When it was read, CLOCK_MONOTONIC.
            ends_at: Loop time of the deadline.
        """
        call = self._cache.get_call(structure)
        if call is None or asyncio.get_running_loop().time() >= ends_at:
            return None
        load = call.load
        if load is None or not load.is_at_hand or not load.engine.has_room:
            load = call.load = self._loaded.at_hand(call.program.loadable)
            if load is None:
                return None
        self._loaded.conduct.check(call.account.suspect)
        fields = link_pb2.RunRequest(key=load.engine_key, received_ns=received_ns).SerializeToString()
        payload = (call.settings, fields, _wire.prefix(_REQUEST, len(raw)), raw)
        with self._loaded.in_use(load):
            try:
                batch_key = BatchKey(load.engine_key, call.settings)
                suffix = call.program.compiled.digests_tail
                work = load.engine.submit(Kind.RUN, payload, call.account, suffix, batch_key)
                try:
                    answer = await work.answer
                except asyncio.CancelledError:
                    load.engine.abandon(work, ends_at)
                    raise
                except EngineGone as gone:
                    return await load.engine.lost(work, gone)
            except EngineLost as lost:
                return lost
            except NotLoaded:
                self._loaded.forget(load)
                return None
        self._loaded.conduct.proved(call.account.suspect)
        record_run(answer, received_ns)
        return answer
