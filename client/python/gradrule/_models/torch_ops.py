"""Converts ATen operations: one small function each, in one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gradrule._builder.handles import TensorHandle
from gradrule._models import images
from gradrule._models.model_graph import ModelGraph, Size, Value

Converted: TypeAlias = Any
"""The results of an operation: a `Value`, a list of these, or the scalar of a size."""

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


class UnsupportedOpError(Exception):
    """Reports arguments of an operation that cannot be converted; the message says which."""


def dtype_of(tensor: Any) -> str:
    """Returns the name of the element type of a PyTorch tensor."""
    return named_dtype(tensor.dtype)


def named_dtype(dtype: torch.dtype) -> str:
    """Returns the name of a PyTorch type. Raises `UnsupportedOpError`."""
    if dtype not in _DTYPES:
        raise UnsupportedOpError(f"of type {dtype}")
    return _DTYPES[dtype]


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
        schema = getattr(node.target, "_schema", None)
        self._names = [argument.name for argument in schema.arguments] if schema is not None else []
        self._defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} if schema else {}

    def arg(self, key: int | str) -> Any:
        """Returns an argument by its position or its name in ATen's schema; its default if it is not given."""
        name = self._names[key] if isinstance(key, int) and self._names else key
        if isinstance(name, str):
            position = self._names.index(name)
            if position < len(self._node.args):
                return self._value_of(self._node.args[position])
            if name in self._node.kwargs:
                return self._value_of(self._node.kwargs[name])
            return self._defaults.get(name)
        return self._value_of(self._node.args[name])

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
        name = self._names[key] if isinstance(key, int) else key
        position = self._names.index(name)
        node = self._node.args[position] if position < len(self._node.args) else self._node.kwargs[name]
        assert isinstance(node, torch.fx.Node)
        return tuple(node.meta["val"].shape)

    def known_sizes(self, key: int | str, axes: Sequence[int]) -> list[int]:
        """Returns sizes of an argument that must be known."""
        sizes = [self.shape_of(key)[axis] for axis in axes]
        if not all(isinstance(size, int) for size in sizes):
            raise UnsupportedOpError("of a tensor whose sizes are not known")
        return sizes

    @property
    def result(self) -> Any:
        """PyTorch's description of the first result, with `dtype` and `shape`."""
        found = self._node.meta["val"]
        return found[0] if isinstance(found, (tuple, list)) else found

    @property
    def result_dtype(self) -> str:
        """Name of the element type of the first result."""
        return dtype_of(self.result) if isinstance(self.result, torch.Tensor) else "int32"

    @property
    def operand_dtype(self) -> str:
        """Name of the type to which PyTorch converts all operands."""
        kinds = [
            item.meta["val"] if isinstance(item, torch.fx.Node) else item
            for item in (*self._node.args, *self._node.kwargs.values())
        ]
        operands = [item for item in kinds if isinstance(item, (torch.Tensor, int, float, bool))]
        dtype = torch.result_type(operands[0], operands[1]) if len(operands) > 1 else operands[0].dtype
        return named_dtype(dtype)

    def cast(self, value: Value, dtype: str) -> Value:
        """Returns a value in another element type."""
        if value.dtype == dtype:
            return value
        # As in PyTorch, all numbers but 0 are True.
        if dtype == "bool":
            zero = self.model.constant(0, value.dtype)
            return Value(self.model.op("NotEqual", value.handle, zero), value.rank, value.channels_last)
        return self.model.elementwise("Cast", value, DstT=dtype)


_Converter: TypeAlias = Callable[[OpCall], Converted]


# Operations of one element each.


