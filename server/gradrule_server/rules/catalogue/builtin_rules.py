"""Declares a rule of the catalogue, and the catalogue, in which names are unique."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

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


class Catalogue:
    """The rules of all families, in order. `catalogue[name]` accepts names and aliases."""

    def __init__(self, families: Iterable[tuple[str, Iterable[BuiltinRule]]]) -> None:
        self._rules: list[BuiltinRule] = []
        self._by_name: dict[str, BuiltinRule] = {}
        self._families: dict[str, str] = {}
        for family, rules in families:
            for rule in rules:
                self._add(family, rule)

    def __iter__(self) -> Iterator[BuiltinRule]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> BuiltinRule:
        rule = self._by_name.get(name)
        if rule is None:
            raise KeyError(f"the catalogue has no rule {name!r}.{did_you_mean(name, self._by_name)}")
        return rule

    def family_of(self, rule: BuiltinRule) -> str:
        """Returns the family of a rule."""
        return self._families[rule.name]

    def _add(self, family: str, rule: BuiltinRule) -> None:
        for name in (rule.name, *rule.aliases):
            holder = self._by_name.get(name)
            if holder is not None:
                raise ValueError(
                    f"the name {name!r} of the rule {rule.name!r} ({family}) is taken by the rule {holder.name!r} "
                    f"({self._families[holder.name]})"
                )
            self._by_name[name] = rule
        self._families[rule.name] = family
        self._rules.append(rule)
