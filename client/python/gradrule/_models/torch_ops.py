"""Converts ATen operations: one small function each, in one table."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gradrule._builder.handles import TensorHandle
from gradrule._models import images
from gradrule._models.model_graph import ModelGraph, Size, Step, UnsupportedOpError, Value
from gradrule.common import tensor_codec

Converted: TypeAlias = Any
"""The results of an operation: a `Value`, a list of these, or the scalar of a size."""

# Arguments that change no number, or only through the type of the result.
_WITHOUT_EFFECT = frozenset(
    {
        "copy",
        "cudnn_enable",
        "cudnn_enabled",
        "device",
        "dtype",
        "generator",
        "implicit",
        "layout",
        "memory_format",
        "momentum",
        "non_blocking",
        "pin_memory",
        "sparse",
    }
)

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the values of a tensor."""
    found = tensor.detach().cpu().contiguous()
    is_bfloat16 = found.dtype is torch.bfloat16
    array: np.ndarray[Any, Any] = (found.view(torch.int16) if is_bfloat16 else found).numpy()
    return array.view(tensor_codec.numpy_dtype(tensor_codec.dtype_number("bfloat16"))) if is_bfloat16 else array


def dtype_of(tensor: Any) -> str:
    """Returns the name of the element type of a PyTorch tensor."""
    return named_dtype(tensor.dtype)


def named_dtype(dtype: torch.dtype) -> str:
    """Returns the name of a PyTorch type. Raises `UnsupportedOpError`."""
    if dtype not in _DTYPES:
        raise UnsupportedOpError(f"of type {dtype}")
    return _DTYPES[dtype]


def known_shape(tensor: Any) -> tuple[Any, ...]:
    """Returns the sizes of PyTorch's description of a tensor; an int wherever the exported program has only one."""
    return tuple(
        size if isinstance(size, int) or not size.node.expr.is_number else int(size.node.expr) for size in tensor.shape
    )


class OpCall:
    """A call of an operation in an exported program.

    Args:
        model: The graph under construction.
        node: The call.
        value_of: Returns an argument with values in place of nodes.
    """

    def __init__(self, model: ModelGraph, node: torch.fx.Node, value_of: Callable[[Any], Any]) -> None:
        self.model = model
        self._node = node
        self._value_of = value_of
        arguments = node.target._schema.arguments
        self._names = [argument.name for argument in arguments]
        self._given = {**dict(zip(self._names, node.args, strict=False)), **node.kwargs}
        self._defaults = {item.name: item.default_value for item in arguments if item.has_default_value()}
        self._unread = set(self._given)

    @property
    def target(self) -> str:
        """Name of the operation with its overload, `max.dim`."""
        return str(self._node.target).removeprefix("aten.")

    def has(self, name: str) -> bool:
        """Returns whether the operation has an argument of this name."""
        return name in self._names

    def arg(self, key: int | str, default: Any = None) -> Any:
        """Returns an argument by its position or its name in ATen's schema.

        If it is not given, returns the schema's default; if the operation has no such argument, `default`.
        """
        name = self._names[key] if isinstance(key, int) else key
        self._unread.discard(name)
        if name in self._given:
            return self._value_of(self._given[name])
        return self._defaults.get(name, default) if name in self._names else default

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns an argument that is True or False; `default` if the operation has no such argument."""
        return bool(self.arg(key, default))

    def check_all_read(self) -> None:
        """Raises `UnsupportedOpError` if an argument that changes the result was not read."""
        for name in sorted(self._unread - _WITHOUT_EFFECT):
            value = self._given[name]
            if value is not None and value != self._defaults.get(name):
                raise UnsupportedOpError(f"with {name}={value}")

    @property
    def results(self) -> Sequence[Any]:
        """PyTorch's descriptions of all results."""
        found = self._node.meta["val"]
        return found if isinstance(found, (tuple, list)) else [found]

    @property
    def is_tuple(self) -> bool:
        """Whether the operation has several results."""
        return isinstance(self._node.meta["val"], (tuple, list))

    def first_of_tuple(self, value: Value) -> Converted:
        """Returns the results of an operation of whose results only the first one can be converted."""
        return [value, *[None] * (len(self.results) - 1)] if self.is_tuple else value

    def value(self, key: int | str) -> Value:
        """Returns an argument that is a tensor; a number becomes one of the result's type."""
        found = self.arg(key)
        if isinstance(found, Value):
            return found
        if isinstance(found, TensorHandle):
            return self.cast(Value(found, 0), self.result_dtype)
        return Value(self.model.constant(found, self.result_dtype), 0)

    def natural(self, key: int | str) -> TensorHandle:
        """Returns an argument that is a tensor, its axes in the order of the model."""
        return self.model.natural(self.value(key))

    def optional(self, key: int | str) -> Value | None:
        """Returns an argument that is a tensor or None."""
        found = self.arg(key)
        return found if isinstance(found, Value) else None

    def int_of(self, key: int | str) -> int:
        """Returns an argument that must be a known integer."""
        found = self.arg(key)
        if not isinstance(found, int):
            raise UnsupportedOpError(f"with a computed {key}")
        return found

    def ints(self, key: int | str, count: int = 0) -> list[int]:
        """Returns a list of known integers; one integer, or a list of one, is repeated `count` times."""
        found = self.arg(key)
        listed = [found] if isinstance(found, int) else list(found or ())
        if not all(isinstance(item, int) for item in listed):
            raise UnsupportedOpError(f"with a computed {key}")
        return listed * count if len(listed) == 1 and count else listed

    def axes(self, key: int | str, value: Value) -> list[int]:
        """Returns axes >= 0 of a value; all of them if the argument is None or empty."""
        found = self.arg(key)
        listed = [found] if isinstance(found, int) else list(found or range(value.rank))
        return [axis % value.rank if value.rank else 0 for axis in listed]

    def shape_of(self, key: int | str) -> tuple[Any, ...]:
        """Returns the sizes of an argument that is a tensor; symbolic ones are no ints."""
        node = self._given[self._names[key] if isinstance(key, int) else key]
        assert isinstance(node, torch.fx.Node)
        return known_shape(node.meta["val"])

    def known_sizes(self, key: int | str, axes: Sequence[int]) -> list[int]:
        """Returns sizes of an argument that must be known."""
        sizes = [self.shape_of(key)[axis] for axis in axes]
        if not all(isinstance(size, int) for size in sizes):
            raise UnsupportedOpError("of a tensor whose sizes are not known")
        return sizes

    @property
    def result(self) -> Any:
        """PyTorch's description of the first result, with `dtype` and `shape`."""
        return self.results[0]

    @property
    def result_dtype(self) -> str:
        """Name of the element type of the first result."""
        return dtype_of(self.result) if isinstance(self.result, torch.Tensor) else "int32"

    @property
    def operand_dtype(self) -> str:
        """Name of the type to which PyTorch converts the first two operands."""
        found = [self._given[name] for name in self._names[:2]]
        operands = [item.meta["val"] if isinstance(item, torch.fx.Node) else item for item in found]
        return named_dtype(torch.result_type(*operands))

    def operand(self, key: int | str, dtype: str) -> Value:
        """Returns an argument that is a tensor, a number or a size, in an element type."""
        found = self.arg(key)
        if isinstance(found, TensorHandle):
            found = Value(found, 0)
        return self.cast(found, dtype) if isinstance(found, Value) else Value(self.model.constant(found, dtype), 0)

    def cast(self, value: Value, dtype: str) -> Value:
        """Returns a value in another element type."""
        if value.dtype == dtype:
            return value
        if value.step is not None and value.step.dtype == dtype:
            return value.step.add()
        # As in PyTorch, all numbers but 0 are True.
        if dtype == "bool":
            zero = self.model.constant(0, value.dtype)
            return Value(self.model.op("NotEqual", value.handle, zero), value.rank, value.channels_last)
        return self.model.elementwise("Cast", value, DstT=dtype)


