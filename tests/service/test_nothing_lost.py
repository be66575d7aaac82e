"""Stored data survives upgrades, backups and crashes: from an old registry to a restored copy."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.service.answers import assert_close, refused
from tests.service.guarded import run_gradrule, token_command
from tests.service.servers import RunningServer, running_server, serve_command, server_environment
from tests.waiting import wait_until

# A registry written by the last release: rules `Kept` and `Stays`, and a program `model` compiled when `Kept`
# was 3 * dy.
OLD = Path(__file__).parent / "data" / "registry_v2.sql"
WEIGHTS = np.arange(6000, dtype=np.float32).reshape(2, 3000) / 1000
FEEDS = {"x": np.float32([[1.0, -2.0]])}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Returns a data folder of that release."""
    folder = tmp_path / "server" / "registry"
    (folder / "blobs").mkdir(parents=True)
    database = sqlite3.connect(folder / "gradrule.db")
    database.execute("PRAGMA journal_mode=WAL")
    database.executescript(OLD.read_text())
    database.close()
    (folder / "blobs" / hashlib.sha256(WEIGHTS.tobytes()).hexdigest()).write_bytes(WEIGHTS.tobytes())
    return folder


def weighted(weights: Any) -> gr.Graph:
    """Makes y = sum(sign(x · w))."""
    g = gr.Graph()
    y = g.op("Sign", g.op("MatMul", g.placeholder("x", "float32", [None, 2]), g.variable("w", weights)))
    g.op("Sum", y, g.constant([0, 1]), name="y")
    return g


class Tenants:
    """Holds the tokens of two tenants and creates their clients."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tokens"
        self.tokens = {
            name: token_command("new", "--tenant", name, "--file", str(self.file)).strip()
            for name in ("default", "ada")
        }

    @contextmanager
    def clients(self, running: RunningServer) -> Iterator[tuple[gr.Client, gr.Client]]:
        """Returns clients of the tenant who owns the old data, and of ada."""
        first, second = (gr.connect(running.target, token=token) for token in self.tokens.values())
        with first, second:
            yield first, second


def check_data(first: gr.Client, ada: gr.Client) -> None:
    """Asserts that all original data is there and works, and that neither tenant sees the other's."""
    assert {rule.name for rule in first.list_rules("user")} >= {"Kept", "Stays"}
    assert first.get_rule("Kept").description == "kept through the years"
    found = first.program("model").evaluate(FEEDS).gradients["x"]
    assert_close(found, 3 * WEIGHTS.sum(axis=1)[np.newaxis])
    assert [(rule.name, rule.formula) for rule in ada.list_rules("user")] == [("Kept", "7 * dy")]
    found = ada.program("own").evaluate(FEEDS).gradients["x"]
    assert_close(found, 7 * (WEIGHTS + 1).sum(axis=1)[np.newaxis])
    with refused("PROGRAM_NOT_FOUND"):
        ada.program("model")
    with refused("PROGRAM_NOT_FOUND"):
        first.program("own")


def test_old_registry_is_migrated_backed_up_and_restored(old: Path, tmp_path: Path) -> None:
    tenants, copy = Tenants(tmp_path), tmp_path / "copies" / "first"
    flags = [f"--tokens={tenants.file}"]
    with running_server(tmp_path / "server", flags) as running, tenants.clients(running) as (first, ada):
        ada.create_rule("Kept", "7 * dy")
        words: dict[str, Any] = {"fetches": ["y"], "ys": ["y"], "xs": ["x"], "overrides": {"Sign": "Kept"}}
        ada.compile(weighted(WEIGHTS + 1), **words, name="own")
        check_data(first, ada)
        # The migration keeps a copy of the original.
        assert stat.S_IMODE((old / "gradrule.db.v2").stat().st_mode) == 0o600
        assert "no problems found" in run_gradrule("registry", "check", "--data-dir", str(old))

        stop = threading.Event()
        acknowledged: list[str] = []

        def work() -> None:
            with gr.connect(running.target, token=tenants.tokens["default"]) as client:
                while not stop.is_set():
                    acknowledged.append(client.create_rule(f"Late{len(acknowledged)}", "dy").name)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            wait_until(lambda: len(acknowledged) >= 20 or None, "twenty rules")
            before = len(acknowledged)
            assert "copied" in run_gradrule("registry", "backup", str(copy), "--data-dir", str(old))
        finally:
            stop.set()
            worker.join()
        assert len(acknowledged) > before
        running.kill()

    shutil.rmtree(old)
    assert "no registry" in run_gradrule("registry", "check", "--data-dir", str(old), code=1)
    assert "restored to" in run_gradrule("registry", "restore", str(copy), "--data-dir", str(old))
    assert "registry already" in run_gradrule("registry", "restore", str(copy), "--data-dir", str(old), code=1)

    with running_server(tmp_path / "server", flags) as running, tenants.clients(running) as (first, ada):
        check_data(first, ada)
        late = {rule.name for rule in first.list_rules("user")} - {"Kept", "Stays"}
        # The copy contains all writes acknowledged before it began, and a prefix of the later ones.
        assert set(acknowledged[:before]) <= late == set(acknowledged[: len(late)])
        assert running.terminate() == 0


