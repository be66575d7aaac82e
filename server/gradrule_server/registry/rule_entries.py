"""Creates entries of rules from stored rows or the catalogue, finds them by name, and converts them to messages."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice

from google.protobuf.message import DecodeError

from gradrule.v1 import override_pb2, rule_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry.store import RuleRow, UnreadableRowError, counted_size
from gradrule_server.rules import RuleContent, write_param
from gradrule_server.rules.catalogue import BUILTINS, BuiltinRule
from gradrule_server.rules.catalogue.presets import BUILTIN_PREFIX, Preset

RULE_PREFIX = "rules/"
RULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")

ListPosition = tuple[int, str]
"""The sort key of a rule in the listing: kind (USER, BUILTIN, OP), then name."""

_MAX_EXPRESSION_CHARS = 120
# Larger definitions of USER rules are not kept in memory. Expressions are smaller.
_MAX_KEPT_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule with its name and metadata.

    Attributes:
        name: Its name; `builtin/NAME` for a BUILTIN rule that a USER rule hides.
        message: The message for clients, without name and definition.
        full_content: Returns its content; None for an OP rule, which is the gradient that TensorFlow registers. The
            content of a USER rule is not kept: a parsed rule takes many times its bytes. Accesses the database if the
            rule is large.
        size: Size of a stored USER rule, bytes; 0 for other rules.
    """

    name: str
    message: rule_pb2.Rule
    full_content: Callable[[], RuleContent | None] = field(compare=False, repr=False)
    size: int = 0

    @property
    def kind(self) -> rule_pb2.RuleKind.ValueType:
        """The kind of the rule."""
        return self.message.kind


@dataclass(frozen=True)
class ReadOnlyRules:
    """The BUILTIN rules of the server and the OP rules of TensorFlow, which all tenants share."""

    builtin: Mapping[str, RuleEntry]
    op: Mapping[str, RuleEntry]

    @classmethod
    def from_op_types(cls, op_gradients: Iterable[str], builtins: Iterable[BuiltinRule] = BUILTINS) -> ReadOnlyRules:
        """Creates OP rules for op types with a registered gradient, and BUILTIN rules from the catalogue."""
        return cls(index_by_name(map(_builtin_entry, builtins)), _op_entries(op_gradients))

    def with_op_rules(self, op_gradients: Iterable[str]) -> ReadOnlyRules:
        """Returns a copy with other OP rules."""
        return replace(self, op=_op_entries(op_gradients))


@dataclass(frozen=True)
class RuleNames:
    """The rules of a tenant at one moment, by name. Immutable, so that readers need no lock.

    A bare name means the USER rule, else the BUILTIN rule, else the OP rule. A USER rule can hide another rule only if
    an upgrade added that rule later; the name then keeps its meaning. `builtin/NAME` always means the BUILTIN rule.

    Attributes:
        user: USER rules by name.
        builtin: BUILTIN rules by name and by alias.
        op: OP rules by op type.
    """

    user: Mapping[str, RuleEntry]
    builtin: Mapping[str, RuleEntry]
    op: Mapping[str, RuleEntry]

    def find(self, name: str) -> RuleEntry | None:
        """Returns the rule that a name means; None if there is none."""
        if name.startswith(BUILTIN_PREFIX):
            return self._builtin(name.removeprefix(BUILTIN_PREFIX))
        return self.user.get(name) or self._builtin(name) or self.op.get(name)

    @cached_property
    def clashes(self) -> tuple[str, ...]:
        """Names of USER rules that hide a BUILTIN or OP rule."""
        return tuple(sorted(name for name in self.user if name in self.builtin or name in self.op))

    def all_names(self) -> Iterator[str]:
        """Yields every name and alias; yields a name once for each rule that has it."""
        yield from self.user
        yield from self.builtin
        yield from self.op

    def list_after(
        self, kind: rule_pb2.RuleKind.ValueType, position: ListPosition, count: int
    ) -> list[tuple[ListPosition, RuleEntry]]:
        """Returns at most `count` rules of a kind (unspecified: any) after `position`, each with its position."""
        entries = self._ordered
        start = bisect_right(entries, position, key=lambda item: item[0])
        chosen = (item for item in entries[start:] if kind in (rule_pb2.RULE_KIND_UNSPECIFIED, item[1].kind))
        return list(islice(chosen, count))

    @cached_property
    def _ordered(self) -> list[tuple[ListPosition, RuleEntry]]:
        entries = [((0, name), entry) for name, entry in self.user.items()]
        entries += [((1, name), self._reachable(entry)) for name, entry in self.builtin.items() if name == entry.name]
        # Omit hidden OP rules, because no name means them.
        entries += [((2, name), entry) for name, entry in self.op.items() if self.find(name) is entry]
        return sorted(entries, key=lambda item: item[0])

    def _builtin(self, name: str) -> RuleEntry | None:
        entry = self.builtin.get(name)
        return None if entry is None else self._reachable(entry)

    def _reachable(self, entry: RuleEntry) -> RuleEntry:
        """Returns the BUILTIN rule with a name that means it: `builtin/NAME` if a USER rule hides it."""
        return replace(entry, name=BUILTIN_PREFIX + entry.name) if entry.name in self.user else entry


