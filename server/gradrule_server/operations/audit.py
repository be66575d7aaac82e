"""Writes the audit log: one line for each registration, and for each refusal because of rights, policy or quotas.

Lines are JSON objects with `time`, `event` (`registration`, `refusal`, `quarantine`, `left_out`), the caller (`tenant`,
`principal`, `peer`, `request_id`, `rpc`), and the object (`action`, `kind`, `name`, `digest`; `reason`, `detail`).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from os import O_APPEND, O_CREAT, O_WRONLY, SEEK_END
from os import open as open_file
from pathlib import Path

from google.protobuf.message import Message

from gradrule.v1 import blob_pb2, program_pb2, rule_pb2
from gradrule_server.operations.log_writing import DroppedCount, LineHandler, RateLimiter
from gradrule_server.operations.logs import JsonFormatter, fields, truncated
from gradrule_server.operations.request_record import Registration, RequestRecord, current

REFUSALS = frozenset(
    {"UNAUTHENTICATED", "PERMISSION_DENIED", "OP_NOT_ALLOWED", "QUARANTINED", "QUOTA_EXCEEDED", "RULE_READ_ONLY"}
)
"""Reasons that are written: the caller lacks a right. Other errors are mistakes in requests."""

STANDARD_OUTPUT = "-"

_FILE_MODE = 0o600
_MAX_NAME_LENGTH = 256
# Limits per tenant. Registrations have a limit as well, because a caller can repeat them at little cost.
_REFUSALS_AT_ONCE = 100
_REFUSALS_PER_SECOND = 1.0
_REGISTRATIONS_AT_ONCE = 1000
_REGISTRATIONS_PER_SECOND = 10.0

_log = logging.getLogger(__name__)
LOGGER = logging.getLogger("gradrule.audit")


def configure(path: str) -> None:
    """Sets where audit lines are written.

    Args:
        path: A file, which only its owner can read, and which is created again if it is moved away; `-` for standard
            output; empty for the server's log.

    Raises:
        OSError: The file cannot be opened.
    """
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        handler.close()
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = not path
    if path:
        handler = LineHandler(sys.stdout) if path == STANDARD_OUTPUT else _AuditFile(Path(path))
        handler.setFormatter(JsonFormatter())
        LOGGER.addHandler(handler)


class _AuditFile(LineHandler, WatchedFileHandler):
    """Appends lines to a file that only its owner can read."""

    def __init__(self, path: Path) -> None:
        WatchedFileHandler.__init__(self, str(path), encoding="utf-8")
        self.dropped, self.is_failing, self.is_torn = DroppedCount(), False, _ends_within_line(path)
        self._failures = RateLimiter(per_second=0.1, burst=1)

    def write(self, line: str) -> None:
        before = self.stream
        self.reopenIfNeeded()
        if self.stream is None:
            # An earlier attempt to open the file again failed.
            self.stream = self._open()
            self._statstream()
        if self.stream is not before:
            self.is_torn = _ends_within_line(Path(self.baseFilename))
        super().write(line)

    def handleError(self, record: logging.LogRecord) -> None:
        """Counts the line as dropped, and reports the failure at a limited rate; it must not fail a request."""
        self.dropped.add()
        if self._failures.allow():
            _log.error("the audit log cannot be written", exc_info=sys.exc_info())

    def _open(self) -> TextIOWrapper:
        def owned(path: str, _: int) -> int:
            return open_file(path, O_WRONLY | O_APPEND | O_CREAT, _FILE_MODE)

        return open(self.baseFilename, "a", encoding="utf-8", opener=owned)


def _ends_within_line(path: Path) -> bool:
    """Returns whether the last line of a file is not complete, as after a full disk or a server that was killed."""
    with contextlib.suppress(OSError):
        # To open a named pipe would wait for a writer.
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                file.seek(-1, SEEK_END)
                return file.read(1) != b"\n"
    return False


class AuditLog:
    """A sink that writes audit lines for ended requests, and lines for quarantines."""

    def __init__(self, refusals: RateLimiter | None = None, registrations: RateLimiter | None = None) -> None:
        self._refusals = refusals or RateLimiter(_REFUSALS_PER_SECOND, _REFUSALS_AT_ONCE)
        self._quarantines = RateLimiter(_REFUSALS_PER_SECOND, _REFUSALS_AT_ONCE)
        self._registrations = registrations or RateLimiter(_REGISTRATIONS_PER_SECOND, _REGISTRATIONS_AT_ONCE)
        self.dropped = 0
        """Number of lines that were dropped since the start, by the rate limit or a failure to write."""
        self._unreported = self._unreported_registrations = 0

    def __call__(self, request: RequestRecord) -> None:
        done = request.registration
        if done is not None:
            if not self._registrations.allow(request.tenant):
                return
            what = {"action": done.action, "kind": done.kind, "name": truncated(done.name, _MAX_NAME_LENGTH)}
            self._write(
                f"{done.action} {done.kind} {truncated(done.name, _MAX_NAME_LENGTH)}",
                "registration",
                request,
                digest=done.digest,
                **what,
            )
        # An error that ends a stream was written with the request within the stream.
        elif request.reason in REFUSALS and not request.parts and self._refusals.allow(request.tenant):
            self._write(
                f"{request.rpc} {request.reason}", "refusal", request, reason=request.reason, detail=request.message
            )

    def log_quarantine(self, detail: str) -> None:
        """Writes that a program was quarantined."""
        if self._quarantines.allow():
            LOGGER.info("quarantine", extra=fields(event="quarantine", detail=detail))

    def log_dropped(self, unwritten: int = 0, *, may_write: bool = True) -> None:
        """Writes how many lines were dropped since the last call, if any. Must not be called within a request.

        Args:
            unwritten: Number of lines that could not be written.
            may_write: Whether a line would be written now; if not, a later call reports the number.
        """
        registrations = self._registrations.take_dropped()
        count = registrations + self._refusals.take_dropped() + self._quarantines.take_dropped() + unwritten
        self.dropped += count
        self._unreported += count
        self._unreported_registrations += registrations
        if self._unreported and may_write:
            counts = fields(event="left_out", count=self._unreported, registrations=self._unreported_registrations)
            LOGGER.info("%d lines were left out", self._unreported, extra=counts)
            self._unreported = self._unreported_registrations = 0

    def _write(self, message: str, event: str, request: RequestRecord, **what: str) -> None:
        who = {"principal": request.principal, "peer": request.peer()}
        LOGGER.info(message, extra=fields(event=event, **{name: text for name, text in (what | who).items() if text}))


def record_registration(request: Message, answer: object) -> None:
    """Records what a successful RPC has created or deleted, if it does so."""
    record = current()
    if record is not None:
        record.registration = _registration(request, answer)


def _registration(request: Message, answer: object) -> Registration | None:
    match answer:
        case rule_pb2.CreateRuleResponse(rule=rule):
            return Registration("create", "rule", rule.name, rule.digest)
        # Without a name, the program was only validated.
        case program_pb2.CompileProgramResponse(program=program) if program.name:
            return Registration("create", "program", program.name, program.digests.program)
        case blob_pb2.UploadBlobResponse(sha256=name):
            return Registration("create", "blob", name, name)
    match request:
        case rule_pb2.DeleteRuleRequest(name=name):
            return Registration("delete", "rule", f"rules/{name.removeprefix('rules/')}")
        case program_pb2.DeleteProgramRequest(name=name):
            return Registration("delete", "program", f"programs/{name.removeprefix('programs/')}")
    return None
