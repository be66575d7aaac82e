"""Stored programs that are deleted or replaced while other tasks use them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradrule.v1 import program_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import CallShape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.programs.cache import ProgramCache
from gradrule_server.programs.compile_tasks import CompileTasks
from gradrule_server.programs.compiler import CompiledProgram, Compiler, RunnableProgram
from gradrule_server.programs.loaded import Loadable, LoadedPrograms
from gradrule_server.programs.preparer import RegistryLookup
from gradrule_server.programs.stored_programs import StoredPrograms
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.recovery.crash_history import CrashHistory
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store
from tests.stores import no_blobs
from tests.unit.link.fake_engine import FakeEngine, FakePool

_CALL = CallShape()


class FakeCompiler:
    """Compiles when the test opens the gate. A program's digest is its spec's first fetch."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0

    async def compile(self, spec: bytes, *_: Any, is_kept: bool) -> tuple[RunnableProgram, link_pb2.PreparedProgram]:
        assert is_kept
        return await self._compile(spec), link_pb2.PreparedProgram(kept_spec=spec)

    async def compile_stored(
        self, graph_bytes: int, read: Callable[[], tuple[bytes, bytes]], *_: Any
    ) -> RunnableProgram:
        return await self._compile(read()[0])

    async def _compile(self, spec: bytes) -> RunnableProgram:
        self.asked += 1
        await self.gate.wait()
        digest = program_pb2.ProgramSpec.FromString(spec).fetches[0]
        message = program_pb2.Program(digests=program_pb2.Digests(program=digest))
        no_params: Any = None
        compiled = CompiledProgram(
            key=digest,
            program=message.SerializeToString(),
            tail=b"",
            digests_tail=b"",
            params=no_params,
            placeholders=frozenset({"x"}),
            used_rules=frozenset(),
        )
        return RunnableProgram(compiled, Loadable(digest, b""))


class Fixture:
    """Stored programs with a registry and a fake compiler."""

    def __init__(self, store: Store) -> None:
        self.compiler = FakeCompiler()
        self.registry = ProgramRegistry(store, no_blobs())
        self.recovery: CallRecovery[Engine] = CallRecovery(FakePool(), CrashHistory())
        self.restart(store)

    def restart(self, store: Store) -> None:
        """An empty cache."""
        rules = RuleRegistry(store, ["Sign"])
        cache = ProgramCache(10, 10**6)
        tasks = CompileTasks(cache, lambda: False)
        self.stored = StoredPrograms(self.registry, rules, self.compiler, cache, tasks)

    async def create(self, digest: str) -> None:
        await self.stored.create(program_pb2.ProgramSpec(fetches=[digest]).SerializeToString(), "p", self.recovery)

    async def find(self, call: CallShape = _CALL) -> str:
        _, program, _ = await self.stored.find("programs/p", call, self.recovery)
        return program.compiled.key


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path)
    yield opened
    opened.close()


async def test_name_reused_while_the_deleted_program_is_read(store: Store) -> None:
    fixture = Fixture(store)
    await fixture.create("old")
    fixture.restart(store)
    fixture.compiler.gate.clear()
    in_flight = asyncio.create_task(fixture.find())
    while fixture.compiler.asked < 2:
        await asyncio.sleep(0.001)
    await fixture.stored.delete("programs/p")
    fixture.compiler.gate.set()
    await fixture.create("new")
    assert await in_flight == "old"
    assert await fixture.find() == "new"
    assert await fixture.find(CallShape(frozenset({"h"}))) == "new"


async def test_deletion_removes_variants(store: Store) -> None:
    fixture = Fixture(store)
    await fixture.create("old")
    other = CallShape(frozenset({"x", "h"}))
    assert await fixture.find(other) == "old"
    await fixture.stored.delete("p")
    await fixture.create("new")
    assert await fixture.find(other) == "new"


async def test_feeding_placeholders_needs_no_variant(store: Store) -> None:
    fixture = Fixture(store)
    await fixture.create("old")
    assert await fixture.find(CallShape(frozenset({"x"}))) == "old"
    assert fixture.compiler.asked == 1


