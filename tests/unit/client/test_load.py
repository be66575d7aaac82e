"""Tests loading graphs from files that TensorFlow and protobuf wrote."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from google.protobuf import json_format, text_format

import gradrule as gr


@functools.cache
def definition() -> Any:
    """A graph with functions, loops, strings that look like enums, and types of every kind."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="x")
        tf.compat.v1.placeholder_with_default(tf.constant("DT_INVALID \" TFT_UNSET\n'"), [], name="text")
        tf.map_fn(lambda v: v * 2.0, x, name="mapped")
        tf.sign(x, name="y")
    message = graph.as_graph_def()
    # A zero enum value, as exported graphs hold it in places.
    message.node[0].attr["_unset"].type = 0
    message.node[0].attr["_list"].list.type.extend([0, 1])
    message.node[0].experimental_type.type_id = 0
    return message


def written(folder: Path, kind: str) -> Path:
    message = definition()
    path = folder / f"graph.{kind.partition(' ')[0]}"
    if kind == "pb":
        path.write_bytes(message.SerializeToString())
    elif kind == "pbtxt":
        path.write_text(text_format.MessageToString(message))
    else:
        snake = kind.endswith("snake")
        path.write_text(json_format.MessageToJson(message, preserving_proto_field_name=snake))
    return path


@pytest.mark.parametrize("kind", ["pb", "pbtxt", "json camel", "json snake"])
def test_every_file_format_gives_the_same_graph(tmp_path: Path, kind: str) -> None:
    g = gr.load(written(tmp_path, kind))
    assert tf.compat.v1.GraphDef.FromString(g.to_bytes()) == definition()


def test_zero_values_are_translated_outside_strings_only(tmp_path: Path) -> None:
    text = written(tmp_path, "pbtxt").read_text()
    assert "type: DT_INVALID" in text
    g = gr.load(tmp_path / "graph.pbtxt")
    constant = next(node for node in g.find(op_type="Const") if node.attrs["dtype"].type == 7)
    assert constant.attrs["value"].tensor.string_val[0] == b"DT_INVALID \" TFT_UNSET\n'"


def test_unset_full_types_in_text(tmp_path: Path) -> None:
    (tmp_path / "g.pbtxt").write_text(
        'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_INVALID } }\n'
        "  experimental_type { type_id: TFT_UNSET args { type_id: TFT_TENSOR } } }"
    )
    (node,) = gr.load(tmp_path / "g.pbtxt").find()
    assert [argument.type_id for argument in node.message.experimental_type.args] == [1000]


def test_unset_types_in_json(tmp_path: Path) -> None:
    node = {"name": "x", "op": "NoOp", "attr": {"T": {"list": {"type": ["DT_INVALID", "DT_FLOAT"]}}}}
    node["experimentalType"] = {"typeId": "TFT_UNSET"}
    (tmp_path / "g.json").write_text(json.dumps({"node": [node], "unknownField": 1}))
    (found,) = gr.load(tmp_path / "g.json").find()
    assert list(found.attrs["T"].list.type) == [0, 1]


def test_inputs_and_outputs(tmp_path: Path) -> None:
    g = gr.load(str(written(tmp_path, "pb")))
    assert g.inputs["x"] == gr.TensorSpec("x", "float32", (None, 4))
    assert g.inputs["text"].optional
    assert g.outputs["y"].dtype == "float32"


def test_unknown_fields_are_kept_or_skipped(tmp_path: Path) -> None:
    unknown = b"\xf2\xff\x01\x03abc"
    data = definition().SerializeToString() + unknown
    (tmp_path / "g.pb").write_bytes(data)
    assert gr.load(tmp_path / "g.pb").to_bytes() == data
    (tmp_path / "g.pbtxt").write_text('node { name: "x" op: "NoOp" news: 3 } other { a: "b" }')
    assert len(gr.load(tmp_path / "g.pbtxt")) == 1


@pytest.mark.parametrize(
    ("name", "content", "kind", "says"),
    [
        ("g.pb", b"\xff\xff", gr.errors.InvalidGraphError, "g.pb"),
        ("g.pbtxt", b"node {", gr.errors.InvalidGraphError, "g.pbtxt"),
        ("g.pbtxt", b"\xff\xfe", gr.errors.InvalidGraphError, "g.pbtxt"),
        ("g.json", b"[1]", gr.errors.InvalidGraphError, "g.json"),
        ("g.json", b"{", gr.errors.InvalidGraphError, "g.json"),
        ("g.tflite", b"", gr.errors.InvalidGraphError, ".pb, .pbtxt, .json"),
        ("g.onnx", b"", gr.errors.InvalidGraphError, "g.onnx"),
        ("saved_model.pb", b"", gr.errors.UnsupportedError, "SavedModel"),
    ],
)
def test_files_that_are_no_graphs(tmp_path: Path, name: str, content: bytes, kind: type[Exception], says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(kind, match=says.replace(".", r"\.")):
        gr.load(tmp_path / name)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(gr.errors.InvalidGraphError, match="No such file"):
        gr.load(tmp_path / "none.pb")
    with pytest.raises(gr.errors.InvalidGraphError, match=r"No such file"):
        gr.load(tmp_path / "none" / "saved_model.pb")
    with pytest.raises(gr.errors.InvalidGraphError, match=r"is a folder without a SavedModel; expected .*\.pb"):
        gr.load(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(gr.errors.InvalidGraphError, match="has no graph with the tag 'serve'; there are: none at all"):
        gr.load(tmp_path)
