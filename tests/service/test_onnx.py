"""Graphs from ONNX models: gradients equal finite differences, and overrides name ONNX's operations and nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import gradrule as gr
from gradrule.cli.failures import REFUSED
from tests.service.servers import RunningServer
from tests.service.shell import shell_in
from tests.unit.models.onnx_models import Array, node, onnx_model

_RANDOM = np.random.default_rng(7)


def _values(*shape: int) -> Array:
    """Returns numbers away from 0, where derivatives of many operations jump."""
    return _RANDOM.choice([-1.0, 1.0], size=shape) * _RANDOM.uniform(0.2, 0.9, size=shape)


def _loop() -> onnx.NodeProto:
    body = helper.make_graph(
        [node("Mul", "h w", "h1"), node("Tanh", "h1", "h2"), node("Identity", "c", "c1"), node("Identity", "h2", "s")],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.DOUBLE, [2, 3]),
        ],
        [
            helper.make_tensor_value_info("c1", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h2", TensorProto.DOUBLE, [2, 3]),
            helper.make_tensor_value_info("s", TensorProto.DOUBLE, [2, 3]),
        ],
    )
    return node("Loop", "count _ x", "last y", body=body)


# Nodes from x to y, the shape of x, and initialisers.
_CASES: dict[str, tuple[list[onnx.NodeProto], tuple[int, ...], Mapping[str, Array]]] = {
    **{name: ([node(name, "x", "y")], (2, 3), {}) for name in ("Tanh", "Exp", "Elu", "Softplus", "Mish", "HardSwish")},
    "Gelu": ([node("Gelu", "x", "y", approximate="tanh")], (2, 3), {}),
    "Clip": ([node("Clip", "x low high", "y")], (2, 3), {"low": np.array(-0.5), "high": np.array(0.4)}),
    "Pow": ([node("Abs", "x", "a"), node("Pow", "a e", "y")], (2, 3), {"e": np.array([1.5, 2.0, 3.0])}),
    "Softmax": ([node("Softmax", "x", "y", axis=1)], (2, 3, 4), {}),
    "ReduceLogSumExp": ([node("ReduceLogSumExp", "x axes", "y")], (2, 3), {"axes": np.array([0])}),
    "ReduceL2": ([node("ReduceL2", "x axes", "y", keepdims=0)], (2, 3), {"axes": np.array([1])}),
    "CumSum": ([node("CumSum", "x axis", "y", reverse=1)], (2, 3), {"axis": np.array(1)}),
    "TopK": ([node("TopK", "x k", "y indices", largest=0)], (2, 5), {"k": np.array([2])}),
    "Slice": (
        [node("Slice", "x s e a t", "y")],
        (4, 5),
        {"s": np.array([-1]), "e": np.array([0]), "a": np.array([1]), "t": np.array([-2])},
    ),
    "Pad": ([node("Pad", "x pads", "y", mode="edge")], (2, 3), {"pads": np.array([1, 0, 0, 2])}),
    "GatherElements": ([node("GatherElements", "x i", "y", axis=1)], (2, 3), {"i": np.array([[0, -1], [2, 2]])}),
    "ScatterND": ([node("ScatterND", "x i u", "y")], (4, 2), {"i": np.array([[1], [3]]), "u": _values(2, 2)}),
    "Gemm": (
        [node("Gemm", "x w c", "y", transA=1, alpha=0.5, beta=2.0)],
        (3, 2),
        {"w": _values(3, 4), "c": _values(4)},
    ),
    "MatMul": ([node("MatMul", "x w", "y")], (2, 3, 4), {"w": _values(4, 2)}),
    "Einsum": ([node("Einsum", "x w", "y", equation="bij,bjk->bik")], (2, 3, 4), {"w": _values(2, 4, 2)}),
    "Conv": (
        [node("Conv", "x w b", "y", strides=[2, 1], pads=[1, 0, 1, 1], group=2)],
        (2, 4, 6, 5),
        {"w": _values(6, 2, 3, 2), "b": _values(6)},
    ),
    "ConvTranspose": (
        [node("ConvTranspose", "x w", "y", strides=[2, 2], output_padding=[1, 0])],
        (1, 3, 4, 4),
        {"w": _values(3, 2, 3, 3)},
    ),
    "AveragePool": ([node("AveragePool", "x", "y", kernel_shape=[3, 3], pads=[1] * 4)], (1, 2, 5, 5), {}),
    "MaxPool": ([node("MaxPool", "x", "y", kernel_shape=[2, 2], dilations=[2, 1])], (1, 2, 6, 5), {}),
    "LpPool": ([node("LpPool", "x", "y", kernel_shape=[2], p=3)], (1, 2, 6), {}),
    "Resize": ([node("Resize", "x _ s", "y", mode="cubic")], (1, 2, 4, 4), {"s": np.array([1, 1, 1.5, 2], np.float32)}),
    "GridSample": ([node("GridSample", "x g", "y", padding_mode="border")], (1, 2, 4, 4), {"g": _values(1, 3, 2, 2)}),
    "LayerNormalization": (
        [node("LayerNormalization", "x w b", "y", axis=1)],
        (2, 3, 4),
        {"w": _values(3, 4), "b": _values(3, 4)},
    ),
    "InstanceNormalization": (
        [node("InstanceNormalization", "x w b", "y")],
        (2, 3, 4),
        {"w": _values(3), "b": _values(3)},
    ),
    "GroupNormalization": (
        [node("GroupNormalization", "x w b", "y", num_groups=2)],
        (2, 4, 3),
        {"w": _values(4), "b": _values(4)},
    ),
    "BatchNormalization": (
        [node("BatchNormalization", "x w b m v", "y")],
        (2, 3, 4),
        {"w": _values(3), "b": _values(3), "m": _values(3), "v": np.array([0.5, 1.0, 2.0])},
    ),
    "LSTM": (
        [node("LSTM", "x w r b", "y", hidden_size=2, direction="bidirectional")],
        (3, 2, 4),
        {"w": _values(2, 8, 4), "r": _values(2, 8, 2), "b": _values(2, 16)},
    ),
    "GRU": ([node("GRU", "x w r", "y", hidden_size=2)], (3, 2, 4), {"w": _values(1, 6, 4), "r": _values(1, 6, 2)}),
    "Loop": ([_loop()], (2, 3), {"count": np.array(3), "w": _values(2, 3)}),
    "DFT": (
        [node("Unsqueeze", "x last", "u"), node("DFT", "u _ axis", "y")],
        (2, 6),
        {"last": np.array([-1]), "axis": np.array(1)},
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_values_and_gradients(client: gr.Client, name: str) -> None:
    nodes, shape, values = _CASES[name]
    model = onnx_model(nodes, {"x": (np.float64, shape)}, ["y"], values, opset=21)
    graph = gr.from_onnx(model.SerializeToString())
    x, direction = _values(*shape), _values(*shape)
    y = client.evaluate(graph, {"x": x}, fetches=["y"]).outputs["y"]
    if name != "Loop":
        (expected,) = ReferenceEvaluator(model).run(["y"], {"x": x})
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    weights = _RANDOM.uniform(0.5, 1.5, size=y.shape)
    found = client.evaluate(graph, {"x": x}, fetches=["y"], ys=["y"], xs=["x"], grad_ys={"y": weights}).gradients["x"]
    step = 1e-6
    ends = [client.evaluate(graph, {"x": x + move * direction}, fetches=["y"]).outputs["y"] for move in (step, -step)]
    slope = np.sum(weights * (ends[0] - ends[1])) / (2 * step)
    assert np.sum(np.asarray(found) * direction) == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("condition", [True, False])
def test_gradients_of_variables_that_branches_in_branches_use(client: gr.Client, condition: bool) -> None:
    def branch(*nodes: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("o", TensorProto.DOUBLE, [2, 3])])

    product = node("MatMul", "x w", "o")
    inner = node(
        "If",
        "c",
        "o",
        then_branch=branch(node("Neg", "x", "n"), node("MatMul", "n w", "o")),
        else_branch=branch(product),
    )
    outer = node("If", "on", "y", then_branch=branch(inner), else_branch=branch(node("Neg", "x", "o")))
    inputs = {"x": (np.float64, [2, 3]), "on": (np.bool_, []), "c": (np.bool_, [])}
    graph = gr.from_onnx(onnx_model([outer], inputs, ["y"], {"w": _values(3, 3)}).SerializeToString())
    x = _values(2, 3)
    feeds = {"x": x, "on": np.array(True), "c": np.array(condition)}
    found = client.evaluate(graph, feeds, fetches=["y"], ys=["y"], xs=["w"]).gradients["w"]
    expected = np.repeat((-x if condition else x).sum(axis=0)[:, None], 3, axis=1)
    np.testing.assert_allclose(found, expected)


def _quantised() -> tuple[gr.Graph, Array]:
    weight = _RANDOM.normal(size=(4, 3)).astype(np.float32)
    nodes = [
        node("QuantizeLinear", "x s z", "qx", name="quantise_x"),
        node("DequantizeLinear", "qx s z", "dx", name="dequantise_x"),
        node("DequantizeLinear", "qw sw zw", "dw", name="dequantise_w"),
        node("Gemm", "dx dw", "y", name="fc", transB=1),
    ]
    scale = float(np.abs(weight).max()) / 127
    integers = np.round(weight / scale).astype(np.int8)
    values: dict[str, Array] = {
        "s": np.array(0.05, np.float32),
        "z": np.array(4, np.uint8),
        "sw": np.array(scale, np.float32),
        "zw": np.array(0, np.int8),
        "qw": integers,
    }
    model = onnx_model(nodes, {"x": (np.float32, ["n", 3])}, ["y"], values, opset=19)
    return gr.from_onnx(model.SerializeToString()), integers * np.float32(scale)


def test_straight_through_rule_of_a_quantised_model(client: gr.Client) -> None:
    graph, weight = _quantised()
    x = _RANDOM.uniform(0, 1, size=(5, 3)).astype(np.float32)
    plain = client.evaluate(graph, {"x": x}, fetches=["y"], ys=["y"], xs=["x"], unconnected_gradients="zero")
    assert not np.asarray(plain.gradients["x"]).any()
    rounded = np.round(x / np.float32(0.05)) * np.float32(0.05)
    np.testing.assert_allclose(plain.outputs["y"], rounded @ weight.T, rtol=1e-5, atol=1e-6)
    # As the straight-through estimator of rounding, or of the whole operation, whose input 1 is the scale.
    every: list[dict[str, Any]] = [{"Round": "ste"}, {"QuantizeLinear": "first(dy / x1)"}]
    for overrides in every:
        passed = client.evaluate(graph, {"x": x}, fetches=["y"], ys=["y"], xs=["x"], overrides=overrides)
        np.testing.assert_allclose(passed.gradients["x"], np.ones((5, 4)) @ weight, rtol=1e-5)


def test_overrides_name_operations_and_nodes(client: gr.Client) -> None:
    nodes = [
        node("Gemm", "x w", "g", name="/head/fc"),
        node("Gelu", "g", "h", name="/head/act"),
        node("Relu", "h", "y"),
    ]
    model = onnx_model(nodes, {"x": (np.float32, [2, 3])}, ["y"], {"w": np.ones((3, 4), np.float32)}, opset=20)
    graph = gr.from_onnx(model.SerializeToString())
    x = _RANDOM.normal(size=(2, 3)).astype(np.float32)
    every: list[Any] = [{"Gelu": "ste", "Relu": "guided_relu"}, [gr.Override(rule="ste", node="head/act")]]
    for overrides in every:
        result = client.evaluate(graph, {"x": x}, fetches=["y"], ys=["y"], xs=["x"], overrides=overrides)
        assert [item.node for item in result.overrides if item.op_type == "Gelu"] == ["head/act"]


def test_command_line_evaluates_a_file(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = shell_in(tmp_path, server, monkeypatch, capsys)
    model = onnx_model([node("Relu", "x", "r", name="act"), node("Mul", "r r", "y")], {"x": (np.float32, [3])}, ["y"])
    Path("model.onnx").write_bytes(model.SerializeToString())
    np.save("x.npy", np.float32([-1, 2, 3]))
    result = shell("evaluate", "model.onnx", "--feed", "x=x.npy", "--y", "y", "--x", "x", "--json")
    assert result.code == 0, result
    Path("model.onnx").write_bytes(model.SerializeToString()[:20])
    assert shell("evaluate", "model.onnx", "--feed", "x=x.npy").code == REFUSED