def test_server_killed_while_writing_keeps_acknowledged_data(tmp_path: Path) -> None:
    acknowledged: list[str] = []
    file = tmp_path / "registry" / "gradrule.db"
    with running_server(tmp_path) as running:
        with gr.connect(running.target) as client:
            file.rename(file.with_name("aside"))
            with refused("UNAVAILABLE") as refusal:
                client.create_rule("Nowhere", "dy")
            refusal.says("removed or replaced")
            wait_until(lambda: f"{file} was removed" in running.log.read_text() or None, "a line in the log")
            file.with_name("aside").rename(file)

        def work() -> None:
            with gr.connect(running.target, timeout=5) as client:
                while True:
                    try:
                        acknowledged.append(client.create_rule(f"R{len(acknowledged)}", "dy").name)
                    except gr.errors.GradruleError:
                        return

        worker = threading.Thread(target=work)
        worker.start()
        wait_until(lambda: len(acknowledged) >= 50 or None, "fifty rules")
        running.kill()
        worker.join()
    assert "no problems found" in run_gradrule("registry", "check", "--data-dir", str(tmp_path / "registry"))
    database = sqlite3.connect(tmp_path / "registry" / "gradrule.db")
    names = {name for (name,) in database.execute("SELECT name FROM rules")}
    database.close()
    # One more write may be stored without an acknowledgement.
    assert set(acknowledged) <= names
    assert len(names) <= len(acknowledged) + 1
    check_missing_database_is_refused(tmp_path)


def check_missing_database_is_refused(folder: Path) -> None:
    """Asserts that a server does not replace a missing database unless told to."""
    data = folder / "registry"
    for path in data.glob("gradrule.db*"):
        path.unlink()
    serve = subprocess.run(
        serve_command("--port", "0", "--data-dir", str(data)),
        capture_output=True,
        text=True,
        env=server_environment(),
        check=False,
    )
    assert serve.returncode == 1
    [line] = serve.stderr.splitlines()
    assert f"{data / 'gradrule.db'} is missing" in line
    assert "remove gradrule.registry" in line
    (data / "gradrule.registry").unlink()
    with running_server(folder):
        pass
    assert "no problems found: no rules" in run_gradrule("registry", "check", "--data-dir", str(data))


def test_damaged_data_is_reported(old: Path, tmp_path: Path) -> None:
    data = ["--data-dir", str(old)]
    assert "no problems found" in run_gradrule("registry", "check", *data)
    with sqlite3.connect(old / "gradrule.db") as database:
        database.execute("DELETE FROM meta")
    database.close()
    assert "schema version" in run_gradrule("registry", "check", *data, code=1)
    (old / "gradrule.db").write_bytes(b"no database at all" * 100)
    for suffix in ("-wal", "-shm"):
        (old / f"gradrule.db{suffix}").unlink(missing_ok=True)
    assert "cannot be read" in run_gradrule("registry", "check", *data, code=1)
    assert "cannot be read" in run_gradrule("registry", "backup", str(tmp_path / "copy"), *data, code=1)
    assert not (tmp_path / "copy").exists()
