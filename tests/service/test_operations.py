"""What operators see of a server: metrics, traces, logs, the audit log, the status."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

import gradrule as gr
from gradrule.cli.main import main
from tests.service import raw
from tests.service.answers import refused
from tests.service.collector import Collector, running_collector
from tests.service.guarded import token_command
from tests.service.health import wait_for_another_engine
from tests.service.servers import (
    STOP_TIMEOUT_S,
    RunningServer,
    free_port,
    running_server,
    serve_command,
    server_environment,
)
from tests.waiting import wait_until

_MARKS = itertools.count(1)

HOSTILE = 'no\nINFO forged: "line"\x1b[2J\x9b31m\u202e'


@dataclass(frozen=True)
class ObservedServer:
    """Holds a server and reads its metrics, logs and spans."""

    server: RunningServer
    client: Any
    metrics_url: str
    audit: Path
    collector: Collector

    def metrics(self) -> dict[str, float]:
        """Returns all samples: `name{label="value"}` → value."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            text = answer.read().decode()
        return {
            sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def log(self) -> list[dict[str, Any]]:
        """Returns the log's lines; each must be JSON."""
        return [json.loads(line) for line in self.log_text().split("\n") if line.startswith("{")]

    def log_text(self) -> str:
        """Returns the log so far, after all earlier lines are written: a thread writes them in order."""
        mark = f"mark-{next(_MARKS)}"
        call(self, "AdminService/GetServerStatus", b"", ("x-request-id", mark))

        def probe() -> str | None:
            text = self.server.log.read_text()
            return text if f'"{mark}"' in text and text.endswith("\n") else None

        return wait_until(probe, "line in the log")

    def audited(self, count: int = 0) -> list[dict[str, Any]]:
        """Waits for `count` lines of the audit log and returns them."""

        def probe() -> list[dict[str, Any]] | None:
            *lines, rest = self.audit.read_text().split("\n")
            return [json.loads(line) for line in lines] if len(lines) >= count and not rest else None

        return wait_until(probe, f"{count} lines in the audit log")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedServer]:
    folder = tmp_path_factory.mktemp("watched")
    port = free_port()
    with running_collector() as collector:
        flags = ("--metrics-port", str(port), "--audit-log", str(folder / "audit.jsonl"), "--log-level", "debug")
        bounds = ("--otel-endpoint", collector.endpoint, "--max-blob-bytes", "8192")
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "200"}
        with (
            running_server(folder, (*flags, *bounds), environment) as server,
            # Each call must count as a unary call, not as part of a stream.
            gr.connect(server.target, stream=False) as client,
        ):
            yield ObservedServer(server, client, f"http://127.0.0.1:{port}/metrics", folder / "audit.jsonl", collector)


def sample(metrics: dict[str, float], name: str, **labels: str) -> float:
    return metrics.get(f"gradrule_{name}" + json.dumps(labels, sort_keys=True), 0.0)


def sign() -> gr.Graph:
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
    return g


def test_metrics_count_requests(watched: ObservedServer) -> None:
    before = watched.metrics()
    program = watched.client.compile(sign(), ys="y", xs="x", overrides={"Sign": "ste"})
    for _ in range(5):
        program(x=[1.0])
    with refused("MISSING_FEED"):
        program()
    with program.forward({"x": [1.0, 2.0]}) as handle:
        handle.vjp()
    after = watched.metrics()

    def grown(name: str, **labels: str) -> float:
        return sample(after, name, **labels) - sample(before, name, **labels)

    evaluate = "GradientService/Evaluate"
    assert grown("requests_total", rpc=evaluate, reason="OK") == 5
    assert grown("requests_total", rpc=evaluate, reason="MISSING_FEED") == 1
    assert grown("requests_total", rpc="ProgramService/CompileProgram", reason="OK") == 1
    assert grown("requests_total", rpc="GradientService/StreamEvaluate/pull_back", reason="OK") == 1
    assert grown("request_seconds_count", rpc=evaluate) == 6
    assert grown("run_seconds_count") == 7
    assert 0 < grown("run_seconds_sum") < 30
    assert 0 < grown("queue_seconds_sum") < 30
    assert grown("compile_seconds_count") == 2
    assert 0 < grown("compile_seconds_sum") < 60
    assert grown("received_bytes_total", rpc=evaluate) > 100
    assert grown("sent_bytes_total", rpc=evaluate) > 100
    assert grown("cache_hits_total", cache="programs") >= 5
    assert grown("cache_misses_total", cache="loaded") == 2
    assert sample(after, "engine_up", engine="0", device="CPU:0") == 1
    assert sample(after, "engine_resident_bytes", engine="0", device="CPU:0") > 1e8
    assert sample(after, "requests_in_flight") == 0


