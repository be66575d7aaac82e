"""The engine's process: started with a socket and a clean environment, greeted, ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from gradrule_server.link.connection import Connection, EngineGone
from gradrule_server.link.environment import engine_environment
from gradrule_server.link.framing import LINK_VERSION
from gradrule_server.link.stderr import log_stderr
from gradrule_server.link.v1 import link_pb2

_GREETING_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0


class EngineRefused(Exception):
    """The engine cannot start as asked (no such device, another release); trying again would not help."""


@dataclass(eq=False)
class EngineProcess:
    """A process that has greeted, or the attempt at one."""

    process: asyncio.subprocess.Process
    connection: Connection
    stderr: asyncio.Task[None]

    @property
    def pid(self) -> int:
        return self.process.pid

    async def greet(self) -> link_pb2.Greeting:
        """Waits for the greeting. `EngineRefused` where the engine cannot run as asked, or does not get that far."""
        try:
            greeting = await asyncio.wait_for(self.connection.greeting, _GREETING_TIMEOUT_S)
        except (EngineGone, TimeoutError):
            self.kill()
            await self.process.wait()
            raise EngineRefused(f"the engine died while it started: {self.how_it_ended()}") from None
        if greeting.refusal:
            await self.process.wait()
            raise EngineRefused(greeting.refusal)
        if greeting.link_version != LINK_VERSION:
            self.connection.close()
            await self.process.wait()
            raise EngineRefused(f"the engine speaks version {greeting.link_version} of the link, not {LINK_VERSION}")
        return greeting

    def kill(self) -> None:
        """Ends it at once, whatever it does."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def stop(self) -> None:
        """Lets it end, or ends it."""
        self.connection.close()
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self.process.wait()

    def how_it_ended(self) -> str:
        """`exit code 3`, `signal 9`."""
        code = self.process.returncode
        if code is None:
            return "its connection broke"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


async def start_process(device: str, threads: int, blob_folder: Path | None, sandbox: str) -> EngineProcess:
    """Starts a process that has yet to greet. `OSError` where the operating system has no room for one."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gradrule_server.engine",
                *("--fd", str(theirs.fileno()), "--device", device, "--threads", str(threads)),
                *("--sandbox", sandbox),
                *(() if blob_folder is None else ("--blobs", str(blob_folder.absolute()))),
                pass_fds=[theirs.fileno()],
                env=engine_environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(threads), sock=ours)
    except BaseException:
        # A process that was started ends by itself when its socket closes.
        ours.close()
        raise
    assert process.stderr is not None
    reader = asyncio.create_task(log_stderr(process.stderr, process.pid), name="engine-stderr")
    return EngineProcess(process, connection, reader)
