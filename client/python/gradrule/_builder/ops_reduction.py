"""Defines the builder's ops over axes, with the names and arguments of TensorFlow's Python."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from gradrule._builder.handles import TensorHandle
from gradrule._builder.op_methods import OpMethods

IndexType: TypeAlias = Literal["int64", "int32"]


class ReductionOps(OpMethods):
    """Adds nodes that work along axes."""

    def reduce_sum(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Sums over axes.

        Args:
            input_tensor: Tensor of any shape; any number type.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self._reduce("Sum", input_tensor, axis, keepdims, name)

    def reduce_mean(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Averages over axes.

        Args:
            input_tensor: Tensor of any shape; any number type.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self._reduce("Mean", input_tensor, axis, keepdims, name)

    def reduce_max(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes the maximum over axes.

        Args:
            input_tensor: Tensor of any shape; any real type.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self._reduce("Max", input_tensor, axis, keepdims, name)

    def reduce_min(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes the minimum over axes.

        Args:
            input_tensor: Tensor of any shape; any real type.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self._reduce("Min", input_tensor, axis, keepdims, name)

    def reduce_prod(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Multiplies over axes.

        Args:
            input_tensor: Tensor of any shape; any number type.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self._reduce("Prod", input_tensor, axis, keepdims, name)

    def reduce_all(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes the logical and over axes.

        Args:
            input_tensor: Tensor of any shape; bool.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self._reduce("All", input_tensor, axis, keepdims, name)

    def reduce_any(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes the logical or over axes.

        Args:
            input_tensor: Tensor of any shape; bool.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self._reduce("Any", input_tensor, axis, keepdims, name)

    def reduce_euclidean_norm(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes the square root of the sum of squares over axes.

        Args:
            input_tensor: Tensor of any shape; any number type.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self._reduce("EuclideanNorm", input_tensor, axis, keepdims, name)

    def reduce_variance(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes the variance over axes.

        Args:
            input_tensor: Tensor of any shape; floating-point or complex.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        mean = self.reduce_mean(input_tensor, axis, keepdims=True)
        return self.reduce_mean(
            self.op_output("SquaredDifference", input_tensor, mean), axis, keepdims=keepdims, name=name
        )

    def reduce_std(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes the standard deviation over axes.

        Args:
            input_tensor: Tensor of any shape; floating-point or complex.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        return self.op_output("Sqrt", self.reduce_variance(input_tensor, axis, keepdims=keepdims), name=name)

    def reduce_logsumexp(
        self, input_tensor: Any, axis: Any = None, *, keepdims: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes the logarithm of the sum of exponentials over axes, without overflow.

        Args:
            input_tensor: Tensor of any shape; floating-point.
            axis: Axis, or several axes. Default: all.
            keepdims: Keeps reduced axes, with size 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The reduced tensor, of the same element type.
        """
        largest = self.reduce_max(input_tensor, axis, keepdims=True)
        # An infinite maximum would give inf - inf. The shift cancels out, so it needs no gradient.
        shift = self.op_output(
            "StopGradient",
            self.op_output(
                "SelectV2", self.op_output("IsFinite", largest), largest, self.op_output("ZerosLike", largest)
            ),
        )
        total = self.reduce_sum(
            self.op_output("Exp", self.op_output("Sub", input_tensor, shift)), axis, keepdims=keepdims
        )
        if not keepdims:
            shift = self.op_output("Reshape", shift, self.op_output("Shape", total))
        return self.op_output("AddV2", self.op_output("Log", total), shift, name=name)

    def l2_normalize(
        self, x: Any, axis: Any = None, *, epsilon: float = 1e-12, name: str | None = None
    ) -> TensorHandle:
        """Divides `x` by its Euclidean norm along axes.

        Args:
            x: Tensor of any shape; floating-point.
            axis: Axis, or several axes. Default: all.
            epsilon: Minimum of the squared norm, > 0.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            A tensor like `x`.
        """
        squares = self.reduce_sum(self.op_output("Square", x), axis, keepdims=True)
        return self.op_output("Mul", x, self.op_output("Rsqrt", self.op_output("Maximum", squares, epsilon)), name=name)

    def argmax(
        self, input: Any, axis: Any = 0, *, output_type: IndexType = "int64", name: str | None = None
    ) -> TensorHandle:
        """Returns the index of the maximum along an axis.

        Args:
            input: Tensor of any shape; any number type.
            axis: Axis to search.
            output_type: `int64` or `int32`.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The indices; the axis is removed.
        """
        return self.op_output("ArgMax", input, axis, output_type=output_type, name=name)

    def argmin(
        self, input: Any, axis: Any = 0, *, output_type: IndexType = "int64", name: str | None = None
    ) -> TensorHandle:
        """Returns the index of the minimum along an axis.

        Args:
            input: Tensor of any shape; any number type.
            axis: Axis to search.
            output_type: `int64` or `int32`.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The indices; the axis is removed.
        """
        return self.op_output("ArgMin", input, axis, output_type=output_type, name=name)

    def cumsum(
        self, x: Any, axis: Any = 0, *, exclusive: bool = False, reverse: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes cumulative sums along an axis.

        Args:
            x: Tensor of any shape; any number type.
            axis: Axis to sum along.
            exclusive: Leaves the own element out of each sum.
            reverse: Sums from the end of the axis.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            A tensor like `x`.
        """
        return self.op_output("Cumsum", x, axis, exclusive=exclusive, reverse=reverse, name=name)

    def cumprod(
        self, x: Any, axis: Any = 0, *, exclusive: bool = False, reverse: bool = False, name: str | None = None
    ) -> TensorHandle:
        """Takes cumulative products along an axis.

        Args:
            x: Tensor of any shape; any number type.
            axis: Axis to multiply along.
            exclusive: Leaves the own element out of each product.
            reverse: Multiplies from the end of the axis.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            A tensor like `x`.
        """
        return self.op_output("Cumprod", x, axis, exclusive=exclusive, reverse=reverse, name=name)

    def softmax(self, logits: Any, axis: int = -1, *, name: str | None = None) -> TensorHandle:
        """Applies softmax along an axis.

        Args:
            logits: Tensor of any shape; floating-point.
            axis: Axis along which the results sum to 1.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            A tensor like `logits`.
        """
        return self._along_last("Softmax", logits, axis, name)

    def log_softmax(self, logits: Any, axis: int = -1, *, name: str | None = None) -> TensorHandle:
        """Applies the logarithm of softmax along an axis.

        Args:
            logits: Tensor of any shape; floating-point.
            axis: Axis of the classes.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            A tensor like `logits`.
        """
        return self._along_last("LogSoftmax", logits, axis, name)

    def _along_last(self, op_type: str, logits: Any, axis: int, name: str | None) -> TensorHandle:
        """Applies an op that works along the last axis to any axis."""
        if axis == -1:
            return self.op_output(op_type, logits, name=name)
        rank = self.op_output("Rank", logits)
        axes = self.op_output("Range", 0, rank, 1)
        last, own = self.op_output("Sub", rank, 1), self.op_output("FloorMod", axis, rank)
        # Swaps the two axes; the same permutation swaps them back.
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
