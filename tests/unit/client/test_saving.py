"""`Graph.save` and `gr.load`: bytes, variables, aliases; and variables made constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr


def with_variables() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [2])
    for name, dtype in (("a/w", "float32"), ("half", "bfloat16")):
        handle = g.op("VarHandleOp", name=name, dtype=dtype, shape=[2], shared_name=name)
        read = g.op("ReadVariableOp", handle, name=f"{name}/read", dtype=dtype)
        x = g.mul(x, g.cast(read, "float32"))
    g.identity(x, name="z")
    g.variables["a/w"] = np.array([1.5, 2.5], np.float32)
    g.variables["half"] = np.array([2, 4], ml_dtypes.bfloat16)
    g.aliases.update(image="x", score="z")
    return g


def test_saved_graphs_are_loaded_unchanged(tmp_path: Path) -> None:
    g = with_variables()
    g.save(tmp_path / "model.pb")
    back = gr.load(tmp_path / "model.pb")
    assert back.to_bytes() == g.to_bytes()
    assert back.aliases == g.aliases
    assert {name: value.dtype for name, value in back.variables.items()} == {
        name: value.dtype for name, value in g.variables.items()
    }
    for name, value in g.variables.items():
        np.testing.assert_array_equal(back.variables[name], value)


def test_a_graph_without_variables_and_aliases_is_one_file(tmp_path: Path) -> None:
    with_variables().save(tmp_path / "model.pb")
    plain = gr.Graph()
    plain.placeholder("x", "float32")
    plain.save(tmp_path / "model.pb")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pb"]
    assert gr.load(tmp_path / "model.pb").variables == {}


def run(graph: gr.Graph, x: Any) -> Any:
    with tf.Graph().as_default() as own, tf.compat.v1.Session(graph=own) as session:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(graph.to_bytes()), name="")
        return session.run("z:0", {"x:0": x})


def test_freezing_makes_constants(tmp_path: Path) -> None:
    with_variables().save(tmp_path / "frozen.pb", freeze=True)
    frozen = gr.load(tmp_path / "frozen.pb")
    assert frozen.variables == {}
    assert not frozen.find(op_type="VarHandleOp")
    assert frozen.aliases == {"image": "x", "score": "z"}
    np.testing.assert_array_equal(run(frozen, [1.0, 2.0]), [3.0, 20.0])


def test_freezing_reaches_into_functions(tmp_path: Path) -> None:
    table = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], name="table")
    inner = tf.function(lambda v: v * tf.gather(table, 1) + tf.gather_nd(table, [[2, 0]]))

    def fn(x: Any) -> Any:
        return tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, inner(v) + table[0]), [0, inner(x)])[1]

    graph = gr.trace(fn, ("float32", [2]))
    graph.save(tmp_path / "frozen.pb", freeze=True)
    frozen = gr.load(tmp_path / "frozen.pb")
    message = tf.compat.v1.GraphDef.FromString(frozen.to_bytes())
    bodies = [message.node, *(function.node_def for function in message.library.function)]
    assert not [node.op for nodes in bodies for node in nodes if "Variable" in node.op or "Resource" in node.op]
    x = np.array([0.5, -1.0], np.float32)
    with tf.Graph().as_default() as own, tf.compat.v1.Session(graph=own) as session:
        tf.import_graph_def(message, name="")
        found = session.run(frozen.tensor("output").name, {"x:0": x})
    np.testing.assert_allclose(found, fn(tf.constant(x)), rtol=1e-6)


def test_graphs_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    g = with_variables()
    with pytest.raises(gr.errors.InvalidGraphError, match=r"saved as \.pb"):
        g.save(tmp_path / "model.onnx")
    with pytest.raises(gr.errors.InvalidGraphError, match="cannot be written"):
        g.save(tmp_path / "none" / "model.pb")
    g.variables["text"] = np.array([b"a"], object)
    with pytest.raises(gr.errors.UnsupportedError, match="'text' holds strings"):
        g.save(tmp_path / "model.pb")
    del g.variables["half"]
    with pytest.raises(gr.errors.UnsupportedError, match="'half' has no value"):
        g.save(tmp_path / "model.pb", freeze=True)
    counter = tf.Variable(1.0, name="counter")
    assigned = gr.trace(lambda x: counter.assign_add(2.0 * x), ("float32", []))
    with pytest.raises(gr.errors.UnsupportedError, match=r"AssignAddVariableOp node .* more with a variable than read"):
        assigned.save(tmp_path / "model.pb", freeze=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK nothing", "cannot be read"),
        ({"optimizer": np.asarray('{"slots": []}')}, "cannot be read"),
        ({"variable:none": np.zeros(2)}, "no variable of the graph"),
        ({"variable:half": np.zeros(2, np.float64)}, "'half' is float64, the variable bfloat16"),
    ],
)
def test_values_that_do_not_belong_to_the_graph(tmp_path: Path, content: Any, says: str) -> None:
    with_variables().save(tmp_path / "model.pb")
    if isinstance(content, bytes):
        (tmp_path / "model.npz").write_bytes(content)
    else:
        np.savez(tmp_path / "model.npz", **content)
    with pytest.raises(gr.errors.InvalidGraphError, match=says):
        gr.load(tmp_path / "model.pb")