def test_metrics_are_served_at_one_path_only(watched: ObservedServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(watched.metrics_url.replace("/metrics", "/"), timeout=10)


def test_lost_engine_appears_in_metrics_and_audit_log(watched: ObservedServer) -> None:
    def restarts() -> float:
        return sum(value for name, value in watched.metrics().items() if "engine_restarts_total" in name)

    before, engine = restarts(), watched.server.wait_for_engine()
    os.kill(engine, signal.SIGKILL)
    wait_for_another_engine(watched.server, engine)
    wait_until(lambda: True if restarts() == before + 1 else None, "a restart in the metrics")
    (status,) = watched.client.server_status().engines
    assert sum(status.ended.values()) == before + 1
    assert status.pid not in (None, engine)


def test_audit_log_records_administrative_calls(watched: ObservedServer) -> None:
    before = len(watched.audited())
    client = watched.client
    made = client.create_rule("Audited", "2 * dy")
    program = client.compile(sign(), ys="y", xs="x", overrides={"Sign": "Audited"})
    client.explain(sign(), ys="y", xs="x", overrides={"Sign": "Audited"})
    blob = client.upload(b"some bytes")
    with refused("QUOTA_EXCEEDED"):
        client.upload(bytes(9000))
    program.delete()
    client.delete_rule("Audited")
    with refused("RULE_READ_ONLY"):
        client.delete_rule("MatMul")
    lines = watched.audited(before + 7)[before:]
    assert [(line.get("action"), line.get("kind"), line.get("name"), line.get("reason")) for line in lines] == [
        ("create", "rule", "rules/Audited", None),
        ("create", "program", program.name, None),
        ("create", "blob", blob, None),
        (None, None, None, "QUOTA_EXCEEDED"),
        ("delete", "program", program.name, None),
        ("delete", "rule", "rules/Audited", None),
        (None, None, None, "RULE_READ_ONLY"),
    ]
    assert (lines[0]["digest"], lines[1]["digest"], lines[2]["digest"]) == (made.digest, program.digests.program, blob)
    assert {line["tenant"] for line in lines} == {"default"}
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in lines)
    assert all(line["request_id"] for line in lines)


def call(watched: ObservedServer, method: str, data: bytes, *metadata: tuple[str, str]) -> tuple[Any, dict[str, Any]]:
    """Sends a call without a credential; returns its status and trailing metadata."""
    with grpc.insecure_channel(watched.server.target) as channel:
        _, done = channel.unary_unary(f"/gradrule.v1.{method}").with_call(data, metadata=metadata, timeout=30)
        return done.code(), dict(done.trailing_metadata())


def test_request_ids_are_returned_and_logged(watched: ObservedServer) -> None:
    data = raw.request(raw.sign_graph()).SerializeToString()
    code, trailers = call(watched, "GradientService/Evaluate", data, ("x-request-id", "mine-1"))
    assert (code, trailers["x-request-id"]) == (grpc.StatusCode.OK, "mine-1")
    _, trailers = call(watched, "GradientService/Evaluate", data, ("x-request-id", "not an id"))
    made = trailers["x-request-id"]
    assert made != "not an id"
    for known in ("mine-1", made):
        (line,) = (line for line in watched.log() if line.get("request_id") == known)
        assert (line["rpc"], line["reason"], line["tenant"]) == ("GradientService/Evaluate", "OK", "default")
        assert line["run_seconds"] > 0


