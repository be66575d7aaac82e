"""Tests what `--memory-limit` counts, and which error a caller gets when a process has no memory left."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule_server.link.fork_server import engine_environment
from gradrule_server.link.monitor import resident_sizes
from tests.service.answers import refused
from tests.service.graph_defs import build_graph_def, placeholder
from tests.service.servers import RunningServer, free_port, running_server

# The smallest limit that is allowed, and what `auto` gives in a small container.
_LIMIT = "1GiB"
_PATIENCE_S = 300.0
_UNLOADED = 'gradrule_cache_evictions_total{cache="loaded",reason="memory"}'
_UNITS = (tf.nn.relu, tf.tanh, tf.nn.softplus, tf.identity)

_IN_A_PROCESS = """
import json
import numpy as np
import tensorflow as tf
from gradrule_server.engine.memory import limit_memory
from gradrule_server.engine.tf_errors import out_of_memory

limit_memory(2 << 30)
found = {"small": float(tf.reduce_sum(tf.ones([1 << 26])))}
for name, make in {
    "tensorflow": lambda: tf.zeros([1 << 30]),
    "numpy": lambda: np.ones(1 << 30, np.float32),
}.items():
    try:
        make()
    except tf.errors.OpError as cause:
        found[name] = out_of_memory(cause)
    except MemoryError:
        found[name] = True
