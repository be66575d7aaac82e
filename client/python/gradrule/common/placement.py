"""Ranks servers for the calls of a program, so that each server keeps few programs loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TypeVar

# Of the average load. With 2, half of the servers would serve a program that all clients call.
_SHARE = 1.25
_T = TypeVar("_T")


def preferred(key: str, loads: Sequence[tuple[_T, str, int]], min_bound: int) -> list[_T]:
    """Returns replicas in the order in which a program's call should try them.

    Each program has an order of its own (rendezvous hashing, Thaler and Ravishankar 1998), which changes for few
    programs when a replica comes or goes. Replicas whose load reaches the bound come last (consistent hashing with
    bounded loads, Mirrokni et al. 2018, arXiv:1608.01350), so a program that is called often gets several replicas.

    Args:
        key: Of the program.
        loads: Replica, its ID, and its number of calls.
        min_bound: Calls that a replica may have in any case before the next one is tried.
    """
    total = sum(load for _, _, load in loads)
    bound = max(min_bound, math.ceil(_SHARE * (total + 1) / max(1, len(loads))))
    ordered = sorted(loads, key=lambda entry: hashlib.sha256(f"{key}/{entry[1]}".encode()).digest())
    free = [replica for replica, _, load in ordered if load < bound]
    busy = sorted((entry for entry in ordered if entry[2] >= bound), key=lambda entry: entry[2])
    return free + [replica for replica, _, _ in busy]