ReadContent = Callable[[str, str], RuleContent]
"""Reads the content of a stored rule, given its name and digest. Raises UNAVAILABLE if it is not there any more."""


def read_rule(row: RuleRow, read_large: ReadContent | None = None) -> RuleEntry:
    """Returns the rule of a row. Raises only `UnreadableRowError` for a damaged row."""
    if not isinstance(row.name, str) or RULE_NAME.fullmatch(row.name) is None:
        raise UnreadableRowError(f"{row.name!r} is not a valid rule name")
    if not (isinstance(row.definition, bytes) and isinstance(row.description, str)):
        raise UnreadableRowError("its definition is not bytes, or its description is not text")
    try:
        row.description.encode()
        return user_entry(row, parse_content(row.name, row.definition), read_large)
    except GradruleError as cause:
        raise UnreadableRowError(cause.message) from cause
    except (DecodeError, ValueError, TypeError, OverflowError, RecursionError) as cause:
        raise UnreadableRowError(str(cause)) from cause


def parse_content(name: str, definition: bytes) -> RuleContent:
    """Parses a stored definition. Raises `GradruleError`, `DecodeError` and other errors if it is damaged."""
    return RuleContent.from_stored(name, rule_pb2.RuleDefinition.FromString(definition))


def user_entry(row: RuleRow, content: RuleContent, read_large: ReadContent | None = None) -> RuleEntry:
    """Returns the entry of a USER rule. `read_large`: reads its content if it is large; None: it is kept."""
    message = rule_pb2.Rule(
        kind=rule_pb2.RULE_KIND_USER,
        description=row.description,
        digest=content.digest,
        per_sample=content.per_sample,
        formula=content.expression or "",
    )
    message.create_time.FromMicroseconds(row.create_time_us)
    if read_large is not None and len(row.definition) > _MAX_KEPT_BYTES:
        read = partial(read_large, row.name, content.digest)
    else:
        read = partial(parse_content, row.name, row.definition)
    return RuleEntry(row.name, message, read, counted_size(row))


def rule_message(entry: RuleEntry) -> rule_pb2.Rule:
    """Returns the message that clients receive for a rule. May access the database."""
    content = entry.full_content()
    rule = rule_pb2.Rule(name=RULE_PREFIX + entry.name, definition=None if content is None else content.to_definition())
    rule.MergeFrom(entry.message)
    return rule


def describe(entry: RuleEntry) -> str:
    """Returns a description such as `the BUILTIN rule 'ste' (dy)`."""
    if entry.kind == rule_pb2.RULE_KIND_OP:
        return f"the OP rule {entry.name!r}, TensorFlow's gradient of {entry.name}"
    form = entry.message.formula or "a graph"
    if len(form) > _MAX_EXPRESSION_CHARS:
        form = form[:_MAX_EXPRESSION_CHARS] + "…"
    kind = rule_pb2.RuleKind.Name(entry.kind).removeprefix("RULE_KIND_")
    since = f", registered {entry.message.create_time.ToJsonString()}" if entry.message.HasField("create_time") else ""
    return f"the {kind} rule {entry.name!r} ({form}{since})"


def index_by_name(entries: Iterable[RuleEntry]) -> dict[str, RuleEntry]:
    """Returns the rules by name and by alias."""
    found = {}
    for entry in entries:
        for name in (entry.name, *entry.message.aliases):
            found[name] = entry
    return found


def preset_message(preset: Preset) -> rule_pb2.Preset:
    """Returns the message, with a line of text for each override: `@convolution → lrp_zplus(eps=1e-06)`."""
    return rule_pb2.Preset(
        name=preset.name,
        description=preset.description,
        reference=preset.reference,
        overrides=map(_describe_override, preset.overrides),
        params=map(write_param, preset.params),
    )


def _describe_override(override: override_pb2.GradientOverride) -> str:
    selector = override.selector
    selected = selector.op_type or selector.layer or "+".join(selector.pattern)
    if selector.position.nearest == override_pb2.POSITION_NEAREST_XS:
        selected += " nearest the xs"
    values = ", ".join(f"{name}={value.number:g}" for name, value in sorted(override.params.items()))
    return f"{selected} → {override.rule.removeprefix(BUILTIN_PREFIX)}{f'({values})' if values else ''}"


def _builtin_entry(rule: BuiltinRule) -> RuleEntry:
    message = rule_pb2.Rule(
        kind=rule_pb2.RULE_KIND_BUILTIN,
        description=rule.description,
        op_types=rule.op_types,
        reference=rule.reference,
        digest=rule.content.digest,
        per_sample=rule.per_sample,
        aliases=rule.aliases,
        formula=rule.formula,
        family=BUILTINS.family_of(rule) if rule.name in BUILTINS else "",
        true_gradient=rule.true_gradient,
    )
    return RuleEntry(rule.name, message, lambda: rule.content)


def _op_entries(op_types: Iterable[str]) -> dict[str, RuleEntry]:
    return {op_type: _op_entry(op_type) for op_type in op_types}


def _op_entry(op_type: str) -> RuleEntry:
    description = f"The gradient that TensorFlow registers for {op_type}."
    message = rule_pb2.Rule(kind=rule_pb2.RULE_KIND_OP, description=description, op_types=[op_type])
    return RuleEntry(op_type, message, lambda: None)
