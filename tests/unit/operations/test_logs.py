"""Tests the lines of the log: their fields and limits, and that clients cannot forge lines."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gradrule_server.operations import logs
from gradrule_server.operations.log_writing import RateLimiter
from gradrule_server.operations.logs import escaped, one_line_json, truncated
from gradrule_server.operations.request_record import EngineRun, RequestRecord
from tests.unit.operations.records import make, refusal

HOSTILE = 'a\nINFO forged: line\r\x1b[2J\x9b31m\u202e\u2028\x7f\x00"\\ ä\ud800 and so on'

HOSTILE_HEADER = b"a secret\n\xff"


class Stream(io.StringIO):
    """A log that may claim to be a terminal."""

    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def root() -> Iterator[None]:
    """The root logger as it was, afterwards."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    of_grpc = logging.getLogger("grpc")
    of_grpc.handlers.clear()
    of_grpc.propagate = True


def log_to(form: logs.Format, level: str = "info", *, is_terminal: bool = False) -> Stream:
    """Returns what this thread logs from now on; other threads of the test process may log meanwhile."""
    stream, thread = Stream(is_terminal), threading.get_ident()
    logs.configure(level, form, stream)
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: record.thread == thread)
    return stream


@pytest.mark.parametrize(
    ("form", "is_terminal", "is_json"),
    [("auto", True, False), ("auto", False, True), ("json", True, True), ("text", False, False)],
)
@pytest.mark.usefixtures("root")
def test_format_is_text_on_a_terminal_and_json_elsewhere(form: logs.Format, is_terminal: bool, is_json: bool) -> None:
    stream = log_to(form, is_terminal=is_terminal)
    logging.getLogger("a.b").info("so %d", 3)
    logging.getLogger("a.b").debug("not this")
    (line,) = stream.lines
    if is_json:
        assert json.loads(line) | {"time": ""} == {"time": "", "level": "info", "logger": "a.b", "message": "so 3"}
    else:
        assert line.endswith(" INFO a.b: so 3")


@pytest.mark.usefixtures("root")
def test_lines_of_a_request_name_the_request() -> None:
    stream = log_to("json")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    make(
        metadata=(("x-request-id", "r1"), ("traceparent", trace)),
        tenant="ada",
        within=lambda _: logging.getLogger("deep").warning("here"),
    )
    line = json.loads(stream.getvalue())
    assert (line["request_id"], line["tenant"], line["rpc"]) == ("r1", "ada", "RuleService/GetRule")
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.usefixtures("root")
def test_clients_cannot_forge_lines(form: logs.Format) -> None:
    stream = log_to(form)
    logging.getLogger("a").info("got %s", HOSTILE, extra=logs.fields(name=HOSTILE))
    make(tenant=HOSTILE, within=lambda _: logging.getLogger("a").info("tenant"))
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert all(line.isprintable() for line in text.split("\n"))
    if form == "json":
        first, second = map(json.loads, stream.lines)
        assert (first["message"], first["name"], second["tenant"]) == (f"got {HOSTILE}", HOSTILE, HOSTILE)


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.usefixtures("root")
def test_tracebacks_cannot_forge_lines(form: logs.Format) -> None:
    stream = log_to(form)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("a").exception("failed")
    first, *more = stream.getvalue().removesuffix("\n").split("\n")
    assert all(line.startswith("    ") and line.isprintable() for line in more)
    assert (form == "json") == (not more)
    assert "Traceback" in (json.loads(first)["exception"] if form == "json" else more[0])


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.usefixtures("root")
def test_lines_are_truncated(form: logs.Format) -> None:
    stream = log_to(form)
    logging.getLogger("a").info("x" * 10**6, extra=logs.fields(name="y" * 10**6))
    assert 4000 < len(stream.getvalue()) < 5000
    assert f"({10**6 - 2048} characters more)" in stream.getvalue()


def test_text_is_truncated_and_escaped() -> None:
    assert truncated("abc", 3) == "abc"
    assert truncated("abcd", 3) == "abc… (1 characters more)"
    assert escaped("ä 日本 ok") == "ä 日本 ok"
    assert escaped("a\n\x1b\u202e\ud800") == r"a\n\x1b\u202e\ud800"
    for value in (HOSTILE, {"k\n": [HOSTILE, 1, None]}):
        assert json.loads(one_line_json(value)) == value
        assert one_line_json(value).isprintable()
    assert one_line_json({"a": {1}}) == '{"a": "{1}"}'


def access_lines(log: logs.AccessLog, stream: Stream, **request: Any) -> list[dict[str, Any]]:
    before = len(stream.lines)
    make(log, **request)
    return [json.loads(line) for line in stream.lines[before:]]


