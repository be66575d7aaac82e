"""Forks engine processes from the fork server, a process that has imported TensorFlow, and logs their stderr.

The front end sends requests on a socket that keeps message boundaries. A request holds the engine's flags, separated by
NUL, and its descriptors: the link's socket, stderr, and optionally the two arenas and the socket that passes on the
memory of clients. The answer is the pid of the engine, or a negative error number.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import signal
import site
import socket
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gradrule_server.concurrency import start_logged_task
from gradrule_server.link.operating_system import adopt_orphans
from gradrule_server.recovery.endings import end_from_exit, fatal_message

_log = logging.getLogger(__name__)

# Bytes of a line of stderr that are kept.
_MAX_LINE_BYTES = 4 * 1024
# TensorFlow logs at severity INFO while it is imported, regardless of its settings.
_INFORMATION = re.compile(r"I\d{4} [\d:.]+ |WARNING: All log messages before absl::InitializeLog")

# Sizes of the messages on the control socket.
_MAX_REQUEST_BYTES = 64 * 1024
_MAX_ANSWER_BYTES = 64
_MAX_DESCRIPTORS = 5

# The first answer takes as long as the import of TensorFlow, which may be long on a busy machine.
_ANSWER_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0
# Before a process is started again that ended before it forked anything.
_RETRY_DELAY_S = 1.0

# Variables of Python and the libraries, and the settings of TensorFlow and CUDA.
_INHERITED = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_INHERITED_PREFIXES = ("TF_", "CUDA_", "NVIDIA_", "XLA_", "OMP_")
# Terraform's variables, which may be secrets.
_REMOVED_PREFIXES = ("TF_VAR_", "TF_TOKEN_", "TF_CLI_")
# This variable would put another allocator between TensorFlow and the system's.
_REMOVED = ("TF_CPU_ALLOCATOR_USE_BFC",)

_MALLOC = {
    # Use huge pages for large tensors: with small pages, getting memory takes longer than filling it.
    "hugetlb": 1,
    # Turn this cache off: what it keeps counts as used, so engines near their limit run out of memory.
    "tcache_count": 0,
    # Keep freed memory, as TensorFlow's own allocator would, and never map a tensor's pages separately: getting 100 MiB
    # of new pages from the kernel takes longer than computing with them.
    "mmap_max": 0,
    "trim_threshold": 256 << 20,
    "top_pad": 1 << 20,
}

_XLA_FLAGS = (
    # XLA's algebraic simplifier regroups floats, so results would differ.
    "--xla_disable_hlo_passes=algsimp",
    # The fast versions of maximum and minimum drop NaN.
    "--xla_cpu_enable_fast_min_max=false",
)


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A request to fork one engine. The descriptors belong to the request."""

    flags: Sequence[str]
    link: int
    stderr: int
    arenas: Sequence[int]

    def close(self) -> None:
        """Closes the descriptors."""
        for fd in (self.link, self.stderr, *self.arenas):
            os.close(fd)


def _make_control_sockets() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a new socket. Raises `OSError`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _send_request(control: socket.socket, flags: Sequence[str], descriptors: Sequence[int]) -> None:
    """Requests an engine. Raises `OSError` if the fork server is gone."""
    socket.send_fds(control, ["\0".join(flags).encode()], list(descriptors))


def receive_request(control: socket.socket) -> ForkRequest | None:
    """Waits for the next request. Returns None when the front end has closed the socket."""
    data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
    if not data:
        return None
    link, stderr, *arenas = descriptors
    return ForkRequest(data.decode().split("\0"), link, stderr, arenas)


def send_pid(control: socket.socket, pid: int) -> None:
    """Answers with the pid of the engine."""
    control.send(str(pid).encode())


def send_failure(control: socket.socket, cause: OSError) -> None:
    """Answers that the operating system could not start a process."""
    control.send(str(-(cause.errno or errno.EAGAIN)).encode())


def _parse_answer(answer: bytes) -> int:
    """Returns the pid. Raises `OSError` if no engine could be forked."""
    pid = int(answer)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid


