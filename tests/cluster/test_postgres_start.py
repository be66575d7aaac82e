"""Tests how a server of a registry in PostgreSQL starts and connects: waiting, signals, encryption, several hosts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from gradrule_server.registry import postgres_database
from gradrule_server.registry.data_folder import StoreError
from gradrule_server.registry.postgres_database import PostgresDatabase
from tests.cluster.postgres import PASSWORD, PostgresServer, running_postgres
from tests.service.certificates import Authority
from tests.service.servers import running_server, serve_command, server_environment
from tests.waiting import wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_that_waits_for_its_database_stops_at_once(tmp_path: Path, number: signal.Signals) -> None:
    # A port without a server.
    url = f"postgresql://gradrule:{PASSWORD}@127.0.0.1:1/rules"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            serve_command("--port", "0", "--data-dir", str(tmp_path / "data")),
            stdout=output,
            stderr=output,
            env=server_environment({"GRADRULE_REGISTRY": url}),
        )
    try:
        wait_until(lambda: "waiting for the database" in log.read_text() or None, "server that waits", 60)
        process.send_signal(number)
        # The server would wait for 30 s.
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
    printed = log.read_text()
    assert "Traceback" not in printed
    assert PASSWORD not in printed


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Returns the authority that has signed the certificate of `encrypted`."""
    return Authority(tmp_path_factory.mktemp("authority"), "trusted")


@pytest.fixture(scope="module")
def encrypted(authority: Authority) -> Iterator[PostgresServer]:
    """Returns a server with TLS, whose certificate is for 127.0.0.1 and not for 127.0.0.2."""
    files = authority.server("postgres")
    with running_postgres(listen_addresses="127.0.0.1,127.0.0.2") as server:
        server.stop()
        server.configure(
            ssl="on",
            ssl_cert_file=str(server.add_file("certificate", files.certificate.read_bytes())),
            ssl_key_file=str(server.add_file("key", files.key.read_bytes())),
        )
        server.start()
        yield server


def test_connection_is_encrypted_and_its_server_verified(
    encrypted: PostgresServer, authority: Authority, tmp_path: Path
) -> None:
    verified = f"{encrypted.create_database()}?sslmode=verify-full&sslrootcert={authority.file}"
    with running_server(tmp_path, environment={"GRADRULE_REGISTRY": verified}) as server:
        # TensorFlow exports functions named like those of OpenSSL; a later TLS connection to PostgreSQL calls them and
        # aborts the process. Tests load TensorFlow, so they connect with TLS only in other processes.
        assert "tensorflow" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        connections = "pg_stat_ssl JOIN pg_stat_activity USING (pid)"
        query = f"SELECT bool_and(ssl) FROM {connections} WHERE application_name = 'gradrule'"
        assert encrypted.execute(query) == ["t"]


def test_another_server_is_refused(
    encrypted: PostgresServer, postgres: PostgresServer, authority: Authority, tmp_path: Path
) -> None:
    url = encrypted.create_database()
    other = Authority(tmp_path, "other")
    verified = f"?sslmode=verify-full&sslrootcert={authority.file}"
    for wrong, problem in (
        (url.replace("127.0.0.1", "127.0.0.2") + verified, "does not match host name"),
        (f"{url}?sslmode=verify-full&sslrootcert={other.file}", "certificate verify failed"),
        (f"{url}?sslmode=verify-full&sslrootcert={tmp_path / 'missing'}", "does not exist"),
        (postgres.create_database() + verified, "does not support SSL"),
    ):
        refused = subprocess.run(
            [sys.executable, "-m", "gradrule_server", "registry", "check", "--data-dir", str(tmp_path / "data")],
            capture_output=True,
            text=True,
            env=server_environment({"GRADRULE_REGISTRY": wrong}),
            check=False,
        )
        assert refused.returncode == 1
        assert problem in refused.stderr
        assert PASSWORD not in refused.stderr


class _Ended(Exception):
    """Ends a start that waits for its database."""


@pytest.fixture
def limited_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises `_Ended` when a start has attempted to connect for the fourth time."""
    attempts = iter(range(3))

    def sleep(_: float) -> None:
        if next(attempts, None) is None:
            raise _Ended

    monkeypatch.setattr(postgres_database, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ((f":{PASSWORD}@", ":wrong@"), "password authentication failed"),
        ((f":{PASSWORD}@", "@"), "no password supplied"),
        (("gradrule:", "nobody:"), "password authentication failed"),
        (("/test_", "/missing_"), "does not exist"),
        (("?", "?sslmode=mandatory&"), "invalid sslmode value"),
        (("?", "?nonsense=1&"), "invalid URI query parameter"),
        (("?", "?service=missing&"), "service"),
        (("?", "?sslmode=require&"), "does not support SSL"),
        (("?", "?channel_binding=require&"), "channel binding"),
        (("?", "?gssencmode=require&sslmode=disable&"), "GSSAPI"),
        (("?", "?options=-c%20nonsense%3D1&"), "nonsense"),
    ],
)
def test_refusal_names_what_is_wrong(database_url: str, change: tuple[str, str], problem: str) -> None:
    url = f"{database_url}?connect_timeout=10"
    wrong = url.replace(*change)
    assert wrong != url
    with pytest.raises(StoreError, match=problem) as refusal:
        PostgresDatabase(wrong)
    assert PASSWORD not in str(refusal.value)


def test_start_waits_for_a_database_that_cannot_be_reached_and_says_why(
    database_url: str, limited_attempts: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(_Ended):
        PostgresDatabase(database_url.replace(f":{PASSWORD}@", ":wrong@"), wait_s=3600)
    [line] = caplog.messages
    assert "waiting for the database" in line
    assert "password authentication failed" in line


def test_start_does_not_wait_for_what_waiting_cannot_mend(database_url: str, limited_attempts: None) -> None:
    with pytest.raises(StoreError, match="invalid URI query parameter"):
        PostgresDatabase(f"{database_url}?nonsense=1", wait_s=3600)


def test_variables_of_libpq_are_used(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=7MB")
    monkeypatch.setenv("PGAPPNAME", "other")

    def shown(url: str) -> dict[str, str]:
        with closing(PostgresDatabase(url)) as database, database.read() as connection:
            names = ("work_mem", "application_name", "statement_timeout", "synchronous_commit")
            return {name: connection.execute(text(f"SHOW {name}")).scalar_one() for name in names}

    ours = {"statement_timeout": "5s", "synchronous_commit": "on"}
    assert shown(database_url) == {"work_mem": "7MB", "application_name": "other", **ours}
    own = f"{database_url}?application_name=own&options=-c%20work_mem%3D9MB"
    assert shown(own) == {"work_mem": "9MB", "application_name": "own", **ours}


def test_server_that_accepts_writes_is_found_among_several_hosts(postgres: PostgresServer) -> None:
    url = postgres.create_database()
    with running_postgres(standby_of=postgres) as standby:
        wait_until(
            lambda: (
                postgres.execute("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'") == ["1"] or None
            ),
            "standby",
        )
        credentials, _, rest = url.partition("@")
        name = rest.rpartition("/")[2]
        for ports in ((standby.port, postgres.port), (1, postgres.port)):
            hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
            with closing(PostgresDatabase(f"{credentials}@{hosts}/{name}")) as database, database.read() as connection:
                assert connection.execute(text("SELECT inet_server_port()")).scalar_one() == postgres.port
        with pytest.raises(StoreError, match="read-only"):
            PostgresDatabase(f"{credentials}@127.0.0.1:{standby.port}/{name}")
