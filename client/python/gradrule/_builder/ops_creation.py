"""Defines the builder's ops that make tensors, with the names and arguments of TensorFlow's Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradrule._builder.handles import Node, TensorHandle, as_tensor
from gradrule._builder.op_methods import OpMaker
from gradrule.common import tensor_codec
from gradrule.errors import InvalidAttrError, InvalidTensorError
from gradrule.v1.tensor_pb2 import Dt

# The graph seed that TensorFlow uses for an op with a seed in a graph without one.
_GRAPH_SEED = 87654321


class Makers(OpMaker):
    """Adds nodes that make tensors.

    A shape is a list of sizes, of which some may be handles, or a handle of an integer vector. A seed gives the same
    numbers as in TensorFlow.
    """

    def zeros(self, shape: Any, dtype: tensor_codec.DtypeLike = "float32", name: str | None = None) -> TensorHandle:
        """Makes a tensor of zeros, or of empty strings."""
        return self._filled(shape, 0, dtype, name)

    def ones(self, shape: Any, dtype: tensor_codec.DtypeLike = "float32", name: str | None = None) -> TensorHandle:
        """Makes a tensor of ones."""
        return self._filled(shape, 1, dtype, name)

    def zeros_like(self, input: Any, dtype: tensor_codec.DtypeLike = None, name: str | None = None) -> TensorHandle:
        """Makes zeros in the shape of a tensor; dtype: default is the tensor's."""
        if dtype is None:
            return self.op_output("ZerosLike", input, name=name)
        return self._filled(self.op_output("Shape", input), 0, dtype, name)

    def ones_like(self, input: Any, dtype: tensor_codec.DtypeLike = None, name: str | None = None) -> TensorHandle:
        """Makes ones in the shape of a tensor; dtype: default is the tensor's."""
        if dtype is None:
            return self.op_output("OnesLike", input, name=name)
        return self._filled(self.op_output("Shape", input), 1, dtype, name)

    def fill(self, dims: Any, value: Any, name: str | None = None) -> TensorHandle:
        """Makes a tensor filled with one scalar."""
        return self.op_output("Fill", self._shape(dims), value, name=name)

    def range(self, start: Any, limit: Any = None, delta: Any = 1, name: str | None = None) -> TensorHandle:
        """Makes a vector of the numbers from `start` to `limit`, exclusive; with one argument, from 0 to it."""
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
        dtype: tensor_codec.DtypeLike = "float32",
        seed: int | None = None,
        name: str | None = None,
    ) -> TensorHandle:
        """Draws uniform numbers from `minval` to `maxval`, exclusive; maxval: default is 1 for floats."""
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
        dtype: tensor_codec.DtypeLike = "float32",
        seed: int | None = None,
        name: str | None = None,
    ) -> TensorHandle:
        """Draws numbers from a normal distribution."""
        return self._normal("RandomStandardNormal", shape, mean, stddev, dtype, seed, name)

    def truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: tensor_codec.DtypeLike = "float32",
        seed: int | None = None,
        name: str | None = None,
    ) -> TensorHandle:
        """Draws from a normal distribution, cut off at two standard deviations from the mean."""
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
