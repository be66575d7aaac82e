"""Parses, matches and makes names of nodes and tensors, and looks up values by them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from gradrule._builder.handles import TensorHandle, as_tensor

_NODE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
V = TypeVar("V")


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


def counted(count: int, what: str) -> str:
    """Returns `1 rule`, `2 rules`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'sign'?` if a known name is similar, else an empty string."""
    known = list(known)
    close = [other for other in known if other.lower() == name.lower()]
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(other) for other in close)}?" if close else ""


def glob_pattern(pattern: str) -> re.Pattern[str]:
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


class ByName(dict[str, V]):
    """Holds values by tensor, under the names that the caller gave.

    A key may also be a handle, or a node with one output; `y` and `y:0` are the same tensor.

    Args:
        values: Values by name.
        aliases: More names of tensors; a value is found by every name of its tensor.
    """

    def __init__(self, values: Mapping[str, V] | None = None, aliases: Mapping[str, str] | None = None) -> None:
        super().__init__(values or {})
        self._aliases = dict(aliases or {})

    def _repr_html_(self) -> str | None:
        from gradrule._builder.array_html import are_tensors, tensors_table
        from gradrule._builder.notebook_text import html_block

        if not are_tensors(self):
            return None
        return html_block(tensors_table("", [("", name, value) for name, value in self.items()]))

    def part(self, names: Iterable[str]) -> ByName[V]:
        """Returns the values of these names."""
        return ByName({name: self[name] for name in names}, self._aliases)

    def __missing__(self, key: Any) -> V:
        found = self._own_key(key)
        if found is None:
            key = as_tensor(key)
            name = key.name if isinstance(key, TensorHandle) else str(key)
            raise KeyError(f"{name}: there is {', '.join(map(repr, self)) or 'nothing'}.{did_you_mean(name, self)}")
        return dict.__getitem__(self, found)

    def __contains__(self, key: object) -> bool:
        return self._own_key(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the value of a tensor, or the default."""
        found = self._own_key(key)
        return default if found is None else dict.__getitem__(self, found)

    def _own_key(self, key: object) -> str | None:
        key = as_tensor(key)
        name = key.name if isinstance(key, TensorHandle) else key
        if not isinstance(name, str):
            return None
        candidates = (name, bare(name), f"{bare(name)}:0")
        found = next((candidate for candidate in candidates if dict.__contains__(self, candidate)), None)
        if found is not None or not self._aliases:
            return found
        tensor = self._tensor(name)
        return next((key for key in self if self._tensor(key) == tensor), None)

    def _tensor(self, name: str) -> str:
        return bare(self._aliases.get(name, name))
