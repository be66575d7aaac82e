"""Defines the builder's ops that make tensors, with the names and arguments of TensorFlow's Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradrule._builder.handles import Node, TensorHandle, as_tensor
from gradrule._builder.op_methods import OpMethods
from gradrule.common import tensor_codec
from gradrule.errors import InvalidAttrError, InvalidTensorError
from gradrule.v1.tensor_pb2 import Dt

# The graph seed that TensorFlow uses for an op with a seed in a graph without one.
_GRAPH_SEED = 87654321


class CreationOps(OpMethods):
    """Adds nodes that make tensors.

    A shape is a list of sizes, of which some may be handles, or a handle of an integer vector. A seed gives the same
    numbers as in TensorFlow.
    """

    def zeros(self, shape: Any, dtype: tensor_codec.DtypeLike = "float32", *, name: str | None = None) -> TensorHandle:
        """Makes a tensor of zeros, or of empty strings.

        Args:
            shape: Sizes, or an integer vector of the graph.
            dtype: Element type; strings become empty.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor.
        """
        return self._filled(shape, 0, dtype, name)

    def ones(self, shape: Any, dtype: tensor_codec.DtypeLike = "float32", *, name: str | None = None) -> TensorHandle:
        """Makes a tensor of ones.

        Args:
            shape: Sizes, or an integer vector of the graph.
            dtype: Element type, not string.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor.

        Raises:
            InvalidAttrError: The type is string.
        """
        return self._filled(shape, 1, dtype, name)

    def zeros_like(self, input: Any, dtype: tensor_codec.DtypeLike = None, *, name: str | None = None) -> TensorHandle:
        """Makes zeros in the shape of a tensor.

        Args:
            input: Tensor that gives the shape.
            dtype: Element type. Default: that of `input`.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor.
        """
        if dtype is None:
            return self.op_output("ZerosLike", input, name=name)
        return self._filled(self.op_output("Shape", input), 0, dtype, name)

    def ones_like(self, input: Any, dtype: tensor_codec.DtypeLike = None, *, name: str | None = None) -> TensorHandle:
        """Makes ones in the shape of a tensor.

        Args:
            input: Tensor that gives the shape.
            dtype: Element type. Default: that of `input`.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor.
        """
        if dtype is None:
            return self.op_output("OnesLike", input, name=name)
        return self._filled(self.op_output("Shape", input), 1, dtype, name)

    def fill(self, dims: Any, value: Any, *, name: str | None = None) -> TensorHandle:
        """Makes a tensor filled with one scalar.

        Args:
            dims: Sizes, or an integer vector of the graph.
            value: Scalar of any type.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor, of the type of `value`.
        """
        return self.op_output("Fill", self._shape(dims), value, name=name)

    def range(self, start: Any, limit: Any = None, delta: Any = 1, *, name: str | None = None) -> TensorHandle:
        """Makes a vector of the numbers from `start` to `limit`, exclusive; with one argument, from 0 to it.

        Args:
            start: First number; the limit if `limit` is not given.
            limit: End of the range, exclusive.
            delta: Difference of neighbours, not 0.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            A vector: float32 if one of the Python numbers is a float, else int32.
        """
        if limit is None:
            start, limit = 0, start
        # As in TensorFlow: any float among Python numbers makes the range float32; else the op's default type holds.
        attrs = {"Tidx": "float32"} if _are_floats(start, limit, delta) else {}
        return self.op_output("Range", start, limit, delta, name=name, **attrs)

    def random_uniform(
        self,
        shape: Any,
        minval: Any = 0,
        maxval: Any = None,
        *,
        dtype: tensor_codec.DtypeLike = "float32",
        seed: int | None = None,
        name: str | None = None,
    ) -> TensorHandle:
        """Draws uniform numbers from `minval` to `maxval`, exclusive.

        Args:
            shape: Sizes, or an integer vector of the graph.
            minval: Smallest number, inclusive.
            maxval: Upper bound, exclusive. Default: 1 for floats; required for integers.
            dtype: Floating-point, or `int32` or `int64`.
            seed: Seed; None draws other numbers in each run.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor.

        Raises:
            InvalidAttrError: The type is an integer and `maxval` is missing.
        """
        number = _number(dtype, "random_uniform")
        if np.issubdtype(tensor_codec.numpy_dtype(number), np.integer):
            if maxval is None:
                raise InvalidAttrError("random_uniform of integers needs maxval")
            return self.op_output(
                "RandomUniformInt", self._shape(shape), minval, maxval, Tout=number, name=name, **_seeds(seed)
            )
        low_is_zero = isinstance(minval, int | float) and minval == 0
        if low_is_zero and maxval is None:
            return self.op_output("RandomUniform", self._shape(shape), dtype=number, name=name, **_seeds(seed))
        drawn = self.op_output("RandomUniform", self._shape(shape), dtype=number, **_seeds(seed))
        width = (1 if maxval is None else as_tensor(maxval)) - as_tensor(minval)
        return self.op_output("AddV2", self.op_output("Mul", drawn, width), minval, name=name)

    def random_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        *,
        dtype: tensor_codec.DtypeLike = "float32",
        seed: int | None = None,
        name: str | None = None,
    ) -> TensorHandle:
        """Draws numbers from a normal distribution.

        Args:
            shape: Sizes, or an integer vector of the graph.
            mean: Mean; must broadcast to `shape`.
            stddev: Standard deviation; must broadcast to `shape`.
            dtype: Floating-point.
            seed: Seed; None draws other numbers in each run.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor.
        """
        return self._normal("RandomStandardNormal", shape, mean, stddev, dtype, seed, name)

    def truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        *,
        dtype: tensor_codec.DtypeLike = "float32",
        seed: int | None = None,
        name: str | None = None,
    ) -> TensorHandle:
        """Draws from a normal distribution, cut off at two standard deviations from the mean.

        Args:
            shape: Sizes, or an integer vector of the graph.
            mean: Mean; must broadcast to `shape`.
            stddev: Standard deviation before the cut; must broadcast to `shape`.
            dtype: Floating-point.
            seed: Seed; None draws other numbers in each run.
            name: Name of the node, made unique. Default: the op type.

        Returns:
            The tensor.
        """
        return self._normal("TruncatedNormal", shape, mean, stddev, dtype, seed, name)

    def _normal(
        self, op_type: str, shape: Any, mean: Any, stddev: Any, dtype: Any, seed: int | None, name: str | None
    ) -> TensorHandle:
        drawn = self.op_output(op_type, self._shape(shape), dtype=_number(dtype, op_type), **_seeds(seed))
        return self.op_output("AddV2", self.op_output("Mul", drawn, stddev), mean, name=name)

    def _filled(self, shape: Any, value: int, dtype: Any, name: str | None) -> TensorHandle:
        number = _number(dtype, name or "Fill")
        if number == Dt.DT_STRING and value:
            raise InvalidAttrError(f"{name or 'Fill'}: there are no ones of type string")
        try:
            array = tensor_codec.from_value("" if number == Dt.DT_STRING else value, number)
        except ValueError as cause:
            raise InvalidTensorError(f"{name or 'Fill'}: {cause}") from None
        return self.op_output("Fill", self._shape(shape), array, name=name)

    def _shape(self, shape: Any) -> Any:
        """Converts a shape to an op's input; an empty list becomes an int32 vector. Raises `InvalidTensorError`."""
        shape = as_tensor(shape)
        if isinstance(shape, TensorHandle) or hasattr(shape, "dtype"):
            return shape
        sizes = [as_tensor(size) for size in ([shape] if isinstance(shape, int) else shape)]
        if any(isinstance(size, TensorHandle | Node) for size in sizes):
            return self.op_output("Pack", sizes)
        try:
            return tensor_codec.from_value(sizes, Dt.DT_INT32)
        except ValueError:
            raise InvalidTensorError(f"a shape is a list of sizes, not {shape!r}") from None


def _are_floats(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values) and float in map(type, values)


def _number(dtype: Any, where: str) -> int:
    try:
        return tensor_codec.dtype_number(dtype)
    except ValueError as cause:
        raise InvalidAttrError(f"{where}: {cause}") from None


def _seeds(seed: int | None) -> dict[str, Any]:
    return {} if seed is None else {"seed": _GRAPH_SEED, "seed2": seed}
