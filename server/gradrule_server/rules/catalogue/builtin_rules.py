"""Declares a rule of the catalogue, and catalogues of rules and presets, in which names are unique."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from gradrule_server.errors import did_you_mean
from gradrule_server.rules.params import Param
from gradrule_server.rules.rule import RuleContent


@dataclass(frozen=True, eq=False)
class BuiltinRule:
    """A rule that is part of the server.

    Attributes:
        name: Its name.
        expression: An expression; None: the rule is code of the engine with this name.
        description: What it computes, also at kinks and zeros.
        reference: Its source: a paper, or the file of a library with version and line. It also says where defaults come
            from. What has no source that can be looked up is "gradrule's own choice".
        aliases: Other names.
        params: Its params.
        op_types: Ops and groups of ops for which it is intended; other ops may use it too. Empty: any op.
        true_gradient: Whether it is the gradient of those ops, up to rounding, except at single points that the
            description names.
        formula: The formula in documentation. For code of the engine it is written like an expression, in which
            `vjp(v)` is the op's own gradient of its input for the upstream gradient v.
        per_sample: Whether the gradient of an example never depends on other examples; set for code only.
    """

    name: str
    expression: str | None
    description: str
    reference: str
    aliases: tuple[str, ...] = ()
    params: tuple[Param, ...] = ()
    op_types: tuple[str, ...] = ()
    true_gradient: bool = False
    formula: str = ""
    per_sample: bool | None = None

    def __post_init__(self) -> None:
        if self.expression is None and not self.formula:
            raise ValueError(f"the rule {self.name!r} is code and lacks a formula for people")
        if self.expression is not None:
            # Parse the expression here, so that an invalid row stops the start of the server, not its first use.
            object.__setattr__(self, "formula", self.expression)
            object.__setattr__(self, "per_sample", self.content.per_sample)

    @property
    def code(self) -> bool:
        """Whether the rule is code of the engine."""
        return self.expression is None

    @cached_property
    def content(self) -> RuleContent:
        """The content of the rule, which can be bound to ops."""
        code = self.name if self.code else None
        return RuleContent(expression=self.expression, params=self.params, code=code)


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=_Named)


class Catalogue(Generic[T]):
    """The rules or presets of all families, in order. `catalogue[name]` accepts names and aliases.

    `kind`: what it lists, for errors.
    """

    def __init__(self, families: Iterable[tuple[str, Iterable[T]]], kind: str = "rule") -> None:
        self._kind = kind
        self._items: list[T] = []
        self._by_name: dict[str, T] = {}
        self._families: dict[str, str] = {}
        for family, items in families:
            for item in items:
                self._add(family, item)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> T:
        item = self._by_name.get(name)
        if item is None:
            raise KeyError(f"there is no {self._kind} {name!r}.{did_you_mean(name, self._by_name)}")
        return item

    def family_of(self, item: T) -> str:
        """Returns the family of a rule."""
        return self._families[item.name]

    def _add(self, family: str, item: T) -> None:
        for name in (item.name, *item.aliases):
            holder = self._by_name.get(name)
            if holder is not None:
                raise ValueError(
                    f"the name {name!r} of the {self._kind} {item.name!r} ({family}) is taken by the {self._kind} "
                    f"{holder.name!r} ({self._families[holder.name]})"
                )
            self._by_name[name] = item
        self._families[item.name] = family
        self._items.append(item)
