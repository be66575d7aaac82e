"""Provides an empty PostgreSQL database for each test."""

from __future__ import annotations

import pytest

from tests.cluster.postgres import PostgresServer


@pytest.fixture
def database_url(postgres: PostgresServer) -> str:
    """Returns the URL of an empty database."""
    return postgres.create_database()