async def test_calls_of_a_program_that_is_not_compiled_compile_it_once(store: Store) -> None:
    fixture = Fixture(store)
    await fixture.create("old")
    fixture.restart(store)
    assert set(await asyncio.gather(*(fixture.find() for _ in range(8)))) == {"old"}
    assert fixture.compiler.asked == 2


async def test_cancelled_deletion_is_completed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(store)
    await fixture.create("old")
    deleting, go_on = threading.Event(), threading.Event()
    delete = fixture.registry.delete

    def slowly(name: str) -> None:
        deleting.set()
        go_on.wait(10)
        delete(name)

    monkeypatch.setattr(fixture.registry, "delete", slowly)
    deletion = asyncio.create_task(fixture.stored.delete("p"))
    await asyncio.to_thread(deleting.wait, 10)
    deletion.cancel()
    await asyncio.wait([deletion])
    go_on.set()

    async def find_until_refused() -> None:
        while await fixture.find():
            await asyncio.sleep(0.001)

    with pytest.raises(GradruleError, match="PROGRAM_NOT_FOUND"):
        await asyncio.wait_for(find_until_refused(), 60)


async def test_program_deleted_while_it_is_stored_is_not_cached(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(store)
    create, loop = fixture.registry.create, asyncio.get_running_loop()

    def create_and_lose(*args: Any) -> Any:
        stored = create(*args)
        # The deletion is complete before the loop hears of the creation.
        asyncio.run_coroutine_threadsafe(fixture.stored.delete("p"), loop).result(10)
        return stored

    monkeypatch.setattr(fixture.registry, "create", create_and_lose)
    await fixture.create("old")
    with pytest.raises(GradruleError, match="PROGRAM_NOT_FOUND"):
        await fixture.find()


class CountingPreparer:
    """Counts how many programs are prepared at a time."""

    def __init__(self) -> None:
        self.at_once = self.most = 0

    async def program(self, *_: Any, **options: Any) -> Any:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        return SimpleNamespace(message=link_pb2.PreparedProgram(key="key"), compile_request=b"", files=())


async def test_large_stored_graphs_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: 24 calls of one stored program, after a restart, would hold its graph 24 times."""
    preparing: Any = CountingPreparer()
    reading = most_read = 0
    nothing: Any = None
    compiler = Compiler(nothing, preparing, Limits(), nothing, "ada")

    async def load(*_: Any) -> Any:
        return "compiled"

    monkeypatch.setattr(compiler, "_load", load)

    def read() -> tuple[bytes, bytes]:
        nonlocal reading, most_read
        reading += 1
        most_read = max(most_read, reading)
        time.sleep(0.002)
        reading -= 1
        return b"", b""

    recovery: Any = SimpleNamespace(ends_at=0.0)
    await asyncio.gather(*(compiler.compile_stored(100 << 20, read, _CALL, recovery) for _ in range(8)))
    assert (preparing.most, most_read) == (1, 1)
    await asyncio.gather(*(compiler.compile_stored(1000, read, _CALL, recovery) for _ in range(8)))
    assert preparing.most > 1


async def test_a_damaged_description_is_a_fault_of_the_engine(store: Store) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), no_blobs(), 10, 10**6)
    compiler = Compiler(loaded, CountingPreparer(), Limits(), no_blobs(), "")
    recovery = CallRecovery(loaded.pool, loaded.crash_history, ends_at=asyncio.get_running_loop().time() + 60)
    lookup = RegistryLookup(RuleRegistry(store, ["Sign"]))
    compiling = asyncio.create_task(compiler.compile(b"", lookup, _CALL, recovery))
    engine.answer(await engine.next(Kind.COMPILE), Kind.COMPILED, b"\xff")
    with pytest.raises(GradruleError, match="ENGINE_CRASHED"):
        await compiling


async def test_size_of_a_stored_graph_is_known_without_reading_it(store: Store) -> None:
    fixture = Fixture(store)
    spec = program_pb2.ProgramSpec(fetches=["y"])
    spec.graph.serialized = b"x" * 12_345
    await fixture.stored.create(spec.SerializeToString(), "p", fixture.recovery)
    stored = fixture.registry.get("p")
    assert fixture.registry.graph_bytes(stored) == 12_345
    fixture.registry.delete("p")
    assert fixture.registry.graph_bytes(stored) == 0
