"""Tensors to and from messages, held against TensorFlow's own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow.core.framework import tensor_pb2 as tf_tensor

from gradrule._builder.graph import Graph
from gradrule.common import tensor_codec
from gradrule.common.dtypes import NAMES
from gradrule.v1.tensor_pb2 import Tensor, TensorShape

PLAIN = [
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]
PLAIN += ["complex64", "complex128"]
NARROW = ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"]
NARROW += ["int4", "uint4"]


def sample(name: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(getattr(ml_dtypes, name)) if name in NARROW else np.dtype(name)
    return np.array([[0, 1, 3], [2, 1, 0]]).astype(dtype)


def to_tensorflow(message: Tensor) -> Any:
    return tf.make_ndarray(tf_tensor.TensorProto.FromString(message.SerializeToString()))


@pytest.mark.parametrize("name", PLAIN + NARROW)
def test_tensorflow_reads_what_we_write(name: str) -> None:
    array = sample(name)
    read = to_tensorflow(tensor_codec.to_message(array))
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read.astype(complex), array.astype(complex))


MATRICES: list[Any] = [[[0, 1, 3], [2, 1, 0]], [[1, 1], [1, 1]]]
SHAPES: list[Any] = [*MATRICES, [], 3]
# TensorFlow's Python cannot write empty tensors and scalars of these.
ONLY_MATRICES = ("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz")


@pytest.mark.parametrize(
    ("name", "values"),
    [(name, values) for name in PLAIN + NARROW for values in SHAPES if values in MATRICES or name not in ONLY_MATRICES],
)
def test_we_read_what_tensorflow_writes(name: str, values: Any) -> None:
    array = np.array(values).astype(sample(name).dtype)
    # Both of TensorFlow's forms: Python's, and that of its C++, which shortens runs at the end.
    for proto in (tf.make_tensor_proto(array), _compressed(array)):
        read = tensor_codec.to_numpy(Tensor.FromString(proto.SerializeToString()))
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read.astype(complex), array.astype(complex))


def _compressed(array: np.ndarray[Any, Any]) -> Any:
    proto = tf.make_tensor_proto(array)
    if array.size and len(set(array.ravel().astype(complex))) == 1 and array.dtype.name not in NARROW:
        # As written by TensorFlow's C++: one value that fills the shape.
        one = tf_tensor.TensorProto(dtype=proto.dtype, tensor_shape=proto.tensor_shape)
        field, value = _field_of(array)
        getattr(one, field).extend(value)
        return one
    return proto


def _field_of(array: np.ndarray[Any, Any]) -> tuple[str, list[Any]]:
    value = array.ravel()[0]
    name = array.dtype.name
    if name == "float16":
        return "half_val", [int(array.ravel()[:1].view(np.uint16)[0])]
    if array.dtype.kind == "c":
        return ("scomplex_val" if name == "complex64" else "dcomplex_val"), [value.real, value.imag]
    special = {"float32": "float_val", "float64": "double_val", "int64": "int64_val", "bool": "bool_val"}
    special |= {"uint32": "uint32_val", "uint64": "uint64_val"}
    return special.get(name, "int_val"), [value.item()]


@pytest.mark.parametrize(
    "array",
    [
        np.array([b"a", b"", b"\x00\xff\x00"], object),
        np.array(["ä", "b"]),
        np.array([b"xy", b"z"]),
        np.array("one"),
        np.empty((0, 2), object),
    ],
    ids=["bytes", "unicode", "fixed", "scalar", "empty"],
)
def test_strings(array: Any) -> None:
    message = tensor_codec.to_message(array)
    wanted = (
        np.vectorize(lambda s: s.encode() if isinstance(s, str) else s, otypes=[object])(array) if array.size else array
    )
    read = tensor_codec.to_numpy(message)
    assert read.dtype == object
    np.testing.assert_array_equal(read, wanted)
    np.testing.assert_array_equal(to_tensorflow(message).reshape(array.shape), wanted)


# No deadline: machines that run tests in parallel are slow, and the first example includes caches.
@settings(deadline=None)
@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.int64, np.complex64, np.uint8]), hnp.array_shapes(min_side=0, max_dims=4)
    )
)
def test_any_layout_and_byte_order(array: np.ndarray[Any, Any]) -> None:
    for form in (array, array.T, array[..., ::-1], array.astype(array.dtype.newbyteorder(">"))):
        read = tensor_codec.to_numpy(tensor_codec.to_message(form))
        assert (read.shape, read.dtype) == (form.shape, array.dtype)
        np.testing.assert_array_equal(read, form)


def test_read_arrays_share_memory_unless_writable() -> None:
    message = tensor_codec.to_message(np.float32([1, 2]))
    assert not tensor_codec.to_numpy(message).flags.writeable
    assert tensor_codec.to_numpy(message, writable=True).flags.writeable


def test_quantised_types_are_plain_integers_with_a_name() -> None:
    message = tensor_codec.to_message(np.array([1, -1], np.int8), "qint8")
    assert NAMES[message.dtype] == "qint8"
    assert tensor_codec.to_numpy(message).tolist() == [1, -1]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Tensor(dtype=1, tensor_shape=TensorShape(dim=[{"size": 2}]), tensor_content=b"1234567"), "7 bytes do not fit"),
        (Tensor(dtype=1, float_val=[1, 2]), "2 values are more than the 1"),
        (Tensor(dtype=1, tensor_shape=TensorShape(dim=[{"size": -1}])), "must be known"),
        (Tensor(dtype=1, tensor_shape=TensorShape(unknown_rank=True)), "must be known"),
        (Tensor(dtype=7, tensor_content=b"a"), "string_val"),
        (Tensor(dtype=8, scomplex_val=[1]), "pairs"),
        (Tensor(dtype=20), "resource"),
        (Tensor(), "unknown"),
    ],
)
def test_broken_tensors(message: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tensor_codec.to_numpy(message)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.array([object()]), None), (np.array(["2020-01-01"], "M8[D]"), None), (np.float64([1]), "float32")],
)
def test_arrays_that_are_no_tensors(value: Any, dtype: Any) -> None:
    with pytest.raises(ValueError):
        tensor_codec.to_message(value, dtype)


@pytest.mark.parametrize(
    "given_as",
    ["float32", np.float32, np.dtype("float32"), np.dtype(">f4"), 1, float, "DT_FLOAT", tf.float32, "f4"],
    ids=str,
)
def test_dtype_names(given_as: Any) -> None:
    assert tensor_codec.dtype_number(given_as) == 1


@pytest.mark.parametrize(
    ("given_as", "name"),
    [("float", "float32"), ("double", "float64"), ("half", "float16"), ("int", "int32"), ("bool", "bool")],
)
def test_names_of_types_have_the_meaning_of_tensorflow(given_as: str, name: str) -> None:
    """TensorFlow refuses `"int"`; Python's ints become int32."""
    assert NAMES[tensor_codec.dtype_number(given_as)] == name
    assert given_as == "int" or tf.as_dtype(given_as).name == name
    assert Graph().placeholder("x", given_as, []).dtype == name


