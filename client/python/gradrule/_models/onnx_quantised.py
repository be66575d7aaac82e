"""Converts ONNX operations on quantised numbers.

QuantizeLinear and DequantizeLinear are nodes that a straight-through rule can name: between them, the integers are
floating-point numbers, through which gradients pass. Other nodes get them as integers.
"""

from __future__ import annotations

import numpy as np
import onnx

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import Converted, OpCall, Tensor, converts
from gradrule._models.onnx_images import convolved

_RANGES = {
    "int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535), "int4": (-8, 7),
    "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3),
}  # fmt: skip


def _along(call: OpCall, x: TensorHandle, index: int) -> TensorHandle:
    """Returns a scale or zero point in a shape that broadcasts with the first input."""
    if block := call.attr("block_size", 0):
        axis = call.axis(default=1)
        return call.op("GatherV2", x, call.const(np.arange(call.known_shape()[axis]) // block, "int32"), axis)
    count = call.rank(index)
    call.attr("axis")
    if count == 0:
        return x
    if call.shape(index) == (1,):
        return call.op("Reshape", x, call.model.int32())
    if count != 1:
        raise UnsupportedOpError("with a scale of several axes")
    shape = [1] * call.rank()
    shape[call.axis(default=1)] = -1
    return call.op("Reshape", x, call.model.int32(*shape))


def _numbers(call: OpCall, index: int, dtype: str) -> TensorHandle:
    """Returns quantised numbers as floating-point ones."""
    found = call.tensor(index)
    if found.quantised is not None:
        return call.cast(call.model.natural(found.quantised), dtype)
    if found.array is not None and (found.array.size <= 1 or not found.dtype):
        return call.const(found.array.astype(np.float64), dtype)
    if not found.dtype:
        raise UnsupportedOpError("of an element type that graphs do not have")
    return call.cast(call.x(index), dtype)


def _kind(call: OpCall, index: int) -> str:
    """Returns the element type of quantised numbers, narrow ones included."""
    number = call.body.element_type(call.node.input[index])
    name = onnx.TensorProto.DataType.Name(number).lower() if number else "uint8"
    if name not in (*_RANGES, "int32"):
        raise UnsupportedOpError(f"of {name}")
    return name


@converts("QuantizeLinear", nodes="QuantizeLinear", refuses="floating-point numbers of 8 bits and less")
def _quantize(call: OpCall) -> Converted:
    if call.dtype() == "int32":
        raise UnsupportedOpError("of int32")
    call.attr("saturate"), call.attr("precision")
    given = call.attr("output_dtype", 0)
    kind = _kind(call, 2) if call.has(2) else onnx.TensorProto.DataType.Name(given or onnx.TensorProto.UINT8).lower()
    if kind not in _RANGES:
        raise UnsupportedOpError(f"to {kind}")
    dtype = "float64" if call.dtype() == "float64" else "float32"
    scale = _along(call, call.cast(call.x(1), dtype), 1)
    zero = _along(call, _numbers(call, 2, dtype), 2) if call.has(2) else call.const(0, dtype)
    low, high = _RANGES[kind]
    x = call.cast(call.x(), dtype)
    y = call.model.composite("QuantizeLinear", x, scale, zero, low=low, high=high)
    name = call.node.output[0]
    return Tensor(call.body.info(name)[0], call.output_shape(), quantised=Value(y, call.rank()))


@converts("DequantizeLinear", nodes="DequantizeLinear", refuses="floating-point numbers of 8 bits and less")
def _dequantize(call: OpCall) -> Converted:
    kind = _kind(call, 0)
    own = call.dtype(1)
    call.attr("output_dtype")
    dtype = "float32" if own in ("float16", "bfloat16") or kind == "int32" else own
    scale = _along(call, call.cast(call.x(1), dtype), 1)
    zero = _along(call, _numbers(call, 2, dtype), 2) if call.has(2) else call.const(0, dtype)
    y = call.model.composite("DequantizeLinear", _numbers(call, 0, dtype), scale, zero)
    return Value(call.cast(y, call.output_dtype()), call.rank())


def _shifted(call: OpCall, index: int, zero: int, dtype: str, column: bool = False) -> TensorHandle:
    """Returns integers less their zero point. `column`: A vector of zero points belongs to the rows."""
    x = call.cast(call.x(index), dtype)
    if not call.has(zero):
        return x
    point = call.cast(call.x(zero), dtype)
    if call.rank(zero) == 1:
        if call.shape(zero) == (1,):
            point = call.op("Reshape", point, call.model.int32())
        elif column:
            point = call.op("ExpandDims", point, 1)
    return call.op("Sub", x, point)


@converts("MatMulInteger", nodes="BatchMatMulV2", differentiable=False)
def _matmul_integer(call: OpCall) -> Converted:
    a, b = _shifted(call, 0, 2, "int32", column=True), _shifted(call, 1, 3, "int32")
    if call.rank(0) < 2 or call.rank(1) < 2:
        raise UnsupportedOpError("of vectors")
    return Value(call.op("BatchMatMulV2", a, b), max(call.rank(0), call.rank(1)))


@converts("ConvInteger", nodes="Conv2D of float64, which holds the integers", differentiable=False)
def _conv_integer(call: OpCall) -> Converted:
    if call.has(3) and call.shape(3) not in ((), (1,)):
        raise UnsupportedOpError("with several zero points of weights")
    x, weight = _shifted(call, 0, 2, "float64"), _shifted(call, 1, 3, "float64")
    y = convolved(call, Value(x, call.rank()), weight, call.known_shape(1), None)
    return call.model.elementwise("Cast", y, DstT="int32")


def _requantized(call: OpCall, total: TensorHandle, scale: TensorHandle, zero: int) -> TensorHandle:
    """Returns the quantised numbers of a total, as integers."""
    low, high = _RANGES[_kind(call, zero)]
    point = call.cast(call.op("Reshape", call.x(zero), call.model.int32()), "float64")
    y = call.model.composite("QuantizeLinear", total, scale, point, low=low, high=high)
    return call.cast(y, call.output_dtype())


def _scales(call: OpCall, first: int, second: int, result: int) -> TensorHandle:
    """Returns the result's scale divided by those of the factors, float64."""
    a, b, y = (call.cast(call.x(index), "float64") for index in (first, second, result))
    return call.op("RealDiv", y, call.op("Mul", a, b))


@converts(
    "QLinearMatMul",
    nodes="BatchMatMulV2 and QuantizeLinear of float64",
    differentiable=False,
    refuses="several scales or zero points",
)
def _quantised_matmul(call: OpCall) -> Converted:
    if any(call.shape(index) not in ((), (1,)) for index in (1, 2, 4, 5, 6, 7)):
        raise UnsupportedOpError("with several scales or zero points")
    if call.rank(0) < 2 or call.rank(3) < 2:
        raise UnsupportedOpError("of vectors")
    total = call.op("BatchMatMulV2", _shifted(call, 0, 2, "float64"), _shifted(call, 3, 5, "float64"))
    scale = call.op("Reshape", _scales(call, 1, 4, 6), call.model.int32())
    return Value(_requantized(call, total, scale, 7), max(call.rank(0), call.rank(3)))


@converts(
    "QLinearConv",
    nodes="Conv2D and QuantizeLinear of float64",
    differentiable=False,
    refuses="several scales or zero points",
)
def _quantised_convolution(call: OpCall) -> Converted:
    if any(call.shape(index) not in ((), (1,)) for index in (1, 2, 4, 5, 6, 7)):
        raise UnsupportedOpError("with several scales or zero points")
    x, weight = _shifted(call, 0, 2, "float64"), _shifted(call, 3, 5, "float64")
    bias = call.cast(call.x(8), "float64") if call.has(8) else None
    y = convolved(call, Value(x, call.rank()), weight, call.known_shape(3), bias)
    scale = call.op("Reshape", _scales(call, 1, 4, 6), call.model.int32())
    return Value(_requantized(call, call.model.natural(y), scale, 7), call.rank())
