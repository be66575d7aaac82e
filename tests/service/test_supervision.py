"""Engines that die, hang, exceed memory or stop answering: errors, other callers, and recovery."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.processes import engines, processor_s
from tests.samples import WHOLE
from tests.service import loop_graphs
from tests.service.answers import provokes, refused
from tests.service.graph_defs import build_graph_def, placeholder, sign_graph
from tests.service.harmful_graphs import CRASHES, FAILED_CHECK, HANGS, HarmfulGraph
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until

_QUARANTINE_S = 5.0
_LIMIT = "3GiB"

_KINDS_OF_CRASHES = {FAILED_CHECK.name, "TensorListReserve"}
_KINDS_OF_HANGS = {"While", "calls", "Const"}

_REFUSED = {"LIMIT_EXCEEDED", "INVALID_GRAPH", "OP_NOT_ALLOWED", "MEMORY_EXCEEDED", "MESSAGE_TOO_LARGE"}
"""What a graph of the corpus of hangs may be told instead of being run until its deadline."""


_PAUSE_S = 0.02
_TIMEOUT_S = 60.0


class HealthyTraffic:
    """Counts right answers and collects errors."""

    def __init__(self) -> None:
        self.answers = 0
        self.errors: list[BaseException] = []

    def ask(self, client: Any, program: Any) -> None:
        """Evaluates a compiled program and an inline one in turn."""
        x = np.float32([self.answers - 3, 2.5])
        if self.answers % 2:
            r = program.evaluate({"x": x}, timeout=_TIMEOUT_S)
        else:
            r = client.evaluate(sign_graph(), feeds={"x": x}, fetches=["y"], timeout=_TIMEOUT_S)
        assert r.outputs["y"].tolist() == np.sign(x).tolist()
        self.answers += 1


@contextlib.contextmanager
def healthy_client(target: str) -> Iterator[HealthyTraffic]:
    """Sends requests while the block runs; asserts that none failed and at least one was answered."""
    found = HealthyTraffic()
    stop = threading.Event()
    with gr.connect(target) as client:
        program = client.compile(sign_graph(), fetches=["y"])
        found.ask(client, program)
        found.ask(client, program)

        def keep_asking() -> None:
            while not stop.is_set():
                try:
                    found.ask(client, program)
                except Exception as caught:
                    found.errors.append(caught)
                time.sleep(_PAUSE_S)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        before = found.answers
        try:
            yield found
            # Answers after the end of the block do not count.
            beside = found.answers - before
        finally:
            stop.set()
            thread.join()
        found.ask(client, program)
    assert not found.errors, found.errors[:3]
    assert beside, "nothing was answered beside it"


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server with a spare, a memory limit and a short quarantine."""
    flags = ("--spares", "1", "--quarantine-s", str(_QUARANTINE_S), "--memory-limit", _LIMIT)
    with running_server(tmp_path_factory.mktemp("supervised"), flags) as running:
        yield running


@pytest.fixture
def own(supervised: RunningServer) -> Iterator[Any]:
    """Returns a client of the supervised server."""
    wait_for_spare(supervised)
    with gr.connect(supervised.target) as connected:
        yield connected


def engine_pids(server: RunningServer) -> set[int]:
    """Returns all engine processes, spares included."""
    return set(engines(server.process.pid))


def wait_for_an_end(server: RunningServer, pids: set[int]) -> None:
    """Waits until one of these engine processes has ended."""
    wait_until(lambda: pids - engine_pids(server) or None, "the end of an engine")


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process; 0 if it has ended."""
    try:
        return processor_s(pid)
    except OSError:
        return 0.0


def server_log(server: RunningServer) -> str:
    """Returns the server's log so far."""
    return server.log.read_text()


def wait_for_spare(server: RunningServer) -> set[int]:
    """Waits until an engine and its spare are idle; returns their process ids."""

    def probe() -> set[int] | None:
        pids = engine_pids(server)
        if len(pids) != 2:
            return None
        log = server_log(server)
        if not all(f"engine {pid} is ready" in log for pid in pids):
            return None
        before = {pid: cpu_seconds(pid) for pid in pids}
        time.sleep(0.5)
        idle = all(cpu_seconds(pid) - before[pid] < 0.05 for pid in pids)
        return pids if idle and engine_pids(server) == pids else None

    return wait_until(probe, "spare")


def are_nearly_idle(pids: set[int]) -> bool:
    """Returns whether none of the processes uses more than 0.6 s of processor time in a second."""
    used = {pid: cpu_seconds(pid) for pid in pids}
    time.sleep(1.0)
    return all(cpu_seconds(pid) - seconds < 0.6 for pid, seconds in used.items())


def evaluate(client: Any, graph: Any, bad: HarmfulGraph, timeout: float, **changes: Any) -> Any:
    return client.evaluate(graph, feeds={**bad.feeds, **changes}, fetches=["y"], timeout=timeout)


