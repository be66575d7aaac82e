"""Registers, finds and lists rules by name: USER rules of a tenant, and the read-only rules of all tenants."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import GradruleError, Resource, did_you_mean, error
from gradrule_server.policy import NodeLimits
from gradrule_server.quotas import Quota
from gradrule_server.registry import page_tokens
from gradrule_server.registry.rule_entries import (
    RULE_NAME,
    RULE_PREFIX,
    ReadContent,
    ReadOnlyRules,
    RuleEntry,
    RuleNames,
    describe,
    parse_content,
    read_rule,
    user_entry,
)
from gradrule_server.registry.store import DEFAULT_TENANT, RuleRow, Store, UnreadableRowError
from gradrule_server.registry.usage import Usage
from gradrule_server.rules import RuleContent, write_param
from gradrule_server.rules.catalogue.presets import BUILTIN_PREFIX
from gradrule_server.rules.language import split_variable

_log = logging.getLogger(__name__)

_POSITION = (re.compile("[012]"), re.compile(".*", re.DOTALL))
_RESERVED = frozenset({"default", "inline"})
_MAX_UNREADABLE_SHOWN = 5
_MOST_NAMES = 1000
# Limit the size of rules: compile workers get them whole.
_MAX_DESCRIPTION_BYTES = 8 * 1024
_MAX_DEFINITION_BYTES = 1024 * 1024


class RuleRegistry:
    """A tenant's rules. Safe to use from several threads; only methods that say so access the database.

    A stored rule that cannot be read is logged and ignored. It stays in the store until a rule of its name is created
    or deleted. Where several servers share the database, `refresh` reads what others have changed.

    Args:
        store: The store of the USER rules.
        read_only: BUILTIN and OP rules, or op types whose OP rules are added to the catalogue.
        tenant: The tenant.
        quota: Limits the number of rules; None: unlimited.
        bytes_quota: Limits the bytes of rules; None: unlimited.
        bounds: Limits for graphs of rules.
    """

    def __init__(
        self,
        store: Store,
        read_only: ReadOnlyRules | Iterable[str],
        *,
        tenant: str = DEFAULT_TENANT,
        quota: Quota | None = None,
        bytes_quota: Quota | None = None,
        bounds: NodeLimits | None = None,
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._quotas = {"rules": quota or Quota.unlimited(), "registry_bytes": bytes_quota or Quota.unlimited()}
        self._bounds = bounds or NodeLimits()
        self._changing = threading.RLock()
        self._revision = 0
        # The revision of the stored rules that these names have, and when each rule was created.
        self._stored_revision = -1
        self._times: dict[str, int] = {}
        if not isinstance(read_only, ReadOnlyRules):
            read_only = ReadOnlyRules.from_op_types(read_only)
        self._unreadable: dict[str, str] = {}
        """Why stored rules cannot be read, by name."""
        self._names = RuleNames(user={}, builtin=read_only.builtin, op=read_only.op)
        self._read_changes()

    def __len__(self) -> int:
        """Returns the number of stored USER rules, including unreadable ones."""
        return len(self._names.user) + len(self._unreadable)

    @property
    def revision(self) -> int:
        """A number that increases each time the meaning of a name may have changed."""
        return self._revision

    @property
    def clashes(self) -> tuple[str, ...]:
        """Names of USER rules that hide a BUILTIN or OP rule that an upgrade has added."""
        return self._names.clashes

    def set_read_only(self, read_only: ReadOnlyRules) -> None:
        """Replaces the BUILTIN and OP rules."""
        with self._changing:
            self._replace(replace(self._names, builtin=read_only.builtin, op=read_only.op))

    def read_definition(self, name: str, definition: bytes, description: str) -> rule_pb2.RuleDefinition:
        """Decodes the definition of a new rule without parsing its graphs.

        Raises INVALID_RULE (the name), LIMIT_EXCEEDED, MALFORMED_REQUEST.
        """
        _valid_name(name)
        _check_size(len(definition), description)
        try:
            return rule_pb2.RuleDefinition.FromString(definition)
        except DecodeError as cause:
            what = rule_pb2.RuleDefinition.DESCRIPTOR.full_name
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"the bytes are not a valid {what}") from cause

    def create(
        self,
        name: str,
        definition: rule_pb2.RuleDefinition,
        description: str,
        *,
        is_checked: bool = False,
        may_replace: bool = False,
    ) -> RuleEntry:
        """Registers a USER rule; returns the existing rule if that has equal content (form, params with ranges).

        Args:
            name: The name, with or without `rules/`.
            definition: The definition.
            description: Text for people.
            is_checked: Whether a compile worker has checked the definition; then its graphs are not parsed here.
            may_replace: Whether to replace a USER rule of this name with other content or another description.

        Raises:
            GradruleError: INVALID_RULE (the name), RULE_EXISTS, LIMIT_EXCEEDED, QUOTA_EXCEEDED, or an error of
                `RuleContent.from_definition`.
        """
        name = _valid_name(name)
        _check_size(definition.ByteSize(), description)
        if is_checked:
            content = RuleContent.from_stored(name, definition)
        else:
            content = RuleContent.from_definition(definition, self._bounds)
            refused = content.check_nodes(self._bounds)
            if refused:
                raise GradruleError(refused)
        row = RuleRow(name, definition.SerializeToString(deterministic=True), description, time.time_ns() // 1000)
        with self._changing:
            with self._store.database.exclusively():
                self._read_changes()
                names = self._names
                holder = names.find(name)
                if holder is not None:
                    is_user = holder.kind == rule_pb2.RULE_KIND_USER
                    is_same = is_user and _equal(holder.full_content(), content)
                    if is_same and not (may_replace and holder.message.description != description):
                        return holder
                    if not (may_replace and is_user):
                        raise _rule_exists(name, holder)
                self._store.add_rule(row, self._tenant, replaces=True, quotas=self._quotas)
            self._times[name] = row.create_time_us
            self._unreadable.pop(name, None)
            entry = _mark_hiding(user_entry(row, content, self._read_content), names.builtin)
            self._replace(replace(names, user={**names.user, name: entry}))
        return entry

    def refresh(self) -> bool:
        """Applies what other servers have written; returns False if their database cannot be reached.

        Does nothing where no other server writes.
        """
        try:
            self._read_changes()
        except GradruleError as cause:
            if cause.reason != errors_pb2.ERROR_REASON_UNAVAILABLE:
                raise
            return False
        return True

    @property
    def is_shared(self) -> bool:
        """Whether other servers may create and delete rules."""
        return self._store.is_shared

    def _read_changes(self) -> None:
        """Reads the rules that were created or deleted since the last call, if other servers may do that."""
        if self._stored_revision >= 0 and not self._store.is_shared:
            return
        revision = self._store.usage([self._tenant]).get(self._tenant, Usage()).rules_revision
        if revision == self._stored_revision:
            return
        with self._changing:
            times = self._store.rule_times(self._tenant)
            changed = {name for name in times.keys() | self._times.keys() if times.get(name) != self._times.get(name)}
            # Databases limit the number of parameters of a statement.
            rows = self._store.iterate_rules(self._tenant, changed if len(changed) <= _MOST_NAMES else None)
            stored, unreadable = _read_rules(rows, self._tenant, self._read_content)
            added = {entry.name: _mark_hiding(entry, self._names.builtin) for entry in stored}
            kept = {name: entry for name, entry in self._names.user.items() if name not in changed}
            self._unreadable = {name: why for name, why in self._unreadable.items() if name not in changed} | unreadable
            self._times, self._stored_revision = times, revision
            if changed:
                self._replace(replace(self._names, user=kept | added))

    def find(self, name: str) -> RuleEntry | None:
        """Returns the rule of a name or alias, with or without `rules/`; None if there is none."""
        return self._names.find(name.removeprefix(RULE_PREFIX))

    def get(self, name: str) -> RuleEntry:
        """Returns the rule of a name or alias, with or without `rules/`. Raises UNKNOWN_RULE.

        Applies what other servers have written first, and raises UNAVAILABLE if that fails and no rule is found.
        """
        is_fresh = self.refresh()
        found = self.find(name)
        if found is None:
            raise self.unknown(name, is_fresh=is_fresh)
        return found

    def delete(self, name: str) -> None:
        """Deletes a USER rule. Raises RULE_READ_ONLY for other rules, and UNKNOWN_RULE."""
        bare = name.removeprefix(RULE_PREFIX)
        with self._changing:
            with self._store.database.exclusively():
                self._read_changes()
                entry = None if bare in self._unreadable else self.find(bare)
                if entry is None and bare not in self._unreadable:
                    raise self.unknown(name)
                if entry is not None and entry.kind != rule_pb2.RULE_KIND_USER:
                    raise error(
                        errors_pb2.ERROR_REASON_RULE_READ_ONLY,
                        f"{bare!r} is {describe(entry)}; only USER rules can be deleted",
                        field="name",
                        resource=_resource(entry.name),
                    )
                self._store.remove_rule(bare, self._tenant, self._quotas)
            self._times.pop(bare, None)
            self._unreadable.pop(bare, None)
            user = {key: stored for key, stored in self._names.user.items() if key != bare}
            self._replace(replace(self._names, user=user))

    def list(self, kind: rule_pb2.RuleKind.ValueType, page_size: int, page_token: str) -> tuple[list[RuleEntry], str]:
        """Returns a page of rules, ordered by kind (USER, BUILTIN, OP) and name, and the token of the next page.

        A page ends at about `page_tokens.MAX_PAGE_BYTES`, even if `page_size` allows more rules. Raises
        MALFORMED_REQUEST.
        """
        size = page_tokens.page_size(page_size)
        listing = f"rules/{kind}"
        order, name = page_tokens.decode(listing, page_token, *_POSITION) if page_token else ("0", "")
        found = self._names.list_after(kind, (int(order), name), size + 1)
        total_bytes = itertools.accumulate(entry.size for _, entry in found[:size])
        size = max(1, sum(total <= page_tokens.MAX_PAGE_BYTES for total in total_bytes))
        page = [entry for _, entry in found[:size]]
        if len(found) <= size:
            return page, ""
        last_order, last_name = found[size - 1][0]
        return page, page_tokens.encode(listing, [str(last_order), last_name])

    def _replace(self, names: RuleNames) -> None:
        # Set the names first, because a reader that sees the new revision must see the new names.
        self._names = names
        self._revision += 1

    def _read_content(self, name: str, digest: str) -> RuleContent:
        """Reads the content of a large rule from the store.

        Raises UNAVAILABLE if the rule was replaced or deleted meanwhile: the repeated call finds what is there now.
        """
        for row in self._store.rules(self._tenant, [name]):
            content = parse_content(row.name, row.definition)
            if content.digest == digest:
                return content
        raise error(
            errors_pb2.ERROR_REASON_UNAVAILABLE,
            f"the rule {name!r} was replaced or deleted while it was read; repeat the call",
            field="name",
            retry_after_s=0.0,
        )

    def unknown(self, name: str, *, is_fresh: bool = True) -> GradruleError:
        """Returns UNKNOWN_RULE for a name, with similar names.

        Returns UNAVAILABLE unless `is_fresh`: another server may have created a rule of this name.
        """
        bare = name.removeprefix(RULE_PREFIX)
        if not is_fresh and RULE_NAME.fullmatch(bare) is not None:
            return error(
                errors_pb2.ERROR_REASON_UNAVAILABLE,
                f"this server does not know the rule {bare!r}, and cannot reach the database to look it up; try again",
                field="name",
                retry_after_s=1.0,
            )
        unreadable = self._unreadable.get(bare)
        if unreadable is not None:
            return error(
                errors_pb2.ERROR_REASON_UNKNOWN_RULE,
                f"the stored rule {bare!r} cannot be read: {unreadable}; create it again, or delete it",
                field="name",
                resource=_resource(bare),
            )
        names, unprefixed = set(self._names.all_names()), bare.removeprefix(BUILTIN_PREFIX)
        # `builtin/NAME` was requested, and NAME is a USER rule.
        exists_unprefixed = unprefixed != bare and unprefixed in names
        if split_variable(bare) is not None:
            hint = f" If {bare!r} is a formula, send it as the definition of a rule: Rule({bare!r})"
        else:
            hint = f" Did you mean {unprefixed!r}?" if exists_unprefixed else did_you_mean(unprefixed, names)
        return error(
            errors_pb2.ERROR_REASON_UNKNOWN_RULE,
            f"there is no rule {bare!r}.{hint}",
            field="name",
            resource=_resource(bare),
        )


def _valid_name(name: str) -> str:
    bare = name.removeprefix(RULE_PREFIX)
    if bare in _RESERVED:
        problem = f"{bare!r} has a meaning in overrides and cannot name a rule"
    elif RULE_NAME.fullmatch(bare) is None:
        problem = f"{bare!r} is no valid rule name: 1 to 128 of A-Z, a-z, 0-9, '_', '.', '-', first a letter or '_'"
    else:
        return bare
    raise error(errors_pb2.ERROR_REASON_INVALID_RULE, problem, field="rule.name")


def _check_size(definition_bytes: int, description: str) -> None:
    """Raises LIMIT_EXCEEDED if a rule is too large."""
    sizes = (
        ("description", len(description.encode()), _MAX_DESCRIPTION_BYTES),
        ("definition", definition_bytes, _MAX_DEFINITION_BYTES),
    )
    for part, size, limit in sizes:
        if size > limit:
            raise error(
                errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                f"the rule's {part} has {size} bytes; a stored rule has at most {limit}",
                field=f"rule.{part}",
            )


def _read_rules(
    rows: Iterable[RuleRow], tenant: str, read_large: ReadContent
) -> tuple[list[RuleEntry], dict[str, str]]:
    """Returns the readable rules of a tenant's rows, and why others are unreadable, which is logged."""
    found: list[RuleEntry] = []
    unreadable: dict[str, str] = {}
    for row in rows:
        try:
            found.append(read_rule(row, read_large))
        except UnreadableRowError as cause:
            unreadable[row.name] = str(cause)
    if unreadable:
        shown = [f"{name!r} ({why})" for name, why in list(unreadable.items())[:_MAX_UNREADABLE_SHOWN]]
        _log.warning(
            "%d stored rules of tenant %r cannot be read and are ignored (`gradrule registry check` shows all): %s",
            len(unreadable),
            tenant,
            ", ".join(shown),
        )
    return found, unreadable