def test_error_holds_the_request_id(watched: ObservedServer) -> None:
    with refused("UNKNOWN_RULE") as refusal:
        watched.client.get_rule("nobody")
    (line,) = (line for line in watched.log() if line.get("request_id") == refusal.error.request_id)
    assert line["reason"] == "UNKNOWN_RULE"
    assert "nobody" in line["message"]


def test_requests_of_a_stream_have_their_own_ids(watched: ObservedServer) -> None:
    with watched.client.compile(sign(), ys="y", xs="x").forward({"x": [1.0]}) as handle:
        handle.vjp()
    parts = [
        line["request_id"]
        for line in watched.log()
        if line.get("rpc", "").startswith("GradientService/StreamEvaluate/")
    ]
    streams = {part.rpartition("/")[0] for part in parts}
    assert len(parts) == len(set(parts)) > 2 * len(streams)


def test_log_lines_cannot_be_forged(watched: ObservedServer) -> None:
    with refused("UNKNOWN_RULE"):
        watched.client.get_rule(HOSTILE)
    with pytest.raises(gr.GradruleError):
        watched.client.evaluate(sign(), {HOSTILE: [1.0]}, fetches=[HOSTILE])
    text = watched.log_text()
    assert all(line.isprintable() for line in text.split("\n"))
    assert not any(line.startswith("INFO forged") for line in text.split("\n"))
    assert any("forged" in line["message"] for line in watched.log())


def test_log_holds_neither_tensors_nor_tokens(watched: ObservedServer) -> None:
    with gr.connect(watched.server.target, token="t0ken-of-mine") as client:
        client.evaluate(sign(), {"x": [-1234567.0]}, fetches=["y"])
        with refused("MISSING_FEED"):
            client.evaluate(sign(), {}, fetches=["y"])
    text = watched.log_text() + watched.audit.read_text()
    assert "t0ken-of-mine" not in text
    assert "-1234567" not in text


def test_trace_covers_front_end_and_engine(watched: ObservedServer) -> None:
    trace_id, caller = os.urandom(16).hex(), "b7ad6b7169203331"
    request = raw.request(raw.sign_graph(), fetches=["y"], vjp=raw.vjp())
    request.spec.overrides.add(rule="ste").selector.op_type = "Sign"
    call(
        watched, "GradientService/Evaluate", request.SerializeToString(), ("traceparent", f"00-{trace_id}-{caller}-01")
    )
    spans = wait_until(
        lambda: found if len(found := watched.collector.trace(trace_id)) == 4 else None, "trace at the collector"
    )
    by_name = {span.name: span for span in spans}
    rpc, run = by_name["gradrule.v1.GradientService/Evaluate"], by_name["run"]
    assert (rpc.service, rpc.parent_id) == ("gradrule", caller)
    assert (run.service, run.attributes["gradrule.device"]) == ("gradrule-engine", "CPU:0")
    assert {by_name[name].parent_id for name in ("compile", "queue", "run")} == {rpc.span_id}
    compiled, queue = by_name["compile"], by_name["queue"]
    times = [rpc.start_ns, compiled.start_ns, compiled.end_ns, queue.end_ns, run.end_ns, rpc.end_ns]
    slack_ns = 1_000_000
    assert all(later - earlier > -slack_ns for earlier, later in itertools.pairwise(times))
    assert any(line.get("trace_id") == trace_id for line in watched.log())


def test_server_status_reports_engines_and_usage(watched: ObservedServer) -> None:
    status = watched.client.server_status()
    assert status.ready
    assert status.version == gr.__version__
    assert status.tensorflow_version.startswith("2.")
    (engine,) = status.engines
    assert engine.pid == watched.server.engine_pid()
    assert status.requests.used == 1
    assert {cache.name for cache in status.caches} == {"programs", "loaded"}
    assert [tenant.name for tenant in status.tenants] == ["default"]