@dataclass(slots=True)
class FatalMessage:
    """The first fatal error that an engine logged; `text` is empty if there was none."""

    text: str = ""

    def check_line(self, line: str) -> None:
        """Keeps the message if the line is the first fatal error."""
        if not self.text:
            self.text = fatal_message(line)


async def log_stderr(stream: asyncio.StreamReader, name: str, fatal: FatalMessage) -> None:
    """Logs the stderr of the process `name` until it ends. Never stops reading: a full pipe would block the process.

    fatal: Receives the first fatal error.
    """
    is_rest = False
    while line := await _read_line(stream):
        text = line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip()
        if not is_rest:
            fatal.check_line(text)
            _log.log(logging.DEBUG if _INFORMATION.match(text) else logging.INFO, "%s: %s", name, text)
        is_rest = not line.endswith(b"\n")


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Returns the next line, or the next part of one that is too long; nothing at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as overrun:
        return await stream.read(overrun.consumed)


class ForkServerEnded(Exception):
    """The fork server ended before it forked an engine. The message says how."""


class ForkedProcess:
    """An engine process that the fork server forked. This process is its parent. Belongs to the running loop."""

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
        # The loop is closed if this program ends before the engine does.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_ended, os.waitstatus_to_exitcode(status))

    def _set_ended(self, returncode: int) -> None:
        self.returncode = returncode
        self._ended.set()


@dataclass(eq=False)
class _Running:
    """The process of the fork server, and its control socket."""

    process: asyncio.subprocess.Process
    control: socket.socket
    fatal_message: FatalMessage
    stderr: asyncio.Task[None]
    has_answered: bool = False
    """Whether it has answered a request, so that it works."""

    async def end(self, timeout_s: float) -> None:
        """Closes the control socket, so that the process ends; kills it after `timeout_s`."""
        self.control.close()
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        await self.stderr


