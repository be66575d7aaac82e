"""Tests starting and stopping metrics, traces and logs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gradrule_server.operations import audit, operations
from gradrule_server.operations.operations import Operations
from tests.unit.operations.states import sources


async def test_failed_background_task_is_logged_and_does_not_prevent_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "audit.jsonl"
    watching = Operations("1.2.3", audit_log=str(file))
    report, died = watching._report_dropped, asyncio.Event()

    def fail() -> None:
        monkeypatch.setattr(watching, "_report_dropped", report)
        died.set()
        raise ValueError("unforeseen")

    monkeypatch.setattr(operations, "_REPORT_DROPPED_S", 0.0)
    monkeypatch.setattr(watching, "_report_dropped", fail)
    try:
        await watching.start(sources(), lambda: True)
        await died.wait()
        watching._audit.log_quarantine("0f1e: SIGABRT")
        await watching.stop()
        assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["quarantine"]
    finally:
        audit.configure("")
    assert "no longer reported" in caplog.text
