"""Provides an S3 server, and an empty PostgreSQL database and bucket for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.postgres import PostgresServer
from tests.cluster.s3 import S3Server, running_s3


@pytest.fixture
def database_url(postgres: PostgresServer) -> str:
    """Returns the URL of an empty database."""
    return postgres.create_database()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """Returns a running S3 server."""
    with running_s3() as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """Returns the name of an empty bucket."""
    return s3.create_bucket()


@pytest.fixture
def s3_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process reach the S3 server."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
