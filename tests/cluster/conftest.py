"""Provides a PostgreSQL server, and an empty database for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.postgres import PostgresServer, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Returns a running PostgreSQL server. A test that stops it must start it again."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def database_url(postgres: PostgresServer) -> str:
    """Returns the URL of an empty database."""
    return postgres.create_database()
