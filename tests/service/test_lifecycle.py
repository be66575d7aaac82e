"""Settings, start, health, drain, and what survives a server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from tests.processes import has_ended
from tests.service import loop_graphs, raw, servers
from tests.service.answers import assert_close, refused
from tests.service.health import (
    GRADIENTS,
    NOT_SERVING,
    SERVING,
    health,
    recorded_health,
    wait_for_another_engine,
)
from tests.service.servers import RunningServer, running_server, serve_command, server_environment
from tests.waiting import wait_until


def refused_start(*flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Starts a server that must fail, and returns how it ended."""
    return subprocess.run(
        serve_command(*flags),
        capture_output=True,
        text=True,
        timeout=90,
        env=server_environment(environment),
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (["--prot", "0"], {}, ["--prot", "Did you mean", "--port"]),
        (["--port", "many"], {}, ["--port", "many"]),
        (["--port", "99999"], {}, ["--port", "99999"]),
        (["--device", "tpu"], {}, ["--device", "tpu", "gpu:N"]),
        ([], {"GRADRULE_PROT": "0"}, ["GRADRULE_PROT", "GRADRULE_PORT"]),
        ([], {"GRADRULE_MAX_MESSAGE_BYTES": "lots"}, ["GRADRULE_MAX_MESSAGE_BYTES", "lots"]),
    ],
)
def test_invalid_settings_are_refused(flags: list[str], environment: dict[str, str], words: list[str]) -> None:
    ended = refused_start(*flags, environment=environment)
    assert ended.returncode == 2
    assert not ended.stdout
    assert "Traceback" not in ended.stderr
    for word in words:
        assert word in ended.stderr


def test_missing_gpu_is_refused(tmp_path: Path) -> None:
    flags = ("--port", "0", "--data-dir", str(tmp_path), "--device", "gpu:0")
    ended = refused_start(*flags, environment={"CUDA_VISIBLE_DEVICES": "-1"})
    assert ended.returncode == 1
    assert "listening" not in ended.stdout
    assert "Traceback" not in ended.stderr
    assert "gpu:0" in ended.stderr.lower()


def test_port_in_use_is_refused(server: RunningServer, tmp_path: Path) -> None:
    port = server.target.rpartition(":")[2]
    ended = refused_start("--port", port, "--data-dir", str(tmp_path))
    assert ended.returncode == 1
    told = f"gradrule serve: cannot listen on 127.0.0.1:{port}: Address already in use; choose another port: --port\n"
    assert ended.stderr.endswith(told)


def test_second_server_on_same_folder_is_refused(server: RunningServer) -> None:
    ended = refused_start("--port", "0", "--data-dir", str(server.data_dir / "registry"))
    assert ended.returncode == 1
    assert str(server.data_dir / "registry") in ended.stderr
    assert "Traceback" not in ended.stderr


def test_flag_wins_over_environment(tmp_path: Path) -> None:
    environment = {"GRADRULE_MAX_MESSAGE_BYTES": "4KiB", "GRADRULE_REFLECTION": "false"}
    with (
        running_server(tmp_path, ["--max-message-bytes", "1MiB"], environment) as running,
        gr.connect(running.target, shared_memory=False) as client,
    ):
        g = gr.Graph()
        g.op("Neg", g.placeholder("x", "float32", [None]), name="y")
        r = client.evaluate(g, feeds={"x": np.ones(10_000, np.float32)}, fetches=["y"])
        assert r.outputs["y"].sum() == -10_000
        with refused("MESSAGE_TOO_LARGE"):
            client.evaluate(g, feeds={"x": np.ones(300_000, np.float32)}, fetches=["y"])
        assert running.terminate() == 0


def test_running_server_is_healthy(server: RunningServer) -> None:
    assert health(server.target, "") == SERVING
    assert health(server.target, GRADIENTS) == SERVING


