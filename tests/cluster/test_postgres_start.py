"""Tests how a server of a registry in PostgreSQL starts and connects: waiting, signals, encryption, several hosts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

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


def check(url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Checks a registry in a process of its own: libraries that tests load may disagree with libpq's OpenSSL."""
    command = [sys.executable, "-m", "gradrule_server", "registry", "check", "--data-dir", str(folder)]
    environment = server_environment({"GRADRULE_REGISTRY": url})
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_connection_is_encrypted_and_its_server_verified(
    encrypted: PostgresServer, authority: Authority, tmp_path: Path
) -> None:
    verified = f"{encrypted.create_database()}?sslmode=verify-full&sslrootcert={authority.file}"
    with running_server(tmp_path, environment={"GRADRULE_REGISTRY": verified}):
        connections = "pg_stat_ssl JOIN pg_stat_activity USING (pid)"
        query = f"SELECT bool_and(ssl) FROM {connections} WHERE application_name = 'gradrule'"
        assert encrypted.execute(query) == ["t"]
    assert check(verified, tmp_path).stdout.startswith("no problems found")


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
        refused = check(wrong, tmp_path)
        assert refused.returncode == 1
        assert problem in refused.stderr
        assert PASSWORD not in refused.stderr


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
