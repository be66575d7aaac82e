"""Looks up values by any name of a tensor: `y`, `y:0`, an alias, a handle or a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from gradrule._builder.handles import TensorHandle, as_tensor
from gradrule._builder.names import bare, near

V = TypeVar("V")


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

    def part(self, names: Iterable[str]) -> ByName[V]:
        """Returns the values of these names."""
        return ByName({name: self[name] for name in names}, self._aliases)

    def __missing__(self, key: Any) -> V:
        found = self._own_key(key)
        if found is None:
            key = as_tensor(key)
            name = key.name if isinstance(key, TensorHandle) else str(key)
            raise KeyError(f"{name}: there is {', '.join(map(repr, self)) or 'nothing'}.{near(name, self)}")
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
