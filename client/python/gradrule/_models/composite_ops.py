"""Composite operations: one node each, with a function of the graph that computes it from TensorFlow's ops.

The function has the name of the operation, so that overrides name the operation; its parts are found by their path
(`encoder/0/Gelu/Erf`). One function serves all floating-point types: it is written for one of them, whose place an
attribute `T` takes. Numbers within it are attributes too, since their type is `T`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradrule._builder.graph import Graph
from gradrule._builder.handles import TensorHandle
from gradrule.common import op_definitions, tensor_codec
from gradrule.v1 import graph_pb2
from gradrule.v1.tensor_pb2 import Dt

# Stands for `T` while a function is built; the bodies use this type for nothing else.
_MARKER = Dt.DT_HALF
_INT32 = Dt.DT_INT32
_BOOL = Dt.DT_BOOL


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of an operation. value: its default. dtype: its element type; 0: that of the operation."""

    value: Any = 0.0
    dtype: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CompositeOp:
    """Describes a composite operation.

    Attributes:
        name: Its name, as overrides give it.
        inputs: Names of its inputs.
        build: Builds the body: takes a graph, the inputs and the constants by name; returns the output.
        constants: Its constants; a call may give other values.
        typed: Inputs that have another type than the operation.
        flags: Attributes of type bool; nodes of the body have `AttrValue(placeholder=flag)` in their place.
    """

    name: str
    inputs: tuple[str, ...]
    build: Callable[..., TensorHandle]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    typed: Mapping[str, Dt.ValueType] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@functools.cache
def function_of(operation: CompositeOp) -> graph_pb2.Function:
    """Returns the function of an operation."""
    body = Graph()
    arguments = {
        name: body.placeholder(name, "half" if name not in operation.typed else _name(operation.typed[name]), None)
        for name in operation.inputs
    }
    constants = {
        name: body.constant(constant.value, _name(constant.dtype or _MARKER), name=name)
        for name, constant in operation.constants.items()
    }
    result = operation.build(body, *arguments.values(), **constants)
    return _function(operation, body, result)


def _name(number: int) -> str:
    return tensor_codec.numpy_dtype(number).name


def _function(operation: CompositeOp, body: Graph, result: TensorHandle) -> graph_pb2.Function:
    """Converts a graph to a function whose type and constants are attributes."""
    function = graph_pb2.Function()
    signature = function.signature
    signature.name = operation.name
    signature.attr.add(name="T", type="type")
    for name in operation.constants:
        signature.attr.add(name=name, type="tensor")
    for name in operation.flags:
        signature.attr.add(name=name, type="bool")
    for name in operation.inputs:
        if name in operation.typed:
            signature.input_arg.add(name=name, type=operation.typed[name])
        else:
            signature.input_arg.add(name=name, type_attr="T")
    signature.output_arg.add(name="y", type_attr="T")
    nodes = {node.name: node for node in body.messages()}
    for node in nodes.values():
        if node.name in operation.inputs:
            continue
        copy = function.node_def.add()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(_reference(text, nodes, operation) for text in node.input)
        for key, value in copy.attr.items():
            if value.WhichOneof("value") == "type" and value.type == _MARKER:
                copy.attr[key].Clear()
                copy.attr[key].placeholder = "T"
        if node.name in operation.constants:
            copy.attr["value"].Clear()
            copy.attr["value"].placeholder = node.name
    function.ret["y"] = _reference(result.name, nodes, operation)
    return function


def _reference(text: str, nodes: Mapping[str, graph_pb2.Node], operation: CompositeOp) -> str:
    """Converts the name of a tensor of a graph to that within a function, `node:output:index`."""
    name, _, index = text.partition(":")
    if name in operation.inputs:
        return name
    definition = op_definitions.find(nodes[name].op)
    assert definition is not None
    position = int(index or 0)
    if len(definition.outputs) == 1:
        return f"{name}:{definition.outputs[0].name}:{position}"
    return f"{name}:{definition.outputs[position].name}:0"


def _gelu(g: Graph, x: TensorHandle, half: TensorHandle, one: TensorHandle, sqrt_half: TensorHandle) -> TensorHandle:
    erf = g.op_output("Erf", g.op_output("Mul", x, sqrt_half))
    return g.op_output("Mul", g.op_output("Mul", x, half), g.op_output("AddV2", erf, one))


