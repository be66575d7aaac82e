"""The audit log: one line for each registration and each refusal that concerns what a caller may do.

Lines are JSON objects with `time`, `event` (`registration`, `refusal`, `quarantine`, `left_out`), who asked (`tenant`,
`principal`, `peer`, `request_id`, `rpc`), and what about (`action`, `kind`, `name`, `digest`; `reason`, `detail`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from os import O_APPEND, O_CREAT, O_WRONLY
from os import open as open_file
from pathlib import Path

from google.protobuf.message import Message

from gradrule.v1 import blob_pb2, program_pb2, rule_pb2
from gradrule_server.operations.logs import JsonFormatter, fields
from gradrule_server.operations.rates import RateBound
from gradrule_server.operations.request import Registration, Request, current
from gradrule_server.operations.text import bounded
from gradrule_server.operations.writing import LeftOut, LineHandler

REFUSALS = frozenset(
    {"UNAUTHENTICATED", "PERMISSION_DENIED", "OP_NOT_ALLOWED", "QUARANTINED", "QUOTA_EXCEEDED", "RULE_READ_ONLY"}
)
"""Reasons that say what a caller may not do; other errors are about what it asked for."""

STANDARD_OUTPUT = "-"

_FILE_MODE = 0o600
_MAX_NAME = 256
# Lines of one tenant's: these at once, then so many a second. Registrations are what the log is for, but repeating one
# costs its caller little.
_REFUSALS_AT_ONCE = 100
_REFUSALS_PER_SECOND = 1.0
_REGISTRATIONS_AT_ONCE = 1000
_REGISTRATIONS_PER_SECOND = 10.0

_log = logging.getLogger(__name__)
LOGGER = logging.getLogger("gradrule.audit")


def configure(path: str) -> None:
    """Audit lines go to a file (made readable for its owner alone), to standard output (`-`), or, without a path, to
    the server's log. A file that was moved away is made anew. `OSError` where it cannot be opened.
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
    """Appends to a file that its owner alone may read."""

    def __init__(self, path: Path) -> None:
        WatchedFileHandler.__init__(self, str(path), encoding="utf-8")
        self.left_out, self.is_failing = LeftOut(), False
        self._failures = RateBound(per_second=0.1, burst=1)

    def write(self, line: str) -> None:
        self.reopenIfNeeded()
        if self.stream is None:
            # It could not be made anew before.
            self.stream = self._open()
            self._statstream()
        super().write(line)

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk must be heard of, but not at each line, and it must not cost anybody an answer."""
        self.left_out.add()
        if self._failures.admits():
            _log.error("the audit log cannot be written", exc_info=sys.exc_info())

    def _open(self) -> TextIOWrapper:
        def owned(path: str, _: int) -> int:
            return open_file(path, O_WRONLY | O_APPEND | O_CREAT, _FILE_MODE)

        return open(self.baseFilename, "a", encoding="utf-8", opener=owned)


class AuditLog:
    """A sink: writes what is to be written of a request, and of engines' quarantines."""

    def __init__(self, refusals: RateBound | None = None, registrations: RateBound | None = None) -> None:
        self._refusals = refusals or RateBound(_REFUSALS_PER_SECOND, _REFUSALS_AT_ONCE)
        self._quarantines = RateBound(_REFUSALS_PER_SECOND, _REFUSALS_AT_ONCE)
        self._registrations = registrations or RateBound(_REGISTRATIONS_PER_SECOND, _REGISTRATIONS_AT_ONCE)
        self.left_out = 0
        """Lines that were left out since the start: there were too many, or they could not be written."""
        self._untold = self._untold_registrations = 0

    def __call__(self, request: Request) -> None:
        done = request.registration
        if done is not None:
            if not self._registrations.admits(request.tenant):
                return
            what = {"action": done.action, "kind": done.kind, "name": bounded(done.name, _MAX_NAME)}
            self._write(
                f"{done.action} {done.kind} {bounded(done.name, _MAX_NAME)}",
                "registration",
                request,
                digest=done.digest,
                **what,
            )
        elif _is_refusal(request) and self._refusals.admits(request.tenant):
            self._write(
                f"{request.rpc} {request.reason}", "refusal", request, reason=request.reason, detail=request.message
            )

    def quarantined(self, detail: str) -> None:
        """A program is refused from now on, for a while."""
        if self._quarantines.admits():
            LOGGER.info("quarantine", extra=fields(event="quarantine", detail=detail))

    def tell_left_out(self, unwritten: int = 0, *, may_write: bool = True) -> None:
        """Writes how many lines were left out since this was written last, if any were. Not called within requests.

        unwritten: how many more there were that could not be written. may_write: else this is told later.
        """
        registrations = self._registrations.take_left_out()
        count = registrations + self._refusals.take_left_out() + self._quarantines.take_left_out() + unwritten
        self.left_out += count
        self._untold += count
        self._untold_registrations += registrations
        if self._untold and may_write:
            told = fields(event="left_out", count=self._untold, registrations=self._untold_registrations)
            LOGGER.info("%d lines were left out", self._untold, extra=told)
            self._untold = self._untold_registrations = 0

    def _write(self, message: str, event: str, request: Request, **what: str) -> None:
        who = {"principal": request.principal, "peer": request.peer()}
        LOGGER.info(message, extra=fields(event=event, **{name: text for name, text in (what | who).items() if text}))


def _is_refusal(request: Request) -> bool:
    # What is refused within a stream and ends it has its line already.
    return request.reason in REFUSALS and not request.parts


def note_registration(rpc: str, request: Message, answer: object) -> None:
    """Notes what a good answer has registered, if its RPC registers anything."""
    registration_of = _REGISTRATIONS.get(rpc)
    under_way = current()
    if registration_of is not None and under_way is not None:
        under_way.registration = registration_of(request, answer)


def _rule_created(_: Message, answer: object) -> Registration | None:
    assert isinstance(answer, rule_pb2.CreateRuleResponse)
    return Registration("create", "rule", answer.rule.name, answer.rule.digest)


def _rule_deleted(request: Message, _: object) -> Registration | None:
    assert isinstance(request, rule_pb2.DeleteRuleRequest)
    return Registration("delete", "rule", _full("rules", request.name))


def _program_compiled(_: Message, answer: object) -> Registration | None:
    if not isinstance(answer, program_pb2.CompileProgramResponse) or not answer.program.name:
        # It was only checked.
        return None
    return Registration("create", "program", answer.program.name, answer.program.digests.program)


def _program_deleted(request: Message, _: object) -> Registration | None:
    assert isinstance(request, program_pb2.DeleteProgramRequest)
    return Registration("delete", "program", _full("programs", request.name))


def _blob_uploaded(_: Message, answer: object) -> Registration | None:
    assert isinstance(answer, blob_pb2.UploadBlobResponse)
    return Registration("create", "blob", answer.sha256, answer.sha256)


def _full(collection: str, name: str) -> str:
    return name if name.startswith(f"{collection}/") else f"{collection}/{name}"


_REGISTRATIONS: dict[str, Callable[[Message, object], Registration | None]] = {
    "RuleService/CreateRule": _rule_created,
    "RuleService/DeleteRule": _rule_deleted,
    "ProgramService/CompileProgram": _program_compiled,
    "ProgramService/DeleteProgram": _program_deleted,
    "BlobService/UploadBlob": _blob_uploaded,
}
