"""Tests the PostgreSQL server that other tests use."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cluster.postgres import PostgresServer, find_programs


def test_committed_rows_survive_stops_and_kills(postgres: PostgresServer, database_url: str) -> None:
    name = database_url.rpartition("/")[2]
    postgres.execute("CREATE TABLE numbers (number integer)", database=name)
    for number, end in enumerate((postgres.stop, postgres.kill)):
        postgres.execute(f"INSERT INTO numbers VALUES ({number})", database=name)
        end()
        assert not postgres.is_running
        postgres.start()
    assert postgres.execute("SELECT number FROM numbers ORDER BY 1", database=name) == ["0", "1"]


def test_it_does_not_run_as_root(postgres: PostgresServer) -> None:
    assert Path(f"/proc/{postgres.pid}").stat().st_uid != 0


def test_a_frozen_server_answers_later(postgres: PostgresServer) -> None:
    command = [find_programs() / "psql", "-XqtAc", "SELECT 7", postgres.url()]
    with postgres.frozen():
        question = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            question.wait(0.3)
    assert question.communicate(timeout=30)[0] == "7\n"
