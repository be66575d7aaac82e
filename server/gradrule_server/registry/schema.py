"""Declares the tables of the registry's database."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKeyConstraint, Index, Integer, LargeBinary, MetaData, String, Table

SCHEMA_VERSION = 2

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

# Names belong to a tenant: two tenants can have different rules and programs with the same name.
rules = Table(
    "rules",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("definition", LargeBinary, nullable=False),
    Column("description", String, nullable=False),
    Column("create_time_us", Integer, nullable=False),
)

# Graphs by their SHA-256, so that programs of a tenant share a graph. Tenants do not share graphs, because the time
# that storing takes would show whether another tenant has the graph.
blobs = Table(
    "blobs",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

# Programs with equal `identity` have equal content. The graph is not in `spec` but in `blobs`.
programs = Table(
    "programs",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("identity", String, nullable=False),
    Column("graph_digest", String, nullable=False),
    Column("spec", LargeBinary, nullable=False),
    Column("snapshot", LargeBinary, nullable=False),
    Column("summary", LargeBinary, nullable=False),
    Column("create_time_us", Integer, nullable=False),
    ForeignKeyConstraint(["tenant", "graph_digest"], ["blobs.tenant", "blobs.digest"]),
    Index("ix_programs_graph", "tenant", "graph_digest"),
)
