"""What an engine writes to its stderr, as lines of the front end's log."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass

from gradrule_server.recovery.endings import fatal_message

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 4 * 1024
# TensorFlow writes lines of severity INFO whatever its settings say, as long as it is being imported.
_INFORMATION = re.compile(r"I\d{4} [\d:.]+ |WARNING: All log messages before absl::InitializeLog")


class Lines:
    """Cuts a stream of bytes into lines, each at most so long; what is longer is left out."""

    def __init__(self, limit: int = _MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._begun = b""
        self._left_out = 0

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that end within the chunk."""
        *ended, rest = chunk.split(b"\n")
        lines = []
        for part in ended:
            self._add(part)
            lines.append(self._take())
        self._add(rest)
        return lines

    def end(self) -> list[str]:
        """The last line, if no line break ended it."""
        return [self._take()] if self._begun else []

    def _add(self, part: bytes) -> None:
        kept = part[: self._limit - len(self._begun)]
        self._begun += kept
        self._left_out += len(part) - len(kept)

    def _take(self) -> str:
        text = self._begun.decode(errors="replace").rstrip()
        if self._left_out:
            text += f"… ({self._left_out} bytes more)"
        self._begun, self._left_out = b"", 0
        return text


@dataclass(slots=True)
class LastWords:
    """What an engine said of its own end: the first such line."""

    fatal: str = ""

    def note(self, line: str) -> None:
        """Looks at a line."""
        if not self.fatal:
            self.fatal = fatal_message(line)


async def log_stderr(stream: asyncio.StreamReader, name: str, last_words: LastWords) -> None:
    """Logs what the process `name` writes until it ends. Never stops reading: a full pipe would block it."""
    lines = Lines()

    def log(line: str) -> None:
        last_words.note(line)
        _log.log(logging.DEBUG if _INFORMATION.match(line) else logging.INFO, "%s: %s", name, line)

    while chunk := await stream.read(_CHUNK_BYTES):
        for line in lines.feed(chunk):
            log(line)
    for line in lines.end():
        log(line)
