"""Graphs from ONNX models have the names, variables and nodes of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import gradrule as gr
from tests.unit.models.onnx_models import node, onnx_model

_RANDOM = np.random.default_rng(0)
_WEIGHT = _RANDOM.normal(size=(4, 3, 3, 3)).astype(np.float32)
_IMAGE = {"x": (np.float32, ["batch", 3, 8, 8])}


def _graph(*args: Any, **options: Any) -> gr.Graph:
    return gr.from_onnx(onnx_model(*args, **options).SerializeToString())


def _ops(graph: gr.Graph) -> dict[str, str]:
    return {item.name: item.op for item in graph.messages()}


def test_nodes_have_the_names_of_onnx() -> None:
    bias = np.zeros(4, np.float32)
    nodes = [
        node("Conv", "x layer1.conv.weight layer1.conv.bias", "c", name="/layer1/conv/Conv", pads=[1] * 4),
        node("Relu", "c", "r", name="/layer1/relu/Relu"),
        node("Relu", "r", "s"),
        node("Relu", "s", "t"),
        node("Add", "t c", "y", name="head:add"),
    ]
    graph = _graph(nodes, _IMAGE, ["y"], {"layer1.conv.weight": _WEIGHT, "layer1.conv.bias": bias})
    ops = _ops(graph)
    assert ops["layer1/conv/Conv"] == "Conv2D"
    assert ops["layer1/conv/Conv/BiasAdd"] == "BiasAdd"
    assert [name for name, op in ops.items() if op == "Relu"] == ["layer1/relu/Relu", "Relu", "Relu_1"]
    assert ops["head_add"] == "AddV2"
    assert set(graph.variables) == {"layer1.conv.weight", "layer1.conv.bias"}
    np.testing.assert_array_equal(graph.variables["layer1.conv.weight"], _WEIGHT)
    assert list(graph.inputs) == ["x"]
    assert graph.inputs["x"].shape == (None, 3, 8, 8)
    assert list(graph.outputs) == ["y"]


def test_layouts_cancel_between_layers_of_images() -> None:
    nodes = [node("Conv", "x w", "c0", pads=[1] * 4)]
    square = _RANDOM.normal(size=(4, 4, 3, 3)).astype(np.float32)
    for place in range(3):
        nodes += [
            node("Relu", f"c{place}", f"r{place}"),
            node("MaxPool", f"r{place}", f"p{place}", kernel_shape=[3, 3], pads=[1] * 4),
            node("Add", f"p{place} c{place}", f"s{place}"),
            node("Conv", f"s{place} v", f"c{place + 1}", pads=[1] * 4),
        ]
    graph = _graph(nodes, _IMAGE, ["c3"], {"w": _WEIGHT, "v": square})
    layouts = [item for item in graph.messages() if item.name.startswith("layout/")]
    assert len(layouts) == 2


def test_names_that_graphs_cannot_have_become_aliases() -> None:
    graph = _graph([node("Relu", "input:0", "output:0")], {"input:0": (np.float32, [2])}, ["output:0"])
    assert list(graph.inputs) == ["input:0"]
    assert list(graph.outputs) == ["output:0"]


def test_output_that_is_an_input_is_a_node() -> None:
    graph = _graph([node("Identity", "x", "y")], _IMAGE, ["y"])
    assert list(graph.outputs) == ["y"]


def test_statistics_are_not_trained() -> None:
    ones = np.ones(3, np.float32)
    values = {"scale": ones, "bias": ones, "mean": ones, "var": ones}
    graph = _graph([node("BatchNormalization", "x scale bias mean var", "y", name="norm")], _IMAGE, ["y"], values)
    assert graph.non_trainable == {"mean", "var"}
    assert _ops(graph)["norm"] == "BatchNormalization"


def test_operations_with_other_names_are_functions() -> None:
    scale = np.ones(4, np.float32)
    weight = np.ones((4, 4), np.float32)
    nodes = [
        node("Gemm", "x w", "g", name="fc", transB=1),
        node("LayerNormalization", "g scale", "n", name="norm"),
        node("Gelu", "n", "h", name="act"),
        node("QuantizeLinear", "h s z", "q", name="q"),
        node("DequantizeLinear", "q s z", "y", name="dq"),
    ]
    values = {"w": weight, "scale": scale, "s": np.array(0.1, np.float32), "z": np.array(3, np.int8)}
    graph = _graph(nodes, {"x": (np.float32, [2, 4])}, ["y"], values, opset=20)
    ops = _ops(graph)
    expected = {
        "fc": "Gemm", "norm": "LayerNormalization", "act": "Gelu", "q": "QuantizeLinear", "dq": "DequantizeLinear",
    }  # fmt: skip
    assert {name: ops[name] for name in expected} == expected
    assert "Cast" not in ops.values()


def test_shapes_are_computed_by_the_conversion() -> None:
    nodes = [
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "batch"),
        node("Unsqueeze", "batch axes", "first"),
        node("Concat", "first rest", "sizes", axis=0),
        node("Reshape", "x sizes", "y"),
    ]
    values = {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([-1])}
    graph = _graph(nodes, {"x": (np.float32, [2, 3, 4])}, ["y"], values)
    assert sorted(_ops(graph).values()) == ["Const", "Placeholder", "Reshape"]
    assert any(op == "Shape" for op in _ops(_graph(nodes, {"x": (np.float32, ["n", 3])}, ["y"], values)).values())


def test_known_condition_leaves_one_branch() -> None:
    branches = {
        name: onnx.helper.make_graph([node(op, "x", "b")], name, [], [onnx.helper.make_tensor_value_info("b", 1, [2])])
        for name, op in (("then_branch", "Relu"), ("else_branch", "Exp"))
    }
    nodes = [node("If", "c", "y", name="branch", **branches)]
    inputs = {"x": (np.float32, [2])}
    graph = _graph(nodes, inputs, ["y"], {"c": np.array(False)})
    assert set(_ops(graph).values()) == {"Placeholder", "Exp"}
    graph = _graph(nodes, {**inputs, "c": (np.bool_, [])}, ["y"])
    assert _ops(graph)["branch"] == "If"


def test_constants_of_weights_are_one_variable_each() -> None:
    weight = np.ones((3, 3), np.float32)
    graph = _graph(
        [node("MatMul", "x w", "a"), node("MatMul", "a w", "y")], {"x": (np.float32, [2, 3])}, ["y"], {"w": weight}
    )
    assert list(graph.variables) == ["w"]


def test_result_that_differs_from_what_onnx_infers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradrule._models import onnx_calls

    monkeypatch.setitem(
        onnx_calls.ONNX_OPS, "Flatten", onnx_calls.OnnxOp(lambda call: call.attr("axis") and call.value(0))
    )
    with pytest.raises(gr.errors.UnsupportedError) as caught:
        _graph([node("Flatten", "x", "y")], _IMAGE, ["y"])
    assert "converted to 4 axes where ONNX has 2" in caught.value.details[0].message
