"""Functions of the operating system that Python lacks: system calls, memory of the machine, return of unused memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import re
import resource
from collections import deque
from pathlib import Path

from gradrule_server.limits import MEMORY_SHARES

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.restype = ctypes.c_int

# linux/prctl.h
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36

_MIN_LIMIT = 1024 * 1024 * 1024

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")

# The first file counts the kills in this container, the second those on the whole machine.
_KILL_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
_SAMPLE_PERIOD_S = 1.0
# The front end notices a killed process some time after the kill, so kills of the last samples count.
_SAMPLES = 4

# Options of mallopt(3), see <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
# Most blocks that are mapped; glibc's default.
_MAX_MAPPED, _MAPPED_BYTES = 65536, 1 << 20
_KEPT_BYTES = 1 << 30

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
# Memory is returned when this much more is unused than after the last time, but at most every 3 s.
_MIN_UNUSED_BYTES = 16 << 20
_MIN_INTERVAL_S = 3.0


def syscall(number: int, *arguments: ctypes.c_void_p | int | None) -> int:
    """Makes a system call by its number, with integers and addresses. Raises `OSError`."""
    return _checked(_libc.syscall(ctypes.c_long(number), *(_word(argument) for argument in arguments)))


def prctl(option: int, *arguments: ctypes.c_void_p | int | None) -> None:
    """Calls `prctl`; missing arguments are 0. Raises `OSError`."""
    words = [_word(argument) for argument in arguments] + [ctypes.c_ulong(0)] * (4 - len(arguments))
    _checked(_libc.prctl(ctypes.c_int(option), *words))


def set_process_name(name: str) -> None:
    """Sets the name that `ps` and `top` show; the kernel keeps 15 bytes of it."""
    text = ctypes.create_string_buffer(name.encode())
    prctl(_PR_SET_NAME, ctypes.c_void_p(ctypes.addressof(text)))


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose own parent ends: it can wait for their exit codes."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def capget(header: ctypes.Structure, capabilities: ctypes.Structure) -> None:
    """Reads the capabilities of this process into `capabilities`. Raises `OSError`."""
    _checked(_libc.capget(address(header), address(capabilities)))


def capset(header: ctypes.Structure, capabilities: ctypes.Structure) -> None:
    """Sets the capabilities of this process. Raises `OSError`."""
    _checked(_libc.capset(address(header), address(capabilities)))


def address(value: ctypes.Structure | ctypes.Array[ctypes.c_uint32]) -> ctypes.c_void_p:
    """Returns the address of an object, which must be kept alive during the call."""
    return ctypes.cast(ctypes.byref(value), ctypes.c_void_p)


def _word(argument: ctypes.c_void_p | int | None) -> ctypes.c_void_p | ctypes.c_ulong:
    return ctypes.c_ulong(argument) if isinstance(argument, int) else argument or ctypes.c_void_p()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def engine_memory() -> int:
    """Returns the memory that all engines and compile workers together may take. Bytes."""
    return int(available_memory() * MEMORY_SHARES["engines"])


def memory_share(engines: int) -> int:
    """Returns the default memory limit of an engine: its part of the memory of `engines` engines. Bytes."""
    return max(_MIN_LIMIT, engine_memory() // engines)


def available_memory() -> int:
    """Returns the memory of the machine, or of this process's container if that has less. Bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_container_limits()])


def most_threads() -> int | None:
    """Returns how many threads the user, or the container that has fewer, may have; None: not limited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = _container_limits("pids", "pids.max", "pids.max")
    return min(limits if soft == resource.RLIM_INFINITY else [soft, *limits], default=None)


class OomKills:
    """Samples the kernel's count of processes that it killed because memory ran out."""

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_SAMPLES)

    async def run(self) -> None:
        """Takes a sample each second, until it is cancelled."""
        while True:
            self._samples.append(_oom_kill_count())
            await asyncio.sleep(_SAMPLE_PERIOD_S)

    @property
    def has_grown(self) -> bool:
        """Whether a process was killed within the last seconds; False without samples."""
        return bool(self._samples) and _oom_kill_count() > self._samples[0]


