"""Graphs that the op policy would refuse reach nothing inside the sandbox; without it each reaches its canary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradrule.v1 import evaluate_pb2
from gradrule_server.engine.sandbox import landlock_version
from gradrule_server.errors import GradruleError
from gradrule_server.link.framing import Kind
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import ProcessOptions
from gradrule_server.link.v1 import link_pb2
from tests.call_payloads import call_payload
from tests.service.escape_graphs import ESCAPES, SECRET, Canaries, Escape, request

# With the sandbox some graphs wait for blocked resources; without it each must reach its canary even on a busy machine.
_PATIENCE_S = {"on": 4.0, "off": 60.0}
_CASES = [pytest.param(escape, place, id=f"{escape.name}-{place}") for escape in ESCAPES for place in escape.places]


class SandboxedEngine:
    """Runs any graph in an engine that the canaries surround."""

    def __init__(self, folder: Path, sandbox: str) -> None:
        self.sandbox = sandbox
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0)
        self.canaries = Canaries(folder, self.listener, os.getpid())
        self.runner = asyncio.Runner()
        blobs = self.canaries.places["data"] / "blobs"
        # A memory limit, a spare, and one thread for each endless graph.
        self.pool = EnginePool(ProcessOptions("cpu", 8, blobs, 4 << 30, sandbox))
        self.runner.run(self.pool.start())
        self._patience_s = _PATIENCE_S[sandbox]
        self._count = 0
        self._unfinished: list[asyncio.Future[bytes]] = []

    def close(self) -> None:
        self._end_engine()
        self.runner.run(self.pool.stop())
        self.runner.run(self._forget())
        self.runner.close()
        self.listener.close()

    def replace_engine(self) -> None:
        """Kills the engine and waits for the next one."""
        pid = self._end_engine()
        self.runner.run(self._replaced(pid))

    def attempt(self, escape: Escape, place: str) -> bool:
        """Returns whether the graph reached its canary."""
        self.canaries.restore(place)
        self._count += 1
        asked = request(escape.build, self.canaries, place, str(self._count))
        with contextlib.suppress(GradruleError):
            if self.runner.run(self._reaches(asked, escape.reach, place)):
                return True
        return self._is_reached(escape.reach, place, b"")

    def _end_engine(self) -> int:
        pid = self.pool.engines[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    async def _reaches(self, asked: link_pb2.CompileRequest, reach: str, place: str) -> bool:
        """Returns whether the canary is reached before the graph ends or time is up: some graphs never end."""
        loop = asyncio.get_running_loop()
        engine = self.pool.engines[0]
        await engine.call(Kind.COMPILE, asked.SerializeToString(), loop.time() + 60)
        run = call_payload(link_pb2.RunRequest(key=asked.key), evaluate_pb2.EvaluateRequest())
        ends_at = loop.time() + self._patience_s
        call = asyncio.ensure_future(engine.call(Kind.RUN, run, ends_at))
        while not call.done() and loop.time() < ends_at:
            if self._is_reached(reach, place, b""):
                self._unfinished.append(call)
                return True
            await asyncio.wait([call], timeout=0.05)
        if not call.done():
            # Cancelling it would end the engine, and the next test would wait for another.
            self._unfinished.append(call)
            return False
        return self._is_reached(reach, place, call.result())

    async def _replaced(self, pid: int) -> None:
        async with asyncio.timeout(60):
            while not self.pool.is_ready or self.pool.engines[0].pid == pid:
                await asyncio.sleep(0.05)

    async def _forget(self) -> None:
        await asyncio.gather(*self._unfinished, return_exceptions=True)

    def _is_reached(self, reach: str, place: str, answer: bytes) -> bool:
        folder = self.canaries.places[place]
        if reach == "read":
            return SECRET in answer
        if reach == "listed":
            return b"canary.txt" in answer
        if reach == "written":
            return any(path.name.startswith("written") for path in folder.iterdir())
        if reach == "overwritten":
            return (folder / "precious").read_bytes() != SECRET
        if reach == "environment":
            return Path("/proc/self/environ").read_bytes() in answer
        return self._was_connected()

    def _was_connected(self) -> bool:
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture(scope="module", params=["on", "off"])
def sandboxed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxedEngine]:
    """Returns a confined engine, then an unconfined one."""
    if request.param == "on" and landlock_version() == 0:
        pytest.skip("this kernel has no Landlock")
    made = SandboxedEngine(tmp_path_factory.mktemp(request.param), request.param)
    yield made
    made.close()


def test_engine_reports_that_it_is_confined(sandboxed: SandboxedEngine) -> None:
    assert ({"files", "calls"} <= set(sandboxed.pool.greeting.sandbox)) == (sandboxed.sandbox == "on")


@pytest.mark.parametrize(("escape", "place"), _CASES)
def test_only_without_the_sandbox_is_a_canary_reached(sandboxed: SandboxedEngine, escape: Escape, place: str) -> None:
    assert sandboxed.attempt(escape, place) == (sandboxed.sandbox == "off")


@pytest.mark.parametrize("sandboxed", ["on"], indirect=True)
def test_replacement_engine_is_confined(sandboxed: SandboxedEngine) -> None:
    sandboxed.replace_engine()
    for escape in ESCAPES:
        if escape.name in ("ReadFile", "WriteFile over another", "DebugIdentity to a file"):
            assert not sandboxed.attempt(escape, "data"), escape.name
