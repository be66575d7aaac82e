"""Tests of how the parts of the server are created and connected."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradrule.v1 import evaluate_pb2
from gradrule_server import assembly
from gradrule_server.link import operating_system
from gradrule_server.operations import audit
from gradrule_server.recovery.crash_history import Workload
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.settings import Settings


@pytest.fixture
def audited(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def settings(tmp_path: Path, audited: Path) -> Settings:
    return Settings.load(["--data-dir", str(tmp_path), "--audit-log", str(audited)], {})


async def test_audit_log_names_quarantined_program_and_reason(settings: Settings, audited: Path) -> None:
    operations = assembly.create_operations(settings)
    blobs = BlobStore(settings.data_dir / "blobs", settings.server_limit("blob_bytes"))
    pool = assembly.create_engine_pool(settings, blobs, lambda ready: None)
    loaded = assembly.create_loaded_programs(settings, pool, blobs, operations.record_quarantine)
    graph = "0123456789abcdef" * 4
    try:
        loaded.crash_history.quarantine(
            Workload("", graph, evaluate_pb2.DERIVATIVE_UNSPECIFIED), "SIGABRT: Check failed: a"
        )
    finally:
        audit.configure("")
    (line,) = map(json.loads, audited.read_text().splitlines())
    assert (line["event"], line["detail"]) == ("quarantine", "0123456789abcdef: SIGABRT: Check failed: a")


@pytest.mark.parametrize(
    ("flags", "gibibytes", "most", "most_on_gpu"),
    [
        ([], 24, 128, 8),
        ([], 4, 64, 8),
        ([], 1, 16, 8),
        (["--engines", "19"], 1, 20, 20),
        (["--max-engines", "5"], 24, 5, 5),
    ],
)
async def test_default_number_of_engines_depends_on_memory_and_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], gibibytes: int, most: int, most_on_gpu: int
) -> None:
    monkeypatch.setattr(assembly, "available_memory", lambda: gibibytes * 2**30)
    monkeypatch.setattr(assembly, "most_threads", lambda: None)
    pool = assembly.create_engine_pool(Settings.load(flags, {}), BlobStore(tmp_path, 0), lambda ready: None)
    assert pool.max_engines == most
    pool.greeting.device = "GPU:0"
    assert pool.max_engines == most_on_gpu


async def test_default_number_of_engines_leaves_threads_for_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assembly, "available_memory", lambda: 24 * 2**30)
    monkeypatch.setattr(assembly, "most_threads", lambda: 2048)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    pool = assembly.create_engine_pool(Settings.load([], {}), BlobStore(tmp_path, 0), lambda ready: None)
    # 9 requests and pings and the main thread, in an engine and a compile worker, and 64 threads of TensorFlow.
    assert pool.max_engines == 2048 // (2 * 10 + 64)


@pytest.mark.parametrize(("flags", "processes"), [([], 3), (["--engines", "3"], 5)])
async def test_default_memory_limit_includes_a_compile_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], processes: int
) -> None:
    monkeypatch.setattr(operating_system, "available_memory", lambda: 60 * 2**30)
    pool = assembly.create_engine_pool(Settings.load(flags, {}), BlobStore(tmp_path, 0), lambda ready: None)
    assert pool.memory_limit == int(60 * 2**30 * 0.6) // processes
