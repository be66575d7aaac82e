"""Arrays of NumPy and other libraries as values of tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from gradrule._builder.array_values import Cast
from gradrule._messages.feed_values import array_of, casting
from gradrule.common.dtypes import NUMBERS
from gradrule.common.tensor_codec import numpy_dtype
from gradrule.errors import FeedDtypeError, GradruleError, InvalidTensorError

_TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "uint64", "bool", "complex64")


def read(value: Any, dtype: str) -> Any:
    return array_of(value, NUMBERS[dtype], "feeds['x']")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.float64([1, 2.5, np.nan, np.inf, -0.0]), "float32"),
        (np.float64(0.5), "float32"),
        (np.uint8([[0, 255]]), "float32"),
        (np.uint8([255]), "float16"),
        (np.int64([2**24]), "float32"),
        (np.array([True, False]), "float32"),
        (np.int64([0, 1]), "bool"),
        (np.uint8([255]), "int64"),
        (np.array([1.5], ml_dtypes.bfloat16), "float32"),
        (np.array([1, 2.5], object), "float32"),
        (np.array([1 + 2j]), "complex64"),
        (np.ma.array([1.0, 2.0], mask=[False, False]), "float32"),
    ],
)
def test_values_that_do_not_change_are_converted(value: Any, dtype: str) -> None:
    found = read(value, dtype)
    assert found.dtype == numpy_dtype(NUMBERS[dtype])
    np.testing.assert_array_equal(found, np.asarray(value).astype(found.dtype))


@pytest.mark.parametrize(
    ("value", "dtype", "says"),
    [
        (np.float64([1, 0.1]), "float32", r"0\.1 \(at \[1\]\) would become 0\.10000000149011612; .*cast=True"),
        (np.float64(0.1), "float32", r"float64, the tensor is float32: 0\.1 would become"),
        (np.float64([1e300]), "float32", "too large"),
        (np.int64([[1, 2**24 + 1]]), "float32", r"16777217 \(at \[0, 1\]\)"),
        (np.int64([2**63 - 1]), "float64", "9223372036854775807"),
        (np.float64([1]), "int64", "floats cannot become int64.*cast=True"),
        (np.int64([2]), "bool", "integers cannot become bool"),
    ],
)
def test_values_that_would_change_need_a_cast(value: Any, dtype: str, says: str) -> None:
    with pytest.raises(FeedDtypeError, match=says):
        read(value, dtype)
    assert read(Cast(value), dtype).dtype == numpy_dtype(NUMBERS[dtype])


@pytest.mark.parametrize(
    ("value", "dtype", "says"),
    [
        (np.array(["a"]), "float32", "string, the tensor is float32"),
        (np.array([1.0, None], object), "float32", "array of objects"),
        (np.array([1j]), "float32", "complex numbers"),
        (np.int8([1]), "qint8", "int8, the tensor is qint8"),
        (np.float64([1]), "string", "float64, the tensor is string"),
    ],
)
def test_values_that_cannot_be_converted_are_refused(value: Any, dtype: str, says: str) -> None:
    for given_value in (value, Cast(value)):
        with pytest.raises(FeedDtypeError, match=says):
            read(given_value, dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.float64([np.nan]), "int64"),
        (np.float64([1, np.nan]), "bool"),
        (np.float32([np.inf]), "bool"),
        (np.int64([3_000_000_000]), "int32"),
        (np.float64([3e9]), "int32"),
        (np.float64([-1, 300]), "uint8"),
        (np.uint8([200]), "int8"),
        (np.uint64([2**63]), "int64"),
        (np.int8([-1]), "uint64"),
        (np.float64([2.0**63]), "int64"),
        (np.float32([2.0**64]), "uint64"),
        (np.float64(100), "int4"),
        (np.array([8], ml_dtypes.uint4), "int4"),
        (np.array([300], ml_dtypes.bfloat16), "uint8"),
        (np.float16([np.inf]), "int64"),
    ],
    ids=str,
)
def test_a_cast_refuses_what_integers_cannot_hold(value: Any, dtype: str) -> None:
    with pytest.raises(FeedDtypeError, match="no value for NaN, infinity and numbers out of range"):
        read(Cast(value), dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (np.float64([-0.9, 255.9]), "uint8", [0, 255]),
        (np.float64([-(2.0**63)]), "int64", [-(2**63)]),
        (np.float64([-128.9, 127.9]), "int8", [-128, 127]),
        (np.uint64([2**63 - 1]), "int64", [2**63 - 1]),
        (np.float64([7.5, -8]), "int4", [7, -8]),
        (np.array([-7], ml_dtypes.int4), "int64", [-7]),
        (np.float64([0.5, 0, -2]), "bool", [True, False, True]),
        (np.array([True]), "uint8", [1]),
        (np.float64([]), "uint8", []),
    ],
    ids=str,
)
def test_a_cast_to_integers_rounds_towards_zero(value: Any, dtype: str, expected: list[Any]) -> None:
    assert read(Cast(value), dtype).tolist() == expected


class NoArray:
    dtype = "float32"


class Ragged(NoArray):
    def to_tensor(self) -> Any: ...


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.ma.array([1.0, 2.0], mask=[False, True]), r"masked elements; .*filled"),
        ((x for x in [1.0]), "is a generator"),
        ({1.0}, "is a set"),
        ({"a": 1.0}, "is a dict"),
        (NoArray(), "is a NoArray, which NumPy does not read"),
        (Ragged(), r"is a Ragged; give a dense array: \.to_tensor\(\)"),
    ],
)
def test_values_that_are_no_arrays_are_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidTensorError, match=rf"feeds\['x'\] .*{says}"):
        read(value, "float32")


class TorchTensor:
    """Behaves as a tensor of PyTorch that requires gradients; PyTorch is not installed here."""

    dtype = "torch.float32"

    def __init__(self, values: Any, requires_grad: bool = True) -> None:
        self._values, self._requires_grad = values, requires_grad

    def detach(self) -> TorchTensor:
        return TorchTensor(self._values, requires_grad=False)

    def cpu(self) -> TorchTensor:
        return self

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if self._requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return np.float32(self._values)


def test_tensors_that_require_gradients_are_read() -> None:
    assert read(TorchTensor([1, 2]), "float32").tolist() == [1.0, 2.0]


def test_casting_leaves_values_that_are_no_arrays() -> None:
    array = np.ones(1)
    assert casting({"x": array, "y": [1.0], "z": "name"}) == {"x": Cast(array), "y": [1.0], "z": "name"}
    assert casting([array, None]) == [Cast(array), None]
    assert casting(None) is None


@given(
    st.sampled_from(_TYPES),
    st_numpy.arrays(
        st.sampled_from([np.float64, np.float32, np.int64, np.uint64, np.uint8, np.bool_]), st.integers(0, 3)
    ),
)
def test_a_conversion_keeps_every_value(dtype: str, array: Any) -> None:
    """Python's numbers compare integers and floats exactly."""
    try:
        found = read(array, dtype)
    except GradruleError:
        return
    numbers = found.astype(complex if found.dtype.kind == "c" else float) if found.dtype.kind in "cfV" else found
    for before, after in zip(array.tolist(), numbers.tolist(), strict=True):
        assert before == after or (before != before and after != after)
