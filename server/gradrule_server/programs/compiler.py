"""From a program's spec to something that runs: prepared in a thread, loaded into the engine, put together."""

from __future__ import annotations

import asyncio
import dataclasses

from gradrule.v1 import program_pb2
from gradrule_server import graphs
from gradrule_server.link.engine import Engine
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request import compiling
from gradrule_server.programs.cache import Runnable
from gradrule_server.programs.compiled import compiled
from gradrule_server.programs.loaded import Loadable, LoadedPrograms
from gradrule_server.programs.prepare import Prepared, prepare
from gradrule_server.programs.retries import Retries
from gradrule_server.programs.rule_lookup import RuleLookup
from gradrule_server.programs.shape import CallShape
from gradrule_server.registry.blobs import BlobStore


class Compiler:
    """Compiles programs of the tenant `owner`; keeps nothing."""

    def __init__(self, loaded: LoadedPrograms, limits: graphs.Limits, blobs: BlobStore, owner: str) -> None:
        self._loaded = loaded
        self._owner = owner
        self._limits = limits
        self._blobs = blobs

    async def compile(
        self, spec: program_pb2.ProgramSpec, call: CallShape, lookup: RuleLookup, retries: Retries
    ) -> Runnable:
        """The program for calls of this shape; `GradruleError` with all that is wrong with it."""
        with compiling():
            prepared, loadable = await asyncio.to_thread(
                _prepare, spec, call, lookup, self._limits, self._blobs, self._owner
            )

            async def load(engine: Engine | None) -> link_pb2.CompileReply:
                with self._loaded.held(loadable, engine, retries.ends_at, retries.account(loadable)) as held:
                    return await self._loaded.ready(held, may_move=engine is None)

            reply = await retries.run(loadable, load, proves=False)
            program = await asyncio.to_thread(compiled, prepared, reply, self._loaded.pool.greeting.device)
            return Runnable(program, loadable)


def _prepare(
    spec: program_pb2.ProgramSpec,
    call: CallShape,
    lookup: RuleLookup,
    limits: graphs.Limits,
    blobs: BlobStore,
    owner: str,
) -> tuple[Prepared, Loadable]:
    """Prepares, and leaves the graph's bytes in one place: the message that goes to engines."""
    prepared = prepare(spec, call, lookup, limits, blobs)
    blobs.verify(prepared.blobs)
    prepared.request.blob_folder = blobs.folder_name
    request = prepared.request.SerializeToString()
    # A program of one tenant's is never another's, however equal they are: nobody learns from its speed or its end.
    key = f"{prepared.key}@{blobs.folder_name}" if blobs.folder_name else prepared.key
    loadable = Loadable(
        key,
        request,
        prepared.blobs,
        prepared.expanded.nodes,
        tuple(blobs.size(name) for name in prepared.blobs),
        prepared.likeness,
        prepared.request.derivative,
        blobs,
        owner,
    )
    # A message gives up its memory as a whole: the rest is copied, then the whole goes.
    prepared.request.ClearField("graph")
    rest = link_pb2.CompileRequest()
    rest.CopyFrom(prepared.request)
    expanded = dataclasses.replace(prepared.expanded, graph_bytes=b"")
    return dataclasses.replace(prepared, request=rest, expanded=expanded), loadable
