"""Starts engine processes through the fork server, a process that has imported TensorFlow and forks itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from socket import socket

from gradrule_server.link import fork_protocol
from gradrule_server.link.environment import engine_environment
from gradrule_server.link.kernel import adopt_orphans
from gradrule_server.link.stderr import LastWords, log_stderr
from gradrule_server.recovery.endings import end_from_exit

_log = logging.getLogger(__name__)

# The first answer comes when TensorFlow is imported; a machine may be busy with other things.
_ANSWER_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0


class ForkServerEnded(Exception):
    """The fork server ended before it forked an engine; the message says how it ended."""


class ForkedProcess:
    """A process that the fork server has forked, and whose parent this process is. Belongs to the running loop."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """The exit code, negative for a signal; None until the process has ended."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._reap, name=f"wait-for-{pid}", daemon=True).start()

    async def wait(self) -> int:
        """Waits until the process has ended. Returns the exit code, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        # The loop is closed where the program ends before the engine does.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_ended, os.waitstatus_to_exitcode(status))

    def _set_ended(self, returncode: int) -> None:
        self.returncode = returncode
        self._ended.set()


@dataclass(eq=False)
class _Running:
    """A fork server's process."""

    process: asyncio.subprocess.Process
    control: socket
    last_words: LastWords
    stderr: asyncio.Task[None]

    async def end(self, timeout_s: float) -> None:
        """Lets it end, or ends it after a while."""
        self.control.close()
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        await self.stderr


class ForkServer:
    """The fork server, started with the first engine, and again when it has ended. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._lock = asyncio.Lock()
        self._unwanted: list[asyncio.Task[ForkedProcess]] = []

    async def fork(self, flags: Sequence[str], descriptors: Sequence[int]) -> ForkedProcess:
        """Returns a new engine process.

        Args:
            flags: The engine's command line.
            descriptors: Passed to the engine, see `fork_protocol`; they still belong to the caller.

        Raises:
            ForkServerEnded: The fork server could not start, or ended before it answered.
            OSError: There is no room for another process.
        """
        asking = asyncio.create_task(self._ask(flags, [os.dup(fd) for fd in descriptors]), name="engine-fork")
        # An answer that nobody reads would be taken for that of the next request.
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._unwanted.append(asking)
            asking.add_done_callback(_kill_unwanted)
            raise

    async def stop(self) -> None:
        """Ends the process, and engines whose caller was cancelled; all others live on."""
        async with self._lock:
            running, self._running = self._running, None
            if running is not None:
                await running.end(_STOP_TIMEOUT_S)
        for asking in self._unwanted:
            if asking.exception() is None:
                await asking.result().wait()

    async def _ask(self, flags: Sequence[str], descriptors: Sequence[int]) -> ForkedProcess:
        try:
            async with self._lock:
                if self._running is not None and self._running.process.returncode is not None:
                    await self._running.end(0)
                    self._running = None
                self._running = running = self._running or await _start()
                answer = await _exchange(running, flags, descriptors)
                if not answer:
                    self._running = None
                    raise await _failure(running, has_ended=answer is not None)
                return ForkedProcess(fork_protocol.parse_answer(answer))
        finally:
            for fd in descriptors:
                os.close(fd)


def _kill_unwanted(asking: asyncio.Task[ForkedProcess]) -> None:
    """Kills an engine that nobody waits for."""
    if asking.exception() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(asking.result().pid, signal.SIGKILL)


async def _start() -> _Running:
    """Starts the process; it reads requests once it has imported TensorFlow. `OSError`."""
    adopt_orphans()
    ours, theirs = fork_protocol.make_pair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "gradrule_server.engine", "--fd", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=engine_environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
    except BaseException:
        ours.close()
        raise
    ours.setblocking(False)
    assert process.stderr is not None
    last_words = LastWords()
    name = f"engine fork server {process.pid}"
    stderr = asyncio.create_task(log_stderr(process.stderr, name, last_words), name="fork-server-stderr")
    return _Running(process, ours, last_words, stderr)


async def _exchange(running: _Running, flags: Sequence[str], descriptors: Sequence[int]) -> bytes | None:
    """Returns the answer; empty where the process has ended, None where it takes too long."""
    try:
        fork_protocol.send_request(running.control, flags, descriptors)
        reading = asyncio.get_running_loop().sock_recv(running.control, fork_protocol.MAX_ANSWER_BYTES)
        return await asyncio.wait_for(reading, _ANSWER_TIMEOUT_S)
    except ConnectionError:
        return b""
    except TimeoutError:
        return None


async def _failure(running: _Running, *, has_ended: bool) -> ForkServerEnded:
    """The error of a fork server that did not answer. Ends it."""
    await running.end(_STOP_TIMEOUT_S if has_ended else 0)
    if not has_ended:
        return ForkServerEnded(f"it did not answer within {_ANSWER_TIMEOUT_S:g} s")
    return ForkServerEnded(str(end_from_exit(running.process.returncode, None, running.last_words.fatal)))