def cases(corpus: tuple[HarmfulGraph, ...], kinds: set[str]) -> Any:
    return pytest.mark.parametrize("bad", [pytest.param(b, id=b.name) for b in corpus if WHOLE or b.name in kinds])


@cases(tuple(bad for bad in CRASHES if bad.told == "MEMORY_EXCEEDED"), _KINDS_OF_CRASHES)
def test_graph_that_ends_engines_for_lack_of_memory_is_not_quarantined(
    supervised: RunningServer, own: Any, bad: HarmfulGraph
) -> None:
    """The next call may have a smaller batch."""
    graph = bad.build()
    with healthy_client(supervised.target):
        for _ in range(2):
            with refused("MEMORY_EXCEEDED") as told:
                evaluate(own, graph, bad, 60.0)
            told.says("SIG", bad.says, "--memory-limit")
    assert not own.server_status().quarantined_programs


@provokes("ENGINE_CRASHED", "QUARANTINED")
@cases(tuple(bad for bad in CRASHES if bad.told != "MEMORY_EXCEEDED"), _KINDS_OF_CRASHES)
def test_crashing_graph_is_reported_and_then_refused(supervised: RunningServer, own: Any, bad: HarmfulGraph) -> None:
    graph = bad.build()
    with healthy_client(supervised.target):
        with refused(bad.told) as told:
            evaluate(own, graph, bad, 60.0)
        told.says("SIG", bad.says)
        assert not re.search(r"/\w+/\w+|0x[0-9a-f]{6}", told.message)
        before = engine_pids(supervised)
        with refused("QUARANTINED") as held:
            evaluate(own, graph, bad, 60.0)
        assert before <= engine_pids(supervised), "it was tried once more"
        held.says("SIG")
        assert 0 < held.error.retry_delay <= _QUARANTINE_S
        # Other feeds do not lift the quarantine; another graph is not affected.
        name = next(iter(bad.feeds))
        with refused("QUARANTINED"):
            evaluate(own, graph, bad, 60.0, **{name: np.zeros_like(bad.feeds[name])})
        assert own.evaluate(sign_graph(), feeds={"x": [-2.0]}, fetches=["y"]).outputs["y"].tolist() == [-1.0]


@cases(HANGS, _KINDS_OF_HANGS)
def test_hanging_graph_is_ended_at_its_deadline(supervised: RunningServer, own: Any, bad: HarmfulGraph) -> None:
    before, graph = engine_pids(supervised), bad.build()
    with healthy_client(supervised.target):
        with pytest.raises(gr.errors.GradruleError) as told:
            evaluate(own, graph, bad, 3.0)
        assert told.value.reason in {"DEADLINE_EXCEEDED", *_REFUSED}
        if told.value.reason == "DEADLINE_EXCEEDED":
            wait_for_an_end(supervised, before)
        wait_until(lambda: are_nearly_idle({*before, supervised.process.pid}) or None, "an end of the hang", 60)


def test_second_overrun_quarantines_the_graph(supervised: RunningServer, own: Any) -> None:
    program = own.compile(loop_graphs.endless(), fetches=["y"])
    with healthy_client(supervised.target):
        for _ in range(2):
            before = engine_pids(supervised)
            with refused("DEADLINE_EXCEEDED"):
                # A new engine loads the program first.
                program.evaluate({"x": loop_graphs.ENDLESS}, timeout=3.0)
            wait_for_an_end(supervised, before)
        wait_until(lambda: own.server_status().quarantined_program_count or None, "a quarantine")
        with refused("QUARANTINED") as held:
            program.evaluate({"x": loop_graphs.ENDS}, timeout=10.0)
        time.sleep(held.error.retry_delay + 0.1)
        assert program.evaluate({"x": loop_graphs.ENDS}, timeout=30.0).outputs["y"] == loop_graphs.ENDS


@provokes("MEMORY_EXCEEDED")
def test_graph_beyond_the_memory_limit_is_refused_with_the_limit(supervised: RunningServer, own: Any) -> None:
    before = engine_pids(supervised)
    zeros = build_graph_def(lambda: tf.reduce_sum(tf.zeros([placeholder("n", tf.int64, [])]), name="y"))
    with healthy_client(supervised.target):
        # A graph whose shapes show the excess is refused before it runs; the others fail when memory runs out.
        for graph in (zeros, build_graph_def(_doubled)):
            with refused("MEMORY_EXCEEDED") as told:
                own.evaluate(graph, feeds={"n": np.int64(10_000_000_000)}, fetches=["y"])
            told.says("3 GiB (--memory-limit)")
            assert own.evaluate(graph, feeds={"n": np.int64(1000)}, fetches=["y"]).outputs["y"] == 0
    # TensorFlow's allocation failed, and no engine died.
    assert engine_pids(supervised) == before