def _gelu_tanh(
    g: Graph, x: TensorHandle, half: TensorHandle, one: TensorHandle, scale: TensorHandle, cubic: TensorHandle
) -> TensorHandle:
    cube = g.op_output("Mul", g.op_output("Mul", x, x), x)
    inner = g.op_output("Mul", scale, g.op_output("AddV2", x, g.op_output("Mul", cubic, cube)))
    return g.op_output("Mul", g.op_output("Mul", x, half), g.op_output("AddV2", g.op_output("Tanh", inner), one))


def _silu(g: Graph, x: TensorHandle) -> TensorHandle:
    return g.op_output("Mul", x, g.op_output("Sigmoid", x))


def _hard_sigmoid(g: Graph, x: TensorHandle, three: TensorHandle, sixth: TensorHandle) -> TensorHandle:
    return g.op_output("Mul", g.op_output("Relu6", g.op_output("AddV2", x, three)), sixth)


def _hard_swish(g: Graph, x: TensorHandle, three: TensorHandle, sixth: TensorHandle) -> TensorHandle:
    return g.op_output("Mul", x, _hard_sigmoid(g, x, three, sixth))


def _mish(g: Graph, x: TensorHandle) -> TensorHandle:
    return g.op_output("Mul", x, g.op_output("Tanh", g.op_output("Softplus", x)))


def _step(g: Graph, x: TensorHandle, zero: TensorHandle, op_type: str) -> TensorHandle:
    return g.op_output("Cast", g.op_output(op_type, x, zero), DstT="half")


def _layer_norm(
    g: Graph,
    x: TensorHandle,
    scale: TensorHandle,
    offset: TensorHandle,
    axes: TensorHandle,
    epsilon: TensorHandle,
) -> TensorHandle:
    centred = g.op_output("Sub", x, g.op_output("Mean", x, axes, keep_dims=True))
    variance = g.op_output("Mean", g.op_output("Square", centred), axes, keep_dims=True)
    normal = g.op_output("Mul", centred, g.op_output("Rsqrt", g.op_output("AddV2", variance, epsilon)))
    return g.op_output("AddV2", g.op_output("Mul", normal, scale), offset)


def _rms_norm(
    g: Graph, x: TensorHandle, scale: TensorHandle, axes: TensorHandle, epsilon: TensorHandle
) -> TensorHandle:
    mean = g.op_output("Mean", g.op_output("Square", x), axes, keep_dims=True)
    return g.op_output("Mul", g.op_output("Mul", x, g.op_output("Rsqrt", g.op_output("AddV2", mean, epsilon))), scale)


def _group_norm(
    g: Graph,
    x: TensorHandle,
    scale: TensorHandle,
    offset: TensorHandle,
    grouped: TensorHandle,
    axes: TensorHandle,
    channels: TensorHandle,
    epsilon: TensorHandle,
) -> TensorHandle:
    shape = g.op_output("Shape", x)
    parts = g.op_output("Reshape", x, grouped)
    centred = g.op_output("Sub", parts, g.op_output("Mean", parts, axes, keep_dims=True))
    variance = g.op_output("Mean", g.op_output("Square", centred), axes, keep_dims=True)
    normal = g.op_output("Mul", centred, g.op_output("Rsqrt", g.op_output("AddV2", variance, epsilon)))
    whole = g.op_output("Reshape", normal, shape)
    scaled = g.op_output("Mul", whole, g.op_output("Reshape", scale, channels))
    return g.op_output("AddV2", scaled, g.op_output("Reshape", offset, channels))


def _batch_norm(
    g: Graph,
    x: TensorHandle,
    scale: TensorHandle,
    offset: TensorHandle,
    mean: TensorHandle,
    variance: TensorHandle,
    epsilon: TensorHandle,
) -> TensorHandle:
    factor = g.op_output("Mul", scale, g.op_output("Rsqrt", g.op_output("AddV2", variance, epsilon)))
    return g.op_output(
        "AddV2", g.op_output("Mul", x, factor), g.op_output("Sub", offset, g.op_output("Mul", mean, factor))
    )


def _attention(
    g: Graph, query: TensorHandle, key: TensorHandle, value: TensorHandle, mask: TensorHandle, scale: TensorHandle
) -> TensorHandle:
    scores = g.op_output("BatchMatMulV2", g.op_output("Mul", query, scale), key, adj_y=True)
    return g.op_output("BatchMatMulV2", g.op_output("Softmax", g.op_output("AddV2", scores, mask)), value)


