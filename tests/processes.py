"""Reads what the operating system reports about processes: memory, descriptors, threads, engines, processor time."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENGINE = "gradrule-engine"


@dataclass(frozen=True)
class Resources:
    """Holds what one process uses. shared_bytes: resident shared memory, mostly arenas."""

    resident_bytes: int
    descriptors: int
    threads: int
    shared_bytes: int


def resources(pid: int) -> Resources:
    """Returns what a process uses now. Raises `OSError` if it is gone."""
    return Resources(
        resident_bytes=resident_bytes(pid),
        descriptors=count_descriptors(pid),
        threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
        shared_bytes=shared_bytes(pid),
    )


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def shared_bytes(pid: int) -> int:
    """Returns the resident shared memory of a process."""
    return _status_bytes(pid, "RssShmem")


def peak_bytes(pid: int) -> int:
    """Returns the largest resident memory of a process since `reset_peak`."""
    return _status_bytes(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    """Starts a new measurement of the peak."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def processor_s(pid: int) -> float:
    """Returns the processor time that a process has used, without that of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_descriptors(pid: int) -> list[str]:
    """Returns the targets of a process's open descriptors; those that it closes meanwhile are left out."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(entry))
    return found


def count_descriptors(pid: int | None = None) -> int:
    """Returns the number of open descriptors of a process.

    For this process (None) it first closes what earlier tests left to the garbage collector, and waits until gRPC's
    threads have closed the descriptors of earlier tests.
    """
    folder = f"/proc/{'self' if pid is None else pid}/fd"
    count = len(os.listdir(folder))
    if pid is None:
        gc.collect()
        for _ in range(40):
            time.sleep(0.05)
            previous, count = count, len(os.listdir(folder))
            if count == previous:
                break
    return count


@contextlib.contextmanager
def no_free_descriptors(pid: int) -> Iterator[None]:
    """Keeps a process from opening descriptors: its limit is one below their number."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count_descriptors(pid) - 1, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def children(pid: int) -> list[int]:
    """Returns the child processes of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return sorted(found)


def engines(pid: int) -> list[int]:
    """Returns the engine processes of a server, oldest first; spares too, but none that have ended."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{child}")
            if _state(folder / "stat") not in "ZX" and (folder / "comm").read_text().strip() == _ENGINE:
                # Process ids start again from small ones, so they do not tell which one is older.
                found.append((_started_at(folder / "stat"), child))
    return [child for _, child in sorted(found)]


def workers(pid: int) -> set[int]:
    """Returns the compile workers of a server."""
    found = set()
    for child in children(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text().strip() == "gradrule-worker":
                found.add(child)
    return found


def busy_processes(pids: Iterable[int]) -> set[int]:
    """Returns those of the processes that have a runnable thread."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            states = [_state(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()]
            if not {"R", "D"}.isdisjoint(states):
                found.add(pid)
    return found


def has_ended(pid: int) -> bool:
    """Returns whether a process has ended, even if its parent has not waited for it yet."""
    return _state(Path(f"/proc/{pid}/stat")) in "ZX"


def _state(path: Path) -> str:
    """Returns the state letter of a thread or process; X if it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _started_at(path: Path) -> int:
    """Returns when a process started, in clock ticks."""
    return int(path.read_text().rpartition(")")[2].split()[19])


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} has no {name}")
