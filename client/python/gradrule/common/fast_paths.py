"""Turns fast paths off, for diagnosis: what differs without one of them is that path's fault.

The variable GRADRULE_DISABLED_FAST_PATHS names them, or `all`; the server has a flag of that name too.
"""

from __future__ import annotations

import os

VARIABLE = "GRADRULE_DISABLED_FAST_PATHS"

FAST_PATHS = {
    "streams": "client: repeated calls share one stream",
    "request-heads": "client: what stands before a tensor's content is written once for each type and shape",
    "answer-layouts": "client: answers are read by the layout of the answer before",
    "known-calls": "front end: a call of the structure of an earlier one is not parsed",
    "batching": "front end: calls of one program run together",
    "feed-plans": "engine: the usual feeds are read by a plan that is made once for each program",
    "sessions": "engine: programs run in TensorFlow sessions",
    "calling-thread": "engine: small programs run on the thread that calls them",
}


def disabled_paths(text: str) -> frozenset[str]:
    """Returns the fast paths of a comma-separated list; all for `all`. Raises `ValueError` for an unknown one."""
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if names == {"all"}:
        return frozenset(FAST_PATHS)
    unknown = sorted(names - FAST_PATHS.keys())
    if unknown:
        raise ValueError(
            f"there is no fast path {unknown[0]!r}; there are {', '.join(FAST_PATHS)}, and all of them: all"
        )
    return names


def is_enabled(name: str) -> bool:
    """Whether a fast path of the client is on."""
    text = os.environ.get(VARIABLE)
    return not text or name not in disabled_paths(text)
