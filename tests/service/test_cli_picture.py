"""`gradrule explain --svg --html` and the same from Python, against a real server."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.cli.failures import FAILED, FOUND
from tests.service.graph_defs import build_graph, build_graph_def, placeholder
from tests.service.servers import RunningServer
from tests.service.shell import Shell, shell_in

NS = "{http://www.w3.org/2000/svg}"


@tf.function
def inner(x: Any) -> Any:
    return tf.sign(x) * x


@tf.function
def outer(x: Any) -> Any:
    return inner(x) + 1.0


def function_loop_and_branch() -> None:
    x = placeholder("x")
    with tf.name_scope("block"):
        h = tf.nn.relu(outer(x))
    _, total = tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, t + tf.sign(t)), [0, h], name="loop")
    chosen = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sign(total) * x, lambda: tf.zeros_like(x))
    tf.nn.relu(x, name="aside")
    tf.reduce_sum(chosen, name="y")


@pytest.fixture
def shell(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    run = shell_in(tmp_path, server, monkeypatch, capsys)
    Path("graph.pb").write_bytes(build_graph_def(function_loop_and_branch).SerializeToString())
    return run


WORDS = ("explain", "graph.pb", "--y", "y", "--x", "x", "--override", "Sign=ste_sign", "--override", "Relu=guided_relu")


def classes_by_name(svg: str) -> dict[str, list[str]]:
    """Returns the CSS classes of drawn nodes by name."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{NS}g"):
        title = group.findtext(f"{NS}title")
        classes = (group.get("class") or "").split()
        if title and classes[0] == "leaf":
            found[title.splitlines()[0]] = classes
    return found


def test_explain_draws_nodes_in_functions_loops_and_branches(shell: Shell) -> None:
    done = shell(*WORDS, "--svg", "out.svg", "--html", "out.html")
    assert done.code == 0
    assert done.rows("wrote out.svg") and done.rows("wrote out.html")
    leaves = classes_by_name(Path("out.svg").read_text())
    signs = {name: classes for name, classes in leaves.items() if "r0" in classes or "r1" in classes}
    rules = shell(*WORDS, "--json").json["overrides"]
    assert set(signs) == {item["node"] for item in rules}
    assert len(signs) == 5
    order = list(dict.fromkeys(item["rule"] for item in rules))
    for item in rules:
        assert f"r{order.index(item['rule'])}" in signs[item["node"]]
        assert ("path" in signs[item["node"]]) is (item["status"] == "active")
    assert "off_path" in signs["aside"]
    assert "x" in leaves["x"] and "y" in leaves["y"]
    page = Path("out.html").read_text()
    assert page.startswith("<!doctype html>") and "guided_relu" in page


def test_path_contains_exactly_the_nodes_with_gradients(shell: Shell) -> None:
    answer = shell(*WORDS, "--svg", "out.svg", "--json").json
    asked = set(answer["default_gradient_nodes"]) | {
        item["node"] for item in answer["overrides"] if item["status"] == "active"
    }
    path = {name for name, classes in classes_by_name(Path("out.svg").read_text()).items() if "path" in classes}
    calls = {"block/PartitionedCall", "block/PartitionedCall/PartitionedCall"}
    assert path == asked | calls | {"x"}


def test_json_output_is_only_json(shell: Shell) -> None:
    assert shell(*WORDS, "--svg", "out.svg", "--json").json["findings"] == []


def test_problems_are_drawn(shell: Shell) -> None:
    g = gr.Graph()
    g.op("Neg", g.placeholder("x", "float32"), name="y")
    message = g._message
    message.node[1].input[0] = "gone"
    Path("broken.pb").write_bytes(message.SerializeToString())
    done = shell("explain", "broken.pb", "--y", "y", "--x", "x", "--svg", "out.svg")
    assert done.code == FOUND
    assert "wrong" in classes_by_name(Path("out.svg").read_text())["y"]


def test_unwritable_file_is_a_failure(shell: Shell) -> None:
    done = shell(*WORDS, "--svg", "no/such/folder/out.svg")
    assert done.code == FAILED
    assert "no/such/folder" in done.err


def test_explanations_are_drawn_from_python(either: Any) -> None:
    explained = either.explain(
        build_graph(function_loop_and_branch), ys=["y"], xs=["x"], overrides={"Sign": "ste_sign"}
    )
    assert "r0" in classes_by_name(explained.svg())["loop/Sign"]
    assert "ste_sign" in explained.html()


def test_whole_calls_and_regions_are_drawn(either: Any) -> None:
    overrides: list[Any] = [gr.Override(gr.Rule("5 * dy"), node="block/PartitionedCall", label="five")]
    explained = either.explain(build_graph(function_loop_and_branch), ys=["y"], xs=["x"], overrides=overrides)
    leaves = classes_by_name(explained.svg())
    assert "r0" in leaves["block/PartitionedCall"]
    assert "path" in leaves["block/PartitionedCall/PartitionedCall/Sign"]


def test_five_thousand_nodes_are_drawn(either: Any, record_property: Callable[[str, object], None]) -> None:
    g = gr.Graph()
    h: Any = g.placeholder("x", "float32", [None])
    tensors = []
    for number in range(1250):
        with g.name_scope(f"stage_{number // 250}/block_{number // 10}/"):
            h = g.add_v2(g.sign(h), g.mul(h, g.constant(0.5)))
            tensors.append(h)
    g.identity(h, name="y")
    # A short path, because TensorFlow's differentiation takes most of the time.
    explained = either.explain(g, ys=["y"], xs=[tensors[-51]], overrides={"Sign": "Identity"}, timeout=240)
    begun = time.monotonic()
    svg, html = explained.svg(), explained.html()
    record_property("seconds", time.monotonic() - begun)
    assert len(g) == 5002
    assert "Identity: 1200 off path, 50 active" in svg
    assert svg.count('class="first"') <= 70
    assert len(html) < 4 << 20