def _mark_hiding(entry: RuleEntry, builtin: Mapping[str, RuleEntry]) -> RuleEntry:
    """Sets `hides_builtin` of a new USER rule if a BUILTIN rule has its name; returns the rule."""
    entry.message.hides_builtin = entry.name in builtin
    return entry


def _equal(stored: RuleContent | None, new: RuleContent) -> bool:
    """Returns whether form and params, with defaults and ranges, are equal; descriptions do not count."""
    return stored is not None and stored.digest == new.digest and _encoded_params(stored) == _encoded_params(new)


def _encoded_params(content: RuleContent) -> list[bytes]:
    entries = [write_param(replace(param, description="")) for param in content.params]
    return [entry.SerializeToString(deterministic=True) for entry in entries]


def _rule_exists(name: str, holder: RuleEntry) -> GradruleError:
    remedy = "choose another name"
    if holder.kind == rule_pb2.RULE_KIND_USER:
        remedy = f"replace it (replace=True), delete it first, or {remedy}"
    return error(
        errors_pb2.ERROR_REASON_RULE_EXISTS,
        f"the name {name!r} is taken by {describe(holder)}; {remedy}",
        field="rule.name",
        resource=_resource(holder.name),
    )


def _resource(name: str) -> Resource:
    return Resource("gradrule.v1.Rule", RULE_PREFIX + name)
