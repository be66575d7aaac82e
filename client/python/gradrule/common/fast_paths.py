"""Turns fast paths off for diagnosis: if results differ without a fast path, that path has a bug.

The environment variable GRADRULE_DISABLED_FAST_PATHS lists them, or is `all`; the server has a flag of the same name.
"""

from __future__ import annotations

import os

VARIABLE = "GRADRULE_DISABLED_FAST_PATHS"

FAST_PATHS = {
    "streams": "client: repeated calls share one stream",
    "answer-layouts": "client: answers are read by the layout of the previous answer",
    "known-calls": "front end: a call with the header of an earlier call is not parsed",
    "batching": "front end: calls of one program run together",
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
            f"there is no fast path {unknown[0]!r}; the fast paths are {', '.join(FAST_PATHS)}; all selects every one"
        )
    return names


def is_enabled(name: str) -> bool:
    """Returns whether a fast path of the client is on."""
    text = os.environ.get(VARIABLE)
    return not text or name not in disabled_paths(text)
