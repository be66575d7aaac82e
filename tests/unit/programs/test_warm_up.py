"""Programs that are loaded after a restart, before calls need them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from gradrule_server.errors import GradruleError
from gradrule_server.link.messages import CallShape
from gradrule_server.programs.cache import ProgramCache, StoredKey
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import Loadable
from gradrule_server.programs.warm_up import FILE_NAME, WarmUp
from tests.unit.link.fake_engine import FakeEngine, FakePool

_FED = CallShape(feeds=frozenset({"hidden"}), derivative=1)
NOT_FOUND = GradruleError([])


class FakeService:
    """One tenant's programs; loading one adds it to the cache."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.cache = ProgramCache(100, 10**9)
        self.loaded: list[tuple[str, CallShape]] = []

    def use(self, name: str, call: CallShape = CallShape(), nodes: int = 1, *, is_used: bool = True) -> None:  # noqa: B008
        compiled: Any = SimpleNamespace(program=b"", tail=b"")
        program = RunnableProgram(compiled, Loadable(name, b"", nodes=nodes))
        self.cache.put(StoredKey(name, call), program, is_used=is_used)

    async def load_stored(self, name: str, call: CallShape, ends_at: float) -> None:
        assert asyncio.get_running_loop().time() < ends_at < asyncio.get_running_loop().time() + 100
        if name == "gone":
            raise NOT_FOUND
        if name == "broken":
            raise OSError("the registry cannot be read")
        self.loaded.append((name, call))
        self.use(name, call, is_used=False)


class Server:
    """A server with a data folder, which can be started again."""

    def __init__(self, folder: Path, pool: FakePool, *owners: str) -> None:
        self.services = {owner: FakeService(owner) for owner in owners}
        self.file = folder / FILE_NAME
        self.warm_up = WarmUp(self.file, pool, self._recent, self._load)

    def _recent(self) -> Sequence[Any]:
        return list(self.services.values())

    async def _load(self, tenant: str) -> Any:
        return self.services[tenant]

    async def start(self) -> None:
        """Starts, and waits until the programs are loaded and recorded again."""
        recorded = asyncio.Event()
        record = self.warm_up._record

        async def record_and_tell() -> None:
            await record()
            recorded.set()

        self.warm_up._record = record_and_tell  # type: ignore[method-assign]
        self.warm_up.start()
        async with asyncio.timeout(60):
            await recorded.wait()


@pytest_asyncio.fixture
async def pool() -> FakePool:
    return FakePool(FakeEngine())


async def restart(server: Server, folder: Path, pool: FakePool) -> Server:
    await server.warm_up.stop()
    other = Server(folder, pool, *server.services)
    await other.start()
    return other


