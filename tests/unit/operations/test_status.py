"""Tests the status message and how the command line shows it."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

import gradrule as gr
from gradrule._results.status_report import RegistryStatus, Usage, server_status
from gradrule.cli import output
from gradrule.cli.status import bytes_text, drawn, duration_text, size_text, usage_text
from gradrule_server import __version__
from gradrule_server.operations import status
from tests.unit.operations.states import REGISTRY, quarantine, sources, tenant


def test_server_and_client_versions_are_equal() -> None:
    assert __version__ == gr.__version__


def test_client_reads_the_whole_status() -> None:
    quarantined = [quarantine("0f1e", "signal 6, twice", 41.5)]
    found = server_status(status.server_status(sources(quarantines=quarantined, limits={"rules": 60}), 90.5))
    assert (found.version, found.tensorflow_version, found.uptime, found.ready) == ("1.2.3", "2.21.0", 90.5, True)
    first, second = found.engines
    assert (first.index, first.device, first.pid, first.running, first.waiting) == (0, "CPU:0", 4711, 2, 1)
    assert (first.programs, first.resident_bytes, first.uptime, first.ended) == (3, 1 << 30, 60.5, {})
    assert (second.pid, second.ready, second.ended) == (None, False, {"crash": 2, "memory": 1})
    assert (found.spare_engines, found.requests) == (1, Usage(4, 256))
    workers = found.compile_workers
    assert (workers.count, workers.busy, workers.waiting, workers.resident_bytes) == (3, 2, 1, 1 << 20)
    use = found.engine_use
    assert (use.evictions, use.since_eviction, use.waiting_tenants) == ({"turn": 4, "idle": 1}, 7.5, 3)
    assert (use.engines, use.memory_bytes) == (Usage(2, 21), Usage(3 << 20, 5 << 20))
    assert found.host == socket.gethostname()
    assert found.registry == RegistryStatus("postgresql://gradrule@db/gradrule", "", None, "s3://bucket/blobs")
    (cache,) = found.caches
    assert (cache.name, cache.entries, cache.size_bytes) == ("programs", Usage(3, 256), Usage(1000, 2000))
    (tenant,) = found.tenants
    assert (tenant.name, tenant.requests, tenant.programs, tenant.rules) == (
        "default",
        Usage(4, 0),
        Usage(5, 0),
        Usage(6, 60),
    )
    assert (tenant.sessions, tenant.session_bytes) == (Usage(7, 0), Usage(8, 0))
    assert (tenant.handles, tenant.handle_bytes, tenant.blob_bytes) == (Usage(9, 0), Usage(10, 0), Usage(11, 0))
    (program,) = found.quarantined_programs
    assert (program.digest, program.reason) == ("0f1e", "signal 6, twice")
    assert 0 < program.remaining <= 41.5


def test_number_of_tenants_in_status_is_limited() -> None:
    tenants = [tenant(f"t{number}", requests=number) for number in range(1500)]
    found = server_status(status.server_status(sources(tenants), 0))
    assert found.tenant_count == 1500
    assert [tenant.name for tenant in found.tenants] == [f"t{number}" for number in range(1499, 499, -1)]


def test_status_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    tenants = [tenant(f"t{number}") for number in range(21)] + [tenant("[red]evil\x1b[2J\n", requests=99)]
    quarantined = [quarantine("0f1e", "signal 6", 41.5)]
    found = server_status(status.server_status(sources(tenants, quarantined, {"blob_bytes": 1 << 30}), 3700))
    screen = output.console()
    screen.print(drawn(screen, found, "host:1"))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for words in (
        ("gradrule 1.2.3 at host:1", "TensorFlow 2.21.0", "ready", "up 1 h 1 min", "4 of 256 requests", "1 spare"),
        ("0", "CPU:0", "4711", "ready", "1.0 GiB"),
        ("1", "CPU:0", "starting", "crash 2, memory 1"),
        ("2 of 21", "3.0 MiB of 5.0 MiB", "3", "idle 1, turn 4", "7 s ago"),
        ("3", "2", "1", "1.0 MiB"),
        ("programs", "3 of 256", "1000 B of 2.0 KiB"),
        ("[red]evil[2J", "99"),
        ("t0", "11 B of 1.0 GiB"),
        ("and 2 tenants more",),
        ("0f1e", "signal 6"),
    ):
        assert any(all(word in line for word in words) for line in text.splitlines()), words


def test_status_shows_a_registry_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    registry = replace(REGISTRY, problem="connection refused", unavailable_s=200.0)
    found = server_status(status.server_status(sources(registry=registry), 0))
    assert (found.registry.problem, found.registry.unavailable_for) == ("connection refused", 200.0)
    screen = output.console()
    screen.print(drawn(screen, found, "host:1"))
    text = " ".join(capsys.readouterr().out.split())
    for words in (REGISTRY.database, "unavailable for 3 min 20 s", REGISTRY.blobs):
        assert words in text


def test_status_of_an_older_server_shows_no_registry(capsys: pytest.CaptureFixture[str]) -> None:
    message = status.server_status(sources(), 0)
    message.ClearField("registry")
    screen = output.console()
    screen.print(drawn(screen, server_status(message), "host:1"))
    assert "database" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59.9, "59 s"), (200, "3 min 20 s"), (18180, "5 h 3 min"), (176400, "2 d 1 h")],
)
def test_durations_are_shown_in_words(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_sizes_are_shown_with_units() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 1536, 1 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1024.0 TiB",
    ]
    assert (usage_text(Usage(3, 0)), usage_text(Usage(3, 4))) == ("3", "3 of 4")
    assert (bytes_text(Usage(3, 0)), bytes_text(Usage(3, 2048))) == ("3 B", "3 B of 2.0 KiB")
