"""Parses, matches and makes names of nodes and tensors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NODE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def is_node_name(name: str) -> bool:
    """Returns whether TensorFlow accepts the name as a node's name."""
    return _NODE_NAME.fullmatch(name) is not None


def bare(tensor: str) -> str:
    """Returns the name without `:0`: `y:0` → `y`, `y:1` → `y:1`."""
    return tensor.removesuffix(":0")


def split(tensor: str) -> tuple[str, int]:
    """Splits a tensor's name into node and output: `y:1` → (`y`, 1), `y` → (`y`, 0), `y:a` → (`y:a`, 0)."""
    node, colon, index = tensor.rpartition(":")
    return (node, int(index)) if colon and index.isdecimal() else (tensor, 0)


def near(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'sign'?` if a known name is similar, else an empty string."""
    known = list(known)
    close = [other for other in known if other.lower() == name.lower()]
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(other) for other in close)}?" if close else ""


def glob(pattern: str) -> re.Pattern[str]:
    """Compiles a glob: `?` and `*` match within a part between slashes, `**` matches across slashes."""
    parts = (
        ".*" if token == "**" else "[^/]*" if token == "*" else "[^/]" if token == "?" else re.escape(token)
        for token in re.split(r"(\*\*|\*|\?)", pattern)
    )
    return re.compile("".join(parts))


class UniqueNames:
    """Makes unique names as TensorFlow does: `Sign`, `Sign_1`, …; upper and lower case are the same name."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def reserve(self, name: str) -> None:
        """Marks a name as used."""
        self._next.setdefault(name.lower(), 1)

    def make(self, requested: str) -> str:
        """Returns the requested name, or the first free one of `requested_1`, …, and marks it as used."""
        key = requested.lower()
        number = self._next.get(key, 0)
        name = requested
        while name.lower() in self._next:
            name = f"{requested}_{number}"
            number += 1
        self._next[key] = max(number, 1)
        self._next.setdefault(name.lower(), 1)
        return name