class ForkServer:
    """Forks engines. Starts the fork server's process when it is needed first, and again at once whenever it ends.

    Belongs to one asyncio loop.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._watching: set[asyncio.Task[None]] = set()
        self._is_working = False
        """Whether a process has ever answered, and `stop` was not called: processes that end are replaced."""
        self.ended: Counter[str] = Counter()
        """The number of processes that ended unexpectedly, by reason."""
        self._lock = asyncio.Lock()
        self._abandoned: list[asyncio.Task[ForkedProcess]] = []

    async def fork(self, flags: Sequence[str], descriptors: Sequence[int]) -> ForkedProcess:
        """Forks a new engine process.

        Args:
            flags: The engine's command line.
            descriptors: Passed to the engine, see `ForkRequest`; they still belong to the caller.

        Raises:
            ForkServerEnded: The fork server could not start, or ended before it answered.
            OSError: The system cannot start another process.
        """
        forking = asyncio.create_task(self._fork(flags, [os.dup(fd) for fd in descriptors]), name="engine-fork")
        # The answer must be read even if the caller is cancelled: it would be taken for that of the next request.
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            self._abandoned.append(forking)
            forking.add_done_callback(_kill_abandoned)
            raise

    async def stop(self) -> None:
        """Ends the fork server, and engines whose caller was cancelled. Other engines go on."""
        async with self._lock:
            # Only now: an engine that was being forked until here has set it.
            self._is_working = False
            running, self._running = self._running, None
            if running is not None:
                await running.end(_STOP_TIMEOUT_S)
        await asyncio.gather(*self._watching)
        for forking in self._abandoned:
            if forking.exception() is None:
                await forking.result().wait()

    async def _fork(self, flags: Sequence[str], descriptors: Sequence[int]) -> ForkedProcess:
        try:
            async with self._lock:
                if self._running is not None and self._running.process.returncode is not None:
                    await self._running.end(0)
                    self._running = None
                running = self._running or await self._start()
                answer = await _exchange(running, flags, descriptors)
                if not answer:
                    self._running = None
                    raise await _failure(running, has_ended=answer is not None)
                running.has_answered = self._is_working = True
                return ForkedProcess(_parse_answer(answer))
        finally:
            for fd in descriptors:
                os.close(fd)

    async def _start(self) -> _Running:
        """Starts a process and watches it. Raises `OSError`."""
        self._running = running = await _start()
        watching = start_logged_task(
            self._watch(running), "fork-server-watch", _log.critical, "the engine fork server is not watched any more"
        )
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return running

    async def _watch(self, running: _Running) -> None:
        """Starts another process when this one ends: it needs seconds to import TensorFlow, so engines cannot wait."""
        await running.process.wait()
        if not self._is_working:
            return
        end = end_from_exit(running.process.returncode, None, running.fatal_message.text)
        self.ended[end.reason] += 1
        _log.error("the engine fork server %d ended (%s); another one starts", running.process.pid, end)
        if not running.has_answered:
            await asyncio.sleep(_RETRY_DELAY_S)
        async with self._lock:
            if self._running is running:
                await running.end(0)
                self._running = None
            if self._is_working and self._running is None:
                try:
                    await self._start()
                except OSError as cause:
                    _log.error("the engine fork server cannot start: %s; the next engine needs it", cause)


def _kill_abandoned(forking: asyncio.Task[ForkedProcess]) -> None:
    """Kills an engine whose caller was cancelled."""
    if forking.exception() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(forking.result().pid, signal.SIGKILL)


def engine_environment() -> dict[str, str]:
    """Returns the environment variables of an engine: what its libraries need, and no more."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if (name in _INHERITED or name.startswith(_INHERITED_PREFIXES))
        and not name.startswith((*_REMOVED, *_REMOVED_PREFIXES))
    }
    own = {
        # Never import from the working folder: an engine may read whatever is on the import path.
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
        "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items()),
        # OpenBLAS would start threads when NumPy is imported, and only a process with one thread can fork safely.
        "OPENBLAS_NUM_THREADS": "1",
        # Memory that TensorFlow's own allocator keeps would count as used.
        "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
        # The last flag of a name wins.
        "XLA_FLAGS": " ".join([inherited.get("XLA_FLAGS", ""), *_XLA_FLAGS]).strip(),
        # A Keras configuration of the server's user must not change results; this folder does not exist.
        "KERAS_HOME": os.path.join(os.devnull, "keras"),
    }
    if site.ENABLE_USER_SITE:
        # Python finds this folder by HOME, which engines do not have.
        own["PYTHONUSERBASE"] = site.getuserbase()
    return inherited | own


async def _start() -> _Running:
    """Starts the process, which reads requests once it has imported TensorFlow. Raises `OSError`."""
    adopt_orphans()
    ours, theirs = _make_control_sockets()
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
    fatal_message = FatalMessage()
    name = f"engine fork server {process.pid}"
    stderr = asyncio.create_task(log_stderr(process.stderr, name, fatal_message), name="fork-server-stderr")
    return _Running(process, ours, fatal_message, stderr)


async def _exchange(running: _Running, flags: Sequence[str], descriptors: Sequence[int]) -> bytes | None:
    """Returns the answer; empty if the process has ended, None if it takes too long."""
    try:
        _send_request(running.control, flags, descriptors)
        reading = asyncio.get_running_loop().sock_recv(running.control, _MAX_ANSWER_BYTES)
        return await asyncio.wait_for(reading, _ANSWER_TIMEOUT_S)
    except ConnectionError:
        return b""
    except TimeoutError:
        return None


async def _failure(running: _Running, *, has_ended: bool) -> ForkServerEnded:
    """Ends a fork server that did not answer, and returns the error."""
    await running.end(_STOP_TIMEOUT_S if has_ended else 0)
    if not has_ended:
        return ForkServerEnded(f"it did not answer within {_ANSWER_TIMEOUT_S:g} s")
    return ForkServerEnded(str(end_from_exit(running.process.returncode, None, running.fatal_message.text)))