async def test_programs_of_all_tenants_are_loaded_in_turn_and_recorded_in_the_same_order(
    tmp_path: Path, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = Server(tmp_path, pool, "ada", "bob")
    await first.start()
    assert not first.file.exists()
    for name in ("old", "gone", "new"):
        first.services["ada"].use(name, _FED)
    first.services["bob"].use("only")
    await first.warm_up.stop()
    recorded = first.file.read_text()
    assert [recorded.index(name) for name in ("new", "only", "gone", "old")] == sorted(
        recorded.index(name) for name in ("new", "only", "gone", "old")
    )
    second = await restart(first, tmp_path, pool)
    assert second.services["ada"].loaded == [("new", _FED), ("old", _FED)]
    assert second.services["bob"].loaded == [("only", CallShape())]
    assert "loaded 3 of 4 recently used programs" in caplog.text
    third = await restart(second, tmp_path, pool)
    assert third.services["ada"].loaded == [("new", _FED), ("old", _FED)]
    await third.warm_up.stop()


async def test_programs_are_loaded_after_calls_that_wait_for_engines(
    tmp_path: Path, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, pool, "ada")
    await server.start()
    server.services["ada"].use("old")
    await server.warm_up.stop()
    monkeypatch.setattr(FakePool, "waiting_tenants", 1)
    server = Server(tmp_path, pool, "ada")
    starting = asyncio.create_task(server.start())
    await asyncio.sleep(0.2)
    assert server.services["ada"].loaded == []
    monkeypatch.setattr(FakePool, "waiting_tenants", 0)
    await starting
    assert server.services["ada"].loaded == [("old", CallShape())]
    await server.warm_up.stop()


async def test_program_that_cannot_be_loaded_does_not_stop_the_others(
    tmp_path: Path, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path, pool, "ada")
    await server.start()
    for name in ("old", "broken"):
        server.services["ada"].use(name)
    server = await restart(server, tmp_path, pool)
    assert server.services["ada"].loaded == [("old", CallShape())]
    assert "recently used broken was not loaded" in caplog.text
    await server.warm_up.stop()
    assert "broken" not in server.file.read_text()


async def test_program_that_a_call_uses_keeps_its_place_when_it_is_loaded(pool: FakePool) -> None:
    service = FakeService("ada")
    for name in ("a", "b"):
        service.use(name)
    service.use("b", is_used=False)
    assert [key for key, _ in service.cache.recent()] == [StoredKey(name, CallShape()) for name in ("b", "a")]


async def test_stop_while_the_list_is_read_keeps_it(tmp_path: Path, pool: FakePool) -> None:
    server = Server(tmp_path, pool, "ada")
    await server.start()
    server.services["ada"].use("a")
    await server.warm_up.stop()
    recorded = server.file.read_text()
    stopped = Server(tmp_path, pool, "ada")
    stopped.warm_up.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await stopped.warm_up.stop()
    assert stopped.file.read_text() == recorded


async def test_large_and_surplus_programs_are_not_recorded(tmp_path: Path, pool: FakePool) -> None:
    server = Server(tmp_path, pool, "ada")
    await server.start()
    for number in range(40):
        server.services["ada"].use(f"p{number}")
    server.services["ada"].use("large", nodes=20_001)
    server = await restart(server, tmp_path, pool)
    assert [name for name, _ in server.services["ada"].loaded] == [f"p{number}" for number in range(39, 8, -1)]
    await server.warm_up.stop()


async def test_no_program_is_loaded_for_a_tenant_that_would_take_the_engine_of_another(
    tmp_path: Path, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, pool, "ada", "bob")
    await server.start()
    server.services["ada"].use("a")
    server.services["bob"].use("b")
    monkeypatch.setattr(pool, "serves", lambda owner: owner == "bob")
    pool._max_engines = pool._max_gpu_engines = len(pool.engines)
    server = await restart(server, tmp_path, pool)
    assert (server.services["ada"].loaded, len(server.services["bob"].loaded)) == ([], 1)
    await server.warm_up.stop()


async def test_no_program_is_loaded_for_a_tenant_without_an_engine_when_memory_is_short(
    tmp_path: Path, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, pool, "ada")
    await server.start()
    server.services["ada"].use("a")
    monkeypatch.setattr(pool, "serves", lambda owner: False)
    pool.memory_share = 1
    server = await restart(server, tmp_path, pool)
    assert server.services["ada"].loaded == []
    await server.warm_up.stop()


async def test_tenants_that_have_not_called_get_at_most_half_of_the_engines(
    tmp_path: Path, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = [f"tenant-{number}" for number in range(6)]
    server = Server(tmp_path, pool, *tenants)
    await server.start()
    for tenant in tenants:
        for name in ("a", "b"):
            server.services[tenant].use(name)
    load = FakeService.load_stored

    async def load_into_own_engine(service: FakeService, name: str, call: CallShape, ends_at: float) -> None:
        if not pool.serves(service.owner):
            engine = FakeEngine()
            engine.owner = service.owner
            pool.engines.append(engine)
        await load(service, name, call, ends_at)

    monkeypatch.setattr(FakeService, "load_stored", load_into_own_engine)
    monkeypatch.setattr(pool, "serves", lambda owner: any(engine.owner == owner for engine in pool.engines))
    pool._max_engines = pool._max_gpu_engines = 8
    server = await restart(server, tmp_path, pool)
    # One of the four is the pool's first engine, which another tenant has.
    assert len(pool.engines) == 4
    assert [len(service.loaded) for service in server.services.values()] == [2, 2, 2, 0, 0, 0]
    await server.warm_up.stop()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"programs": [1]}', '{"programs": [{"tenant": "a"}]}', "[" * 9999])
async def test_damaged_list_is_ignored(
    content: str, tmp_path: Path, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path, pool, "ada")
    server.file.write_text(content)
    await server.start()
    assert server.services["ada"].loaded == []
    assert "is ignored" in caplog.text
    await server.warm_up.stop()


async def test_list_that_cannot_be_written_is_a_warning(
    tmp_path: Path, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "removed", pool, "ada")
    await server.start()
    server.services["ada"].use("a")
    await server.warm_up.stop()
    assert "cannot be written" in caplog.text
