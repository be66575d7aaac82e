"""Writes the server's log as JSON lines, or as text on a terminal; lines within a request name the request.

No line holds values of tensors or credentials. Text from clients (names, messages) is truncated and escaped. A record
is one line; only tracebacks in text format have several lines, which are indented.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from gradrule_server.operations.log_writing import LineHandler, RateLimiter
from gradrule_server.operations.request_record import OK, RequestRecord, current

Format = Literal["auto", "json", "text"]

MAX_TEXT = 2048
"""Longest text from a client in a line of the log, in characters."""
_MAX_TRACE = 16 * 1024
_FIELDS = "gradrule_fields"

# Successful calls of these frequent RPCs are logged at debug level.
_FREQUENT_RPCS = ("GradientService/", "SessionService/", "BlobService/FindMissingBlobs", "AdminService/")
_LINES_PER_SECOND = 20.0
_LINES_AT_ONCE = 400

# Limits for lines that gRPC logs: clients can cause any number of them.
_GRPC_LINES_PER_SECOND = 1.0
_GRPC_LINES_AT_ONCE = 20

_access = logging.getLogger("gradrule.access")
_grpc = logging.getLogger("gradrule_server.grpc")
_printed = logging.getLogger("gradrule_server.stderr")


def configure(level: str, form: Format, stream: TextIO | None = None) -> None:
    """Sets up logging to a stream (default: stderr). `auto`: text on a terminal, JSON elsewhere."""
    stream = sys.stderr if stream is None else stream
    handler = LineHandler(stream)
    is_text = form == "text" or (form == "auto" and stream.isatty())
    handler.setFormatter(TextFormatter() if is_text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    grpc_logger = logging.getLogger("grpc")
    grpc_logger.handlers[:] = [GrpcHandler()]
    grpc_logger.propagate = False


def fields(**values: object) -> dict[str, Any]:
    """Returns the argument `extra` of a log call that adds these fields to the line."""
    return {_FIELDS: values}


@contextlib.contextmanager
def standard_error_as_lines() -> Iterator[None]:
    """Logs what Python code prints to standard error in the body of the `with` statement, at a limited rate.

    gRPC prints tracebacks of failures that clients can cause.
    """
    previous = sys.stderr
    sys.stderr = _LoggingStream()
    try:
        yield
    finally:
        sys.stderr = previous


class _LoggingStream(io.TextIOBase):
    """A text stream that logs each line."""

    def __init__(self) -> None:
        super().__init__()
        self._limiter = RateLimiter(_GRPC_LINES_PER_SECOND, _GRPC_LINES_AT_ONCE)
        self._unfinished_line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, unfinished = (self._unfinished_line + text).split("\n")
        # Longer lines are truncated anyway.
        self._unfinished_line = unfinished[:MAX_TEXT]
        for line in lines:
            if line.strip() and self._limiter.allow():
                _printed.warning("%s%s", escaped(line.strip()), _dropped_clause(self._limiter))
        return len(text)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, fields of the request, fields of the line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": truncated(record.getMessage()),
        }
        line |= _fields_of(record)
        if record.exc_info:
            line["exception"] = truncated(self.formatException(record.exc_info), _MAX_TRACE)
        return one_line_json(line)


class TextFormatter(logging.Formatter):
    """Formats a record as `TIME LEVEL LOGGER: MESSAGE [field=value …]`."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {escaped(record.getMessage())}"
        found = _fields_of(record)
        if found:
            line += f" [{' '.join(f'{name}={escaped(str(value))}' for name, value in found.items())}]"
        if record.exc_info:
            trace = truncated(self.formatException(record.exc_info), _MAX_TRACE)
            line += "".join(f"\n    {escaped(part)}" for part in trace.splitlines())
        return line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the fields of the current request, followed by those of the line."""
    found: dict[str, object] = {}
    own: dict[str, object] = getattr(record, _FIELDS, {})
    request = current()
    if request is not None:
        found |= {"request_id": request.id, "rpc": request.rpc}
        if request.tenant:
            found["tenant"] = request.tenant
        if request.trace_id:
            found["trace_id"] = request.trace_id
    for name, value in own.items():
        found[name] = truncated(value) if isinstance(value, str) else value
    return found


class AccessLog:
    """A sink that logs one line for each request, with the reason and message of an error.

    Successful calls of frequent RPCs are logged at debug level, all others at info level. Lines at info level are
    limited to 20 a second for each tenant, so that the errors of one tenant neither fill the disk nor hide those of
    others. All callers that are not authenticated share one limit.
    """

    def __init__(self, limiter: RateLimiter | None = None) -> None:
        self._limiter = limiter or RateLimiter(_LINES_PER_SECOND, _LINES_AT_ONCE)

    def __call__(self, request: RequestRecord) -> None:
        is_frequent = request.reason == OK and request.rpc.startswith(_FREQUENT_RPCS)
        level = logging.DEBUG if is_frequent else logging.INFO
        if not _access.isEnabledFor(level):
            return
        if level >= logging.INFO and not self._limiter.allow(request.tenant):
            return
        message = f": {request.message}" if request.message else ""
        _access.log(
            level,
            "%s %s%s",
            request.rpc,
            request.reason,
            message,
            extra=fields(reason=request.reason, **measurements(request)),
        )

    def log_dropped(self) -> None:
        """Logs how many lines were dropped since the last call, if any. Must not be called within a request."""
        dropped = self._limiter.take_dropped()
        if dropped:
            _access.warning("%d lines of requests were left out", dropped)


class GrpcHandler(logging.Handler):
    """Logs lines of gRPC's Python layer at a limited rate, without values that clients sent.

    gRPC logs each header that is not UTF-8 with two tracebacks; this handler keeps the text of gRPC's source and the
    type of the exception.
    """

    def __init__(self, limiter: RateLimiter | None = None) -> None:
        super().__init__()
        self._limiter = limiter or RateLimiter(_GRPC_LINES_PER_SECOND, _GRPC_LINES_AT_ONCE)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._limiter.allow():
            return
        # In messages that gRPC formats itself, names from clients follow a bracket.
        text = (
            record.msg.partition("[")[0].replace("%s", "…").strip()
            if isinstance(record.msg, str)
            else type(record.msg).__name__
        )
        failure = record.exc_info[0] if record.exc_info else None
        _grpc.log(
            record.levelno,
            "gRPC: %s%s%s",
            text,
            "" if failure is None else f" ({failure.__name__})",
            _dropped_clause(self._limiter),
        )


def _dropped_clause(limiter: RateLimiter) -> str:
    dropped = limiter.take_dropped()
    return f"; {dropped} such lines were left out before" if dropped else ""


def truncated(text: str, limit: int = MAX_TEXT) -> str:
    """Returns at most `limit` characters of a text, with the number of the others."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} characters more)"


def escaped(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a truncated text in which unprintable characters are escaped (`\\n`, `\\x1b`, `\\u202e`)."""
    text = truncated(text, limit)
    return text if text.isprintable() else "".join(map(_printable, text))


def one_line_json(value: object) -> str:
    """Returns JSON on one line, with unprintable characters escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if text.isprintable():
        return text
    # Unprintable characters occur in strings only, where JSON has escapes for them.
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def measurements(request: RequestRecord) -> dict[str, object]:
    """Returns the durations (seconds) and sizes (bytes) of an ended request, as fields of a line."""
    found: dict[str, object] = {"seconds": round(request.seconds, 6)}
    if request.compile_ns:
        found["compile_seconds"] = round(request.compile_ns / 1e9, 6)
    if request.has_run:
        run = request.engine_run
        found |= {"queue_seconds": round(run.queue_ns / 1e9, 6), "run_seconds": round(run.run_ns / 1e9, 6)}
    return found | {"bytes_in": request.bytes_in, "bytes_out": request.bytes_out}