def _gemm(g: Graph, a: TensorHandle, b: TensorHandle, c: TensorHandle) -> TensorHandle:
    transposed: dict[str, Any] = {
        f"transpose_{name.lower()}": graph_pb2.AttrValue(placeholder=f"trans{name}") for name in "AB"
    }
    return g.op_output("AddV2", g.op_output("MatMul", a, b, **transposed), c)


def _quantize(
    g: Graph, x: TensorHandle, scale: TensorHandle, zero: TensorHandle, low: TensorHandle, high: TensorHandle
) -> TensorHandle:
    rounded = g.op_output("AddV2", g.op_output("Round", g.op_output("RealDiv", x, scale)), zero)
    return g.op_output("Minimum", g.op_output("Maximum", rounded, low), high)


def _dequantize(g: Graph, x: TensorHandle, scale: TensorHandle, zero: TensorHandle) -> TensorHandle:
    return g.op_output("Mul", g.op_output("Sub", x, zero), scale)


_AXES = Constant([0], _INT32)
_HALF, _ONE = Constant(0.5), Constant(1.0)

COMPOSITE_OPS: Mapping[str, CompositeOp] = {
    operation.name: operation
    for operation in (
        # Hendrycks and Gimpel 2016, equation 1, and its approximation below equation 2.
        CompositeOp("Gelu", ("x",), _gelu, {"half": _HALF, "one": _ONE, "sqrt_half": Constant(0.5**0.5)}),
        CompositeOp(
            "GeluTanh",
            ("x",),
            _gelu_tanh,
            {
                "half": _HALF,
                "one": _ONE,
                "scale": Constant(0.7978845608028654),
                "cubic": Constant(0.044715),
            },
        ),
        CompositeOp("Silu", ("x",), _silu),
        CompositeOp("Mish", ("x",), _mish),
        CompositeOp("HardSigmoid", ("x",), _hard_sigmoid, {"three": Constant(3.0), "sixth": Constant(1 / 6)}),
        CompositeOp("HardSwish", ("x",), _hard_swish, {"three": Constant(3.0), "sixth": Constant(1 / 6)}),
        CompositeOp("Heaviside", ("x",), functools.partial(_step, op_type="Greater"), {"zero": Constant()}),
        CompositeOp("HeavisideEqual", ("x",), functools.partial(_step, op_type="GreaterEqual"), {"zero": Constant()}),
        CompositeOp("LayerNorm", ("x", "scale", "offset"), _layer_norm, {"axes": _AXES, "epsilon": Constant(1e-5)}),
        CompositeOp("RmsNorm", ("x", "scale"), _rms_norm, {"axes": _AXES, "epsilon": Constant(1e-5)}),
        CompositeOp(
            "GroupNorm",
            ("x", "scale", "offset"),
            _group_norm,
            {"grouped": _AXES, "axes": _AXES, "channels": _AXES, "epsilon": Constant(1e-5)},
        ),
        CompositeOp(
            "BatchNorm", ("x", "scale", "offset", "mean", "variance"), _batch_norm, {"epsilon": Constant(1e-5)}
        ),
        # Under the names that ONNX has for them.
        CompositeOp(
            "LayerNormalization", ("x", "scale", "offset"), _layer_norm, {"axes": _AXES, "epsilon": Constant(1e-5)}
        ),
        CompositeOp(
            "InstanceNormalization", ("x", "scale", "offset"), _layer_norm, {"axes": _AXES, "epsilon": Constant(1e-5)}
        ),
        CompositeOp(
            "GroupNormalization",
            ("x", "scale", "offset"),
            _group_norm,
            {"grouped": _AXES, "axes": _AXES, "channels": _AXES, "epsilon": Constant(1e-5)},
        ),
        CompositeOp("RMSNormalization", ("x", "scale"), _rms_norm, {"axes": _AXES, "epsilon": Constant(1e-5)}),
        CompositeOp(
            "BatchNormalization", ("x", "scale", "offset", "mean", "variance"), _batch_norm, {"epsilon": Constant(1e-5)}
        ),
        CompositeOp(
            "QuantizeLinear", ("x", "scale", "zero"), _quantize, {"low": Constant(-128), "high": Constant(127)}
        ),
        CompositeOp("DequantizeLinear", ("x", "scale", "zero"), _dequantize),
        CompositeOp("Gemm", ("a", "b", "c"), _gemm, flags=("transA", "transB")),
        CompositeOp("Attention", ("query", "key", "value", "mask"), _attention, {"scale": _ONE}),
    )
}
