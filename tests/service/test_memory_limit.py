"""Tests what `--memory-limit` counts, and which error a caller gets when a process has no memory left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule_server.link.fork_server import engine_environment
from tests.service.answers import refused
from tests.service.graph_defs import build_graph_def, placeholder
from tests.service.servers import RunningServer, running_server

# The smallest limit that is allowed, and what `auto` gives in a small container.
_LIMIT = "1GiB"
_PATIENCE_S = 300.0
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
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose engines have little memory."""
    with running_server(tmp_path_factory.mktemp("small"), ("--memory-limit", _LIMIT, "--device", "cpu")) as running:
        yield running


@pytest.fixture
def client(small: RunningServer) -> Iterator[Any]:
    with gr.connect(small.target) as connected:
        yield connected


def _chain(nodes: int) -> gr.Graph:
    def build() -> None:
        x = placeholder("x", tf.float32, (None, 8))
        for index in range(nodes):
            x = _UNITS[index % len(_UNITS)](x)
        tf.identity(x, name="y")

    return gr.Graph.from_bytes(build_graph_def(build).SerializeToString())


def _weights(mib: int) -> gr.Graph:
    """Returns a graph with a constant of this size: y = sum(relu(x @ w))."""
    columns = mib * (1 << 20) // 4 // 64

    def build() -> None:
        x = placeholder("x", tf.float32, (None, 64))
        weights = tf.constant(np.random.default_rng(0).normal(size=(64, columns)).astype(np.float32))
        tf.identity(tf.reduce_sum(tf.nn.relu(x @ weights), 1), name="y")

    return gr.Graph.from_bytes(build_graph_def(build).SerializeToString())


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


def test_programs_that_fit_alone_are_never_refused(client: Any) -> None:
    """Three of them are more than the limit, so an engine without memory is replaced."""
    graph, first = _weights(48), None
    for index, rule in enumerate(_rules(client, 4)):
        gradient = _gradient(client, graph, 64, rule)
        first = gradient if first is None else first
        np.testing.assert_allclose(gradient, first * (1 + index / 1000), rtol=1e-4, atol=0.01)
    ended = {reason for engine in client.server_status().engines for reason in engine.ended}
    assert ended & {"full", "memory"}
    assert not client.server_status().quarantined_programs


def test_program_that_does_not_fit_alone_is_told_so(client: Any) -> None:
    [rule] = _rules(client, 1)
    graph = _weights(220)
    for _ in range(2):
        with refused("MEMORY_EXCEEDED") as refusal:
            _gradient(client, graph, 64, rule)
        refusal.says("takes more memory", "--memory-limit", "smaller batch")
    assert not client.server_status().quarantined_programs
    small_graph = _chain(4)
    for _ in range(100):
        assert _gradient(client, small_graph, 8, rule).shape == (2, 8)
