"""What releases before there were tenants wrote."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

from gradrule.v1 import rule_pb2

DEFINITION = rule_pb2.RuleDefinition(expression="3 * dy")
DIGEST = hashlib.sha256(b"graph").hexdigest()

VERSION_1 = """
CREATE TABLE meta ("key" VARCHAR NOT NULL, value VARCHAR NOT NULL, PRIMARY KEY ("key"));
CREATE TABLE rules (name VARCHAR NOT NULL, definition BLOB NOT NULL, description VARCHAR NOT NULL,
    create_time_us INTEGER NOT NULL, PRIMARY KEY (name));
CREATE TABLE blobs (digest VARCHAR NOT NULL, content BLOB NOT NULL, PRIMARY KEY (digest));
CREATE TABLE programs (id VARCHAR NOT NULL, identity VARCHAR NOT NULL, graph_digest VARCHAR NOT NULL,
    spec BLOB NOT NULL, snapshot BLOB NOT NULL, summary BLOB NOT NULL, create_time_us INTEGER NOT NULL,
    PRIMARY KEY (id), FOREIGN KEY(graph_digest) REFERENCES blobs (digest));
CREATE INDEX ix_programs_graph_digest ON programs (graph_digest);
INSERT INTO meta VALUES ('schema_version', '1');
"""


def version_1(folder: Path, spec: bytes = b"spec") -> Path:
    """A registry of the first schema, as it was made and used: in WAL mode."""
    file = folder / "gradrule.db"
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.executescript(VERSION_1)
        database.execute("INSERT INTO rules VALUES ('Q', ?, 'kept', 5)", (DEFINITION.SerializeToString(),))
        database.execute("INSERT INTO blobs VALUES (?, ?)", (DIGEST, b"graph"))
        database.execute(
            "INSERT INTO programs VALUES ('p', 'same', ?, ?, ?, ?, 7)",
            (DIGEST, spec, b"", b""),
        )
    database.close()
    return file
