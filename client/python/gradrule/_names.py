"""Names of nodes and tensors: unique ones, normal ones, and patterns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NODE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def is_node_name(name: str) -> bool:
    """Whether TensorFlow takes the name for a node."""
    return _NODE_NAME.fullmatch(name) is not None


def bare(tensor: str) -> str:
    """`y:0` → `y`; any other name itself."""
    return tensor.removesuffix(":0")


def split(tensor: str) -> tuple[str, int]:
    """`y:1` → (`y`, 1), `y` → (`y`, 0). What follows a colon and is no number stays in the name."""
    node, colon, index = tensor.rpartition(":")
    return (node, int(index)) if colon and index.isdecimal() else (tensor, 0)


def near(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'sign'?` or nothing."""
    known = list(known)
    close = [other for other in known if other.lower() == name.lower()]
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(other) for other in close)}?" if close else ""


def glob(pattern: str) -> re.Pattern[str]:
    """A node pattern: `?` and `*` stay within a part between slashes, `**` crosses them."""
    parts = (
        ".*" if token == "**" else "[^/]*" if token == "*" else "[^/]" if token == "?" else re.escape(token)
        for token in re.split(r"(\*\*|\*|\?)", pattern)
    )
    return re.compile("".join(parts))


class UniqueNames:
    """Names handed out once each, as TensorFlow does it: `Sign`, `Sign_1`, …; upper and lower case count as equal."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def reserve(self, name: str) -> None:
        """Marks a name that is taken."""
        self._next.setdefault(name.lower(), 1)

    def make(self, wished: str) -> str:
        """The wished name, or the first free one of `wished_1`, `wished_2`, …"""
        key = wished.lower()
        number = self._next.get(key, 0)
        name = wished
        while name.lower() in self._next:
            name = f"{wished}_{number}"
            number += 1
        self._next[key] = max(number, 1)
        self._next.setdefault(name.lower(), 1)
        return name
