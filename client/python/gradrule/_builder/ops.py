"""Defines the builder's ops whose name or arguments in TensorFlow's Python differ from the op type's.

All other op types are methods by their names in snake case: `g.sign(x)`, `g.conv2d(x, w, strides=[1, 1, 1, 1],
padding="SAME")`. `_ops_make` and `_ops_reduce` define the ops that make tensors and those that reduce them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradrule._builder.handles import TensorHandle, as_tensor
from gradrule._builder.ops_creation import Makers
from gradrule._builder.ops_reduction import Reductions
from gradrule.common.tensor_codec import DtypeLike
from gradrule.errors import InvalidAttrError

_PAD_MODES = ("CONSTANT", "REFLECT", "SYMMETRIC")


class GraphOps(Makers, Reductions):
    """Adds op nodes by TensorFlow's Python names; arguments and shapes are those of the `tf` function of that name."""

    def matmul(
        self, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Multiplies matrices, or batches of matrices if the known shape of an operand has more than 2 axes."""
        shapes = [operand.shape for operand in map(as_tensor, (a, b)) if isinstance(operand, TensorHandle)]
        if any(shape is not None and len(shape) > 2 for shape in shapes):
            return self.op_output("BatchMatMulV2", a, b, adj_x=transpose_a, adj_y=transpose_b, name=name)
        return self.op_output("MatMul", a, b, transpose_a=transpose_a, transpose_b=transpose_b, name=name)

    def einsum(self, equation: str, *inputs: Any, name: str | None = None) -> TensorHandle:
        """Sums products of elements by index: `einsum("ij,jk->ik", a, b)`."""
        tensors = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list | tuple) else inputs
        return self.op_output("Einsum", list(tensors), equation=equation, name=name)

    def cast(self, x: Any, dtype: DtypeLike, name: str | None = None) -> TensorHandle:
        """Converts `x` to another element type."""
        return self.op_output("Cast", x, DstT=dtype, name=name)

    def where(self, condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> TensorHandle:
        """Selects `x` where the condition is true, else `y`; all three broadcast. Without both: the indices of true."""
        if (x is None) != (y is None):
            raise InvalidAttrError("where takes both x and y, or neither")
        if x is None:
            return self.op_output("Where", condition, name=name)
        return self.op_output("SelectV2", condition, x, y, name=name)

    def boolean_mask(self, tensor: Any, mask: Any, name: str | None = None) -> TensorHandle:
        """Selects the entries where a bool mask over the first axes is true; joins these axes into one."""
        return self.op_output("GatherNd", tensor, self.op_output("Where", mask), name=name)

    def concat(self, values: Sequence[Any], axis: int = 0, name: str | None = None) -> TensorHandle:
        """Concatenates tensors along an axis."""
        return self.op_output("ConcatV2", list(values), axis, name=name)

    def stack(self, values: Sequence[Any], axis: int = 0, name: str | None = None) -> TensorHandle:
        """Stacks tensors of one shape along a new axis."""
        return self.op_output("Pack", list(values), axis=axis, name=name)

    def unstack(self, value: Any, num: int | None = None, axis: int = 0, name: str | None = None) -> Any:
        """Returns a tuple of the slices along an axis. num: size of the axis, needed if the shape is unknown."""
        if num is None:
            num = _size(as_tensor(value), axis)
        return self.op("Unpack", value, num=num, axis=axis, name=name)

    def split(self, value: Any, num_or_size_splits: int | Sequence[int], axis: int = 0, name: str | None = None) -> Any:
        """Returns a tuple of parts along an axis: a number of equal parts, or parts of the given sizes."""
        if isinstance(num_or_size_splits, int):
            return self.op("Split", axis, value, num_split=num_or_size_splits, name=name)
        sizes = list(num_or_size_splits)
        return self.op("SplitV", value, sizes, axis, num_split=len(sizes), name=name)

    def gather(
        self, params: Any, indices: Any, axis: int = 0, batch_dims: int = 0, name: str | None = None
    ) -> TensorHandle:
        """Selects slices of `params` along an axis. The gradient is sparse for axis 0."""
        return self.op_output("GatherV2", params, indices, axis, batch_dims=batch_dims, name=name)

    def transpose(self, a: Any, perm: Any = None, conjugate: bool = False, name: str | None = None) -> TensorHandle:
        """Permutes the axes of `a`; without `perm`, reverses them."""
        if perm is None:
            rank = self.op_output("Rank", a)
            perm = self.op_output("Range", self.op_output("Sub", rank, 1), -1, -1)
        return self.op_output("ConjugateTranspose" if conjugate else "Transpose", a, perm, name=name)

    def expand_dims(self, input: Any, axis: Any, name: str | None = None) -> TensorHandle:
        """Inserts an axis of size 1."""
        return self.op_output("ExpandDims", input, axis, name=name)

    def squeeze(self, input: Any, axis: int | Sequence[int] | None = None, name: str | None = None) -> TensorHandle:
        """Removes axes of size 1: all, or the given ones."""
        axes = [] if axis is None else [axis] if isinstance(axis, int) else list(axis)
        return self.op_output("Squeeze", input, squeeze_dims=axes, name=name)

    def pad(
        self, tensor: Any, paddings: Any, mode: str = "CONSTANT", constant_values: Any = 0, name: str | None = None
    ) -> TensorHandle:
        """Pads a tensor before and after each axis with a constant or mirrored values. Raises `InvalidAttrError`."""
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
        on_value: Any = 1.0,
        off_value: Any = 0.0,
        axis: int = -1,
        dtype: DtypeLike = None,
        name: str | None = None,
    ) -> TensorHandle:
        """Writes `on_value` at the indices along a new axis of size `depth`. dtype: default is that of the values."""
        attrs = {"axis": axis} if dtype is None else {"axis": axis, "T": dtype}
        return self.op_output("OneHot", indices, depth, on_value, off_value, name=name, **attrs)


def _size(value: Any, axis: int) -> int:
    shape = value.shape if isinstance(value, TensorHandle) else np.shape(value)
    size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    if size is None:
        raise InvalidAttrError(f"unstack needs num: the tensor's size along axis {axis} is unknown")
    return int(size)
