"""Defines the builder's ops whose name or arguments in TensorFlow's Python differ from the op type's.

All other op types are methods by their names in snake case: `g.sign(x)`, `g.conv2d(x, w, strides=[1, 1, 1, 1],
padding="SAME")`. `ops_creation` and `ops_reduction` define the ops that create and reduce tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from gradrule._builder.handles import TensorHandle, as_tensor
from gradrule._builder.ops_creation import CreationOps
from gradrule._builder.ops_reduction import ReductionOps
from gradrule.common.tensor_codec import DtypeLike
from gradrule.errors import InvalidAttrError

PadMode: TypeAlias = Literal["CONSTANT", "REFLECT", "SYMMETRIC"]

_PAD_MODES = get_args(PadMode)


class GraphOps(CreationOps, ReductionOps):
    """Adds op nodes by TensorFlow's Python names; arguments and shapes are those of the `tf` function of that name."""

    def matmul(
        self, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Multiplies matrices, or batches of matrices if the known shape of an operand has more than 2 axes.

        Args:
            a: Matrix (n, k), or a batch (…, n, k).
            b: Matrix (k, m), or a batch (…, k, m), of the same element type.
            transpose_a: Transposes the last two axes of `a`; a batch is conjugated too.
            transpose_b: The same for `b`.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The product, (n, m) or (…, n, m).

        Raises:
            InvalidAttrError: Both operands state their shapes, as placeholders and constants do, and k differs.
        """
        operands = [as_tensor(operand) for operand in (a, b)]
        _check_inner_sizes(operands, transpose_a, transpose_b)
        shapes = [operand.shape for operand in operands if isinstance(operand, TensorHandle)]
        if any(shape is not None and len(shape) > 2 for shape in shapes):
            return self.op_output("BatchMatMulV2", a, b, adj_x=transpose_a, adj_y=transpose_b, name=name)
        return self.op_output("MatMul", a, b, transpose_a=transpose_a, transpose_b=transpose_b, name=name)

    def einsum(self, equation: str, *inputs: Any, name: str | None = None) -> TensorHandle:
        """Sums products of elements by index: `einsum("ij,jk->ik", a, b)`.

        Args:
            equation: Indices of the inputs and of the result.
            inputs: The tensors, one by one or as one list.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The sums.
        """
        tensors = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list | tuple) else inputs
        return self.op_output("Einsum", list(tensors), equation=equation, name=name)

    def cast(self, x: Any, dtype: DtypeLike, *, name: str | None = None) -> TensorHandle:
        """Converts `x` to another element type.

        Args:
            x: Tensor of any shape.
            dtype: New element type.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor in the new type.
        """
        return self.op_output("Cast", x, DstT=dtype, name=name)

    def where(self, condition: Any, x: Any = None, y: Any = None, *, name: str | None = None) -> TensorHandle:
        """Selects `x` where the condition is true, else `y`; all three broadcast. Without both: the indices of true.

        Args:
            condition: Bool tensor.
            x: Values where the condition is true; give both or neither.
            y: Values where the condition is false.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The selected values; or the indices, int64 of shape (n, rank).

        Raises:
            InvalidAttrError: Only one of `x` and `y` is given.
        """
        if (x is None) != (y is None):
            raise InvalidAttrError("where takes both x and y, or neither")
        if x is None:
            return self.op_output("Where", condition, name=name)
        return self.op_output("SelectV2", condition, x, y, name=name)

    def boolean_mask(self, tensor: Any, mask: Any, *, name: str | None = None) -> TensorHandle:
        """Selects the entries where a bool mask over the first axes is true; joins these axes into one.

        Args:
            tensor: Tensor of any type.
            mask: Bool tensor; its shape equals the first sizes of `tensor`.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The selected entries, of shape (n, …).
        """
        return self.op_output("GatherNd", tensor, self.op_output("Where", mask), name=name)

    def concat(self, values: Sequence[Any], axis: int = 0, *, name: str | None = None) -> TensorHandle:
        """Concatenates tensors along an axis.

        Args:
            values: Tensors of one element type; sizes may differ along `axis` only.
            axis: Axis to join along.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The joined tensor.
        """
        return self.op_output("ConcatV2", list(values), axis, name=name)

    def stack(self, values: Sequence[Any], axis: int = 0, *, name: str | None = None) -> TensorHandle:
        """Stacks tensors of one shape along a new axis.

        Args:
            values: Tensors of one element type and shape.
            axis: Position of the new axis.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The stacked tensor.
        """
        return self.op_output("Pack", list(values), axis=axis, name=name)

    def unstack(self, value: Any, num: int | None = None, *, axis: int = 0, name: str | None = None) -> Any:
        """Returns the slices along an axis.

        Args:
            value: Tensor of any type.
            num: Size of the axis; needed if the shape is unknown.
            axis: Axis to remove.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            A tuple of `num` tensors.

        Raises:
            InvalidAttrError: `num` is not given and the size is unknown.
        """
        if num is None:
            num = _size(as_tensor(value), axis)
        return self.op("Unpack", value, num=num, axis=axis, name=name)

    def split(
        self, value: Any, num_or_size_splits: int | Sequence[int], axis: int = 0, *, name: str | None = None
    ) -> Any:
        """Splits a tensor along an axis.

        Args:
            value: Tensor of any type.
            num_or_size_splits: Number of equal parts, or the size of each part.
            axis: Axis to split.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            A tuple of tensors.
        """
        if isinstance(num_or_size_splits, int):
            return self.op("Split", axis, value, num_split=num_or_size_splits, name=name)
        sizes = list(num_or_size_splits)
        return self.op("SplitV", value, sizes, axis, num_split=len(sizes), name=name)

    def gather(
        self, params: Any, indices: Any, *, axis: int = 0, batch_dims: int = 0, name: str | None = None
    ) -> TensorHandle:
        """Selects slices of `params` along an axis. The gradient is sparse for axis 0.

        Args:
            params: Tensor of any type.
            indices: Integer tensor.
            axis: Axis to select from.
            batch_dims: Number of leading axes that both share.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The slices; the axis is replaced by the axes of `indices`.
        """
        return self.op_output("GatherV2", params, indices, axis, batch_dims=batch_dims, name=name)

    def transpose(self, a: Any, perm: Any = None, *, conjugate: bool = False, name: str | None = None) -> TensorHandle:
        """Permutes the axes of `a`; without `perm`, reverses them.

        Args:
            a: Tensor of any type.
            perm: Order of the axes. Default: reversed.
            conjugate: Conjugates complex numbers.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The permuted tensor.
        """
        if perm is None:
            rank = self.op_output("Rank", a)
            perm = self.op_output("Range", self.op_output("Sub", rank, 1), -1, -1)
        return self.op_output("ConjugateTranspose" if conjugate else "Transpose", a, perm, name=name)

    def expand_dims(self, input: Any, axis: Any, *, name: str | None = None) -> TensorHandle:
        """Inserts an axis of size 1.

        Args:
            input: Tensor of any type.
            axis: Position of the new axis.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor with one more axis.
        """
        return self.op_output("ExpandDims", input, axis, name=name)

    def squeeze(self, input: Any, axis: int | Sequence[int] | None = None, *, name: str | None = None) -> TensorHandle:
        """Removes axes of size 1: all, or the given ones.

        Args:
            input: Tensor of any type.
            axis: Axes of size 1. Default: all of them.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor without these axes.
        """
        axes = [] if axis is None else [axis] if isinstance(axis, int) else list(axis)
        return self.op_output("Squeeze", input, squeeze_dims=axes, name=name)

    def pad(
        self,
        tensor: Any,
        paddings: Any,
        mode: PadMode = "CONSTANT",
        *,
        constant_values: Any = 0,
        name: str | None = None,
    ) -> TensorHandle:
        """Pads a tensor before and after each axis with a constant or mirrored values.

        Args:
            tensor: Tensor of any number type.
            paddings: Integers of shape (rank, 2): how many entries before and after.
            mode: `CONSTANT`, `REFLECT` or `SYMMETRIC`; lower case is accepted too.
            constant_values: Scalar for `CONSTANT`.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The padded tensor.

        Raises:
            InvalidAttrError: The mode is unknown.
        """
        kind = mode.upper()
        if kind not in _PAD_MODES:
            raise InvalidAttrError(f"the mode of pad is one of {', '.join(_PAD_MODES)}, not {mode!r}")
        if kind != "CONSTANT":
            return self.op_output("MirrorPad", tensor, paddings, mode=kind, name=name)
        if isinstance(constant_values, int | float) and constant_values == 0:
            return self.op_output("Pad", tensor, paddings, name=name)
        return self.op_output("PadV2", tensor, paddings, constant_values, name=name)

    def one_hot(
        self,
        indices: Any,
        depth: Any,
        *,
        on_value: Any = 1.0,
        off_value: Any = 0.0,
        axis: int = -1,
        dtype: DtypeLike = None,
        name: str | None = None,
    ) -> TensorHandle:
        """Writes `on_value` at the indices along a new axis of size `depth`.

        Args:
            indices: Integer tensor.
            depth: Size of the new axis.
            on_value: Scalar at the indices.
            off_value: Scalar elsewhere.
            axis: Position of the new axis; -1: last.
            dtype: Element type. Default: that of the values.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor, with one more axis.
        """
        attrs = {"axis": axis} if dtype is None else {"axis": axis, "T": dtype}
        return self.op_output("OneHot", indices, depth, on_value, off_value, name=name, **attrs)


def _size(value: Any, axis: int) -> int:
    shape = value.shape if isinstance(value, TensorHandle) else np.shape(value)
    size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    if size is None:
        raise InvalidAttrError(f"unstack needs num: the tensor's size along axis {axis} is unknown")
    return int(size)


def _check_inner_sizes(operands: Sequence[Any], transpose_a: bool, transpose_b: bool) -> None:
    """Raises `InvalidAttrError` if matrices with stated shapes cannot be multiplied.

    Only these shapes are checked here, because they are wrong most often; the server checks all.
    """
    a, b = (getattr(operand, "shape", None) for operand in operands)
    if not (isinstance(a, tuple) and isinstance(b, tuple) and len(a) >= 2 and len(b) >= 2):
        return
    inner = a[-2 if transpose_a else -1], b[-1 if transpose_b else -2]
    if None not in inner and inner[0] != inner[1]:
        transposed = [" transposed" if flag else "" for flag in (transpose_a, transpose_b)]
        a_text, b_text = (
            "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]" for shape in (a, b)
        )
        raise InvalidAttrError(
            f"matmul of {a_text}{transposed[0]} and {b_text}{transposed[1]}: the inner sizes {inner[0]} and {inner[1]} "
            "differ; transpose_a or transpose_b swaps the last two axes"
        )