_Converter: TypeAlias = Callable[[OpCall], Converted]


# Operations of one element each.


def _unary(op_type: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        x = call.value(0)
        # Of the results that are no numbers, only LogicalNot has such an operand.
        if call.result_dtype != "bool" or op_type == "LogicalNot":
            x = call.cast(x, call.result_dtype)
        return call.model.elementwise(op_type, x)

    return convert


def _binary(op_type: str) -> _Converter:
    """Returns the conversion of an operation of two tensors or numbers, with PyTorch's promotion of types."""

    def convert(call: OpCall) -> Value:
        dtype = call.result_dtype
        if dtype == "bool" and not op_type.startswith("Logical"):
            dtype = call.operand_dtype
        if op_type in _ARITHMETIC and dtype == "bool":
            raise UnsupportedOpError("of bool")
        left, right = (call.operand(key, dtype) for key in (0, 1))
        return call.model.broadcast(op_type, [left, _times_alpha(call, right)])

    return convert


_ARITHMETIC = frozenset({"AddV2", "Sub", "Mul", "Maximum", "Minimum"})


def _comparison(op_type: str, step_type: str) -> _Converter:
    """Returns the conversion of a comparison, which becomes a step function where its result becomes a number."""
    compare = _binary(op_type)

    def convert(call: OpCall) -> Converted:
        model, dtype, y = call.model, call.operand_dtype, compare(call)

        def add_step() -> Value:
            left, right = (call.operand(key, dtype) for key in (0, 1))
            is_zero = not isinstance(call.arg(1), (Value, TensorHandle)) and call.arg(1) == 0
            difference = left if is_zero else model.broadcast("Sub", [left, right])
            step = Value(model.composite(step_type, difference.handle), difference.rank, difference.channels_last)
            if is_zero:
                return step
            # The difference of infinite numbers is no number.
            exact = model.elementwise("Cast", Value(y.handle, y.rank, y.channels_last), DstT=dtype)
            return model.broadcast("SelectV2", [model.elementwise("IsFinite", difference), step, exact])

        if dtype.startswith(("float", "bfloat")):
            y.step = Step(dtype, add_step)
        return y

    return convert


def _detach(call: OpCall) -> Value:
    return call.model.elementwise("StopGradient", call.value(0))


def _times_alpha(call: OpCall, value: Value) -> Value:
    alpha = call.arg("alpha", 1)
    return value if alpha == 1 else call.model.broadcast("Mul", [value, call.operand("alpha", value.dtype)])


def _reversed_subtraction(call: OpCall) -> Value:
    left, right = (call.operand(key, call.result_dtype) for key in (0, 1))
    return call.model.broadcast("Sub", [right, _times_alpha(call, left)])


def _bitwise(op_type: str) -> _Converter:
    logical = _unary(op_type) if op_type == "LogicalNot" else _binary(op_type)

    def convert(call: OpCall) -> Converted:
        if call.result_dtype != "bool":
            raise UnsupportedOpError("of numbers")
        return logical(call)

    return convert


def _divide(call: OpCall) -> Value:
    mode, dtype = call.arg("rounding_mode"), call.result_dtype
    operands = [call.operand(key, dtype) for key in (0, 1)]
    if mode == "floor":
        return _floor_quotient(call, operands)
    if mode == "trunc" and "int" in dtype:
        return call.model.broadcast("TruncateDiv", operands)
    quotient = call.model.broadcast("RealDiv", operands)
    if mode is None:
        return quotient
    magnitude = call.model.elementwise("Floor", call.model.elementwise("Abs", quotient))
    return call.model.broadcast("Mul", [call.model.elementwise("Sign", quotient), magnitude])


def _floor_divide(call: OpCall) -> Value:
    return _floor_quotient(call, [call.operand(key, call.result_dtype) for key in (0, 1)])


def _floor_quotient(call: OpCall, operands: Sequence[Value]) -> Value:
    """Divides and rounds down. PyTorch takes the remainder off first: 1 / 0.1 is 9, since 0.1 is a little more."""
    model = call.model
    if "int" in call.result_dtype:
        return model.broadcast("FloorDiv", operands)
    whole = model.broadcast("Sub", [operands[0], model.broadcast("FloorMod", operands)])
    return model.elementwise("Round", model.broadcast("RealDiv", [whole, operands[1]]))


def _composite_unary(op_type: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        x = call.value(0)
        return Value(call.model.composite(op_type, x.handle), x.rank, x.channels_last)

    return convert


def _gelu(call: OpCall) -> Value:
    x = call.value(0)
    op_type = "GeluTanh" if call.arg("approximate") == "tanh" else "Gelu"
    return Value(call.model.composite(op_type, x.handle), x.rank, x.channels_last)


def _leaky_relu(call: OpCall) -> Value:
    model, x, slope = call.model, call.value(0), float(call.arg("negative_slope"))
    # The attribute of LeakyRelu is a float32.
    if x.dtype != "float64" or float(np.float32(slope)) == slope:
        return model.elementwise("LeakyRelu", x, alpha=slope)
    is_positive = model.op("Greater", x.handle, model.constant(0, x.dtype))
    negative = model.op("Mul", x.handle, model.constant(slope, x.dtype))
    return Value(model.op("SelectV2", is_positive, x.handle, negative), x.rank, x.channels_last)


def _elu(call: OpCall) -> Value:
    if (call.arg("alpha"), call.arg("scale"), call.arg("input_scale")) != (1, 1, 1):
        raise UnsupportedOpError("with alpha or scale other than 1")
    return call.model.elementwise("Elu", call.value(0))


def _softplus(call: OpCall) -> Value:
    if call.arg("beta") != 1 or call.arg("threshold") != 20:
        raise UnsupportedOpError("with beta other than 1, or threshold other than 20")
    return call.model.elementwise("Softplus", call.value(0))


def _log_sigmoid(call: OpCall) -> Value:
    negative = call.model.elementwise("Neg", call.value(0))
    return call.model.elementwise("Neg", call.model.elementwise("Softplus", negative))


def _prelu(call: OpCall) -> Value:
    x, weight = call.value(0), call.value(1)
    if x.rank > 2 and weight.rank == 1 and call.shape_of(1)[0] != 1:
        x = Value(call.model.channels_last(x), x.rank, channels_last=True)
    negative = call.model.op("Minimum", x.handle, call.model.constant(0, x.dtype))
    positive = call.model.op("Relu", x.handle)
    scaled = call.model.op("Mul", negative, weight.handle)
    return Value(call.model.op("AddV2", positive, scaled), x.rank, x.channels_last)


def _clamp(call: OpCall) -> Value:
    x = call.cast(call.value(0), call.result_dtype)
    # At a bound, PyTorch's gradient is 1, as that of Maximum; that of Relu is 0.
    for key, op_type in (("min", "Maximum"), ("max", "Minimum")):
        if call.arg(key) is not None:
            x = call.model.broadcast(op_type, [x, call.operand(key, x.dtype)])
    return x


def _hard_tanh(call: OpCall) -> Value:
    x = call.value(0)
    if (call.arg("min_val"), call.arg("max_val")) == (0, 6):
        return call.model.elementwise("Relu6", x)
    x = call.model.broadcast("Maximum", [x, call.operand("min_val", x.dtype)])
    return call.model.broadcast("Minimum", [x, call.operand("max_val", x.dtype)])


def _power(call: OpCall) -> Value:
    exponent, dtype = call.arg(1), call.result_dtype
    x = call.operand(0, dtype)
    simple = {2: "Square", 0.5: "Sqrt", -0.5: "Rsqrt"}
    if isinstance(exponent, (int, float)) and exponent in simple:
        return call.model.elementwise(simple[exponent], x)
    return call.model.broadcast("Pow", [x, call.operand(1, dtype)])


def _where(call: OpCall) -> Value:
    values = [call.operand(key, call.result_dtype) for key in ("self", "other")]
    return call.model.broadcast("SelectV2", [call.value("condition"), *values])


def _masked_fill(call: OpCall) -> Value:
    x = call.value(0)
    return call.model.broadcast("SelectV2", [call.value("mask"), call.operand("value", x.dtype), x])


def _same(call: OpCall) -> Value:
    return call.value(0)


def _dropout(call: OpCall) -> Converted:
    probability, is_training = call.arg(1), call.flag("train")
    if is_training and probability:
        raise UnsupportedOpError("in training mode: call module.eval() first")
    return call.first_of_tuple(call.value(0))


def _to_dtype(call: OpCall) -> Value:
    return call.cast(call.value(0), call.result_dtype)


# Matrices.


def _linear(call: OpCall) -> Value:
    x, weight, bias = call.natural(0), call.natural(1), call.optional(2)
    rank = call.value(0).rank
    if rank == 2:
        y = call.model.op("MatMul", x, weight, transpose_b=True)
    else:
        # A matrix with all leading axes in one: MatMul and BiasAdd are the ops of a layer.
        sizes = call.shape_of(0)
        features = [int(sizes[-1])]
        matrix = call.model.op("Reshape", x, call.model.int32(-1, *features))
        y = call.model.op("MatMul", matrix, weight, transpose_b=True)
    if bias is not None:
        y = call.model.op("BiasAdd", y, bias.handle)
    if rank == 2:
        return Value(y, 2)
    out = int(call.shape_of(1)[0])
    shape = _sizes_with_one_unknown(call, [*call.shape_of(0)[:-1], out], call.value(0))
    return Value(call.model.op("Reshape", y, shape), rank)


def _sizes_with_one_unknown(call: OpCall, sizes: Sequence[Any], value: Value) -> TensorHandle:
    """Returns a shape: -1 for the only symbolic size, the graph's sizes if there are several."""
    unknown = [axis for axis, size in enumerate(sizes) if not isinstance(size, int)]
    if len(unknown) < 2:
        return call.model.int32(*(size if isinstance(size, int) else -1 for size in sizes))
    return call.model.sizes(
        [size if isinstance(size, int) else call.model.size_of(value, axis) for axis, size in enumerate(sizes)]
    )


def _matmul(call: OpCall) -> Value:
    left, right = call.value(0), call.value(1)
    x, y = call.model.natural(left), call.model.natural(right)
    rank = max(left.rank, right.rank, 2)
    if left.rank == 1:
        x = call.model.op("ExpandDims", x, 0)
    if right.rank == 1:
        y = call.model.op("ExpandDims", y, 1)
    product = call.model.op("MatMul" if rank == 2 else "BatchMatMulV2", x, y)
    dropped = [axis for axis, operand in ((-2, left), (-1, right)) if operand.rank == 1]
    if dropped:
        product = call.model.op("Squeeze", product, squeeze_dims=dropped)
    return Value(product, rank - len(dropped))


def _addmm(call: OpCall) -> Value:
    if call.arg("beta") != 1 or call.arg("alpha") != 1:
        raise UnsupportedOpError("with alpha or beta other than 1")
    product = call.model.op("MatMul", call.natural(1), call.natural(2))
    bias = call.value(0)
    return Value(call.model.op("BiasAdd" if bias.rank == 1 else "AddV2", product, call.model.natural(bias)), 2)


def _einsum(call: OpCall) -> Value:
    operands = [call.model.natural(value) for value in call.arg(1)]
    equation = str(call.arg(0)).replace(" ", "")
    return Value(call.model.op("Einsum", operands, equation=equation), call.result.dim())


def _attention(call: OpCall) -> Value:
    model, dtype, rank = call.model, call.result_dtype, call.value(0).rank
    query, key, value = (call.natural(index) for index in range(3))
    if call.arg("dropout_p"):
        raise UnsupportedOpError("with dropout")
    scale = call.arg("scale")
    scale = call.known_sizes(0, [-1])[0] ** -0.5 if scale is None else scale
    zero, lowest = (model.constant(number, dtype) for number in (0, torch.finfo(call.result.dtype).min))
    mask, is_causal = call.optional("attn_mask"), call.flag("is_causal")
    allowed = model.natural(mask) if mask is not None and mask.dtype == "bool" else None
    added = zero
    if mask is not None and allowed is None:
        allowed = model.op("Greater", model.natural(mask), model.constant(-math.inf, dtype))
        added = model.op("Maximum", model.natural(mask), lowest)
    if is_causal:
        first = model.constant(0, "int32")
        rows, columns = (
            model.op("Range", first, model.size_of(call.value(index), -2), model.constant(1, "int32"))
            for index in (0, 1)
        )
        causal = model.op("GreaterEqual", model.op("ExpandDims", rows, 1), columns)
        added = model.op("SelectV2", causal, zero, lowest)
    elif mask is not None and mask.dtype == "bool":
        added = model.op("SelectV2", allowed, zero, lowest)
    y = model.composite("Attention", query, key, value, added, scale=scale)
    if allowed is not None:
        # The result is 0 where a row of the mask allows nothing.
        any_key = model.op("Cast", model.op("Any", allowed, model.int32(-1), keep_dims=True), DstT=dtype)
        y = model.op("Mul", y, any_key)
    return Value(y, rank)


# Normalisation.


def _batch_norm(call: OpCall) -> Converted:
    model, x = call.model, call.value(0)
    mean, variance = call.optional("running_mean"), call.optional("running_var")
    if call.flag("training") or mean is None or variance is None:
        raise UnsupportedOpError("in training mode: call module.eval() first")
    scale, offset = _scale_and_offset(call, call.known_sizes(0, [1]))
    inputs = model.channels_last(x), scale, offset, mean.handle, variance.handle
    if x.rank == 4 and x.dtype == "float32":
        y = model.ops("FusedBatchNormV3", *inputs, epsilon=float(call.arg("eps")), is_training=False)[0]
    else:
        y = model.composite("BatchNorm", *inputs, epsilon=call.arg("eps"))
    return call.first_of_tuple(Value(y, x.rank, channels_last=x.rank > 2))


def _scale_and_offset(call: OpCall, shape: Sequence[int]) -> tuple[TensorHandle, TensorHandle]:
    """Returns the arguments `weight` and `bias` of a normalisation; ones and zeros if they are not given."""
    weight, bias = call.optional("weight"), call.optional("bias")
    dtype = call.result_dtype
    scale = call.model.constant(np.ones(shape), dtype) if weight is None else call.model.natural(weight)
    offset = call.model.constant(np.zeros(shape), dtype) if bias is None else call.model.natural(bias)
    return scale, offset


def _layer_norm(call: OpCall) -> Converted:
    shape, x = call.ints("normalized_shape"), call.value(0)
    inputs = call.natural(0), *_scale_and_offset(call, shape)
    y = call.model.composite("LayerNorm", *inputs, axes=[*range(-len(shape), 0)], epsilon=call.arg("eps"))
    return call.first_of_tuple(Value(y, x.rank))


def _rms_norm(call: OpCall) -> Value:
    shape, x, epsilon = call.ints("normalized_shape"), call.value(0), call.arg("eps")
    epsilon = torch.finfo(call.result.dtype).eps if epsilon is None else epsilon
    scale, _ = _scale_and_offset(call, shape)
    y = call.model.composite("RmsNorm", call.natural(0), scale, axes=[*range(-len(shape), 0)], epsilon=epsilon)
    return Value(y, x.rank)


def _group_norm(call: OpCall) -> Value:
    model, x = call.model, call.value(0)
    groups = call.int_of("num_groups")
    sizes = call.shape_of(0)
    known = call.known_sizes(0, range(1, x.rank))
    scale, offset = _scale_and_offset(call, known[:1])
    batch = sizes[0] if isinstance(sizes[0], int) else -1
    if x.channels_last:
        grouped = [batch, *known[1:], groups, known[0] // groups]
        axes = [*range(1, x.rank - 1), x.rank]
        channels = [known[0]]
    else:
        grouped = [batch, groups, known[0] // groups, *known[1:]]
        axes = [*range(2, x.rank + 1)]
        channels = [known[0], *[1] * (x.rank - 2)]
    y = model.composite(
        "GroupNorm",
        x.handle,
        scale,
        offset,
        grouped=grouped,
        axes=axes,
        channels=channels,
        epsilon=call.arg("eps"),
    )
    return Value(y, x.rank, x.channels_last)


def _softmax(op_type: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        model, x = call.model, call.cast(call.value(0), call.result_dtype)
        axis = model.axis_of(x, call.int_of("dim"))
        if axis == x.rank - 1:
            return Value(model.op(op_type, x.handle), x.rank, x.channels_last)
        order = [other for other in range(x.rank) if other != axis] + [axis]
        moved = model.op("Transpose", x.handle, model.int32(*order))
        back = [order.index(other) for other in range(x.rank)]
        y = model.op("Transpose", model.op(op_type, moved), model.int32(*back))
        return Value(y, x.rank, x.channels_last)

    return convert


# Images.


def _pairs(amounts: Sequence[int]) -> list[tuple[int, int]]:
    return [(amount, amount) for amount in amounts]


def _convolution(call: OpCall) -> Value:
    x, weight, bias = call.value(0), call.natural("weight"), call.optional("bias")
    shape = [int(size) for size in call.shape_of("weight")]
    axes = len(shape) - 2
    if x.rank != axes + 2:
        raise UnsupportedOpError("of an image without a batch axis; give it one")
    window: dict[str, Any] = {
        "weight_shape": shape,
        "strides": call.ints("stride", axes),
        "dilations": call.ints("dilation", axes),
        "groups": call.int_of("groups"),
    }
    padding = call.arg("padding")
    if padding == "same":
        window["padding"] = images.same_padding(call.shape_of(0)[2:], shape[2:], window["strides"], window["dilations"])
    else:
        window["padding"] = _pairs([0] * axes if padding == "valid" else call.ints("padding", axes))
    handle = None if bias is None else bias.handle
    if not call.flag("transposed", "transpose" in call.target):
        return images.convolution(call.model, x, weight, handle, **window)
    window["output_padding"] = call.ints("output_padding", axes)
    return images.transposed_convolution(call.model, x, weight, handle, **window)


def _pool_window(call: OpCall) -> dict[str, Any]:
    axes = int(call.target.partition("pool")[2][0])
    if call.value(0).rank != axes + 2:
        raise UnsupportedOpError("of an image without a batch axis; give it one")
    kernel = call.ints("kernel_size", axes)
    return {
        "kernel": kernel,
        "strides": call.ints("stride", axes) or kernel,
        "padding": _pairs(call.ints("padding", axes)),
        "sizes": call.shape_of(0)[2:],
        "ceil_mode": call.flag("ceil_mode"),
    }


def _max_pool(call: OpCall) -> Converted:
    if any(size != 1 for size in call.ints("dilation")):
        raise UnsupportedOpError("with dilation")
    return call.first_of_tuple(images.max_pool(call.model, call.value(0), **_pool_window(call)))


def _avg_pool(call: OpCall) -> Value:
    if call.arg("divisor_override", None) is not None:
        raise UnsupportedOpError("with divisor_override")
    window = _pool_window(call)
    return images.average_pool(call.model, call.value(0), **window, count_padding=call.flag("count_include_pad"))


def _adaptive_avg_pool(call: OpCall) -> Value:
    x, sizes = call.value(0), call.shape_of(0)[2:]
    if len(sizes) != int(call.target.partition("pool")[2][0]):
        raise UnsupportedOpError("of an image without a batch axis; give it one")
    return images.adaptive_average_pool(call.model, x, sizes=sizes, output=call.ints(1, len(sizes)))


def _adaptive_max_pool(call: OpCall) -> Converted:
    x = call.value(0)
    sizes = call.known_sizes(0, range(2, x.rank))
    output = call.ints(1, len(sizes))
    if any(size % count for size, count in zip(sizes, output, strict=True)):
        raise UnsupportedOpError("whose output size does not divide the image's size")
    kernel = [size // count for size, count in zip(sizes, output, strict=True)]
    padding = _pairs([0] * len(sizes))
    return call.first_of_tuple(
        images.max_pool(call.model, x, kernel=kernel, strides=kernel, padding=padding, sizes=sizes)
    )


def _nearest(size: int, count: int, scale: float | None, *, is_exact: bool) -> np.ndarray[Any, Any]:
    """Returns the matrix that takes the nearest elements, [count, size]. PyTorch computes positions in float32."""
    step = np.float32(size / count if scale is None else 1 / scale)
    index = np.arange(count, dtype=np.float32)
    position = np.floor((index + np.float32(0.5)) * step if is_exact else index * step)
    matrix = np.zeros((count, size))
    matrix[np.arange(count), np.minimum(position, size - 1).astype(int)] = 1
    return matrix


def _upsample(mode: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        x = call.value(0)
        sizes = call.known_sizes(0, range(2, x.rank))
        call.arg("output_size")
        output = [int(size) for size in call.result.shape[2:]]
        align, exact = call.flag("align_corners"), "exact" in call.target
        scales = call.arg("scale_factors", None)
        if scales is None:
            scales = [call.arg(f"scales_{letter}", None) for letter in "dhw"[-len(sizes) :]]
        positions = "align_corners" if align else "asymmetric" if mode == "nearest" and not exact else "half_pixel"
        matrices = [
            _nearest(before, after, scale, is_exact=exact)
            if mode == "nearest"
            else images.interpolation(
                mode,
                before,
                after,
                coordinates=positions,
                scale=scale,
                antialias="_aa" in call.target,
            )
            for before, after, scale in zip(sizes, output, scales, strict=True)
        ]
        return images.resampled(call.model, x, matrices)

    return convert


def _pad(mode: str = "") -> _Converter:
    def convert(call: OpCall) -> Value:
        model, x = call.model, call.value(0)
        pad = call.ints("pad" if call.has("pad") else "padding")
        own_mode = mode or call.arg("mode", "constant")
        amounts = [(0, 0)] * x.rank
        for position in range(len(pad) // 2):
            amounts[model.axis_of(x, x.rank - 1 - position)] = pad[2 * position], pad[2 * position + 1]
        if own_mode == "constant":
            y = images.padded(model, x.handle, amounts, call.arg("value", 0) or 0, all_axes=True)
        elif own_mode == "reflect" and all(amount >= 0 for pair in amounts for amount in pair):
            y = model.op("MirrorPad", x.handle, model.constant(np.array(amounts), "int32"), mode="REFLECT")
        else:
            raise UnsupportedOpError(f"with mode {own_mode!r}")
        return Value(y, x.rank, x.channels_last)

    return convert


def _pixel_shuffle(call: OpCall) -> Value:
    model, x = call.model, call.value(0)
    factor = call.int_of(1)
    channels, height, width = call.known_sizes(0, range(1, 4))
    shape = model.int32(-1, channels // factor**2, factor, factor, height, width)
    parts = model.op("Reshape", model.natural(x), shape)
    moved = model.op("Transpose", parts, model.int32(0, 1, 4, 2, 5, 3))
    shape = model.int32(-1, channels // factor**2, height * factor, width * factor)
    return Value(model.op("Reshape", moved, shape), 4)


# Reductions.


def _reduction(op_type: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        model = call.model
        x = call.cast(call.value(0), call.result_dtype)
        axes = call.axes("dim", x)
        keep = call.flag("keepdim")
        if op_type == "Sum" and not keep and x.parts is not None and axes == [x.parts[0]]:
            # The sum of tensors that were stacked for it is an addition, which rules for sums find.
            return functools.reduce(lambda left, right: model.broadcast("AddV2", [left, right]), x.parts[1])
        return _reduced(model, op_type, x, axes, keep)

    return convert


def _reduced(model: ModelGraph, op_type: str, x: Value, axes: Sequence[int], keep: bool) -> Value:
    if x.channels_last and (keep or len(axes) == x.rank or set(axes) >= set(range(2, x.rank))):
        positions = [model.axis_of(x, axis) for axis in axes]
        y = model.op(op_type, x.handle, model.int32(*positions), keep_dims=keep)
        return Value(y, x.rank, True) if keep else Value(y, x.rank - len(axes))
    y = model.op(op_type, model.natural(x), model.int32(*axes), keep_dims=keep)
    return Value(y, x.rank if keep else x.rank - len(axes))


def _extremum(op_type: str, arg_type: str) -> _Converter:
    def convert(call: OpCall) -> Converted:
        model, x = call.model, call.value(0)
        if call.arg("dim") in (None, []):
            return _reduced(model, op_type, x, [*range(x.rank)], keep=False)
        axes = call.axes("dim", x)
        keep = bool(call.arg("keepdim"))
        value = _reduced(model, op_type, x, axes, keep)
        if not call.is_tuple:
            return value
        index = model.op(arg_type, model.natural(x), axes[0], output_type="int64")
        if keep:
            index = model.op("ExpandDims", index, axes[0])
        return [value, Value(index, x.rank if keep else x.rank - 1)]

    return convert


def _arg_extremum(op_type: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        model, x = call.model, call.natural(0)
        rank = call.value(0).rank
        axis = call.arg("dim")
        if axis is None:
            x, axis, rank = model.op("Reshape", x, model.int32(-1)), 0, 1
        axis %= rank
        index = model.op(op_type, x, axis, output_type="int64")
        if call.arg("keepdim"):
            return Value(model.op("ExpandDims", index, axis), rank)
        return Value(index, rank - 1)

    return convert


def _variance(call: OpCall) -> Converted:
    model, x = call.model, call.value(0)
    axes = call.axes("dim", x)
    correction = call.arg("correction", int(call.flag("unbiased", default=True)))
    correction = 1 if correction is None else correction
    keep = bool(call.arg("keepdim"))
    mean = _reduced(model, "Mean", x, axes, keep=True)
    squares = model.elementwise("Square", model.broadcast("Sub", [x, mean]))
    y = _reduced(model, "Mean", squares, axes, keep)
    if correction:
        count = math.prod(call.known_sizes(0, axes))
        factor = Value(model.constant(count / (count - correction), x.dtype), 0)
        y = model.broadcast("Mul", [y, factor])
    if call.is_tuple:
        return [y, _reduced(model, "Mean", x, axes, keep)]
    return model.elementwise("Sqrt", y) if call.target.startswith("std") else y


def _vector_norm(call: OpCall) -> Value:
    if call.arg("ord") not in (2, None):
        raise UnsupportedOpError("with ord other than 2")
    model, x = call.model, call.cast(call.value(0), call.result_dtype)
    call.arg("dtype")
    total = _reduced(model, "Sum", model.elementwise("Square", x), call.axes("dim", x), keep=bool(call.arg("keepdim")))
    # The gradient of a norm of 0 is 0.
    zero = Value(model.constant(0, total.dtype), 0)
    is_zero = model.broadcast("Equal", [total, zero])
    positive = model.broadcast("SelectV2", [is_zero, Value(model.constant(1, total.dtype), 0), total])
    return model.broadcast("SelectV2", [is_zero, zero, model.elementwise("Sqrt", positive)])


def _cumulative_sum(call: OpCall) -> Value:
    x = call.cast(call.value(0), call.result_dtype)
    y = call.model.op("Cumsum", x.handle, call.model.axis_of(x, call.int_of("dim")))
    return Value(y, x.rank, x.channels_last)


# Shapes.


def _reshape(call: OpCall) -> Value:
    sizes = call.arg(1)
    return Value(call.model.op("Reshape", call.natural(0), call.model.sizes(sizes)), len(sizes))


def _flatten(call: OpCall) -> Value:
    x = call.value(0)
    sizes = call.shape_of(0)
    start, end = call.int_of("start_dim") % max(x.rank, 1), call.int_of("end_dim") % max(x.rank, 1)
    merged = sizes[start : end + 1]
    size = math.prod(merged) if all(isinstance(item, int) for item in merged) else -1
    shape = [*sizes[:start], size, *sizes[end + 1 :]]
    unknown = [item for item in shape if not isinstance(item, int) or item == -1]
    if len(unknown) > 1:
        raise UnsupportedOpError("of several axes whose sizes are not known")
    numbers = [item if isinstance(item, int) else -1 for item in shape]
    return Value(call.model.op("Reshape", call.natural(0), call.model.int32(*numbers)), len(numbers))


def _permute(call: OpCall) -> Value:
    return _permuted(call, [axis % call.value(0).rank for axis in call.ints("dims")])


def _permuted(call: OpCall, axes: Sequence[int]) -> Value:
    model, x = call.model, call.value(0)
    if x.rank > 2 and x.channels_last and [*axes] == [0, *range(2, x.rank), 1]:
        return Value(x.handle, x.rank)
    if x.rank > 2 and not x.channels_last and [*axes] == [0, x.rank - 1, *range(1, x.rank - 1)]:
        return Value(x.handle, x.rank, channels_last=True)
    return Value(model.op("Transpose", model.natural(x), model.int32(*axes)), x.rank)


def _swap_axes(call: OpCall) -> Value:
    x = call.value(0)
    first, second = (call.int_of(key) % x.rank if call.has(key) else axis for axis, key in enumerate(("dim0", "dim1")))
    axes = [*range(x.rank)]
    axes[first], axes[second] = axes[second], axes[first]
    return _permuted(call, axes)


def _unsqueeze(call: OpCall) -> Value:
    x = call.value(0)
    axis = call.int_of("dim") % (x.rank + 1)
    return Value(call.model.op("ExpandDims", call.natural(0), axis), x.rank + 1)


def _squeeze(call: OpCall) -> Value:
    x = call.value(0)
    sizes = call.shape_of(0)
    axes = [] if call.arg("dim") == [] else call.axes("dim", x)
    dropped = [axis for axis in axes if sizes[axis] == 1]
    if not dropped:
        return x
    return Value(call.model.op("Squeeze", call.natural(0), squeeze_dims=dropped), x.rank - len(dropped))


def _expand(call: OpCall) -> Value:
    model, x, sizes = call.model, call.value(0), call.arg(1)
    own = call.shape_of(0)
    first = len(sizes) - x.rank
    shape = [
        (own[axis - first] if isinstance(own[axis - first], int) else model.size_of(x, axis - first))
        if isinstance(size, int) and size == -1
        else size
        for axis, size in enumerate(sizes)
    ]
    return Value(model.op("BroadcastTo", model.natural(x), model.sizes(shape)), len(sizes))


def _repeat(call: OpCall) -> Value:
    model, x, counts = call.model, call.value(0), call.arg(1)
    tensor = model.natural(x)
    for _ in range(len(counts) - x.rank):
        tensor = model.op("ExpandDims", tensor, 0)
    return Value(model.op("Tile", tensor, model.sizes(counts)), len(counts))


def _concatenate(call: OpCall) -> Value:
    model = call.model
    values = [call.cast(value, call.result_dtype) for value in call.arg(0)]
    rank, axis = values[0].rank, call.int_of("dim")
    if any(value.channels_last for value in values):
        tensors = [model.channels_last(value) for value in values]
        position = model.axis_of(Value(tensors[0], rank, channels_last=True), axis)
        return Value(model.op("ConcatV2", tensors, position), rank, channels_last=True)
    tensors = [value.handle for value in values]
    return Value(tensors[0] if len(tensors) == 1 else model.op("ConcatV2", tensors, axis % rank), rank)


def _stack(call: OpCall) -> Value:
    values = [call.cast(value, call.result_dtype) for value in call.arg(0)]
    rank = values[0].rank + 1
    axis = call.int_of("dim") % rank
    handle = call.model.op("Pack", [call.model.natural(value) for value in values], axis=axis)
    return Value(handle, rank, parts=(axis, values))


def _split(call: OpCall) -> Converted:
    model, x = call.model, call.value(0)
    axis = call.int_of("dim") % x.rank
    sizes = [result.shape[axis] for result in call.results]
    call.arg(1)
    if not all(isinstance(size, int) for size in sizes):
        raise UnsupportedOpError("of an axis whose size is not known")
    parts = model.ops("SplitV", x.handle, model.int32(*sizes), model.axis_of(x, axis), num_split=len(sizes))
    return [Value(part, x.rank, x.channels_last) for part in parts]


def _unbind(call: OpCall) -> Converted:
    model, x = call.model, call.value(0)
    axis = call.int_of("dim") % x.rank
    count = len(call.results)
    parts = model.ops("Unpack", model.natural(x), num=count, axis=axis)
    return [Value(part, x.rank - 1) for part in parts]


def _select(call: OpCall) -> Value:
    model, x = call.model, call.value(0)
    axis, index = call.int_of("dim") % x.rank, call.int_of("index")
    if index < 0:
        size = call.shape_of(0)[axis]
        position: Any = index + size if isinstance(size, int) else None
        if position is None:
            count = model.size_of(x, axis)
            position = model.op("AddV2", count, model.constant(index, "int32"))
    else:
        position = index
    return Value(model.op("GatherV2", model.natural(x), position, axis), x.rank - 1)


def _slice(call: OpCall) -> Value:
    model, x = call.model, call.value(0)
    axis = call.int_of("dim") % x.rank
    start, end, step = call.arg("start"), call.arg("end"), call.int_of("step")
    start = 0 if start is None else start
    position = model.axis_of(x, axis)
    if start == 0 and step == 1 and (end is None or (isinstance(end, int) and end >= 2**31 - 1)):
        return x
    begins: list[Size] = [0] * x.rank
    ends: list[Size] = [0] * x.rank
    begins[position] = start
    open_ended = end is None or (isinstance(end, int) and end >= 2**31 - 1)
    ends[position] = 0 if open_ended else end
    others = sum(1 << other for other in range(x.rank) if other != position)
    y = model.op(
        "StridedSlice",
        x.handle,
        model.sizes(begins),
        model.sizes(ends),
        model.int32(*(step if other == position else 1 for other in range(x.rank))),
        begin_mask=others,
        end_mask=others | (1 << position if open_ended else 0),
    )
    return Value(y, x.rank, x.channels_last)


def _embedding(call: OpCall) -> Value:
    model, indices, padding = call.model, call.value(1), call.arg("padding_idx")
    if call.flag("scale_grad_by_freq"):
        raise UnsupportedOpError("with scale_grad_by_freq")
    tensor = model.natural(indices)
    y = model.op("GatherV2", call.natural(0), tensor, 0)
    if padding is not None and padding >= 0:
        # The weights of padding get no gradient.
        is_padding = model.op("ExpandDims", model.op("Equal", tensor, model.constant(padding, indices.dtype)), -1)
        y = model.op("SelectV2", is_padding, model.op("StopGradient", y), y)
    return Value(y, indices.rank + 1)


def _index_select(call: OpCall) -> Value:
    x = call.value(0)
    axis = call.int_of("dim") % x.rank
    return Value(call.model.op("GatherV2", call.natural(0), call.natural(2), axis), x.rank)


def _gather(call: OpCall) -> Value:
    model, x = call.model, call.value(0)
    axis = call.int_of("dim") % x.rank
    if axis != x.rank - 1:
        raise UnsupportedOpError("along another axis than the last")
    indices = call.natural("index")
    sizes, own = call.shape_of("index")[:-1], call.shape_of(0)[:-1]
    if [str(size) for size in sizes] != [str(size) for size in own]:
        raise UnsupportedOpError("whose index has other leading sizes than the tensor")
    return Value(model.op("GatherV2", model.natural(x), indices, axis, batch_dims=axis), x.rank)


def _index(call: OpCall) -> Value:
    model, x = call.model, call.value(0)
    indices = call.arg(1)
    given = [axis for axis, index in enumerate(indices) if index is not None]
    if any(indices[axis].dtype == "bool" for axis in given):
        raise UnsupportedOpError("by a mask")
    tensors = [_counted_from_start(call, axis, indices[axis]) for axis in given]
    if len(given) == 1:
        rank = indices[given[0]].rank
        return Value(model.op("GatherV2", model.natural(x), tensors[0], given[0]), x.rank - 1 + rank)
    if given != [*range(len(given))]:
        raise UnsupportedOpError("by several tensors that are not the first ones")
    shape = model.op("Shape", tensors[0])
    for tensor in tensors[1:]:
        shape = model.op("BroadcastArgs", shape, model.op("Shape", tensor))
    rank = max(indices[axis].rank for axis in given)
    joined = model.op("Pack", [model.op("BroadcastTo", tensor, shape) for tensor in tensors], axis=rank)
    return Value(model.op("GatherNd", model.natural(x), joined), x.rank - len(given) + rank)


def _counted_from_start(call: OpCall, axis: int, index: Value) -> TensorHandle:
    """Returns an index, int64, whose negative numbers count from the end of an axis."""
    model = call.model
    tensor = model.natural(call.cast(index, "int64"))
    size = model.op("Cast", model.size_of(call.value(0), axis), DstT="int64")
    is_negative = model.op("Less", tensor, model.constant(0, "int64"))
    return model.op("SelectV2", is_negative, model.op("AddV2", tensor, size), tensor)


def _flip(call: OpCall) -> Value:
    x = call.value(0)
    if call.arg("dims") == []:
        return x
    axes = [call.model.axis_of(x, axis) for axis in call.axes("dims", x)]
    return Value(call.model.op("ReverseV2", x.handle, call.model.int32(*axes)), x.rank, x.channels_last)


def _roll(call: OpCall) -> Value:
    x = call.value(0)
    shifts, axes = call.ints("shifts"), call.ints("dims")
    if not axes:
        raise UnsupportedOpError("without dims")
    positions = [call.model.axis_of(x, axis) for axis in axes]
    y = call.model.op("Roll", x.handle, call.model.int32(*shifts), call.model.int32(*positions))
    return Value(y, x.rank, x.channels_last)


# Constants.


def _filled(fill: float | None) -> _Converter:
    """Returns the conversion of an operation that fills a tensor. `fill`: None: an argument says with what."""

    def convert(call: OpCall) -> Value:
        model = call.model
        value = call.arg("fill_value") if fill is None else fill
        is_like = "_like" in call.target
        scalar = model.constant(value, call.result_dtype)
        if is_like:
            x = call.value(0)
            return Value(model.op("Fill", model.op("Shape", x.handle), scalar), x.rank, x.channels_last)
        sizes = call.arg("size")
        return Value(model.op("Fill", model.sizes(sizes), scalar), len(sizes))

    return convert


def _arange(call: OpCall) -> Value:
    model, dtype = call.model, call.result_dtype
    start, end, step = call.arg("start", 0), call.arg("end"), call.arg("step", 1)
    if not any(isinstance(item, TensorHandle) for item in (start, end, step)):
        # The number of elements is computed in float64.
        return Value(model.constant(torch.arange(start, end, step, dtype=call.result.dtype).numpy(), dtype), 1)
    ends = [
        model.op("Cast", item, DstT=dtype) if isinstance(item, TensorHandle) else model.constant(item, dtype)
        for item in (start, end, step)
    ]
    return Value(model.op("Range", *ends), 1)


def _scalar_tensor(call: OpCall) -> Value:
    return call.operand(0, call.result_dtype)


def _full_triangle(is_upper: bool) -> _Converter:
    def convert(call: OpCall) -> Value:
        model, x = call.model, call.value(0)
        diagonal = int(call.arg("diagonal") or 0)
        rows, columns = call.known_sizes(0, [-2, -1])
        ones = np.ones((rows, columns), bool)
        mask = model.constant(np.triu(ones, diagonal) if is_upper else np.tril(ones, diagonal), "bool")
        return Value(model.op("SelectV2", mask, model.natural(x), model.constant(0, x.dtype)), x.rank)

    return convert


_UNARY = {
    "abs": "Abs",
    "acos": "Acos",
    "acosh": "Acosh",
    "asin": "Asin",
    "asinh": "Asinh",
    "atan": "Atan",
    "atanh": "Atanh",
    "ceil": "Ceil",
    "cos": "Cos",
    "cosh": "Cosh",
    "digamma": "Digamma",
    "erf": "Erf",
    "erfc": "Erfc",
    "erfinv": "Erfinv",
    "exp": "Exp",
    "expm1": "Expm1",
    "floor": "Floor",
    "isfinite": "IsFinite",
    "isinf": "IsInf",
    "isnan": "IsNan",
    "lgamma": "Lgamma",
    "log": "Log",
    "log1p": "Log1p",
    "logical_not": "LogicalNot",
    "neg": "Neg",
    "reciprocal": "Reciprocal",
    "relu": "Relu",
    "relu6": "Relu6",
    "round": "Round",
    "rsqrt": "Rsqrt",
    "selu": "Selu",
    "sigmoid": "Sigmoid",
    "sign": "Sign",
    "sgn": "Sign",
    "sin": "Sin",
    "sinh": "Sinh",
    "softsign": "Softsign",
    "sqrt": "Sqrt",
    "square": "Square",
    "tan": "Tan",
    "tanh": "Tanh",
}
_BINARY = {
    "add": "AddV2",
    "atan2": "Atan2",
    "eq": "Equal",
    "le": "LessEqual",
    "logical_and": "LogicalAnd",
    "logical_or": "LogicalOr",
    "lt": "Less",
    "maximum": "Maximum",
    "minimum": "Minimum",
    "mul": "Mul",
    "ne": "NotEqual",
    "remainder": "FloorMod",
    "sub": "Sub",
}
_ALIKE = ("alias", "clone", "contiguous", "lift_fresh_copy", "identity")

ATEN_OPS: Mapping[str, _Converter] = {
    **{name: _unary(op_type) for name, op_type in _UNARY.items()},
    **{name: _binary(op_type) for name, op_type in _BINARY.items()},
    **dict.fromkeys(_ALIKE, _same),
    "gt": _comparison("Greater", "Heaviside"),
    "ge": _comparison("GreaterEqual", "HeavisideEqual"),
    "detach": _detach,
    "bitwise_not": _bitwise("LogicalNot"),
    "bitwise_and": _bitwise("LogicalAnd"),
    "__and__": _bitwise("LogicalAnd"),
    "bitwise_or": _bitwise("LogicalOr"),
    "__or__": _bitwise("LogicalOr"),
    "div": _divide,
    "rsub": _reversed_subtraction,
    "pow": _power,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "hardtanh": _hard_tanh,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "native_dropout": _dropout,
    "_to_copy": _to_dtype,
    "to": _to_dtype,
    "gelu": _gelu,
    "silu": _composite_unary("Silu"),
    "mish": _composite_unary("Mish"),
    "hardsigmoid": _composite_unary("HardSigmoid"),
    "hardswish": _composite_unary("HardSwish"),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "floor_divide": _floor_divide,
    "softplus": _softplus,
    "log_sigmoid": _log_sigmoid,
    "prelu": _prelu,
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "batch_norm": _batch_norm,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "softmax": _softmax("Softmax"),
    "_softmax": _softmax("Softmax"),
    "log_softmax": _softmax("LogSoftmax"),
    "_log_softmax": _softmax("LogSoftmax"),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        _convolution,
    ),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices"), _max_pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _avg_pool),
    **dict.fromkeys(
        ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d"),
        _adaptive_avg_pool,
    ),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), _adaptive_max_pool),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), _upsample("nearest")),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), _upsample("linear")),
    "upsample_bicubic2d": _upsample("cubic"),
    "_upsample_bilinear2d_aa": _upsample("linear"),
    **dict.fromkeys(
        ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"), _upsample("nearest")
    ),
    "pad": _pad(),
    "constant_pad_nd": _pad("constant"),
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d"), _pad("reflect")),
    "pixel_shuffle": _pixel_shuffle,
    "all": _reduction("All"),
    "any": _reduction("Any"),
    "mean": _reduction("Mean"),
    "sum": _reduction("Sum"),
    "prod": _reduction("Prod"),
    "amax": _extremum("Max", "ArgMax"),
    "amin": _extremum("Min", "ArgMin"),
    "max.other": _binary("Maximum"),
    "min.other": _binary("Minimum"),
    "max": _extremum("Max", "ArgMax"),
    "min": _extremum("Min", "ArgMin"),
    "argmax": _arg_extremum("ArgMax"),
    "argmin": _arg_extremum("ArgMin"),
    "var": _variance,
    "var_mean": _variance,
    "std": _variance,
    "linalg_vector_norm": _vector_norm,
    "cumsum": _cumulative_sum,
    "view": _reshape,
    "reshape": _reshape,
    "_unsafe_view": _reshape,
    "flatten": _flatten,
    "permute": _permute,
    "transpose": _swap_axes,
    "t": _swap_axes,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "repeat": _repeat,
    "cat": _concatenate,
    "stack": _stack,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "unbind": _unbind,
    "select": _select,
    "slice": _slice,
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "index": _index,
    "flip": _flip,
    "roll": _roll,
    "full": _filled(None),
    "full_like": _filled(None),
    "ones": _filled(1),
    "ones_like": _filled(1),
    "zeros": _filled(0),
    "zeros_like": _filled(0),
    "arange": _arange,
    "scalar_tensor": _scalar_tensor,
    "tril": _full_triangle(is_upper=False),
    "triu": _full_triangle(is_upper=True),
}
"""Conversions by the name of ATen's operation."""
