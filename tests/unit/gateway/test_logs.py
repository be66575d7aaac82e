"""Lines of the log: one line each, escaped, truncated, and not too many."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from gradrule_gateway import logs


def record(message: str, **values: Any) -> logging.LogRecord:
    made = logging.LogRecord("gradrule.access", logging.INFO, "", 0, message, None, None)
    made.__dict__.update(logs.fields(**values))
    return made


def test_text_of_clients_stays_on_one_line() -> None:
    made = record("GET /v1/\n\x1b[31m\u202e UNSUPPORTED", status=404, request_id="")
    text = logs.TextFormatter().format(made)
    assert text.isprintable()
    assert text.endswith("[status=404]")
    line = logs.JsonFormatter().format(made)
    assert line.isprintable()
    found = json.loads(line)
    assert (found["message"], found["status"]) == (made.msg, 404)
    assert "request_id" not in found


def test_long_text_is_truncated() -> None:
    found = json.loads(logs.JsonFormatter().format(record("x" * 5000, reason="y" * 5000)))
    assert found["message"] == "x" * 2048 + "… (2952 characters more)"
    assert found["reason"].startswith("y" * 2048 + "…")


def test_lines_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("gradrule_gateway.logs.time.monotonic", lambda: now)
    limiter = logs.RateLimiter(per_second=2, at_once=3)
    assert [limiter.allow() for _ in range(5)] == [True, True, True, False, False]
    now = 1.0
    assert [limiter.allow() for _ in range(3)] == [True, True, False]
    assert (limiter.take_dropped(), limiter.take_dropped()) == (3, 0)