def _doubled() -> None:
    """Sums zeros that grow to n elements in a loop."""
    n = placeholder("n", tf.int64, [])
    (grown,) = tf.while_loop(
        lambda zeros: tf.size(zeros, out_type=tf.int64) < n,
        lambda zeros: (tf.concat([zeros, zeros], 0),),
        [tf.zeros([1])],
        shape_invariants=[tf.TensorShape([None])],
    )
    tf.reduce_sum(grown, name="y")


def test_engine_killed_from_outside_quarantines_no_graph(supervised: RunningServer, own: Any) -> None:
    """Engines are killed idle and busy, one after the other; every call gets its answer."""
    slow = own.compile(loop_graphs.counted(1_500_000), fetches=["y"])
    told_before = server_log(supervised).count("(SIGKILL)")
    with healthy_client(supervised.target), futures.ThreadPoolExecutor() as pool:
        call = pool.submit(slow.evaluate, {"x": np.float32(3)}, timeout=120.0)
        for _ in range(2):
            time.sleep(0.5)
            assert not call.done(), "it ended before its engine: nothing is shown"
            for pid in engine_pids(supervised):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: True if engine_pids(supervised) else None, "an engine")
        assert call.result().outputs["y"] == 3
    # The log must not say exit code 255, which a process gets that someone else has waited for.
    wait_until(lambda: server_log(supervised).count("(SIGKILL)") > told_before or None, "a line in the log")
    assert "exit code 255" not in server_log(supervised)


def test_silent_engine_is_killed(supervised: RunningServer, own: Any) -> None:
    before = wait_for_spare(supervised)
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    # Both get health checks; no request runs on them.
    wait_until(lambda: None if before & engine_pids(supervised) else True, "an end of both", 150)
    wait_until(lambda: "answered nothing for" in server_log(supervised) or None, "a line in the log")
    assert own.evaluate(sign_graph(), feeds={"x": [2.0]}, fetches=["y"], timeout=150.0).outputs["y"].tolist() == [1.0]


def _chain(count: int, op: Any = tf.sin) -> Any:
    def build() -> None:
        value = placeholder("x", shape=())
        for _ in range(count):
            value = op(value)
        tf.identity(value, name="y")

    return build_graph_def(build)


def test_slow_compilation_delays_no_other_program(supervised: RunningServer, own: Any) -> None:
    """An engine compiles one program at a time; a program that waits behind a slow one moves to the spare."""
    # It takes ten seconds or more; other programs move to the spare after two, and the spare needs one or two to be
    # asked.
    long = _chain(20_000)
    with healthy_client(supervised.target), futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(own.compile, long, ys=["y"], xs=["x"], timeout=200.0)
        time.sleep(1.5)
        for op, wanted in ((tf.cos, -np.sin(0.5)), (tf.exp, np.exp(0.5))):
            r = own.evaluate(_chain(1, op), feeds={"x": np.float32(0.5)}, ys=["y"], xs=["x"], timeout=60.0)
            np.testing.assert_allclose(r.gradients["x"], wanted, rtol=1e-6)
        assert not slow.done()
        slow.result()


def test_program_is_compiled_once_although_deadlines_pass(own: Any) -> None:
    """The engine goes on, keeps what it has loaded, and the retry of a call finds its program compiled."""
    feeds, long = {"x": np.float32(0.5)}, _chain(3_000)
    other = own.compile(_chain(3), ys=["y"], xs=["x"])
    other.evaluate(feeds)

    def loaded() -> list[tuple[int, int]]:
        return [(engine.pid, engine.programs) for engine in own.server_status().engines if engine.programs]

    [(pid, count)] = loaded()
    for timeout in itertools.count(0.5, 0.1):
        # Deadlines pass while a worker prepares it, while the engine loads it, and in the first run.
        with contextlib.suppress(gr.errors.DeadlineExceededError):
            answer = own.evaluate(long, feeds=feeds, ys=["y"], xs=["x"], timeout=timeout)
            break
    assert answer.gradients["x"] is not None
    assert own.server_status().quarantined_program_count == 0
    assert loaded() == [(pid, count + 1)]
    assert other.evaluate(feeds).timings.compile == 0


def test_session_outlives_deadlines_that_pass_while_its_calls_are_compiled(own: Any) -> None:
    with tf.Graph().as_default() as graph:
        value = tf.compat.v1.get_variable("w", initializer=tf.fill([], 0.5), use_resource=True)
        for _ in range(2_000):
            value = tf.sin(value)
        tf.identity(value, name="loss")
    with own.session(graph.as_graph_def()) as session:
        session.assign({"w": np.float32(0.25)})
        for timeout in itertools.count(0.5, 0.1):
            with contextlib.suppress(gr.errors.DeadlineExceededError):
                session.evaluate({}, ys=["loss"], xs=["w"], timeout=timeout)
                break
        assert timeout > 0.5, "no deadline has passed: nothing is shown"
        assert session.read()["w"] == 0.25
