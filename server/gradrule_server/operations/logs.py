"""The server's log: JSON lines, or text for people at a terminal; each line of a request's names the request.

No line holds a value of a tensor or a credential. What strangers chose (names, messages) is bounded and escaped: one
record is one line, and only a traceback, in text, is several, each of them indented.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from gradrule_server.operations.rates import RateBound
from gradrule_server.operations.request import OK, Request, current
from gradrule_server.operations.text import MAX_TEXT, bounded, one_line_json, plain
from gradrule_server.operations.writing import LineHandler

Format = Literal["auto", "json", "text"]

_MAX_TRACE = 16 * 1024
_FIELDS = "gradrule_fields"

# RPCs whose good calls are many: their lines are for debugging.
_HOT = ("GradientService/", "SessionService/", "BlobService/FindMissingBlobs", "AdminService/")
_LINES_PER_SECOND = 20.0
_LINES_AT_ONCE = 400

# Of lines that gRPC writes by itself: clients can cause as many as they like.
_GRPC_LINES_PER_SECOND = 1.0
_GRPC_LINES_AT_ONCE = 20

_access = logging.getLogger("gradrule.access")
_grpc = logging.getLogger("gradrule_server.grpc")
_printed = logging.getLogger("gradrule_server.stderr")


def configure(level: str, form: Format, stream: TextIO | None = None) -> None:
    """Logs to a stream (stderr if none is given). `auto`: text on a terminal, JSON elsewhere."""
    stream = sys.stderr if stream is None else stream
    handler = LineHandler(stream)
    is_text = form == "text" or (form == "auto" and stream.isatty())
    handler.setFormatter(TextFormatter() if is_text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    of_grpc = logging.getLogger("grpc")
    of_grpc.handlers[:] = [GrpcLines()]
    of_grpc.propagate = False


def fields(**values: object) -> dict[str, Any]:
    """What `extra` of a log call takes to add fields to a line."""
    return {_FIELDS: values}


@contextlib.contextmanager
def standard_error_as_lines() -> Iterator[None]:
    """Within it what Python code prints to standard error is logged, bounded as gRPC's own lines are: gRPC prints
    tracebacks of failures that clients can cause.
    """
    before = sys.stderr
    sys.stderr = _Printed()
    try:
        yield
    finally:
        sys.stderr = before


class _Printed(io.TextIOBase):
    """Logs each line that is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._bound = RateBound(_GRPC_LINES_PER_SECOND, _GRPC_LINES_AT_ONCE)
        self._begun = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, begun = (self._begun + text).split("\n")
        # No line of the log is longer.
        self._begun = begun[:MAX_TEXT]
        for line in lines:
            if line.strip() and self._bound.admits():
                left_out = self._bound.take_left_out()
                told = f"; {left_out} such lines were left out before" if left_out else ""
                _printed.warning("%s%s", plain(line.strip()), told)
        return len(text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the request's fields and the line's own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": bounded(record.getMessage()),
        }
        line |= _fields_of(record)
        if record.exc_info:
            line["exception"] = bounded(self.formatException(record.exc_info), _MAX_TRACE)
        return one_line_json(line)


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE [field=value …]`."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {plain(record.getMessage())}"
        found = _fields_of(record)
        if found:
            line += f" [{' '.join(f'{name}={plain(str(value))}' for name, value in found.items())}]"
        if record.exc_info:
            trace = bounded(self.formatException(record.exc_info), _MAX_TRACE)
            line += "".join(f"\n    {plain(part)}" for part in trace.splitlines())
        return line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The request's fields, then the line's own."""
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
        found[name] = bounded(value) if isinstance(value, str) else value
    return found


class AccessLog:
    """A sink: one line for each request, refused ones with reason and message.

    Good calls of the RPCs that are called often are logged at debug, all else at info, and the latter no faster than
    20 a second and tenant in the long run, so that nobody's refusals fill a disk or hide another's. Callers that are
    not known have one budget together.
    """

    def __init__(self, bound: RateBound | None = None) -> None:
        self._bound = bound or RateBound(_LINES_PER_SECOND, _LINES_AT_ONCE)

    def __call__(self, request: Request) -> None:
        is_hot = request.reason == OK and request.rpc.startswith(_HOT)
        level = logging.DEBUG if is_hot else logging.INFO
        if not _access.isEnabledFor(level):
            return
        if level >= logging.INFO and not self._bound.admits(request.tenant):
            return
        told = f": {request.message}" if request.message else ""
        _access.log(
            level,
            "%s %s%s",
            request.rpc,
            request.reason,
            told,
            extra=fields(reason=request.reason, **measured(request)),
        )

    def tell_left_out(self) -> None:
        """Writes how many lines were left out since this was written last, if any were. Not called within requests."""
        left_out = self._bound.take_left_out()
        if left_out:
            _access.warning("%d lines of requests were left out", left_out)


class GrpcLines(logging.Handler):
    """Logs what gRPC's Python layer logs: a bounded number of lines, and none of the values that clients sent.

    gRPC writes each header that is not UTF-8 with two tracebacks. Here its line is the text that gRPC's own source
    holds, and the type of the exception.
    """

    def __init__(self, bound: RateBound | None = None) -> None:
        super().__init__()
        self._bound = bound or RateBound(_GRPC_LINES_PER_SECOND, _GRPC_LINES_AT_ONCE)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._bound.admits():
            return
        # gRPC formats some messages before it logs them; names that clients chose stand in brackets there.
        told = (
            record.msg.partition("[")[0].replace("%s", "…").strip()
            if isinstance(record.msg, str)
            else type(record.msg).__name__
        )
        failure = record.exc_info[0] if record.exc_info else None
        left_out = self._bound.take_left_out()
        _grpc.log(
            record.levelno,
            "gRPC: %s%s%s",
            told,
            "" if failure is None else f" ({failure.__name__})",
            f"; {left_out} such lines were left out before" if left_out else "",
        )


def measured(request: Request) -> dict[str, object]:
    """What was measured of a request that has ended, in seconds and bytes."""
    found: dict[str, object] = {"seconds": round(request.seconds, 6)}
    if request.compile_ns:
        found["compile_seconds"] = round(request.compile_ns / 1e9, 6)
    if request.has_run:
        run = request.engine_run
        found |= {"queue_seconds": round(run.queue_ns / 1e9, 6), "run_seconds": round(run.run_ns / 1e9, 6)}
    return found | {"bytes_in": request.bytes_in, "bytes_out": request.bytes_out}
