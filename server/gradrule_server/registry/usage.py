"""Counts what tenants have stored, in the transactions that change it, and checks it against their limits."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    union_all,
    update,
)

from gradrule_server.quotas import Quota
from gradrule_server.registry.schema import blobs, programs, rules, tenant_usage

# Cast text to bytes, because SQLite then finds the length in bytes without reading the text.
RULE_BYTES = func.length(rules.c.definition) + func.length(cast(rules.c.description, LargeBinary))
"""The bytes of a rule that count."""

PROGRAM_BYTES = func.length(programs.c.summary) + func.length(programs.c.spec) + func.length(programs.c.snapshot)
"""The bytes of a program that count; its graph counts once for each tenant."""

_MOST_STEPS = 1 << 20
STORED_RESOURCES = ("rules", "programs", "registry_bytes")
"""The resources that are counted here."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant has stored.

    Attributes:
        rules: Number of rules.
        programs: Number of programs.
        registry_bytes: Bytes of both.
        rules_revision: Increases with each change of its rules, by a random number.
        programs_revision: Increases with each change of its programs, by a random number.
    """

    rules: int = 0
    programs: int = 0
    registry_bytes: int = 0
    rules_revision: int = 0
    programs_revision: int = 0


def read_usage(connection: Connection, tenants: Collection[str] | None = None) -> dict[str, Usage]:
    """Returns what each of the tenants has stored, if it has a row; None: of all tenants."""
    query = select(tenant_usage)
    if tenants is not None:
        query = query.where(tenant_usage.c.tenant.in_(tenants))
    found = (dict(row._mapping) for row in connection.execute(query))
    return {row.pop("tenant"): Usage(**row) for row in found}


def read_total(connection: Connection) -> Usage:
    """Returns what all tenants have stored together, with the sums of their revisions."""
    sums = [func.coalesce(func.sum(column), 0) for column in tenant_usage.c if column is not tenant_usage.c.tenant]
    return Usage(*map(int, connection.execute(select(*sums)).one()))


def change_usage(connection: Connection, tenant: str, change: Usage, quotas: Mapping[str, Quota] | None = None) -> None:
    """Adds to what a tenant has stored. No other transaction may write meanwhile.

    Args:
        connection: The transaction of the change.
        tenant: The tenant.
        change: What is added; negative numbers: what is removed. Its revisions are 1 for what has changed.
        quotas: The tenant's limits by resource.

    Raises:
        GradruleError: The error of a limit that is exceeded.
    """
    own, total = read_usage(connection, [tenant]).get(tenant), read_total(connection)
    for resource, quota in (quotas or {}).items():
        amount = getattr(change, resource)
        quota.count(getattr(own or Usage(), resource), getattr(total, resource), amount)
    row = {column.name: getattr(change, column.name) for column in tenant_usage.c if column.name != "tenant"}
    for name in ("rules_revision", "programs_revision"):
        # Random: after the last changes were lost, as with an asynchronous standby, other changes give other numbers.
        row[name] *= random.randrange(1, _MOST_STEPS)
    if own is None:
        connection.execute(insert(tenant_usage).values(tenant=tenant, **row))
        return
    values = {name: tenant_usage.c[name] + amount for name, amount in row.items()}
    connection.execute(update(tenant_usage).where(tenant_usage.c.tenant == tenant).values(values))


def count_again(connection: Connection) -> None:
    """Counts everything that is stored, in new or migrated tables. All revisions start again."""
    one, none = literal(1), literal(0)
    counted: list[tuple[ColumnElement[Any], ...]] = [
        (rules.c.tenant, one, none, RULE_BYTES),
        (programs.c.tenant, none, one, PROGRAM_BYTES),
        (blobs.c.tenant, none, none, func.length(blobs.c.content)),
    ]
    rows = union_all(
        *(
            select(
                tenant.label("tenant"),
                *(value.label(name) for value, name in zip(values, STORED_RESOURCES, strict=True)),
            )
            for tenant, *values in counted
        )
    ).subquery()
    sums = select(rows.c.tenant, *(func.sum(rows.c[name]) for name in STORED_RESOURCES), one, one).group_by(
        rows.c.tenant
    )
    connection.execute(delete(tenant_usage))
    connection.execute(insert(tenant_usage).from_select(list(tenant_usage.c), sums.group_by(rows.c.tenant)))
