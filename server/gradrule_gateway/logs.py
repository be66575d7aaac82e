"""Writes the gateway's log in the form of the server's: JSON lines, or text on a terminal.

No line has a credential or a value of a tensor. Text from clients is truncated and escaped.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

Form = Literal["auto", "json", "text"]
_FIELDS = "gradrule_fields"
_MAX_TEXT = 2048
_MAX_TRACE = 16 * 1024


def configure(level: str, form: Form, stream: TextIO | None = None) -> None:
    """Sets up logging to a stream (default: stderr). `auto`: text on a terminal, JSON elsewhere."""
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    is_text = form == "text" or (form == "auto" and stream.isatty())
    handler.setFormatter(TextFormatter() if is_text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def fields(**values: object) -> dict[str, Any]:
    """Returns the argument `extra` of a log call that adds these fields to the line; empty ones are left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value != ""}}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, fields of the line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _truncated(record.getMessage()),
        }
        line |= {
            name: _truncated(value) if isinstance(value, str) else value
            for name, value in getattr(record, _FIELDS, {}).items()
        }
        if record.exc_info:
            line["exception"] = _truncated(self.formatException(record.exc_info), _MAX_TRACE)
        text = json.dumps(line, ensure_ascii=False, default=str)
        return "".join(part if part.isprintable() else json.dumps(part)[1:-1] for part in text)


class TextFormatter(logging.Formatter):
    """Formats a record as `TIME LEVEL LOGGER: MESSAGE [field=value …]`."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {_escaped(record.getMessage())}"
        found = getattr(record, _FIELDS, {})
        if found:
            line += f" [{' '.join(f'{name}={_escaped(str(value))}' for name, value in found.items())}]"
        if record.exc_info:
            trace = _truncated(self.formatException(record.exc_info), _MAX_TRACE)
            line += "".join(f"\n    {_escaped(part)}" for part in trace.splitlines())
        return line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _truncated(text: str, limit: int = _MAX_TEXT) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} characters more)"


def _escaped(text: str) -> str:
    text = _truncated(text)
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode("ascii") for part in text)
