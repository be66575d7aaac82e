"""Tests that constants written by TensorFlow are accepted, and that missing or additional bytes are refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape
from gradrule_server.errors import reason_name
from gradrule_server.graphs.ir import Limits
from gradrule_server.policy.faults import shape_fault, tensor_fault

DTYPES = [
    np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16,
    np.uint32, np.uint64, np.bool_, np.complex64, np.complex128, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn,
    ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (2, 3), (3, 0, 2)]


def reason_of(tensor: Tensor, limits: Limits | None = None) -> str | None:
    fault = tensor_fault(tensor, limits or Limits())
    return reason_name(fault[0]) if fault else None


def shape(*sizes: int) -> TensorShape:
    return TensorShape(dim=[TensorShape.Dim(size=size) for size in sizes])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("sizes", SHAPES)
def test_tensors_that_tensorflow_writes_are_accepted(dtype: type, sizes: tuple[int, ...]) -> None:
    value: Any = np.ones(sizes, np.float32).astype(dtype)
    for made in (tf.make_tensor_proto(value), tf.make_tensor_proto(1 if dtype != np.bool_ else True, dtype, sizes)):
        tensor = Tensor.FromString(made.SerializeToString())
        assert reason_of(tensor) is None
        if tensor.tensor_content:
            tensor.tensor_content += b"\0"
            assert reason_of(tensor) == "INVALID_TENSOR"
            if len(tensor.tensor_content) > 2:  # no content at all is zeros
                tensor.tensor_content = tensor.tensor_content[:-2]
                assert reason_of(tensor) == "INVALID_TENSOR"


def test_encoded_strings_are_checked() -> None:
    tensor = Tensor.FromString(tf.make_tensor_proto([b"a", b"", b"ccc"]).SerializeToString())
    assert reason_of(tensor) is None
    tensor.string_val.append(b"d")
    assert reason_of(tensor) == "INVALID_TENSOR"
    packed = Tensor(dtype=Dt.DT_STRING, tensor_shape=shape(2), tensor_content=b"\x01\x02abb")
    assert reason_of(packed) is None
    for wrong in (b"\x01\x02ab", b"\x01\x02abbb", b"\x01", b"\xff\xff\xff\xff\xff\xff\xff\x01"):
        assert reason_of(Tensor(dtype=Dt.DT_STRING, tensor_shape=shape(2), tensor_content=wrong)) == "INVALID_TENSOR"


def test_too_many_values_are_refused() -> None:
    assert reason_of(Tensor(dtype=Dt.DT_FLOAT, tensor_shape=shape(2), float_val=[1, 2, 3])) == "INVALID_TENSOR"
    assert reason_of(Tensor(dtype=Dt.DT_COMPLEX64, tensor_shape=shape(2), scomplex_val=[1, 2, 3])) == "INVALID_TENSOR"
    assert reason_of(Tensor(dtype=Dt.DT_COMPLEX64, tensor_shape=shape(2), scomplex_val=[1, 2])) is None


@pytest.mark.parametrize("dtype", [Dt.DT_UNSPECIFIED, Dt.DT_FLOAT_REF, Dt.DT_RESOURCE, 999])
def test_element_types_without_constants_are_refused(dtype: Dt.ValueType) -> None:
    assert reason_of(Tensor(dtype=dtype)) == "INVALID_TENSOR"


def test_shapes_are_checked() -> None:
    def reason(value: TensorShape, *, known: bool) -> str | None:
        fault = shape_fault(value, Limits(), known=known)
        return reason_name(fault[0]) if fault else None

    assert reason(shape(-1, 3), known=False) is None
    assert reason(TensorShape(unknown_rank=True), known=False) is None
    for value in (shape(-1), TensorShape(unknown_rank=True)):
        assert reason(value, known=True) == "INVALID_TENSOR"
    assert reason(shape(-2), known=False) == "INVALID_TENSOR"
    assert reason(TensorShape(unknown_rank=True, dim=[TensorShape.Dim(size=1)]), known=False) == "INVALID_TENSOR"
    assert reason(shape(2**40, 2**40), known=True) == "INVALID_TENSOR"
    assert reason(shape(2**40, 2**40, 0), known=True) == "INVALID_TENSOR"
    assert reason(shape(*[1] * 8), known=True) is None
    assert reason(shape(*[1] * 9), known=True) == "LIMIT_EXCEEDED"
