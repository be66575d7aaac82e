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
        return self.reduce_mean(self.op_output("SquaredDifference", input_tensor, mean), axis, keepdims, name)

    def reduce_std(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Standard deviation over axes."""
        return self.op_output("Sqrt", self.reduce_variance(input_tensor, axis, keepdims), name=name)

    def reduce_logsumexp(
        self, input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Logarithm of the sum of exponentials over axes, safe for large values."""
        largest = self.reduce_max(input_tensor, axis, keepdims=True)
        # Infinite values must not meet themselves in a difference; the shift cancels out and takes no gradient.
        shift = self.op_output(
            "StopGradient",
            self.op_output(
                "SelectV2", self.op_output("IsFinite", largest), largest, self.op_output("ZerosLike", largest)
            ),
        )
        total = self.reduce_sum(self.op_output("Exp", self.op_output("Sub", input_tensor, shift)), axis, keepdims)
        if not keepdims:
            shift = self.op_output("Reshape", shift, self.op_output("Shape", total))
        return self.op_output("AddV2", self.op_output("Log", total), shift, name=name)

    def l2_normalize(self, x: Any, axis: Any = None, epsilon: float = 1e-12, name: str | None = None) -> TensorHandle:
        """`x` over the root of its sum of squares along axes, which counts as at least `epsilon`."""
        squares = self.reduce_sum(self.op_output("Square", x), axis, keepdims=True)
        return self.op_output("Mul", x, self.op_output("Rsqrt", self.op_output("Maximum", squares, epsilon)), name=name)

    def argmax(self, input: Any, axis: Any = 0, output_type: Any = "int64", name: str | None = None) -> TensorHandle:
        """Where the largest value along an axis lies."""
        return self.op_output("ArgMax", input, axis, output_type=output_type, name=name)

    def argmin(self, input: Any, axis: Any = 0, output_type: Any = "int64", name: str | None = None) -> TensorHandle:
        """Where the least value along an axis lies."""
        return self.op_output("ArgMin", input, axis, output_type=output_type, name=name)

    def cumsum(
        self, x: Any, axis: Any = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Sums of what comes up to each place along an axis."""
        return self.op_output("Cumsum", x, axis, exclusive=exclusive, reverse=reverse, name=name)

    def cumprod(
        self, x: Any, axis: Any = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Products of what comes up to each place along an axis."""
        return self.op_output("Cumprod", x, axis, exclusive=exclusive, reverse=reverse, name=name)

    def softmax(self, logits: Any, axis: int = -1, name: str | None = None) -> TensorHandle:
        """Exponentials along an axis, over their sum."""
        return self._along_last("Softmax", logits, axis, name)

    def log_softmax(self, logits: Any, axis: int = -1, name: str | None = None) -> TensorHandle:
        """Logarithm of `softmax`."""
        return self._along_last("LogSoftmax", logits, axis, name)

    def _along_last(self, op_type: str, logits: Any, axis: int, name: str | None) -> TensorHandle:
        """An op that works along the last axis, along any one."""
        if axis == -1:
            return self.op_output(op_type, logits, name=name)
        rank = self.op_output("Rank", logits)
        axes = self.op_output("Range", 0, rank, 1)
        last, own = self.op_output("Sub", rank, 1), self.op_output("FloorMod", axis, rank)
        # The two axes swapped; the permutation is its own inverse.
        swapped = self.op_output(
            "SelectV2",
            self.op_output("Equal", axes, own),
            last,
            self.op_output("SelectV2", self.op_output("Equal", axes, last), own, axes),
        )
        along = self.op_output(op_type, self.op_output("Transpose", logits, swapped))
        return self.op_output("Transpose", along, swapped, name=name)

    def _reduce(self, op_type: str, input_tensor: Any, axis: Any, keepdims: bool, name: str | None) -> TensorHandle:
        if axis is None:
            axis = self.op_output("Range", 0, self.op_output("Rank", input_tensor), 1)
        elif isinstance(axis, set | range | tuple):
            axis = list(axis)
        return self.op_output(op_type, input_tensor, axis, keep_dims=keepdims, name=name)
