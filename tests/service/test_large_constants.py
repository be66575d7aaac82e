"""Large constants of a graph: programs share them; results, names and errors are those of a constant in the graph."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.processes import engines, resident_bytes
from tests.service.answers import assert_close, dense, refused, statuses
from tests.service.graph_defs import build_graph_def, load_graph, placeholder
from tests.service.guarded import Guarded
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until

_RANDOM = np.random.default_rng(0)
_SIZE = 48
# Each has 9 KiB.
_TOP, _CALLED, _LOOPED = (_RANDOM.normal(size=(_SIZE, _SIZE)).astype(np.float32) / _SIZE for _ in range(3))
_X = _RANDOM.normal(size=(5, _SIZE)).astype(np.float32)


@tf.function
def _called(x: Any) -> Any:
    return tf.nn.relu(x @ tf.constant(_CALLED, name="called"))


def _model() -> None:
    x = placeholder("x", tf.float32, (None, _SIZE))
    hidden = tf.nn.relu(x @ tf.constant(_TOP, name="top"), name="first")
    hidden = _called(_called(hidden))

    def step(count: Any, value: Any) -> Any:
        return count + 1, tf.tanh(value @ tf.constant(_LOOPED, name="looped"))

    _, hidden = tf.while_loop(lambda count, _: count < 3, step, (0, hidden), name="loop")
    tf.reduce_sum(hidden * hidden, axis=1, name="y")


def _local(x: Any, top: Any, rule_scale: float = 1.0) -> Any:
    """The same model, whose first relu has the gradient `rule_scale * dy`."""

    @tf.custom_gradient
    def first(value: Any) -> Any:
        return tf.nn.relu(value), lambda dy: rule_scale * dy

    hidden = first(x @ top) if rule_scale != 1.0 else tf.nn.relu(x @ top)
    for _ in range(2):
        hidden = tf.nn.relu(hidden @ _CALLED)
    for _ in range(3):
        hidden = tf.tanh(hidden @ _LOOPED)
    return tf.reduce_sum(hidden * hidden, axis=1)


def _gradients(rule_scale: float = 1.0) -> tuple[Any, Any, Any]:
    x, top = tf.constant(_X), tf.constant(_TOP)
    with tf.GradientTape() as tape:
        tape.watch([x, top])
        y = _local(x, top, rule_scale)
    return y, *tape.gradient(y, [x, top])


@pytest.fixture(scope="module")
def graph_def() -> Any:
    return build_graph_def(_model)


@pytest.fixture(scope="module")
def graph(graph_def: Any) -> gr.Graph:
    return load_graph(graph_def)


@pytest.mark.parametrize("rule_scale", [1.0, 2.0, 3.0])
def test_results_and_gradients_are_those_of_tensorflow(client: gr.Client, graph: gr.Graph, rule_scale: float) -> None:
    overrides = [] if rule_scale == 1.0 else [gr.Override(gr.Rule(f"{rule_scale} * dy"), node="first")]
    r = client.evaluate(graph, {"x": _X}, fetches=["y"], ys="y", xs=["x", "top"], overrides=overrides)
    y, dx, dtop = _gradients(rule_scale)
    assert_close(r.outputs["y"], y)
    assert_close(dense(r.gradients["x"]), dx, rtol=1e-4)
    assert_close(dense(r.gradients["top"]), dtop, rtol=1e-4)


def test_constants_can_be_fetched_and_fed(client: gr.Client, graph: gr.Graph) -> None:
    assert_close(client.evaluate(graph, {}, fetches=["top"]).outputs["top"], _TOP)
    r = client.evaluate(graph, {"x": _X, "top": 2 * _TOP}, fetches=["y"])
    assert_close(r.outputs["y"], _local(_X, 2 * _TOP))
    # The fed value belongs to that call alone.
    assert_close(client.evaluate(graph, {"x": _X}, fetches=["y"]).outputs["y"], _local(_X, _TOP))


def test_a_program_is_described_as_before(client: gr.Client, graph: gr.Graph) -> None:
    made = client.compile(graph, fetches=["y"], ys="y", xs="x", overrides={"Relu": gr.Rule("2 * dy")})
    assert made.digests.graph == hashlib.sha256(graph.to_bytes()).hexdigest()
    assert list(made.inputs) == ["x"]
    assert set(statuses(made.evaluate({"x": _X})).values()) == {"active"}
    with refused("UNKNOWN_FEED") as refusal:
        made.evaluate({"x": _X, "topp": _TOP})
    refusal.says("topp")
    with refused("UNKNOWN_TENSOR"):
        client.evaluate(graph, {"x": _X}, fetches=["no such tensor"])


def test_a_wrong_constant_is_refused_as_before(client: gr.Client, graph_def: Any) -> None:
    broken = type(graph_def).FromString(graph_def.SerializeToString())
    [top] = [node for node in broken.node if node.name == "top"]
    top.attr["value"].tensor.tensor_content = top.attr["value"].tensor.tensor_content[:-1]
    with refused("INVALID_TENSOR") as refusal:
        client.evaluate(gr.Graph.from_bytes(broken.SerializeToString()), {"x": _X}, fetches=["y"])
    refusal.says("top", "9215 bytes")


def test_forward_runs_and_jacobians_use_the_constants(client: gr.Client, graph: gr.Graph) -> None:
    program = client.compile(graph, ys="y", xs="x")
    with program.forward({"x": _X}) as handle:
        assert_close(dense(handle.vjp()["x"]), _gradients()[1], rtol=1e-4)
    jacobian = client.jacobian(graph, {"x": _X}, ys=["y"], xs=["x"])["y"]["x"]
    assert_close(np.einsum("yyx->yx", jacobian), _gradients()[1], rtol=1e-4)


def test_values_of_variables_that_a_request_holds_are_shared_too(client: gr.Client, server: RunningServer) -> None:
    weights = _RANDOM.normal(size=(_SIZE, _SIZE)).astype(np.float32)
    for factor in (2.0, 3.0):
        g = gr.Graph()
        product = g.op("MatMul", g.placeholder("x", "float32", [None, _SIZE]), g.variable("w", weights))
        g.op("Mul", product, g.constant(np.float32(factor)), name="y")
        r = client.evaluate(g, {"x": _X}, fetches=["y"])
        assert_close(r.outputs["y"], factor * (_X @ weights), rtol=1e-4)
        r = client.evaluate(g, {"x": _X, "w": 2 * weights}, fetches=["y"])
        assert_close(r.outputs["y"], 2 * factor * (_X @ weights), rtol=1e-4)


def _kept(folder: Path) -> set[Path]:
    return set(folder.rglob(".kept-*"))


def test_programs_of_one_tenant_share_one_file_and_those_of_two_tenants_none(
    guarded: Guarded, ada: gr.Client, grace: gr.Client, graph: gr.Graph
) -> None:
    data_dir, before = guarded.running.data_dir, _kept(guarded.running.data_dir)
    for scale in (2.0, 3.0, 4.0):
        overrides = [gr.Override(gr.Rule(f"{scale} * dy"), node="first")]
        r = ada.evaluate(graph, {"x": _X}, ys="y", xs="x", overrides=overrides)
        assert_close(dense(r.gradients["x"]), _gradients(scale)[1], rtol=1e-4)
    of_ada = _kept(data_dir) - before
    assert len(of_ada) == 1
    grace.evaluate(graph, {"x": _X}, ys="y", xs="x")
    of_grace = _kept(data_dir) - before - of_ada
    assert len(of_grace) == 1
    assert {path.parent for path in of_ada}.isdisjoint(path.parent for path in of_grace)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path, ("--device", "cpu")) as running:
        yield running


def test_a_new_engine_loads_the_constants_again(own_server: RunningServer, graph: gr.Graph) -> None:
    with gr.connect(own_server.target) as client:
        y = client.evaluate(graph, {"x": _X}, fetches=["y"]).outputs["y"]
        [pid] = engines(own_server.process.pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: engines(own_server.process.pid) != [pid] or None, "another engine")
        assert_close(client.evaluate(graph, {"x": _X}, fetches=["y"]).outputs["y"], y)


def test_a_stored_program_has_its_constants_after_a_crash_of_the_server(tmp_path: Path, graph: gr.Graph) -> None:
    for is_first in (True, False):
        with running_server(tmp_path, ("--device", "cpu")) as running, gr.connect(running.target) as client:
            assert not is_first or not _kept(tmp_path)
            program = client.compile(graph, name="kept", fetches=["y"]) if is_first else client.program("kept")
            y = program.evaluate({"x": _X}).outputs["y"]
            assert_close(y, _local(_X, _TOP))
            # What the last server left is gone.
            assert len(_kept(tmp_path)) == 1
            os.kill(running.process.pid, signal.SIGKILL)
            running.process.wait()
            assert len(_kept(tmp_path)) == 1


_MANY_BYTES = 160 << 20


def test_an_engine_holds_each_constant_once(own_server: RunningServer) -> None:
    """Four maps of one network take at most 1.3 times the bytes of its weights in the engine."""
    rows, columns = 10240, 4096
    weights = np.full((rows, columns), 1e-4, np.float32)

    def build() -> None:
        product = placeholder("x", tf.float32, (None, rows)) @ tf.constant(weights)
        tf.reduce_sum(tf.nn.relu(product), name="y")

    large = load_graph(build_graph_def(build))
    x = np.ones((1, rows), np.float32)
    with gr.connect(own_server.target) as client:
        # What TensorFlow takes once for any program.
        small = gr.Graph()
        a = small.placeholder("a", "float32", [None, 4])
        small.op("Relu", small.op("MatMul", a, a, transpose_b=True), name="y")
        client.evaluate(small, {"a": np.ones((4, 4), np.float32)}, ys="y", xs="a")
        [pid] = engines(own_server.process.pid)
        before = resident_bytes(pid)
        for number in range(4):
            r = client.evaluate(large, {"x": x}, ys="y", xs="x", overrides={"Relu": gr.Rule(f"{number + 1.0} * dy")})
            wanted = np.full((1, rows), (number + 1.0) * columns * 1e-4, np.float32)
            assert_close(dense(r.gradients["x"]), wanted, rtol=1e-4)
        # A process that is kept ready may have started meanwhile.
        assert engines(own_server.process.pid)[0] == pid
        assert Path(f"/proc/{pid}/maps").read_text().count("/.kept-") == 1
        # The products read all weights, so all pages of the file lie in memory.
        assert _MANY_BYTES < resident_bytes(pid) - before < 1.3 * _MANY_BYTES
        [file] = _kept(own_server.data_dir)
        assert file.stat().st_size == _MANY_BYTES