def test_health_of_an_unknown_service_is_not_found(server: RunningServer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health(server.target, "gradrule.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server whose engine these tests may kill."""
    with running_server(tmp_path_factory.mktemp("own")) as running:
        yield running


def test_health_follows_the_engine(own: RunningServer) -> None:
    engine = own.wait_for_engine()

    def probe() -> bool | None:
        # The next engine may be ready before the health is read.
        own.kill_engines()
        return True if health(own.target, GRADIENTS) == NOT_SERVING else None

    wait_until(probe, "NOT_SERVING")
    assert health(own.target, "") == SERVING
    wait_for_another_engine(own, engine)


def test_engine_killed_while_idle_is_replaced(own: RunningServer) -> None:
    with gr.connect(own.target) as client:
        p = client.compile(
            raw.sign_graph().SerializeToString(), fetches=["y"], ys=["y"], xs=["x"], overrides={"Sign": "ste"}
        )
        engine = own.wait_for_engine()
        os.kill(engine, signal.SIGKILL)
        # The caller gets an answer without an error.
        r = p.evaluate({"x": [2.0]}, timeout=30)
        assert own.engine_pid() != engine
        assert_close(r.outputs["y"], np.float32([1]))
        assert_close(r.gradients["x"], np.float32([1]))


def test_endless_loop_ends_at_its_deadline(own: RunningServer) -> None:
    engine = own.wait_for_engine()
    with gr.connect(own.target) as client:
        p = client.compile(loop_graphs.endless(), fetches=["y"])
        p.evaluate({"x": loop_graphs.ENDS})
        started = time.monotonic()
        with refused("DEADLINE_EXCEEDED"):
            p.evaluate({"x": loop_graphs.ENDLESS}, timeout=1.5)
        assert time.monotonic() - started < 30
        wait_for_another_engine(own, engine)
        assert p.evaluate({"x": loop_graphs.ENDS}).outputs["y"] == loop_graphs.ENDS


def test_calls_beside_an_endless_loop_are_answered(own: RunningServer) -> None:
    """While one call hangs, others are answered."""
    engine = own.wait_for_engine()
    ends: list[str] = []

    def hang(client: gr.Client) -> None:
        try:
            client.evaluate(loop_graphs.endless(), feeds={"x": loop_graphs.ENDLESS}, fetches=["y"], timeout=30.0)
        except gr.errors.GradruleError as caught:
            ends.append(caught.reason)

    with gr.connect(own.target) as client:
        hanging = threading.Thread(target=hang, args=(client,))
        hanging.start()
        own.wait_for_running_calls(1)
        r = client.evaluate(raw.sign_graph().SerializeToString(), feeds={"x": [3.0]}, fetches=["y"], timeout=28.0)
        assert r.outputs["y"].tolist() == [1.0]
        hanging.join()
    assert ends == ["DEADLINE_EXCEEDED"]
    wait_for_another_engine(own, engine)


def test_sigterm_lets_running_calls_finish(tmp_path: Path) -> None:
    """The server then exits with 0."""
    with running_server(tmp_path, ("--drain-s", "200")) as running:
        with gr.connect(running.target) as client:
            p = client.compile(loop_graphs.counted(1_000_000), fetches=["y"])
            answers: list[Any] = []
            call = threading.Thread(target=lambda: answers.append(p.evaluate({"x": np.float32(3)}, timeout=200)))
            call.start()
            running.wait_for_running_calls(1)
            engine = running.engine_pid()
            started = time.monotonic()
            assert running.terminate() == 0
            call.join()
            assert time.monotonic() - started < 150
        assert len(answers) == 1
        assert answers[0].outputs["y"] == 3
        assert engine is not None
        wait_until(lambda: has_ended(engine) or None, "end of the engine")
        assert "Traceback" not in running.log.read_text()


def test_sigterm_during_the_start_ends_the_server(tmp_path: Path) -> None:
    process = subprocess.Popen(
        serve_command("--port", "0", "--data-dir", str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=server_environment(),
    )
    starting = RunningServer(process, "", tmp_path, tmp_path)
    starting.wait_for_engine()
    process.terminate()
    _, stderr = process.communicate(timeout=servers.STOP_TIMEOUT_S)
    assert process.returncode == 0, stderr


def sign_program(client: Any) -> Any:
    """Makes y = sign(x) with a USER rule."""
    return client.compile(
        raw.sign_graph().SerializeToString(), fetches=["y"], ys=["y"], xs=["x"], overrides={"Sign": "Kept"}, name="kept"
    )


def check_stored(client: Any, factor: float) -> None:
    r = client.program("programs/kept").evaluate({"x": [2.0]})
    assert_close(r.outputs["y"], np.float32([1]))
    assert_close(r.gradients["x"], np.float32([factor]))


def check_stored_program_is_loaded(server: RunningServer, client: Any) -> None:
    """Asserts that the server loads the program by itself: its first call compiles nothing."""
    wait_until(lambda: True if "loaded 1 of 1 recently used programs" in server.log.read_text() else None, "warm-up")
    caches = {cache.name: cache.entries.used for cache in client.server_status().caches}
    assert caches == {"programs": 1, "loaded": 1}
    assert client.program("programs/kept").evaluate({"x": [2.0]}).timings.compile == 0


def test_rules_and_programs_survive_restarts(tmp_path: Path) -> None:
    """The server is stopped and started, the rule's name gets another rule, and the server is killed right after the
    acknowledgement.

    During the start after the kill its health reports NOT_SERVING.
    """
    with running_server(tmp_path) as first:
        with gr.connect(first.target) as client:
            client.create_rule("Kept", "5 * dy", description="kept")
            digests = sign_program(client).digests
            check_stored(client, 5)
        assert first.terminate() == 0
    with running_server(tmp_path) as second, gr.connect(second.target) as client:
        assert client.get_rule("Kept").expression == "5 * dy"
        check_stored_program_is_loaded(second, client)
        p = client.program("programs/kept")
        assert p.digests == digests
        assert [(spec.name, spec.dtype) for spec in p.inputs.values()] == [("x", "float32")]
        check_stored(client, 5)
        client.delete_rule("Kept")
        client.create_rule("Kept", "7 * dy")
        check_stored(client, 5)
        client.create_rule("Late", "9 * dy")
        second.kill()
    with running_server(tmp_path) as third, gr.connect(third.target) as client:
        assert client.get_rule("Late").expression == "9 * dy"
        assert client.get_rule("Kept").expression == "7 * dy"
        check_stored_program_is_loaded(third, client)
        check_stored(client, 5)
        fresh = client.compile(
            raw.sign_graph().SerializeToString(), fetches=["y"], ys=["y"], xs=["x"], overrides={"Sign": "Kept"}
        )
        assert fresh.name != "programs/kept"
        assert_close(fresh.evaluate({"x": [2.0]}).gradients["x"], np.float32([7]))
        compiled_last = client.compile(raw.sign_graph().SerializeToString(), fetches=["x"], name="last")
        third.kill()
    with (
        recorded_health(third.target) as seen,
        running_server(tmp_path, ["--port", third.target.rpartition(":")[2]]) as fourth,
        gr.connect(fourth.target) as client,
    ):
        assert {item.name for item in client.list_programs()} == {"programs/kept", "programs/last", fresh.name}
        assert client.program(compiled_last.name).evaluate({"x": [4.0]}).outputs["x"].tolist() == [4.0]
    # During the restart its health reported that it could not serve yet.
    assert seen.faults() == []


_LISTENS = "print('gradrule: listening on nowhere:1', flush=True)"
_FAILS = f"{_LISTENS}; raise SystemExit(3)"
_STAYS = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_LISTENS}; signal.pause()"


@pytest.mark.parametrize(("program", "how"), [(_FAILS, "ended with 3"), (_STAYS, "did not stop within 1 s")])
def test_server_that_does_not_stop_fails_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, how: str
) -> None:
    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", 1.0)
    with (
        pytest.raises(AssertionError, match=f"the server {how}"),
        running_server(tmp_path, program=("-c", program)) as running,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        running.process.wait(1)


def test_engine_in_an_endless_loop_ends_with_its_front_end(tmp_path: Path) -> None:
    """Nothing else would end it when the front end is killed."""
    with running_server(tmp_path) as running, gr.connect(running.target) as client:
        p = client.compile(loop_graphs.endless(), fetches=["y"])
        engine = running.wait_for_engine()
        with futures.ThreadPoolExecutor() as pool:
            call = pool.submit(p.evaluate, {"x": loop_graphs.ENDLESS}, timeout=60.0)
            running.wait_for_running_calls(1)
            assert not call.done()
            running.process.kill()
            with refused("UNAVAILABLE"):
                call.result()
        wait_until(lambda: has_ended(engine) or None, "end of the engine")


def test_local_server_ends_with_its_block(tmp_path: Path) -> None:
    with gr.local(data_dir=str(tmp_path)) as client:
        client.create_rule("Mine", "5 * dy")
        r = client.evaluate(
            raw.sign_graph().SerializeToString(), feeds={"x": [2.0]}, ys=["y"], xs=["x"], overrides={"Sign": "Mine"}
        )
        assert_close(r.gradients["x"], np.float32([5]))
    with pytest.raises(gr.errors.GradruleError):
        client.get_rule("Mine")