def test_status_is_printed_on_the_command_line(watched: ObservedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", watched.server.target, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["engines"][0]["pid"] == watched.server.engine_pid()
    # stdout is a pipe: the status is printed once.
    assert main(["status", "--target", watched.server.target]) == 0
    text = capsys.readouterr().out
    assert "TensorFlow 2." in text
    assert str(watched.server.engine_pid()) in text


def test_live_status_table_updates_until_interrupted(watched: ObservedServer) -> None:
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gradrule.cli", "status", "--target", watched.server.target, "--interval", "0.1"]
    environment = server_environment({"TERM": "xterm", "COLUMNS": "160", "LINES": "50"})
    # The test process may ignore SIGINT, and child processes inherit that.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    finally:
        signal.signal(signal.SIGINT, previous)
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"TensorFlow") < 3:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_metrics_and_status_are_off_by_default(server: RunningServer, tmp_path: Path) -> None:
    with running_server(tmp_path, ["--no-admin", "--log-format", "text"]) as plain, gr.connect(plain.target) as client:
        with refused("UNSUPPORTED"):
            client.server_status()
        with refused("UNKNOWN_RULE"):
            client.get_rule(HOSTILE)
        told = "INFO gradrule.access: RuleService/GetRule UNKNOWN_RULE"
        wait_until(lambda: True if told in plain.log.read_text() else None, "a line in the log")
        text = plain.log.read_text()
        assert "[request_id=" in text
        assert all(line.isprintable() for line in text.split("\n"))


def test_unread_log_delays_neither_callers_nor_shutdown(tmp_path: Path) -> None:
    """Nobody reads the log here. Calls without credentials have no tenant."""
    tokens, audit = tmp_path / "tokens", tmp_path / "audit.jsonl"
    token = token_command("new", "--tenant", "default", "--file", str(tokens)).strip()
    flags = ("--port", "0", "--data-dir", str(tmp_path / "registry"), "--spares", "0", "--log-level", "debug")
    guards = ("--tokens", str(tokens), "--audit-log", str(audit))
    with subprocess.Popen(
        serve_command(*flags, *guards), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=server_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
            target = process.stdout.readline().decode().removeprefix("gradrule: listening on ").strip()
            with gr.connect(target, token=token, timeout=30.0) as client:
                for _ in range(300):
                    client.evaluate(sign(), {"x": [1.0]}, fetches=["y"])
                client.create_rule("Unheard", "2 * dy")
            with gr.connect(target, timeout=30.0) as stranger, refused("UNAUTHENTICATED"):
                stranger.get_rule("Unheard")
            waiting = int.from_bytes(fcntl.ioctl(process.stderr, termios.FIONREAD, bytes(4)), sys.byteorder)
            assert waiting > 3000, "the pipe is not full: this shows nothing"
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0
        finally:
            process.kill()
    made, turned_away = (json.loads(line) for line in audit.read_text().splitlines())
    assert (made["event"], made["tenant"]) == ("registration", "default")
    assert (turned_away["reason"], turned_away.get("tenant")) == ("UNAUTHENTICATED", None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--otel-endpoint", "collector:4317"], ["--otel-endpoint", "http://HOST:PORT"]),
        (["--log-format", "xml"], ["--log-format", "xml"]),
        (["--metrics-port", "70000"], ["--metrics-port", "70000"]),
        (["--audit-log", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_invalid_settings_are_refused(flags: list[str], words: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        serve_command("--port", "0", "--data-dir", str(tmp_path), *flags),
        capture_output=True,
        text=True,
        timeout=60,
        env=server_environment(),
        check=False,
    )
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    for word in words:
        assert word in ended.stderr


def test_metrics_port_in_use_is_reported(watched: ObservedServer, tmp_path: Path) -> None:
    taken = watched.metrics_url.removesuffix("/metrics").rpartition(":")[2]
    ended = subprocess.run(
        serve_command("--port", "0", "--data-dir", str(tmp_path), "--metrics-port", taken),
        capture_output=True,
        text=True,
        timeout=60,
        env=server_environment(),
        check=False,
    )
    assert ended.returncode == 1
    assert f"metrics on 127.0.0.1:{taken}" in ended.stderr
    assert "Traceback" not in ended.stderr
