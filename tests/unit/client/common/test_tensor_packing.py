"""Packing and unpacking of single tensors."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradrule as gr
from gradrule.common import tensor_codec, tensor_packing
from gradrule.v1 import tensor_pb2

BOTH = tensor_packing.Packing(zstd=True, bfloat16=True)
ZSTD = tensor_packing.Packing(zstd=True)
BFLOAT16 = tensor_packing.Packing(bfloat16=True)


def packed(array: np.ndarray[Any, Any], packing: tensor_packing.Packing) -> tensor_pb2.PackedTensor | None:
    found = tensor_packing.pack(tensor_codec.number_of_array(array), array, packing)
    return None if found is None else tensor_pb2.Tensor.FromString(found.head + found.content).packed


def bits(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint32).view(np.float32)


def test_rounding_is_to_nearest_and_ties_go_to_even() -> None:
    x = bits(0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x00008001, 0x80000001, 0x7F7FFFFF, 0xFF7F0000)
    message = packed(x, BFLOAT16)
    assert message is not None
    found = np.frombuffer(message.content, np.uint16)
    assert found.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F81, 0x0001, 0x8000, 0x7F80, 0xFF7F]
    np.testing.assert_array_equal(tensor_packing.unpack(message), x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_nan_stays_nan() -> None:
    x = np.concatenate([bits(0x7F800001, 0xFFFFFFFF, 0x7FC00000), np.array([np.inf, -np.inf], np.float32)])
    message = packed(x, BFLOAT16)
    assert message is not None
    found = tensor_packing.unpack(message)
    assert np.isnan(found[:3]).all()
    assert found[3:].tolist() == [np.inf, -np.inf]
    assert tensor_packing.unpack(message, keep_bfloat16=True).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "bool", "complex64", "float16", "bfloat16"])
@pytest.mark.parametrize("packing", [ZSTD, BOTH])
def test_round_trips(dtype: str, packing: tensor_packing.Packing) -> None:
    x = np.arange(4096).reshape(2, 2048).astype(tensor_codec.numpy_dtype(tensor_codec.dtype_number(dtype)))
    for array in (x, x.T, x[:, ::2], x.astype(x.dtype.newbyteorder(">"))):
        message = packed(array, packing)
        assert message is not None
        assert len(message.content) < array.nbytes
        found = tensor_packing.unpack(message)
        expected = array.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "float32" and packing.bfloat16 else x
        assert found.shape == array.shape
        np.testing.assert_array_equal(found, expected if expected.shape == array.shape else array.astype(x.dtype))
        assert tensor_packing.unpacked_bytes(message) == array.nbytes


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(0, np.float32),
        np.array([b"a"] * 1000, object),
        np.ones(4096, ml_dtypes.int4),
        np.ones(100, np.float64),
        np.frombuffer(np.random.default_rng(0).bytes(1 << 14), np.uint8),
    ],
    ids=["empty", "strings", "narrow", "small", "noise"],
)
def test_tensors_that_would_not_become_smaller_are_not_packed(array: np.ndarray[Any, Any]) -> None:
    assert packed(array, BOTH) is None


def test_without_the_package_zstd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = packed(np.zeros(4096, np.float32), ZSTD)
    assert message is not None
    monkeypatch.setattr(tensor_packing, "has_zstd", lambda: False)
    with pytest.raises(gr.errors.UnsupportedError, match=r"gradrule\[zstd\]"):
        gr.Transfer(compression="zstd")
    gr.Transfer(compression="gzip", wire_dtype="bfloat16")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"gradrule\[zstd\]"):
        tensor_packing.unpack(message)


def test_unknown_transfer_options_are_refused() -> None:
    with pytest.raises(gr.errors.InvalidParamError, match="'gzip', 'zstd' or None"):
        gr.Transfer(compression="lz4")
    with pytest.raises(gr.errors.InvalidParamError, match="'bfloat16' or None"):
        gr.Transfer(wire_dtype="float16")
    with pytest.raises(gr.errors.InvalidParamError, match="give it to connect"):
        gr.Transfer(compression="gzip").checked_for_call()