print(json.dumps(found))
"""


def test_allocation_beyond_the_limit_fails_and_the_process_survives() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=engine_environment(),
    )
    found = json.loads(ended.stdout)
    assert found == {"small": float(1 << 26), "tensorflow": True, "numpy": True}


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[RunningServer]:
    """A server whose engines have little memory."""
    flags = ("--memory-limit", _LIMIT, "--device", "cpu", "--metrics-port", str(metrics_port))
    with running_server(tmp_path_factory.mktemp("small"), flags) as running:
        yield running


@pytest.fixture
def client(small: RunningServer) -> Iterator[Any]:
    with gr.connect(small.target) as connected:
        yield connected


@pytest.fixture
def metric(metrics_port: int) -> Callable[[str], float]:
    """Returns the current value of a metric, given with its labels."""

    def read(name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    return read


def _chain(nodes: int) -> gr.Graph:
    def build() -> None:
        x = placeholder("x", tf.float32, (None, 8))
        for index in range(nodes):
            x = _UNITS[index % len(_UNITS)](x)
        tf.identity(x, name="y")

    return gr.Graph.from_bytes(build_graph_def(build).SerializeToString())


def _weight_values(mib: int, seed: int) -> Any:
    return np.random.default_rng(seed).random((64, mib * (1 << 20) // 4 // 64), np.float32) - np.float32(0.5)


def _weights(mib: int, seed: int = 0) -> gr.Graph:
    """Returns a graph with a constant of this size: y = sum(relu(x @ w))."""

    def build() -> None:
        x = placeholder("x", tf.float32, (None, 64))
        weights = tf.constant(_weight_values(mib, seed))
        tf.identity(tf.reduce_sum(tf.nn.relu(x @ weights), 1), name="y")

    return gr.Graph.from_bytes(build_graph_def(build).SerializeToString())


def _repeated() -> None:
    """Applies relu to n copies of x: the backward part needs its output."""
    x = placeholder("x", tf.float32, (None, 1024))
    n = placeholder("n", tf.int32, [])
    tf.reduce_sum(tf.nn.relu(tf.tile(x, tf.stack([n, 1]))), name="y")


def _gradient(client: Any, graph: gr.Graph, columns: int, rule: str) -> Any:
    x = np.ones((2, columns), np.float32)
    return client.evaluate(
        graph, {"x": x}, fetches=["y"], ys=["y"], xs=["x"], overrides={"Relu": rule}, timeout=_PATIENCE_S
    ).gradients["x"]


def _rules(client: Any, count: int) -> list[str]:
    """Registers rules that multiply the upstream gradient by 1, 1.001, 1.002, …"""
    for index in range(count):
        client.create_rule(f"Scale{index}", f"dy * {1 + index / 1000}")
    return [f"Scale{index}" for index in range(count)]


def test_least_limit_serves_ten_maps_of_a_graph_with_1200_nodes(small: RunningServer, client: Any) -> None:
    """What malloc and threads reserve and nobody uses does not count."""
    graph, before = _chain(1200), small.wait_for_engine()
    first = None
    for index, rule in enumerate(_rules(client, 10)):
        gradient = _gradient(client, graph, 8, rule)
        first = gradient if first is None else first
        # 300 of the nodes are relu.
        np.testing.assert_allclose(gradient, first * (1 + index / 1000) ** 300, rtol=1e-3)
    assert small.engine_pid() == before
    assert not client.server_status().quarantined_programs


def test_idle_programs_are_unloaded_before_an_engine_is_full(
    small: RunningServer, client: Any, metric: Callable[[str], float]
) -> None:
    """Forward handles hold most of the memory. Programs are unloaded, so the engine and its handles stay."""
    program = client.compile(build_graph_def(_repeated), fetches=["y"], ys=["y"], xs=["x"])
    before, unloaded = small.wait_for_engine(), metric(_UNLOADED)
    feeds = {"x": np.ones((1024, 1024), np.float32), "n": np.int32(30)}
    with program.forward(feeds, timeout=_PATIENCE_S) as first:
        with contextlib.ExitStack() as handles:
            for _ in range(4):
                handle = handles.enter_context(program.forward(feeds, timeout=_PATIENCE_S))
                assert handle.bytes >= 120 << 20
            rules = iter(_rules(client, 12))
            # How many fit depends on what one takes. No other test has loaded these.
            while metric(_UNLOADED) == unloaded:
                assert _gradient(client, _chain(1600), 8, next(rules)).shape == (2, 8)
        assert first.vjp()["x"].shape == (1024, 1024)
    assert small.engine_pid() == before


def test_programs_that_fit_alone_are_never_refused(
    small: RunningServer, client: Any, metric: Callable[[str], float]
) -> None:
    """Their weights and the engine itself are more than the limit; they are used in turn and again."""
    graphs, (rule,) = [_weights(200, seed) for seed in range(5)], _rules(client, 1)
    before, unloaded = client.server_status().engines, metric(_UNLOADED)
    first = [_gradient(client, graph, 64, rule) for graph in graphs]
    assert len({gradient.tobytes() for gradient in first}) == len(graphs)
    for graph, wanted in zip(graphs, first, strict=True):
        np.testing.assert_array_equal(_gradient(client, graph, 64, rule), wanted)
    status = client.server_status()
    loaded = sum(engine.programs for engine in status.engines)
    assert loaded >= len(graphs) or metric(_UNLOADED) > unloaded
    assert [engine.pid for engine in status.engines] == [engine.pid for engine in before]
    assert not status.quarantined_programs


def test_program_that_does_not_fit_alone_is_told_so(client: Any) -> None:
    [rule] = _rules(client, 1)
    graph = _weights(500)
    for _ in range(2):
        with refused("MEMORY_EXCEEDED") as refusal:
            _gradient(client, graph, 64, rule)
        refusal.says("takes more memory", "iB of 1 GiB (--memory-limit) were in use", "smaller batch")
    assert not client.server_status().quarantined_programs
    small_graph = _chain(4)
    for _ in range(100):
        assert _gradient(client, small_graph, 8, rule).shape == (2, 8)


def test_memory_of_different_programs_is_bounded(tmp_path: Path) -> None:
    """Programs beyond the most that an engine keeps are unloaded, and their memory is used again."""
    with (
        running_server(tmp_path, ("--device", "cpu", "--program-cache", "50")) as running,
        gr.connect(running.target) as client,
    ):
        sizes = []
        for index in range(300):
            g = gr.Graph()
            g.op_output("Relu", g.placeholder("x", "float32", [None, index + 1]), name="y")
            client.evaluate(g, {"x": np.ones((1, index + 1), np.float32)}, ys=["y"], xs=["x"], timeout=_PATIENCE_S)
            if index in (149, 299):
                sizes.append(resident_sizes(running.wait_for_engine())[0])
        assert sum(engine.programs for engine in client.server_status().engines) <= 50
    # 150 programs that stay take some 50 MiB.
    assert sizes[1] - sizes[0] < 25 << 20