@pytest.mark.usefixtures("root")
def test_successful_frequent_rpcs_are_logged_at_debug_level() -> None:
    log, stream = logs.AccessLog(), log_to("json")
    assert access_lines(log, stream, rpc="GradientService/Evaluate") == []
    assert access_lines(log, stream, rpc="GradientService/StreamEvaluate/evaluate") == []
    (refused,) = access_lines(log, stream, rpc="GradientService/Evaluate", fails=refusal("MISSING_FEED", "x"))
    assert (refused["reason"], refused["message"]) == ("MISSING_FEED", "GradientService/Evaluate MISSING_FEED: x")
    (made,) = access_lines(log, stream, rpc="RuleService/CreateRule")
    assert made["reason"] == "OK"
    assert made["seconds"] >= 0
    debugged = log_to("json", "debug")

    def run(request: RequestRecord) -> None:
        request.sent_to_engine_ns = 5
        request.read_engine_run = lambda: EngineRun(10**6, 10**9, "CPU:0")

    (good,) = access_lines(log, debugged, rpc="GradientService/Evaluate", within=run)
    assert (good["level"], good["queue_seconds"], good["run_seconds"]) == ("debug", 0.001, 1.0)


@pytest.mark.usefixtures("root")
def test_rate_of_access_lines_is_limited() -> None:
    now = [0.0]
    log, stream = logs.AccessLog(RateLimiter(1, 5, lambda: now[0])), log_to("json")
    for _ in range(100):
        make(log, fails=refusal("UNKNOWN_RULE"))
    assert len(stream.lines) == 5
    log.log_dropped()
    assert json.loads(stream.lines[-1])["message"] == "95 lines of requests were left out"
    now[0] = 1.0
    (refused,) = access_lines(log, stream, fails=refusal("UNKNOWN_RULE"))
    assert refused["reason"] == "UNKNOWN_RULE"
    log.log_dropped()
    assert len(stream.lines) == 7


@pytest.mark.usefixtures("root")
def test_tenants_have_separate_rate_limits() -> None:
    log, stream = logs.AccessLog(RateLimiter(1, 5, lambda: 0.0)), log_to("json")
    for tenant, reported in (("greedy", 5), (None, 5), ("default", 5)):
        before = len(stream.lines)
        for _ in range(100):
            make(log, fails=refusal("UNKNOWN_RULE"), tenant=tenant)
        assert [json.loads(line).get("tenant") for line in stream.lines[before:]] == [tenant] * reported


def test_rate_limiter_limits_each_key() -> None:
    now = [0.0]
    bound = RateLimiter(2, 3, lambda: now[0])
    assert [bound.allow("a") for _ in range(5)] == [True] * 3 + [False] * 2
    assert bound.allow("b")
    now[0] = 1.0
    assert [bound.allow("a") for _ in range(3)] == [True, True, False]
    assert (bound.take_dropped(), bound.take_dropped()) == (3, 0)
    now[0] = 100.0
    assert [bound.allow("a") for _ in range(4)] == [True] * 3 + [False]
    for number in range(3000):
        bound.allow(f"k{number}")
    assert bound.take_dropped() == 1


@pytest.mark.usefixtures("root")
def test_grpc_lines_hold_no_values_and_are_limited() -> None:
    stream = log_to("json")
    of_grpc = logging.getLogger("grpc._cython.cygrpc")
    for _ in range(500):
        try:
            HOSTILE_HEADER.decode()
        except UnicodeDecodeError:
            of_grpc.exception("Invalid encoding on %s", HOSTILE_HEADER)
            of_grpc.exception("Unexpected [UnicodeDecodeError] raised by servicer method [/secret]")
    assert 10 < len(stream.lines) < 30
    assert "secret" not in stream.getvalue()
    reported = [json.loads(line)["message"] for line in stream.lines]
    assert reported[:2] == ["gRPC: Invalid encoding on … (UnicodeDecodeError)", "gRPC: Unexpected (UnicodeDecodeError)"]
    assert all("exception" not in json.loads(line) for line in stream.lines)


@pytest.mark.usefixtures("root")
def test_standard_error_is_logged_line_by_line() -> None:
    stream, before = log_to("json"), sys.stderr
    with logs.standard_error_as_lines():
        print("first\x1b[2J", "and more", file=sys.stderr)
        print("half", end="", file=sys.stderr)
        print(" a line\n\n", file=sys.stderr)
        for _ in range(500):
            print("again", file=sys.stderr)
    assert sys.stderr is before
    reported = [json.loads(line)["message"] for line in stream.lines]
    assert reported[:3] == ["first\\x1b[2J and more", "half a line", "again"]
    assert len(reported) < 30
