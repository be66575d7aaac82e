"""What a rule of the catalogue is, and the catalogue itself: rules by name, each name taken once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from gradrule_server.errors import did_you_mean
from gradrule_server.rules.params import Param
from gradrule_server.rules.rule import RuleContent


@dataclass(frozen=True, eq=False)
class BuiltinRule:
    """A rule that ships with the server: an expression, or (`expression` None) code of the engine under this name.

    `description`: what it does, also at kinks and zeros. `reference`: where it is from. `op_types`: ops and groups of
    ops it is meant for (it works on others too; none: any op). `true_gradient`: it is the gradient of those ops, up to
    rounding, but for single points that the description names.
    `formula`: what it computes, for people. Of an expression it is the expression; of code it is written in the same
    notation, in which `vjp(v)` is the op's own gradient of its input for the upstream gradient v.
    `per_sample`: stated for code alone, since it is read from an expression.
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
            # Reading it here makes a faulty row an error at start-up, not at its first use.
            object.__setattr__(self, "formula", self.expression)
            object.__setattr__(self, "per_sample", self.content.per_sample)

    @property
    def code(self) -> bool:
        """True if the engine computes it; False if it is data."""
        return self.expression is None

    @cached_property
    def content(self) -> RuleContent:
        """The rule as it is bound to ops."""
        code = self.name if self.code else None
        return RuleContent(expression=self.expression, params=self.params, code=code)


class Catalogue:
    """Rules in the order of their families. Iterating gives the rules; `catalogue[name]` takes names and aliases."""

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
        """The family, as its file is named."""
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
