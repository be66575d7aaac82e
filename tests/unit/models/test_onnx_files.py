"""Bad ONNX files are typed errors that say what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import gradrule as gr
from gradrule.errors import InvalidGraphError, UnsupportedError
from tests.unit.models.onnx_models import node, onnx_model

_X = {"x": (np.float32, [2, 3])}


def _relu() -> onnx.ModelProto:
    return onnx_model([node("Relu", "x", "y")], _X, ["y"])


def test_empty_bytes_are_no_model() -> None:
    with pytest.raises(InvalidGraphError, match="no ONNX model"):
        gr.from_onnx(b"")


def test_truncated_model_is_refused_at_each_length() -> None:
    data = _relu().SerializeToString()
    for length in range(1, len(data), 7):
        with pytest.raises((InvalidGraphError, UnsupportedError)):
            gr.from_onnx(data[:length])


def test_random_bytes_are_no_model() -> None:
    generator = np.random.default_rng(0)
    for size in (10, 100, 1000):
        with pytest.raises((InvalidGraphError, UnsupportedError)):
            gr.from_onnx(generator.bytes(size))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidGraphError, match=r"model\.onnx cannot be read"):
        gr.load(tmp_path / "model.onnx")


def test_cycle_is_refused() -> None:
    model = _relu()
    model.graph.node[0].input[0] = "z"
    model.graph.node.append(node("Relu", "y", "z"))
    with pytest.raises(InvalidGraphError):
        gr.from_onnx(model.SerializeToString())


def test_missing_initialiser_is_named() -> None:
    model = onnx_model([node("MatMul", "x w", "y")], _X, ["y"], {"w": np.ones((3, 2), np.float32)})
    del model.graph.initializer[:]
    with pytest.raises(InvalidGraphError, match="w"):
        gr.from_onnx(model.SerializeToString())


def test_initialiser_without_its_data_is_refused() -> None:
    model = onnx_model([node("MatMul", "x w", "y")], _X, ["y"], {"w": np.ones((3, 2), np.float32)})
    model.graph.initializer[0].raw_data = b"1234"
    with pytest.raises(InvalidGraphError, match="w"):
        gr.from_onnx(model.SerializeToString())


def test_shape_bomb_is_refused() -> None:
    model = onnx_model([node("MatMul", "x w", "y")], _X, ["y"], {"w": np.ones((3, 2), np.float32)})
    model.graph.initializer[0].dims[:] = [3, 2**40]
    with pytest.raises(InvalidGraphError):
        gr.from_onnx(model.SerializeToString())


def test_large_constants_are_not_computed_by_the_conversion() -> None:
    size = np.array([2**30], np.int64)
    nodes = [node("ConstantOfShape", "size", "big"), node("ReduceSum", "big", "total"), node("Add", "x total", "y")]
    graph = gr.from_onnx(onnx_model(nodes, _X, ["y"], {"size": size}).SerializeToString())
    assert len(graph.to_bytes()) < 10_000


def test_deep_nesting_is_refused() -> None:
    data = b""
    for _ in range(2000):
        # A graph in an attribute in a node in a graph.
        for field in (6, 5, 1):
            size, length = len(data), b""
            while size > 127:
                length += bytes([size & 127 | 128])
                size >>= 7
            data = bytes([field << 3 | 2]) + length + bytes([size]) + data
    model = _relu().SerializeToString()
    with pytest.raises(InvalidGraphError, match="no ONNX model"):
        gr.from_onnx(model + bytes([7 << 3 | 2]) + b"\xff\xff\x7f" + data)


@pytest.mark.parametrize("depth", [5, 30])
def test_nested_branches_are_converted_or_refused(depth: int) -> None:
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    flat = helper.make_graph([node("Relu", "x", "y")], "flat", [], [result])
    inner = flat
    for _ in range(depth):
        inner = helper.make_graph([node("If", "c", "y", then_branch=inner, else_branch=flat)], "deep", [], [result])
    model = _relu()
    model.graph.node[0].CopyFrom(inner.node[0])
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    data = model.SerializeToString()
    graph = gr.from_onnx(data)
    assert sum(item.op == "If" for item in graph.messages()) == 1


def _function(name: str, calls: str, count: int) -> onnx.FunctionProto:
    nodes = [
        helper.make_node(calls, [f"t{i}"], [f"t{i + 1}"], domain="own" if calls != "Relu" else "") for i in range(count)
    ]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["t0"], [f"t{count}"], nodes, imports)


def _calling(name: str, functions: list[onnx.FunctionProto]) -> bytes:
    model = _relu()
    model.graph.node[0].CopyFrom(helper.make_node(name, ["x"], ["y"], domain="own"))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.extend(functions)
    return bytes(model.SerializeToString())


def test_function_that_calls_itself_is_refused() -> None:
    with pytest.raises(InvalidGraphError, match="'F' calls itself"):
        gr.from_onnx(_calling("F", [_function("F", "F", 1)]))


def test_functions_that_multiply_are_refused() -> None:
    functions = [_function(f"F{i}", f"F{i + 1}" if i < 9 else "Relu", 10) for i in range(10)]
    with pytest.raises(UnsupportedError, match="more than 200000 nodes"):
        gr.from_onnx(_calling("F0", functions))


def test_function_is_expanded() -> None:
    graph = gr.from_onnx(_calling("F", [_function("F", "Relu", 2)]))
    assert [item.op for item in graph.messages()] == ["Placeholder", "Relu", "Relu"]


def test_old_and_future_opsets_are_refused() -> None:
    for version in (9, 999):
        model = _relu()
        model.opset_import[0].version = version
        with pytest.raises(UnsupportedError, match=f"opset {version}; supported are 11 to"):
            gr.from_onnx(model.SerializeToString())


def test_unknown_domain_is_refused() -> None:
    model = _relu()
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises((InvalidGraphError, UnsupportedError), match=r"com\.example"):
        gr.from_onnx(model.SerializeToString())


def test_all_problems_are_reported_at_once() -> None:
    nodes = [
        node("RandomNormalLike", "x", "a", name="noise"),
        node("Dropout", "x _ on", "b", name="drop"),
        node("Add", "a b", "y"),
    ]
    model = onnx_model(nodes, _X, ["y"], {"on": np.array(True)})
    with pytest.raises(UnsupportedError, match="RandomNormalLike, Dropout") as caught:
        gr.from_onnx(model.SerializeToString())
    assert [detail.node for detail in caught.value.details] == ["noise", "drop"]
    assert "of ai.onnx 17, node 'noise': its random numbers" in caught.value.details[0].message
    assert "in training mode; export the model for inference" in caught.value.details[1].message


def test_attribute_that_is_not_converted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradrule._models import onnx_calls, onnx_table

    row = onnx_table.all_rows()["LeakyRelu"]
    ignoring = onnx_calls.OnnxOp(lambda call: call.value(0), row.nodes)
    monkeypatch.setitem(onnx_calls.ONNX_OPS, "LeakyRelu", ignoring)
    model = onnx_model([node("LeakyRelu", "x", "y", alpha=0.5)], _X, ["y"])
    with pytest.raises(UnsupportedError, match="LeakyRelu") as caught:
        gr.from_onnx(model.SerializeToString())
    assert "with the attribute 'alpha', which is not supported" in caught.value.details[0].message


def _external(tmp_path: Path, location: str, **entries: Any) -> Path:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    model = onnx_model([node("MatMul", "x w", "y")], _X, ["y"], {"w": values})
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/w.bin").write_bytes(b"1234" + values.tobytes())
    (tmp_path / "outside.bin").write_bytes(values.tobytes())
    file = tmp_path / "model/model.onnx"
    file.write_bytes(model.SerializeToString())
    return file


def test_external_data_is_read(tmp_path: Path) -> None:
    graph = gr.load(_external(tmp_path, "w.bin", offset=4, length=24))
    np.testing.assert_array_equal(graph.variables["w"], np.arange(6, dtype=np.float32).reshape(3, 2))


@pytest.mark.parametrize("location", ["../outside.bin", "model/../../outside.bin", "/etc/passwd", ""])
def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    with pytest.raises(UnsupportedError, match="must be in the model's folder"):
        gr.load(_external(tmp_path, location))


def test_external_data_behind_a_link_is_refused(tmp_path: Path) -> None:
    file = _external(tmp_path, "link.bin")
    os.symlink(tmp_path / "outside.bin", tmp_path / "model/link.bin")
    with pytest.raises(UnsupportedError, match="symbolic link"):
        gr.load(file)


def test_external_data_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidGraphError, match="shorter"):
        gr.load(_external(tmp_path, "w.bin", offset=20, length=24))
    (tmp_path / "model/w.bin").unlink()
    with pytest.raises(InvalidGraphError, match="cannot be read"):
        gr.load(tmp_path / "model/model.onnx")


def test_external_data_of_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="only bytes were given"):
        gr.from_onnx(_external(tmp_path, "w.bin").read_bytes())


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'gradrule\[onnx\]'"):
        gr.from_onnx(b"")


def test_string_input_is_refused() -> None:
    model = onnx_model([node("Identity", "x", "y")], {"x": (object, [2])}, ["y"])
    with pytest.raises(UnsupportedError) as caught:
        gr.from_onnx(model.SerializeToString())
    assert "graphs take tensors of numbers and booleans" in caught.value.details[0].message


@pytest.mark.parametrize(
    ("bad", "attribute"),
    [
        (node("LayerNormalization", "x s", "y", axis=2**31), "axis"),
        (node("Split", "x", "y z", num_outputs=1), "number of outputs"),
        (node("Einsum", "x", "y", equation="...ii - ...i"), "no equation"),
    ],
)
def test_attributes_that_end_the_process_in_onnx_are_refused(bad: onnx.NodeProto, attribute: str) -> None:
    model = onnx_model([node("Relu", "x", "y")], _X, ["y"], {"s": np.ones(3, np.float32)}, opset=18)
    model.graph.node[0].CopyFrom(bad)
    with pytest.raises(InvalidGraphError, match=attribute):
        gr.from_onnx(model.SerializeToString())


def test_sizes_that_no_array_has_are_refused() -> None:
    sizes = np.array([2, 2**40], np.int64)
    nodes = [node("Resize", "x _ _ sizes", "r"), node("ReduceSum", "r", "y")]
    with pytest.raises(UnsupportedError) as caught:
        gr.from_onnx(onnx_model(nodes, _X, ["y"], {"sizes": sizes}).SerializeToString())
    assert "Resize" in caught.value.details[0].message


def test_names_that_are_no_text_are_refused() -> None:
    data = _relu().SerializeToString().replace(b"Relu", b"R\xfflu")
    with pytest.raises((InvalidGraphError, UnsupportedError)):
        gr.from_onnx(data)
