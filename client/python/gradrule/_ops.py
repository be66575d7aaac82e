"""Ops of the builder by the names that TensorFlow's Python gives them.

Any op type is a method by its name in snake case: `g.sign(x)`, `g.conv2d(x, w, strides=[1, 1, 1, 1], padding="SAME")`.
Here, in `_ops_make` and in `_ops_reduce` stand only those whose Python name or arguments differ from the op's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradrule._handles import TensorHandle, as_tensor
from gradrule._ops_make import Makers
from gradrule._ops_reduce import Reductions
from gradrule._tensors import DtypeLike
from gradrule.errors import InvalidAttrError

_PAD_MODES = ("CONSTANT", "REFLECT", "SYMMETRIC")


class GraphOps(Makers, Reductions):
    """The part of the builder that gives ops their Python names."""

    def matmul(
        self, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, name: str | None = None
    ) -> TensorHandle:
        """`a @ b` of matrices, or of batches of them where an operand states a rank above 2; see `batch_matmul`."""
        shapes = [operand.shape for operand in map(as_tensor, (a, b)) if isinstance(operand, TensorHandle)]
        if any(shape is not None and len(shape) > 2 for shape in shapes):
            return self.op_output("BatchMatMulV2", a, b, adj_x=transpose_a, adj_y=transpose_b, name=name)
        return self.op_output("MatMul", a, b, transpose_a=transpose_a, transpose_b=transpose_b, name=name)

    def einsum(self, equation: str, *inputs: Any, name: str | None = None) -> TensorHandle:
        """Sums of products by index, `einsum("ij,jk->ik", a, b)`."""
        tensors = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list | tuple) else inputs
        return self.op_output("Einsum", list(tensors), equation=equation, name=name)

    def cast(self, x: Any, dtype: DtypeLike, name: str | None = None) -> TensorHandle:
        """`x` in another element type."""
        return self.op_output("Cast", x, DstT=dtype, name=name)

    def where(self, condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> TensorHandle:
        """`x` where the condition holds, else `y`; all three broadcast. Without both, the places where it holds."""
        if (x is None) != (y is None):
            raise InvalidAttrError("where takes both x and y, or neither")
        if x is None:
            return self.op_output("Where", condition, name=name)
        return self.op_output("SelectV2", condition, x, y, name=name)

    def boolean_mask(self, tensor: Any, mask: Any, name: str | None = None) -> TensorHandle:
        """The entries along the first axes where a mask of bools holds, in one row."""
        return self.op_output("GatherNd", tensor, self.op_output("Where", mask), name=name)

    def concat(self, values: Sequence[Any], axis: int = 0, name: str | None = None) -> TensorHandle:
        """The tensors one after the other along an axis."""
        return self.op_output("ConcatV2", list(values), axis, name=name)

    def stack(self, values: Sequence[Any], axis: int = 0, name: str | None = None) -> TensorHandle:
        """The tensors beside each other along a new axis."""
        return self.op_output("Pack", list(values), axis=axis, name=name)

    def unstack(self, value: Any, num: int | None = None, axis: int = 0, name: str | None = None) -> Any:
        """The slices along an axis, a tuple. num: how many, where the tensor's shape is not stated."""
        if num is None:
            num = _size(as_tensor(value), axis)
        return self.op("Unpack", value, num=num, axis=axis, name=name)

    def split(self, value: Any, num_or_size_splits: int | Sequence[int], axis: int = 0, name: str | None = None) -> Any:
        """Equal parts along an axis, or parts of the given sizes; a tuple."""
        if isinstance(num_or_size_splits, int):
            return self.op("Split", axis, value, num_split=num_or_size_splits, name=name)
        sizes = list(num_or_size_splits)
        return self.op("SplitV", value, sizes, axis, num_split=len(sizes), name=name)

    def gather(
        self, params: Any, indices: Any, axis: int = 0, batch_dims: int = 0, name: str | None = None
    ) -> TensorHandle:
        """Slices of `params` along an axis. Its gradient is sparse along axis 0."""
        return self.op_output("GatherV2", params, indices, axis, batch_dims=batch_dims, name=name)

    def transpose(self, a: Any, perm: Any = None, conjugate: bool = False, name: str | None = None) -> TensorHandle:
        """`a` with its axes in another order; without one, in reverse."""
        if perm is None:
            rank = self.op_output("Rank", a)
            perm = self.op_output("Range", self.op_output("Sub", rank, 1), -1, -1)
        return self.op_output("ConjugateTranspose" if conjugate else "Transpose", a, perm, name=name)

    def expand_dims(self, input: Any, axis: Any, name: str | None = None) -> TensorHandle:
        """A tensor with one more axis, of size 1."""
        return self.op_output("ExpandDims", input, axis, name=name)

    def squeeze(self, input: Any, axis: int | Sequence[int] | None = None, name: str | None = None) -> TensorHandle:
        """A tensor without axes of size 1: all of them, or those given."""
        axes = [] if axis is None else [axis] if isinstance(axis, int) else list(axis)
        return self.op_output("Squeeze", input, squeeze_dims=axes, name=name)

    def pad(
        self, tensor: Any, paddings: Any, mode: str = "CONSTANT", constant_values: Any = 0, name: str | None = None
    ) -> TensorHandle:
        """A tensor with more before and after it along each axis: a constant, or itself in a mirror."""
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
        """Ones at the indices along a new axis of size `depth`. dtype: that of the values unless given."""
        attrs = {"axis": axis} if dtype is None else {"axis": axis, "T": dtype}
        return self.op_output("OneHot", indices, depth, on_value, off_value, name=name, **attrs)


def _size(value: Any, axis: int) -> int:
    shape = value.shape if isinstance(value, TensorHandle) else np.shape(value)
    size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    if size is None:
        raise InvalidAttrError(f"unstack needs num: the graph does not state the tensor's size along axis {axis}")
    return int(size)
