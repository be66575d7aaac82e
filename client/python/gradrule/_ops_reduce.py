"""Reductions, and what is built of them, by the names and arguments that TensorFlow's Python gives them."""

from __future__ import annotations

from typing import Any

from gradrule._handles import TensorHandle
from gradrule._opmaker import OpMaker


class Reductions(OpMaker):
    """Ops over axes. axis: one, or several; None: all."""

    def reduce_sum(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Sum over axes."""
        return self._reduce("Sum", input_tensor, axis, keepdims, name)

    def reduce_mean(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Mean over axes."""
        return self._reduce("Mean", input_tensor, axis, keepdims, name)

    def reduce_max(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Largest value over axes."""
        return self._reduce("Max", input_tensor, axis, keepdims, name)

    def reduce_min(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Least value over axes."""
        return self._reduce("Min", input_tensor, axis, keepdims, name)

    def reduce_prod(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Product over axes."""
        return self._reduce("Prod", input_tensor, axis, keepdims, name)

    def reduce_all(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Whether all are true, over axes."""
        return self._reduce("All", input_tensor, axis, keepdims, name)

    def reduce_any(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Whether any is true, over axes."""
        return self._reduce("Any", input_tensor, axis, keepdims, name)

    def reduce_euclidean_norm(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Root of the sum of squares over axes."""
        return self._reduce("EuclideanNorm", input_tensor, axis, keepdims, name)

    def reduce_variance(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Mean squared distance from the mean over axes."""
        mean = self.reduce_mean(input_tensor, axis, keepdims=True)
        return self.reduce_mean(self.one("SquaredDifference", input_tensor, mean), axis, keepdims, name)

    def reduce_std(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Standard deviation over axes."""
        return self.one("Sqrt", self.reduce_variance(input_tensor, axis, keepdims), name=name)

    def reduce_logsumexp(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Logarithm of the sum of exponentials over axes, safe for large values."""
        largest = self.reduce_max(input_tensor, axis, keepdims=True)
        # Infinite values must not meet themselves in a difference; the shift cancels out and takes no gradient.
        shift = self.one(
            "StopGradient",
            self.one("SelectV2", self.one("IsFinite", largest), largest, self.one("ZerosLike", largest)),
        )
        total = self.reduce_sum(self.one("Exp", self.one("Sub", input_tensor, shift)), axis, keepdims)
        if not keepdims:
            shift = self.one("Reshape", shift, self.one("Shape", total))
        return self.one("AddV2", self.one("Log", total), shift, name=name)

    def l2_normalize(self, x: Any, axis: Any = None, epsilon: float = 1e-12, name: str | None = None) -> TensorHandle:
        """`x` over the root of its sum of squares along axes, which counts as at least `epsilon`."""
        squares = self.reduce_sum(self.one("Square", x), axis, keepdims=True)
        return self.one("Mul", x, self.one("Rsqrt", self.one("Maximum", squares, epsilon)), name=name)

    def argmax(self, input: Any, axis: Any = 0, output_type: Any = "int64", name: str | None = None) -> TensorHandle:
        """Where the largest value along an axis lies."""
        return self.one("ArgMax", input, axis, output_type=output_type, name=name)

    def argmin(self, input: Any, axis: Any = 0, output_type: Any = "int64", name: str | None = None) -> TensorHandle:
        """Where the least value along an axis lies."""
        return self.one("ArgMin", input, axis, output_type=output_type, name=name)

    def cumsum(
        self, x: Any, axis: Any = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Sums of what comes up to each place along an axis."""
        return self.one("Cumsum", x, axis, exclusive=exclusive, reverse=reverse, name=name)

    def cumprod(
        self, x: Any, axis: Any = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Products of what comes up to each place along an axis."""
        return self.one("Cumprod", x, axis, exclusive=exclusive, reverse=reverse, name=name)

    def softmax(self, logits: Any, axis: int = -1, name: str | None = None) -> TensorHandle:
        """Exponentials along an axis, over their sum."""
        return self._along_last("Softmax", logits, axis, name)

    def log_softmax(self, logits: Any, axis: int = -1, name: str | None = None) -> TensorHandle:
        """Logarithm of `softmax`."""
        return self._along_last("LogSoftmax", logits, axis, name)

    def _along_last(self, op_type: str, logits: Any, axis: int, name: str | None) -> TensorHandle:
        """An op that works along the last axis, along any one."""
        if axis == -1:
            return self.one(op_type, logits, name=name)
        rank = self.one("Rank", logits)
        axes = self.one("Range", 0, rank, 1)
        last, own = self.one("Sub", rank, 1), self.one("FloorMod", axis, rank)
        # The two axes swapped; the permutation is its own inverse.
        swapped = self.one(
            "SelectV2",
            self.one("Equal", axes, own),
            last,
            self.one("SelectV2", self.one("Equal", axes, last), own, axes),
        )
        along = self.one(op_type, self.one("Transpose", logits, swapped))
        return self.one("Transpose", along, swapped, name=name)

    def _reduce(self, op_type: str, input_tensor: Any, axis: Any, keepdims: bool, name: str | None) -> TensorHandle:
        if axis is None:
            axis = self.one("Range", 0, self.one("Rank", input_tensor), 1)
        elif isinstance(axis, set | range | tuple):
            axis = list(axis)
        return self.one(op_type, input_tensor, axis, keep_dims=keepdims, name=name)