def _unary(op_type: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        return call.model.elementwise(op_type, call.cast(call.value(0), call.result_dtype))

    return convert


def _binary(op_type: str) -> _Converter:
    """Returns the conversion of an operation of two tensors or numbers, with PyTorch's promotion of types."""

    def convert(call: OpCall) -> Value:
        dtype = call.result_dtype
        if dtype == "bool":
            dtype = call.operand_dtype
        operands = [call.cast(_operand(call, key, dtype), dtype) for key in (0, 1)]
        if op_type in ("AddV2", "Sub") and (alpha := _alpha(call)) != 1:
            factor = Value(call.model.constant(alpha, dtype), 0)
            operands[1] = call.model.broadcast("Mul", [operands[1], factor])
        return call.model.broadcast(op_type, operands)

    return convert


def _operand(call: OpCall, key: int, dtype: str) -> Value:
    found = call.arg(key)
    if isinstance(found, Value):
        return found
    if isinstance(found, TensorHandle):
        return Value(found, 0)
    return Value(call.model.constant(found, dtype), 0)


def _alpha(call: OpCall) -> Any:
    try:
        return call.arg("alpha")
    except ValueError:
        return 1


def _reversed_subtraction(call: OpCall) -> Value:
    left, right = (call.cast(_operand(call, key, call.result_dtype), call.result_dtype) for key in (1, 0))
    return call.model.broadcast("Sub", [left, right])


def _divide(call: OpCall) -> Value:
    mode = call.arg("rounding_mode") if "rounding_mode" in call._names else None
    dtype = call.result_dtype
    operands = [call.cast(_operand(call, key, dtype), dtype) for key in (0, 1)]
    if mode == "floor":
        return call.model.broadcast("FloorDiv", operands)
    if mode == "trunc":
        if dtype.startswith("int"):
            return call.model.broadcast("TruncateDiv", operands)
        quotient = call.model.broadcast("RealDiv", operands)
        magnitude = call.model.elementwise("Floor", call.model.elementwise("Abs", quotient))
        return call.model.broadcast("Mul", [call.model.elementwise("Sign", quotient), magnitude])
    return call.model.broadcast("RealDiv", operands)


def _compare_equal(op_type: str) -> _Converter:
    return _binary(op_type)


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
    return call.model.elementwise("LeakyRelu", call.value(0), alpha=float(call.arg("negative_slope")))


def _elu(call: OpCall) -> Value:
    if (call.arg("alpha"), call.arg("scale"), call.arg("input_scale")) != (1, 1, 1):
        raise UnsupportedOpError("with alpha or scale other than 1")
    return call.model.elementwise("Elu", call.value(0))


def _softplus(call: OpCall) -> Value:
    if call.arg("beta") != 1:
        raise UnsupportedOpError("with beta other than 1")
    return call.model.elementwise("Softplus", call.value(0))


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
    low, high = call.arg(1), call.arg(2)
    if (low, high) == (0, 6):
        return call.model.elementwise("Relu6", x)
    if low == 0 and high is None:
        return call.model.elementwise("Relu", x)
    for bound, op_type in ((low, "Maximum"), (high, "Minimum")):
        if bound is not None:
            value = bound if isinstance(bound, Value) else Value(call.model.constant(bound, x.dtype), 0)
            x = call.model.broadcast(op_type, [x, value])
    return x


def _power(call: OpCall) -> Value:
    exponent = call.arg(1)
    x = call.cast(_operand(call, 0, call.result_dtype), call.result_dtype)
    if exponent == 2:
        return call.model.elementwise("Square", x)
    if exponent == 0.5:
        return call.model.elementwise("Sqrt", x)
    other = call.cast(_operand(call, 1, call.result_dtype), call.result_dtype)
    return call.model.broadcast("Pow", [x, other])


def _where(call: OpCall) -> Value:
    condition = call.value(0)
    values = [call.cast(_operand(call, key, call.result_dtype), call.result_dtype) for key in (1, 2)]
    return call.model.broadcast("SelectV2", [condition, *values])


def _masked_fill(call: OpCall) -> Value:
    x, mask = call.value(0), call.value(1)
    filler = call.cast(_operand(call, 2, x.dtype), x.dtype)
    return call.model.broadcast("SelectV2", [mask, filler, x])


def _same(call: OpCall) -> Value:
    return call.value(0)


def _dropout(call: OpCall) -> Value:
    if call.arg(2) and call.arg(1):
        raise UnsupportedOpError("in training mode: call module.eval() first")
    return call.value(0)


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
    model = call.model
    query, key, value = (call.natural(index) for index in range(3))
    rank = call.value(0).rank
    if call.arg("dropout_p"):
        raise UnsupportedOpError("with dropout")
    if call.arg("enable_gqa"):
        raise UnsupportedOpError("with enable_gqa")
    scale = call.arg("scale") or call.known_sizes(0, [-1])[0] ** -0.5
    dtype = call.result_dtype
    lowest = float(np.finfo(np.float32).min)
    mask = call.optional("attn_mask")
    added = model.constant(0, dtype)
    if call.arg("is_causal"):
        rows, columns = call.known_sizes(0, [-2])[0], call.known_sizes(1, [-2])[0]
        added = model.constant(np.where(np.tril(np.ones((rows, columns), bool)), 0.0, lowest), dtype)
    elif mask is not None and mask.dtype == "bool":
        added = model.op("SelectV2", model.natural(mask), model.constant(0, dtype), model.constant(lowest, dtype))
    elif mask is not None:
        added = model.natural(mask)
    return Value(model.composite("Attention", query, key, value, added, scale=scale), rank)


# Normalisation.


def _batch_norm(call: OpCall) -> Value:
    model = call.model
    x, weight, bias, mean, variance = (call.optional(index) for index in range(5))
    names = call._names
    is_training = bool(call.arg("training")) if "training" in names else False
    if is_training or mean is None or variance is None or x is None:
        raise UnsupportedOpError("in training mode: call module.eval() first")
    channels = call.known_sizes(0, [1])[0]
    scale = weight.handle if weight else model.constant(np.ones(channels), x.dtype)
    offset = bias.handle if bias else model.constant(np.zeros(channels), x.dtype)
    inputs = model.channels_last(x), scale, offset, mean.handle, variance.handle
    if x.rank == 4 and x.dtype == "float32":
        y = model.ops("FusedBatchNormV3", *inputs, epsilon=float(call.arg("eps")), is_training=False)[0]
    else:
        y = model.composite("BatchNorm", *inputs, epsilon=call.arg("eps"))
    value = Value(y, x.rank, channels_last=x.rank > 2)
    return [value, None, None] if isinstance(call._node.meta["val"], (tuple, list)) else value  # type: ignore[return-value]


def _layer_norm(call: OpCall) -> Converted:
    model = call.model
    x, weight, bias = call.value(0), call.optional("weight"), call.optional("bias")
    shape = call.ints("normalized_shape")
    scale = model.natural(weight) if weight else model.constant(np.ones(shape), x.dtype)
    offset = model.natural(bias) if bias else model.constant(np.zeros(shape), x.dtype)
    axes = [*range(-len(shape), 0)]
    y = Value(model.composite("LayerNorm", model.natural(x), scale, offset, axes=axes, epsilon=call.arg("eps")), x.rank)
    return [y, None, None] if isinstance(call._node.meta["val"], (tuple, list)) else y


def _rms_norm(call: OpCall) -> Value:
    model, x, weight = call.model, call.value(0), call.optional("weight")
    shape = call.ints("normalized_shape")
    scale = model.natural(weight) if weight else model.constant(np.ones(shape), x.dtype)
    epsilon = call.arg("eps")
    if epsilon is None:
        epsilon = torch.finfo(call.result.dtype).eps
    y = model.composite("RmsNorm", model.natural(x), scale, axes=[*range(-len(shape), 0)], epsilon=epsilon)
    return Value(y, x.rank)


def _group_norm(call: OpCall) -> Value:
    model, x = call.model, call.value(0)
    groups = call.int_of("num_groups")
    sizes = call.shape_of(0)
    known = call.known_sizes(0, range(1, x.rank))
    weight, bias = call.optional("weight"), call.optional("bias")
    scale = weight.handle if weight else model.constant(np.ones(known[0]), x.dtype)
    offset = bias.handle if bias else model.constant(np.zeros(known[0]), x.dtype)
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


def _convolution(call: OpCall) -> Value:
    names = call._names
    transposed = bool(call.arg("transposed")) if "transposed" in names else "transpose" in str(call._node.target)
    x, weight, bias = call.value(0), call.natural("weight"), call.optional("bias")
    axes = x.rank - 2
    if axes < 1 or axes > 3:
        raise UnsupportedOpError("of a tensor without a batch axis")
    padding = call.arg("padding")
    return images.convolution(
        call.model,
        x,
        weight,
        None if bias is None else bias.handle,
        weight_shape=tuple(int(size) for size in call.shape_of("weight")),
        strides=call.ints("stride", axes),
        padding=padding if isinstance(padding, str) else call.ints("padding", axes),
        dilations=call.ints("dilation", axes),
        groups=call.int_of("groups"),
        output_padding=call.ints("output_padding", axes) if transposed else None,
        sizes=call.shape_of(0)[2:],
        unsupported=UnsupportedOpError,
    )


def _max_pool(call: OpCall) -> Converted:
    x = call.value(0)
    axes = x.rank - 2
    kernel = call.ints("kernel_size", axes)
    if any(size != 1 for size in call.ints("dilation", axes)):
        raise UnsupportedOpError("with dilation")
    y = images.pool(
        call.model,
        x,
        is_max=True,
        kernel=kernel,
        strides=call.ints("stride", axes) or kernel,
        padding=call.ints("padding", axes),
        ceil_mode=bool(call.arg("ceil_mode")),
        sizes=call.shape_of(0)[2:],
        unsupported=UnsupportedOpError,
    )
    return [y, None] if isinstance(call._node.meta["val"], (tuple, list)) else y


def _avg_pool(call: OpCall) -> Value:
    x = call.value(0)
    axes = x.rank - 2
    kernel = call.ints("kernel_size", axes)
    padding = call.ints("padding", axes)
    if "divisor_override" in call._names and call.arg("divisor_override") is not None:
        raise UnsupportedOpError("with divisor_override")
    ceil_mode = bool(call.arg("ceil_mode"))
    if (any(padding) and not call.arg("count_include_pad")) or ceil_mode:
        counted = False
    else:
        counted = True
    return images.pool(
        call.model,
        x,
        is_max=False,
        kernel=kernel,
        strides=call.ints("stride", axes) or kernel,
        padding=padding,
        ceil_mode=ceil_mode,
        sizes=call.shape_of(0)[2:],
        unsupported=UnsupportedOpError,
        counts_padding=counted,
    )


def _adaptive_avg_pool(call: OpCall) -> Value:
    x = call.value(0)
    axes = x.rank - 2
    output = call.ints(1, axes)
    model = call.model
    if all(size == 1 for size in output):
        tensor = model.channels_last(x)
        return Value(model.op("Mean", tensor, model.int32(*range(1, axes + 1)), keep_dims=True), x.rank, True)
    sizes = call.known_sizes(0, range(2, x.rank))
    return images.resampled(model, x, [images.adaptive_average(a, b) for a, b in zip(sizes, output, strict=True)])


def _upsample(mode: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        x = call.value(0)
        sizes = call.known_sizes(0, range(2, x.rank))
        output = [int(size) for size in call.result.shape[2:]]
        names = call._names
        align = bool(call.arg("align_corners")) if "align_corners" in names else False
        factors: list[Any] = [None] * len(sizes)
        if "scale_factors" in names and call.arg("scale_factors"):
            factors = list(call.arg("scale_factors"))
        matrices = [
            images.interpolation(mode, before, after, align_corners=align, factor=factor)
            for before, after, factor in zip(sizes, output, factors, strict=True)
        ]
        return images.resampled(call.model, x, matrices)

    return convert


def _pad(call: OpCall) -> Value:
    mode = call.arg("mode") if "mode" in call._names else "constant"
    filler = call.arg("value") if "value" in call._names else 0
    return _padded(call, call.ints("pad" if "pad" in call._names else "padding"), mode, filler or 0)


def _pad_by(mode: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        return _padded(call, call.ints("padding"), mode, 0)

    return convert


def _padded(call: OpCall, pad: Sequence[int], mode: str, filler: float) -> Value:
    model, x = call.model, call.value(0)
    amounts = [(0, 0)] * x.rank
    for position in range(len(pad) // 2):
        amounts[model.axis_of(x, x.rank - 1 - position)] = pad[2 * position], pad[2 * position + 1]
    tensor = x.handle
    if any(amount < 0 for pair in amounts for amount in pair):
        if mode != "constant":
            raise UnsupportedOpError("with negative padding")
        begin = [max(0, -before) for before, _ in amounts]
        shape = model.op("Shape", tensor)
        cut = model.int32(*(max(0, -before) + max(0, -after) for before, after in amounts))
        tensor = model.op("Slice", tensor, model.int32(*begin), model.op("Sub", shape, cut))
        amounts = [(max(0, before), max(0, after)) for before, after in amounts]
    paddings = model.constant(np.array(amounts), "int32")
    if mode in ("reflect",):
        y = model.op("MirrorPad", tensor, paddings, mode="REFLECT")
    elif mode == "constant":
        y = model.op("PadV2", tensor, paddings, model.constant(filler, x.dtype))
    else:
        raise UnsupportedOpError(f"with mode {mode!r}")
    return Value(y, x.rank, x.channels_last)


def _pixel_shuffle(call: OpCall) -> Value:
    model, x = call.model, call.value(0)
    factor = call.int_of(1)
    channels, height, width = call.known_sizes(0, range(1, 4))
    tensor = model.natural(x)
    parts = model.op("Reshape", tensor, model.int32(-1, channels // factor**2, factor, factor, height, width))
    moved = model.op("Transpose", parts, model.int32(0, 1, 4, 2, 5, 3))
    shape = model.int32(-1, channels // factor**2, height * factor, width * factor)
    return Value(model.op("Reshape", moved, shape), 4)


# Reductions.


def _reduction(op_type: str) -> _Converter:
    def convert(call: OpCall) -> Value:
        model = call.model
        x = call.cast(call.value(0), call.result_dtype)
        axes = call.axes("dim", x) if "dim" in call._names else [*range(x.rank)]
        keep = bool(call.arg("keepdim")) if "keepdim" in call._names else False
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
        if "dim" not in call._names or call.arg("dim") is None:
            return _reduced(model, op_type, x, [*range(x.rank)], keep=False)
        axes = call.axes("dim", x)
        keep = bool(call.arg("keepdim"))
        value = _reduced(model, op_type, x, axes, keep)
        if not isinstance(call._node.meta["val"], (tuple, list)):
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
    correction = call.arg("correction") if "correction" in call._names else 1
    correction = 1 if correction is None else correction
    keep = bool(call.arg("keepdim"))
    mean = _reduced(model, "Mean", x, axes, keep=True)
    squares = model.elementwise("Square", model.broadcast("Sub", [x, mean]))
    y = _reduced(model, "Mean", squares, axes, keep)
    if correction:
        count = math.prod(call.known_sizes(0, axes))
        factor = Value(model.constant(count / (count - correction), x.dtype), 0)
        y = model.broadcast("Mul", [y, factor])
    if "var_mean" in str(call._node.target):
        return [y, _reduced(model, "Mean", x, axes, keep)]
    return model.elementwise("Sqrt", y) if "std" in str(call._node.target) else y


def _vector_norm(call: OpCall) -> Value:
    if call.arg("ord") not in (2, None):
        raise UnsupportedOpError("with ord other than 2")
    model, x = call.model, call.value(0)
    total = _reduced(model, "Sum", model.elementwise("Square", x), call.axes("dim", x), keep=bool(call.arg("keepdim")))
    return model.elementwise("Sqrt", total)


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
    x = call.value(0)
    axes = [axis % x.rank for axis in call.ints("dims")]
    return Value(call.model.op("Transpose", call.natural(0), call.model.int32(*axes)), x.rank)


def _swap_axes(call: OpCall) -> Value:
    x = call.value(0)
    first, second = (0, 1) if len(call._names) == 1 else (call.int_of(1) % x.rank, call.int_of(2) % x.rank)
    axes = [*range(x.rank)]
    axes[first], axes[second] = axes[second], axes[first]
    return Value(call.model.op("Transpose", call.natural(0), call.model.int32(*axes)), x.rank)


def _unsqueeze(call: OpCall) -> Value:
    x = call.value(0)
    axis = call.int_of("dim") % (x.rank + 1)
    return Value(call.model.op("ExpandDims", call.natural(0), axis), x.rank + 1)


def _squeeze(call: OpCall) -> Value:
    x = call.value(0)
    sizes = call.shape_of(0)
    axes = call.axes("dim", x) if "dim" in call._names else [*range(x.rank)]
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
    return Value(call.model.op("Pack", [call.model.natural(value) for value in values], axis=axis), rank)


def _split(call: OpCall) -> Converted:
    model, x = call.model, call.value(0)
    axis = call.int_of("dim") % x.rank
    results = call._node.meta["val"]
    sizes = [result.shape[axis] for result in results]
    if not all(isinstance(size, int) for size in sizes):
        raise UnsupportedOpError("of an axis whose size is not known")
    parts = model.ops("SplitV", x.handle, model.int32(*sizes), model.axis_of(x, axis), num_split=len(sizes))
    return [Value(part, x.rank, x.channels_last) for part in parts]


def _unbind(call: OpCall) -> Converted:
    model, x = call.model, call.value(0)
    axis = call.int_of("dim") % x.rank
    count = len(call._node.meta["val"])
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
    indices = call.value(1)
    y = call.model.op("GatherV2", call.natural(0), call.model.natural(indices), 0)
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
    if len(given) == 1:
        axis = given[0]
        index = indices[axis]
        size = call.shape_of(0)[axis]
        if not isinstance(size, int):
            raise UnsupportedOpError("of an axis whose size is not known")
        wrapped = model.op("FloorMod", model.natural(index), model.constant(size, index.dtype), name="wrapped_index")
        return Value(model.op("GatherV2", model.natural(x), wrapped, axis), x.rank - 1 + index.rank)
    if given == [*range(len(given))] and len({indices[axis].rank for axis in given}) == 1:
        joined = model.op(
            "Pack", [model.natural(call.cast(indices[axis], "int64")) for axis in given], axis=indices[0].rank
        )
        return Value(model.op("GatherNd", model.natural(x), joined), x.rank - len(given) + indices[0].rank)
    raise UnsupportedOpError("by several tensors")


def _flip(call: OpCall) -> Value:
    x = call.value(0)
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
        is_like = "like" in str(call._node.target)
        sizes = None if is_like else call.arg("size")
        scalar = model.constant(value, call.result_dtype)
        if is_like:
            x = call.value(0)
            return Value(model.op("Fill", model.op("Shape", x.handle), scalar), x.rank, x.channels_last)
        return Value(model.op("Fill", model.sizes(sizes), scalar), len(sizes))

    return convert


def _arange(call: OpCall) -> Value:
    model, dtype = call.model, call.result_dtype
    names = call._names
    start = call.arg("start") if "start" in names else 0
    step = call.arg("step") if "step" in names else 1
    end = call.arg("end")
    ends = [
        model.op("Cast", item, DstT=dtype) if isinstance(item, TensorHandle) else model.constant(item, dtype)
        for item in (start, end, 1 if step is None else step)
    ]
    return Value(model.op("Range", *ends), 1)


def _scalar_tensor(call: OpCall) -> Value:
    return call.cast(_operand(call, 0, call.result_dtype), call.result_dtype)


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
    "log_sigmoid": "LogSigmoid",
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
    "floor_divide": "FloorDiv",
    "ge": "GreaterEqual",
    "gt": "Greater",
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
_ALIKE = ("alias", "clone", "contiguous", "detach", "lift_fresh_copy", "identity")

ATEN_OPS: Mapping[str, _Converter] = {
    **{name: _unary(op_type) for name, op_type in _UNARY.items()},
    **{name: _binary(op_type) for name, op_type in _BINARY.items()},
    **dict.fromkeys(_ALIKE, _same),
    "div": _divide,
    "rsub": _reversed_subtraction,
    "pow": _power,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clamp_min": _clamp_min,
    "hardtanh": _hard_tanh,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "_to_copy": _to_dtype,
    "to": _to_dtype,
    "gelu": _gelu,
    "silu": _composite_unary("Silu"),
    "mish": _composite_unary("Mish"),
    "hardsigmoid": _composite_unary("HardSigmoid"),
    "hardswish": _composite_unary("HardSwish"),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "softplus": _softplus,
    "prelu": _prelu,
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "softmax": _softmax("Softmax"),
    "_softmax": _softmax("Softmax"),
    "log_softmax": _softmax("LogSoftmax"),
    "_log_softmax": _softmax("LogSoftmax"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d"), _convolution),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices"), _max_pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _avg_pool),
    **dict.fromkeys(
        ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d"),
        _adaptive_avg_pool,
    ),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), _upsample("nearest")),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), _upsample("linear")),
    "upsample_bicubic2d": _upsample("cubic"),
    "pad": _pad,
    "constant_pad_nd": _pad,
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d"), _pad_by("reflect")),
    "pixel_shuffle": _pixel_shuffle,
    "mean": _reduction("Mean"),
    "sum": _reduction("Sum"),
    "prod": _reduction("Prod"),
    "amax": _extremum("Max", "ArgMax"),
    "amin": _extremum("Min", "ArgMin"),
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
