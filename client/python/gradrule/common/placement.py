"""Ranks servers for the calls of a program, so that each server keeps few programs loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# Of the average load. With 2, half of the servers would serve a program that all clients call.
_SHARE = 1.25
_T = TypeVar("_T")


@dataclass(frozen=True)
class Load(Generic[_T]):
    """Calls in progress on a replica.

    Attributes:
        replica: The replica, or what stands for it.
        identity: Text that identifies the replica.
        program_calls: Calls of the program whose call is placed.
        calls: Calls of all programs, with these.
    """

    replica: _T
    identity: str
    program_calls: int
    calls: int


def preferred(key: str, loads: Sequence[Load[_T]], *, program_bound: int, replica_bound: int) -> list[_T]:
    """Returns replicas in the order in which a program's call should try them.

    Each program has an order of its own (rendezvous hashing, Thaler and Ravishankar 1998), which changes for few
    programs when a replica comes or goes. Replicas that are busy come last, the least busy first (consistent hashing
    with bounded loads, Mirrokni et al. 2018, arXiv:1608.01350), so a program that is called often gets several
    replicas. A replica is busy if one of two bounds is reached; both are at least 25 % more than the average. The bound
    of the program's calls has no effect on a replica that has fewer calls in all than the average.

    Args:
        key: Of the program.
        loads: Of all replicas.
        program_bound: Calls of the program that a replica may have in any case before the next one is tried.
        replica_bound: Calls of all programs that a replica may have in any case before the next one is tried.
    """
    average = sum(load.calls for load in loads) / max(1, len(loads))
    program_bound = _bound([load.program_calls for load in loads], program_bound)
    replica_bound = _bound([load.calls for load in loads], replica_bound)

    def order(load: Load[_T]) -> tuple[int, bytes]:
        is_busy_with_program = load.program_calls >= program_bound and load.calls >= average
        is_busy = is_busy_with_program or load.calls >= replica_bound
        return load.calls if is_busy else -1, hashlib.sha256(f"{key}/{load.identity}".encode()).digest()

    return [load.replica for load in sorted(loads, key=order)]


def _bound(calls: Sequence[int], minimum: int) -> int:
    """Returns the number of calls from which a replica is busy, given the calls of all replicas."""
    return max(minimum, math.ceil(_SHARE * (sum(calls) + 1) / max(1, len(calls))))
