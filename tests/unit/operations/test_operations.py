"""The life of what watches a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gradrule_server.operations import audit, operations
from gradrule_server.operations.operations import Operations, OperationsSettings
from tests.unit.operations.states import sources


async def test_what_died_meanwhile_is_told_and_stops_nothing_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "audit.jsonl"
    watching = Operations(OperationsSettings("1.2.3", audit_log=str(file)))
    tell, died = watching._tell, asyncio.Event()

    def fail() -> None:
        monkeypatch.setattr(watching, "_tell", tell)
        died.set()
        raise ValueError("unforeseen")

    monkeypatch.setattr(operations, "_TELL_LEFT_OUT_S", 0.0)
    monkeypatch.setattr(watching, "_tell", fail)
    try:
        await watching.start(sources())
        await died.wait()
        watching._audit.quarantined("0f1e: SIGABRT")
        await watching.stop()
        assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["quarantine"]
    finally:
        audit.configure("")
    assert "not told any more" in caplog.text
