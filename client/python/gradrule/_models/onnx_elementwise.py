"""Converts ONNX operations that compute each element on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import (
    DTYPES,
    FLOATS,
    Convert,
    OnnxOp,
    OpCall,
    Tensor,
    add_op,
    converts,
)

_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")


def _unary(op_type: str) -> Convert:
    def convert(call: OpCall) -> Value:
        return call.model.elementwise(op_type, call.value(0))

    return convert


def _binary(op_type: str) -> Convert:
    def convert(call: OpCall) -> Value:
        return call.model.broadcast(op_type, [call.value(0), call.value(1)])

    return convert


def _through(op_type: str, dtypes: Sequence[str], wide: str) -> Callable[[OpCall], Value]:
    """Returns the conversion of an operation that TensorFlow computes for some of `dtypes` in the type `wide` only."""

    def convert(call: OpCall) -> Value:
        values = [call.value(index) for index in range(len(call))]
        if values[0].dtype not in dtypes:
            return call.model.broadcast(op_type, values)
        if values[0].dtype == "uint64":
            raise UnsupportedOpError("of uint64")
        own = values[0].dtype
        widened = [call.model.elementwise("Cast", value, DstT=wide) for value in values]
        return call.model.elementwise("Cast", call.model.broadcast(op_type, widened), DstT=own)

    return convert


_UNARY = {
    "Acos": "Acos", "Acosh": "Acosh", "Asin": "Asin", "Asinh": "Asinh", "Atan": "Atan", "Atanh": "Atanh", "Cos": "Cos",
    "Cosh": "Cosh", "Elu": "Elu", "Erf": "Erf", "Exp": "Exp", "Log": "Log", "Neg": "Neg", "Reciprocal": "Reciprocal",
    "Relu": "Relu", "Sigmoid": "Sigmoid", "Sin": "Sin", "Sinh": "Sinh", "Softplus": "Softplus", "Softsign": "Softsign",
    "Sqrt": "Sqrt", "Tan": "Tan", "Tanh": "Tanh",
}  # fmt: skip
_UNARY_WITHOUT_GRADIENT = {
    "Ceil": "Ceil", "Floor": "Floor", "Round": "Round", "IsNaN": "IsNan", "Not": "LogicalNot", "BitwiseNot": "Invert",
}  # fmt: skip
_BINARY = {"Add": "AddV2", "Sub": "Sub", "Mul": "Mul"}
_BINARY_WITHOUT_GRADIENT = {
    "And": "LogicalAnd", "Or": "LogicalOr", "Xor": "NotEqual", "Equal": "Equal", "Greater": "Greater", "Less": "Less",
    "GreaterOrEqual": "GreaterEqual", "LessOrEqual": "LessEqual", "BitwiseAnd": "BitwiseAnd", "BitwiseOr": "BitwiseOr",
    "BitwiseXor": "BitwiseXor",
}  # fmt: skip

for _names, _conversion, _gradient in (
    (_UNARY, _unary, True),
    (_UNARY_WITHOUT_GRADIENT, _unary, False),
    (_BINARY, _binary, True),
    (_BINARY_WITHOUT_GRADIENT, _binary, False),
):
    for _name, _op_type in _names.items():
        if _name != "Elu":
            add_op(_name, OnnxOp(_conversion(_op_type), _op_type, _gradient))

add_op("Abs", OnnxOp(_through("Abs", _UNSIGNED, "int64"), "Abs", refuses="uint64"))
add_op("Sign", OnnxOp(_through("Sign", _UNSIGNED, "int64"), "Sign", refuses="uint64"))


@converts("Identity", nodes="none: the tensor itself")
def _identity(call: OpCall) -> Tensor | Value:
    return call.body.tensor_or_value(call.node.input[0])


@converts("Cast", nodes="Cast", refuses="strings, floating-point numbers of 8 bits and less")
def _cast(call: OpCall) -> Value:
    dtype = DTYPES.get(call.attr("to"))
    # Says what becomes of numbers that 8 bits cannot hold, which graphs do not have.
    call.attr("saturate"), call.attr("round_mode")
    if dtype is None:
        raise UnsupportedOpError("to an element type that graphs do not have")
    return cast_value(call, call.value(0), dtype)


@converts("CastLike", nodes="Cast", refuses="as Cast")
def _cast_like(call: OpCall) -> Value:
    call.attr("saturate"), call.attr("round_mode")
    return cast_value(call, call.value(0), call.dtype(1) or call.output_dtype())


def cast_value(call: OpCall, value: Value, dtype: str) -> Value:
    """Returns a value in another element type, without a node if it has this type."""
    return value if value.dtype == dtype else call.model.elementwise("Cast", value, DstT=dtype)


@converts("BitCast", nodes="Bitcast", differentiable=False, refuses="types of other sizes")
def _bit_cast(call: OpCall) -> Value:
    value, dtype = call.value(0), call.output_dtype()
    call.attr("to")
    if value.dtype == dtype:
        return value
    return (
        call.model.elementwise("Cast", value, DstT=dtype)
        if "bool" in (value.dtype, dtype)
        else call.model.elementwise("Bitcast", value, type=dtype)
    )


@converts("Div", nodes="RealDiv, or TruncateDiv of integers")
def _divide(call: OpCall) -> Value:
    is_real = call.dtype() in FLOATS or call.dtype().startswith("complex")
    return call.model.broadcast("RealDiv" if is_real else "TruncateDiv", [call.value(0), call.value(1)])


@converts("Mod", nodes="FloorMod, or TruncateMod with fmod=1", refuses="fmod=1 of uint64")
def _modulo(call: OpCall) -> Value:
    if not call.attr("fmod"):
        return call.model.broadcast("FloorMod", [call.value(0), call.value(1)])
    if call.dtype() in ("float16", "bfloat16"):
        return _through("TruncateMod", ("float16", "bfloat16"), "float32")(call)
    return _through("TruncateMod", ("int8", "int16", *_UNSIGNED), "int64")(call)


@converts("Pow", nodes="Square or Pow", refuses="uint64")
def _power(call: OpCall) -> Value:
    x, exponent = call.value(0), call.value(1)
    known = call.array(1)
    if known is not None and known.size == 1 and known.ndim <= x.rank and known.reshape(-1)[0] == 2:
        return call.model.elementwise("Square", x)
    own = x.dtype
    if own in FLOATS:
        return call.model.broadcast("Pow", [x, cast_value(call, exponent, own)])
    if "uint64" in (own, exponent.dtype) or own not in ("int32", "int64"):
        raise UnsupportedOpError(f"of {own}")
    wide = "float64" if exponent.dtype in FLOATS else "int64"
    powers = call.model.broadcast("Pow", [cast_value(call, x, wide), cast_value(call, exponent, wide)])
    return cast_value(call, powers, own)


@converts("BitShift", nodes="LeftShift or RightShift", differentiable=False)
def _shift(call: OpCall) -> Value:
    """Shifts bits; amounts that are negative or not below the width shift all of them out."""
    model, x, amount = call.model, call.value(0), call.value(1)
    width = np.dtype(x.dtype).itemsize * 8
    inside = model.broadcast("Less", [amount, Value(call.const(width), 0)])
    if x.dtype not in _UNSIGNED:
        positive = model.broadcast("GreaterEqual", [amount, Value(call.const(0), 0)])
        inside = model.broadcast("LogicalAnd", [inside, positive])
    if call.attr("direction") == "LEFT" or x.dtype in _UNSIGNED:
        shifted = model.broadcast("LeftShift" if call.attr("direction") == "LEFT" else "RightShift", [x, amount])
        return model.broadcast("SelectV2", [inside, shifted, Value(call.const(0), 0)])
    amount = model.broadcast("SelectV2", [inside, amount, Value(call.const(width - 1), 0)])
    return model.broadcast("RightShift", [x, amount])


def _folded_over(op_type: str) -> Convert:
    """Returns the conversion of an operation of any number of inputs."""

    def convert(call: OpCall) -> Value:
        result = call.value(0)
        for index in range(1, len(call)):
            result = call.model.broadcast(op_type, [result, call.value(index)])
        return result

    return convert


add_op("Max", OnnxOp(_folded_over("Maximum"), "Maximum"))
add_op("Min", OnnxOp(_folded_over("Minimum"), "Minimum"))
add_op("Sum", OnnxOp(_folded_over("AddV2"), "AddV2"))


@converts("Mean", nodes="AddV2 and RealDiv")
def _mean(call: OpCall) -> Value:
    total = _folded_over("AddV2")(call)
    assert isinstance(total, Value)
    return call.model.broadcast("RealDiv", [total, Value(call.const(len(call)), 0)])


@converts("Where", nodes="SelectV2")
def _where(call: OpCall) -> Value:
    return call.model.broadcast("SelectV2", [call.value(0), call.value(1), call.value(2)])


@converts("Clip", nodes="Relu, Relu6, or Maximum and Minimum")
def _clip(call: OpCall) -> Value:
    x = call.value(0)
    low = call.array(1) if call.has(1) else None
    high = call.array(2) if call.has(2) else None
    if low is not None and float(low.reshape(-1)[0]) == 0 and x.dtype in FLOATS:
        if not call.has(2):
            return call.model.elementwise("Relu", x)
        if high is not None and float(high.reshape(-1)[0]) == 6:
            return call.model.elementwise("Relu6", x)
    for index, op_type in ((1, "Maximum"), (2, "Minimum")):
        if call.has(index):
            x = call.model.broadcast(op_type, [x, call.value(index)])
    return x


@converts("IsInf", nodes="IsInf", differentiable=False)
def _is_infinite(call: OpCall) -> Value:
    x, model = call.value(0), call.model
    positive, negative = call.attr("detect_positive"), call.attr("detect_negative")
    if positive and negative:
        return model.elementwise("IsInf", x)
    sought = np.inf if positive else -np.inf if negative else np.nan
    return model.broadcast("Equal", [x, Value(call.const(sought), 0)])


@converts("LeakyRelu", nodes="LeakyRelu")
def _leaky_relu(call: OpCall) -> Value:
    return call.model.elementwise("LeakyRelu", call.value(0), alpha=float(call.attr("alpha")))


def _scaled(call: OpCall, value: Value, factor: float) -> Value:
    return value if factor == 1 else call.model.broadcast("Mul", [value, Value(call.const(factor), 0)])


def _exponential_linear(call: OpCall, x: Value, alpha: float) -> Value:
    """Returns x where it is positive, else alpha (exp(x) - 1)."""
    model, zero = call.model, Value(call.const(0), 0)
    if alpha == 1:
        return model.elementwise("Elu", x)
    below = model.elementwise("Expm1", model.broadcast("Minimum", [x, zero]))
    return model.broadcast("AddV2", [model.elementwise("Relu", x), _scaled(call, below, alpha)])


@converts("Elu", nodes="Elu; with another alpha: Relu, Expm1 and Minimum")
def _elu(call: OpCall) -> Value:
    return _exponential_linear(call, call.value(0), float(call.attr("alpha")))


@converts("Selu", nodes="Selu; with other numbers: as Elu")
def _selu(call: OpCall) -> Value:
    alpha, gamma = float(call.attr("alpha")), float(call.attr("gamma"))
    if np.float32(alpha) == np.float32(1.67326319217681884765625) and np.float32(gamma) == np.float32(
        1.05070102214813232421875
    ):
        return call.model.elementwise("Selu", call.value(0))
    return _scaled(call, _exponential_linear(call, call.value(0), alpha), gamma)


@converts("Celu", nodes="Elu")
def _celu(call: OpCall) -> Value:
    alpha = float(call.attr("alpha"))
    x = _scaled(call, call.value(0), 1 / alpha)
    return _scaled(call, call.model.elementwise("Elu", x), alpha)


@converts("ThresholdedRelu", nodes="SelectV2")
def _thresholded_relu(call: OpCall) -> Value:
    x, model = call.value(0), call.model
    above = model.broadcast("Greater", [x, Value(call.const(call.attr("alpha")), 0)])
    return model.broadcast("SelectV2", [above, x, Value(call.const(0), 0)])


@converts("Shrink", nodes="SelectV2")
def _shrink(call: OpCall) -> Value:
    x, model, dtype = call.value(0), call.model, call.dtype()
    limit, bias = float(call.attr("lambd")), float(call.attr("bias"))
    if dtype not in FLOATS and (limit % 1 or bias % 1 or dtype in _UNSIGNED):
        raise UnsupportedOpError(f"of {dtype} with lambd {limit} and bias {bias}")
    zero = Value(call.const(0), 0)
    below = model.broadcast("Less", [x, Value(call.const(-limit), 0)])
    above = model.broadcast("Greater", [x, Value(call.const(limit), 0)])
    raised = model.broadcast("AddV2", [x, Value(call.const(bias), 0)])
    lowered = model.broadcast("Sub", [x, Value(call.const(bias), 0)])
    return model.broadcast("SelectV2", [below, raised, model.broadcast("SelectV2", [above, lowered, zero])])


@converts("PRelu", nodes="Relu, Minimum, Mul and AddV2", refuses="unsigned integers")
def _prelu(call: OpCall) -> Value:
    x, model = call.value(0), call.model
    if x.dtype in _UNSIGNED:
        raise UnsupportedOpError(f"of {x.dtype}")
    below = model.broadcast("Mul", [model.broadcast("Minimum", [x, Value(call.const(0), 0)]), call.value(1)])
    return model.broadcast("AddV2", [model.elementwise("Relu", x), below])


@converts("HardSigmoid", nodes="Mul, AddV2, Maximum and Minimum")
def _hard_sigmoid(call: OpCall) -> Value:
    model = call.model
    y = _scaled(call, call.value(0), float(call.attr("alpha")))
    y = model.broadcast("AddV2", [y, Value(call.const(call.attr("beta")), 0)])
    y = model.broadcast("Maximum", [y, Value(call.const(0), 0)])
    return model.broadcast("Minimum", [y, Value(call.const(1), 0)])


def composite_value(call: OpCall, op_type: str) -> Value:
    """Adds a composite operation of the first input."""
    x = call.value(0)
    return Value(call.model.composite(op_type, x.handle), x.rank, x.channels_last)


@converts("HardSwish", nodes="HardSwish")
def _hard_swish(call: OpCall) -> Value:
    return composite_value(call, "HardSwish")


@converts("Mish", nodes="Mish")
def _mish(call: OpCall) -> Value:
    return composite_value(call, "Mish")


@converts("Gelu", nodes="Gelu, or GeluTanh with approximate=tanh")
def _gelu(call: OpCall) -> Value:
    return composite_value(call, "GeluTanh" if call.attr("approximate") == "tanh" else "Gelu")


@converts("Swish", nodes="Silu; with another alpha: Mul and Sigmoid")
def _swish(call: OpCall) -> Value:
    alpha = float(call.attr("alpha"))
    if alpha == 1:
        return composite_value(call, "Silu")
    x = call.value(0)
    return call.model.broadcast("Mul", [x, call.model.elementwise("Sigmoid", _scaled(call, x, alpha))])


def scalar(call: OpCall, index: int) -> TensorHandle:
    """Returns an input of one element as a scalar."""
    return call.op("Reshape", call.x(index), call.model.int32())
