"""What the operating system tells of a server: memory, descriptors, threads, shared memory, engines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENGINE = "gradrule-engine"


@dataclass(frozen=True)
class Holds:
    """What one process holds at a time. shared_bytes: of shared memory, arenas above all, what it has
    touched.
    """

    resident_bytes: int
    descriptors: int
    threads: int
    shared_bytes: int


def holds(pid: int) -> Holds:
    """What a process holds now. `OSError` where it is gone."""
    folder = Path(f"/proc/{pid}")
    pages = (folder / "statm").read_text().split()
    return Holds(
        resident_bytes=int(pages[1]) * _PAGE_BYTES,
        descriptors=len(list((folder / "fd").iterdir())),
        threads=len(list((folder / "task").iterdir())),
        shared_bytes=_told_bytes(pid, "RssShmem"),
    )


def children(pid: int) -> list[int]:
    """Processes whose parent this one is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return sorted(found)


def engines(pid: int) -> list[int]:
    """The engines of a server, spares included; those that have ended but were not waited for yet are left out."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{child}")
            if _state(folder / "stat") not in "ZX" and (folder / "comm").read_text().strip() == _ENGINE:
                found.append(child)
    return found


def working(pids: Iterable[int]) -> set[int]:
    """Those of the processes that work, or would if the machine had time for them: a thread of theirs can run."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            states = [_state(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()]
            if not {"R", "D"}.isdisjoint(states):
                found.add(pid)
    return found


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if nobody has waited for it yet."""
    return _state(Path(f"/proc/{pid}/stat")) in "ZX"


def _state(path: Path) -> str:
    """Of a thread or a process: a letter; that of the dead where it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held since `forget_peak`."""
    return _told_bytes(pid, "VmHWM")


def _told_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} tells no {name}")


def forget_peak(pid: int) -> None:
    """Begins to measure the peak anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
