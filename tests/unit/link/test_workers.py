"""Which task gets which compile worker, and when workers end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gradrule_server.link import process as process_module
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.process import EngineTimes, ProcessOptions, Spares
from gradrule_server.link.workers import CompileWorkers
from tests.unit.link.fake_engine import Starter

_LONG_S = 60.0


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> Starter:
    started = Starter()
    monkeypatch.setattr(process_module, "start_process", started)
    return started


@contextlib.asynccontextmanager
async def made(most: int = 10, idle_s: float = 15.0) -> AsyncIterator[CompileWorkers]:
    processes = Spares(ProcessOptions("cpu", 4), 0)
    times = EngineTimes(worker_idle_s=idle_s)
    found = CompileWorkers(processes, lambda: most, times)
    yield found
    await processes.stop()


class Task:
    """A task of a tenant, which goes on until `end`."""

    def __init__(self, among: CompileWorkers, owner: str) -> None:
        self.owner = owner
        self._over = asyncio.Event()
        self.worker: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self.running = asyncio.create_task(self._run(among))

    async def _run(self, among: CompileWorkers) -> None:
        async with among.hold(self.owner) as worker:
            self.worker.set_result(worker)
            call = asyncio.ensure_future(worker.call(Kind.PREPARE, b"", asyncio.get_running_loop().time() + _LONG_S))
            over = asyncio.ensure_future(self._over.wait())
            try:
                await asyncio.wait([call, over], return_when=asyncio.FIRST_COMPLETED)
            finally:
                call.cancel()
                over.cancel()
                await asyncio.gather(call, over, return_exceptions=True)

    async def started(self) -> Engine:
        return await asyncio.wait_for(asyncio.shield(self.worker), 60)

    async def cancel(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])


async def finished(among: CompileWorkers, starter: Starter, owner: str) -> Engine:
    """A task that its worker has answered; the worker."""
    async with among.hold(owner) as worker:
        transport = next(
            transport
            for process, transport in zip(starter.started, starter.transports, strict=True)
            if process.pid == worker.pid
        )
        call = asyncio.ensure_future(worker.call(Kind.PREPARE, b"", asyncio.get_running_loop().time() + _LONG_S))
        await asyncio.sleep(0)
        _, request_id, _ = transport.sent[-1]
        process = next(process for process in starter.started if process.pid == worker.pid)
        process.connection.data_received(workers_answer(request_id))
        assert await call == b"done"
        return worker


def workers_answer(request_id: int) -> bytes:
    return pack_header(Kind.PREPARED, request_id, 4) + b"done"


async def test_a_worker_is_used_again_by_its_tenant_alone(starter: Starter) -> None:
    async with made() as among:
        first = await finished(among, starter, "ada")
        assert await finished(among, starter, "ada") is first
        assert await finished(among, starter, "bob") is not first
        assert len(starter.started) == 2


async def test_a_tenant_whose_worker_takes_long_gets_one_more_and_no_third(starter: Starter) -> None:
    async with made() as among:
        tasks = [Task(among, "ada") for _ in range(3)]
        assert await tasks[0].started() is not await tasks[1].started()
        while among.waiting != 1:
            await asyncio.sleep(0.001)
        other = Task(among, "bob")
        await other.started()
        await asyncio.sleep(0.1)
        assert not tasks[2].worker.done()
        for task in (*tasks, other):
            await task.cancel()


async def test_a_worker_without_a_caller_is_ended_and_the_next_task_gets_another(starter: Starter) -> None:
    async with made() as among:
        task = Task(among, "ada")
        lost = await task.started()
        pid = lost.pid
        await task.cancel()
        async with asyncio.timeout(60):
            while among.busy:
                await asyncio.sleep(0.001)
        (process,) = [process for process in starter.started if process.pid == pid]
        assert process.is_killed
        assert await finished(among, starter, "ada") is not lost


async def test_workers_of_all_tenants_are_bounded_and_tenants_without_one_come_first(starter: Starter) -> None:
    async with made(most=2) as among:
        own = [Task(among, "ada") for _ in range(3)]
        await asyncio.gather(own[0].started(), own[1].started())
        other = Task(among, "bob")
        await asyncio.sleep(0.1)
        assert not other.worker.done()
        await own[0].cancel()
        # It came last, and its tenant has none.
        await other.started()
        assert not own[2].worker.done()
        for task in (*own, other):
            await task.cancel()


async def test_tenants_that_wait_for_the_worker_of_another_one_are_known(starter: Starter) -> None:
    async with made(most=2) as among:
        tasks = [Task(among, "ada"), Task(among, "bob")]
        await asyncio.gather(*(task.started() for task in tasks))
        assert not among.is_kept_waiting_by("ada")
        tasks.append(Task(among, "ada"))
        await asyncio.sleep(0)
        assert not among.is_kept_waiting_by("ada")
        assert among.is_kept_waiting_by("bob")
        tasks.append(Task(among, "eve"))
        await asyncio.sleep(0)
        assert among.is_kept_waiting_by("ada")
        assert not among.is_kept_waiting_by("eve")
        for task in tasks:
            await task.cancel()


async def test_an_idle_worker_of_another_tenant_makes_room(starter: Starter) -> None:
    async with made(most=1) as among:
        await finished(among, starter, "ada")
        await finished(among, starter, "bob")
        assert [worker.owner for worker in among.workers] == ["bob"]


async def test_a_worker_that_is_idle_ends(starter: Starter) -> None:
    async with made(idle_s=0.02) as among:
        await finished(among, starter, "ada")
        async with asyncio.timeout(60):
            while among.workers or not starter.started[0].is_killed:
                await asyncio.sleep(0.001)


async def test_a_worker_that_kept_much_memory_is_replaced(starter: Starter) -> None:
    async with made() as among:
        first = await finished(among, starter, "ada")
        starter.started[0].own_bytes = 1 << 30
        second = await finished(among, starter, "ada")
        assert second is first
        assert await finished(among, starter, "ada") is not first