OOM_KILLS = OomKills()
"""Shared by all engine processes, since there is one kernel."""


class _MallocInfo(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def keep_freed_memory() -> None:
    """Makes glibc use freed memory for large blocks, instead of new pages from the kernel.

    The first write to a new page costs ten times as much as copying to one that is there: 60 MiB take 60 ms, then 5.
    `HeapTrimmer` returns the memory. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def map_large_blocks(*, is_on: bool) -> None:
    """Sets whether glibc maps the pages of each new block of 1 MiB or more separately, and so returns them when freed.

    Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_MMAP_MAX, _MAX_MAPPED if is_on else 0)


def allocated_bytes() -> int:
    """Returns the bytes that malloc has given to this process and not got back; 0 with other C libraries."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return 0
    info.restype = _MallocInfo
    return _allocated(info())


class HeapTrimmer:
    """Makes glibc return unused memory once there is much of it, since gRPC's buffers are spread over many arenas.

    Unused is what the process has taken and glibc does not report as in use. Some of it can never be returned, since it
    shares pages with memory in use, so only the increase since the last time counts.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        self._info = getattr(library, "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _MallocInfo
        self._trimmed_at = 0.0
        self._unused_before: int | None = None

    def trim_if_due(self, now: float) -> bool:
        """Returns unused memory to the system if there is much, in some milliseconds. `now`: seconds of any clock."""
        if self._trim is None or self._info is None or now - self._trimmed_at < _MIN_INTERVAL_S:
            return False
        if self._unused_before is None:
            self._unused_before = self._unused()
        if self._unused() - self._unused_before < _MIN_UNUSED_BYTES:
            return False
        self.trim(now)
        return True

    def trim(self, now: float) -> None:
        """Collects garbage and returns unused memory to the system. `now`: as in `trim_if_due`."""
        self._trimmed_at = now
        # Reset calls are in reference cycles, and each holds some 20 KiB of gRPC's memory. So are programs in engines.
        gc.collect()
        if self._trim is not None:
            self._trim(0)
            self._unused_before = self._unused()

    def _unused(self) -> int:
        """Returns the bytes that this process has taken and malloc does not use; they include Python's own objects."""
        found: _MallocInfo = self._info() if self._info is not None else _MallocInfo()
        return status_bytes("RssAnon") - _allocated(found)


def _allocated(info: _MallocInfo) -> int:
    """Returns the bytes in use in arenas and in blocks that are mapped separately."""
    return int(info.uordblks) + int(info.hblkhd)


class _OwnStatus:
    """The open file `/proc/self/status` of this process.

    It stays open, because a sandboxed process that is short of memory may be unable to open it again: the kernel has
    then forgotten the folder that the sandbox grants.
    """

    pid = 0
    file = -1


def status_bytes(name: str) -> int:
    """Returns a size of this process that `/proc/self/status` names, bytes; 0 if it is not known."""
    try:
        if _OwnStatus.pid != os.getpid():
            _OwnStatus.file = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
            _OwnStatus.pid = os.getpid()
        text = os.pread(_OwnStatus.file, 1 << 14, 0).decode(errors="replace")
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _container_limits(
    resource_name: str = "memory", file: str = "memory.max", older_file: str = "memory.limit_in_bytes"
) -> list[int]:
    """Returns the limits of the control groups that contain this process; of memory in bytes."""
    limits = []
    for line in _lines(_OWN_CGROUPS):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            folder, found = _CGROUP_ROOT / name.lstrip("/"), file
        elif resource_name in controllers.split(","):
            folder, found = _CGROUP_ROOT / resource_name / name.lstrip("/"), older_file
        else:
            continue
        # Inside a container its own group often appears as the root.
        for place in (folder, *folder.parents):
            limits += [int(text) for text in _lines(place / found) if text.isdigit()]
            if place == _CGROUP_ROOT:
                break
    return limits


def _oom_kill_count() -> int:
    for counter in _KILL_COUNTERS:
        lines = _lines(counter)
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file; none if this system has no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
