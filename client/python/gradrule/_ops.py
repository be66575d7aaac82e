"""Ops of the builder by the names that TensorFlow's Python gives them.

Any op type is a method by its name in snake case: `g.sign(x)`, `g.conv2d(x, w, strides=[1, 1, 1, 1], padding="SAME")`.
Below stand only those whose Python name or arguments differ from the op's.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from gradrule import _opdefs
from gradrule._handles import TensorHandle
from gradrule._names import near
from gradrule._tensors import DtypeLike

# Python's names for op types that they are not the snake case of.
_ALIASES = {
    "add": "AddV2",
    "subtract": "Sub",
    "multiply": "Mul",
    "divide": "RealDiv",
    "truediv": "RealDiv",
    "negative": "Neg",
    "mod": "FloorMod",
    "stack": "Pack",
    "unstack": "Unpack",
    "top_k": "TopKV2",
    "reverse": "ReverseV2",
    "batch_matmul": "BatchMatMulV2",
    "tensor_scatter_nd_update": "TensorScatterUpdate",
    "tensor_scatter_nd_add": "TensorScatterAdd",
    "fused_batch_norm": "FusedBatchNormV3",
    "max_pool2d": "MaxPool",
    "avg_pool2d": "AvgPool",
    "depthwise_conv2d": "DepthwiseConv2dNative",
}


@functools.cache
def _by_plain_name() -> dict[str, str]:
    """Op types by their name without case and underscores."""
    return {name.lower().replace("_", ""): name for name in reversed(_opdefs.names()) if not name.startswith("_")}


def op_type_of(method: str) -> str | None:
    """The op type that a method's name means, `MatMul` for `matmul` and `mat_mul`, or None."""
    return _ALIASES.get(method) or _by_plain_name().get(method.lower().replace("_", ""))


class GraphOps(ABC):
    """The part of the builder that gives ops their Python names."""

    @abstractmethod
    def op(self, op_type: str, *inputs: Any, name: str | None = None, **attrs: Any) -> Any:
        """Adds a node."""

    @abstractmethod
    def one(self, op_type: str, *inputs: Any, name: str | None = None, **attrs: Any) -> TensorHandle:
        """Adds a node of an op type with one output."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        op_type = None if method.startswith("_") else op_type_of(method)
        if op_type is None:
            hint = near(method, [*_ALIASES, *_by_plain_name()]) if not method.startswith("_") else ""
            raise AttributeError(f"a graph has no method {method!r}, and no op has that name.{hint}")
        return functools.partial(self.op, op_type)

    def matmul(
        self, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, name: str | None = None
    ) -> TensorHandle:
        """`a @ b` of matrices, or of batches of them where an operand states a rank above 2; see `batch_matmul`."""
        shapes = [operand.shape for operand in (a, b) if isinstance(operand, TensorHandle)]
        if any(shape is not None and len(shape) > 2 for shape in shapes):
            return self.one("BatchMatMulV2", a, b, adj_x=transpose_a, adj_y=transpose_b, name=name)
        return self.one("MatMul", a, b, transpose_a=transpose_a, transpose_b=transpose_b, name=name)

    def cast(self, x: Any, dtype: DtypeLike, name: str | None = None) -> TensorHandle:
        """`x` in another element type."""
        return self.one("Cast", x, DstT=dtype, name=name)

    def where(self, condition: Any, x: Any, y: Any, name: str | None = None) -> TensorHandle:
        """`x` where the condition holds, else `y`; all three broadcast."""
        return self.one("SelectV2", condition, x, y, name=name)

    def concat(self, values: Sequence[Any], axis: int = 0, name: str | None = None) -> TensorHandle:
        """The tensors one after the other along an axis."""
        return self.one("ConcatV2", list(values), axis, name=name)

    def split(self, value: Any, num_or_sizes: int | Sequence[int], axis: int = 0, name: str | None = None) -> Any:
        """Equal parts along an axis, or parts of the given sizes; a tuple."""
        if isinstance(num_or_sizes, int):
            return self.op("Split", axis, value, num_split=num_or_sizes, name=name)
        return self.op("SplitV", value, list(num_or_sizes), axis, num_split=len(num_or_sizes), name=name)

    def gather(self, params: Any, indices: Any, axis: int = 0, name: str | None = None) -> TensorHandle:
        """Slices of `params` along an axis. Its gradient is sparse along axis 0."""
        return self.one("GatherV2", params, indices, axis, name=name)

    def squeeze(self, x: Any, axis: int | Sequence[int] = (), name: str | None = None) -> TensorHandle:
        """`x` without axes of size 1: all of them, or those given."""
        axes = [axis] if isinstance(axis, int) else list(axis)
        return self.one("Squeeze", x, squeeze_dims=axes, name=name)

    def one_hot(
        self, indices: Any, depth: int, on_value: Any = 1.0, off_value: Any = 0.0, name: str | None = None
    ) -> TensorHandle:
        """Ones at the indices along a new last axis of size `depth`."""
        return self.one("OneHot", indices, depth, on_value, off_value, name=name)

    def reduce_sum(self, x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> TensorHandle:
        """Sum over axes; None: over all."""
        return self._reduce("Sum", x, axis, keepdims, name)

    def reduce_mean(self, x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> TensorHandle:
        """Mean over axes; None: over all."""
        return self._reduce("Mean", x, axis, keepdims, name)

    def reduce_max(self, x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> TensorHandle:
        """Largest value over axes; None: over all."""
        return self._reduce("Max", x, axis, keepdims, name)

    def reduce_min(self, x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> TensorHandle:
        """Least value over axes; None: over all."""
        return self._reduce("Min", x, axis, keepdims, name)

    def reduce_prod(self, x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> TensorHandle:
        """Product over axes; None: over all."""
        return self._reduce("Prod", x, axis, keepdims, name)

    def reduce_all(self, x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> TensorHandle:
        """Whether all are true, over axes; None: over all."""
        return self._reduce("All", x, axis, keepdims, name)

    def reduce_any(self, x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> TensorHandle:
        """Whether any is true, over axes; None: over all."""
        return self._reduce("Any", x, axis, keepdims, name)

    def _reduce(self, op_type: str, x: Any, axis: Any, keepdims: bool, name: str | None) -> TensorHandle:
        if axis is None:
            axis = self.one("Range", 0, self.one("Rank", x), 1)
        elif isinstance(axis, set | range | tuple):
            axis = list(axis)
        return self.one(op_type, x, axis, keep_dims=keepdims, name=name)