def test_other_dtype_names() -> None:
    found = [
        tensor_codec.dtype_number(name)
        for name in ("bfloat16", ml_dtypes.bfloat16, tf.bfloat16, "string", str, bool, int)
    ]
    assert [NAMES[number] for number in found] == ["bfloat16"] * 3 + ["string"] * 2 + ["bool", "int32"]
    for bad in ("float33", 0, 101, None, True, "datetime64[D]", "long", "uint", "l"):
        with pytest.raises(ValueError, match="is no element type"):
            tensor_codec.dtype_number(bad)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1.5], "int32"),
        ([300], "uint8"),
        ([-1], "uint8"),
        ([8], "int4"),
        ([2], "bool"),
        ([1j], "float32"),
        (["a"], "float32"),
        ([1], "string"),
        ([None], "float32"),
        ([[1.0], [1.0, 2.0]], "float32"),
        ([2**70], "int64"),
        ([1e300], "float32"),
        ([1e6], "float16"),
        ([1e6], "float8_e4m3fn"),
    ],
)
def test_lists_are_never_converted_with_loss(value: Any, dtype: str) -> None:
    with pytest.raises(ValueError):
        tensor_codec.from_value(value, tensor_codec.dtype_number(dtype))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, "float32"),
        ([True, 0], "bool"),
        ([1, 2.5], "bfloat16"),
        ([], "int64"),
        ([7], "int4"),
        ([1], "complex64"),
        ([2], "float8_e5m2"),
    ],
)
def test_lists_take_the_type(value: Any, dtype: str) -> None:
    array = tensor_codec.from_value(value, tensor_codec.dtype_number(dtype))
    assert array.dtype.name == dtype
    assert array.astype(complex).tolist() == np.asarray(value, complex).tolist()


def test_string_values_keep_zero_bytes() -> None:
    assert tensor_codec.from_value([["ä"], [b"\xff\x00"]], tensor_codec.dtype_number("string")).tolist() == [
        ["ä"],
        [b"\xff\x00"],
    ]
    assert tensor_codec.from_value(["a", b"b\x00"], tensor_codec.dtype_number("string")).tolist() == ["a", b"b\x00"]


@pytest.mark.parametrize("values", [{"float_val": [1.0, 2.0]}, {}])
def test_small_messages_with_large_shapes_are_refused(values: dict[str, list[float]]) -> None:
    """A few bytes must not become gigabytes."""
    shape = tensor_codec.shape_message([2**16, 2**16])
    with pytest.raises(ValueError, match="4294967296 of float32"):
        tensor_codec.to_numpy(Tensor(dtype=1, tensor_shape=shape, **values))
