"""Copies an engine's stderr into the front end's log, line by line."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass

from gradrule_server.recovery.endings import fatal_message

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 4 * 1024
# TensorFlow logs at severity INFO while it is imported, regardless of its settings.
_INFORMATION = re.compile(r"I\d{4} [\d:.]+ |WARNING: All log messages before absl::InitializeLog")


class LineSplitter:
    """Splits a stream of bytes into lines. What exceeds `limit` bytes of a line is dropped."""

    def __init__(self, limit: int = _MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._current = b""
        self._dropped = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Returns the lines that end within the chunk."""
        *complete, rest = chunk.split(b"\n")
        lines = []
        for part in complete:
            self._add(part)
            lines.append(self._take())
        self._add(rest)
        return lines

    def end(self) -> list[str]:
        """Returns the last line, if it has no line break."""
        return [self._take()] if self._current else []

    def _add(self, part: bytes) -> None:
        kept = part[: self._limit - len(self._current)]
        self._current += kept
        self._dropped += len(part) - len(kept)

    def _take(self) -> str:
        text = self._current.decode(errors="replace").rstrip()
        if self._dropped:
            text += f"… ({self._dropped} bytes more)"
        self._current, self._dropped = b"", 0
        return text


@dataclass(slots=True)
class FatalMessage:
    """The first fatal error that an engine logged; `text` is empty if there was none."""

    text: str = ""

    def check_line(self, line: str) -> None:
        """Keeps the message if the line is the first fatal error."""
        if not self.text:
            self.text = fatal_message(line)


async def log_stderr(stream: asyncio.StreamReader, name: str, fatal: FatalMessage) -> None:
    """Logs the stderr of the process `name` until it ends. Never stops reading: a full pipe would block the process.

    fatal: Receives the first fatal error.
    """
    lines = LineSplitter()

    def log(line: str) -> None:
        fatal.check_line(line)
        _log.log(logging.DEBUG if _INFORMATION.match(line) else logging.INFO, "%s: %s", name, line)

    while chunk := await stream.read(_CHUNK_BYTES):
        for line in lines.feed(chunk):
            log(line)
    for line in lines.end():
        log(line)
