"""Draws messages of any type of the API, and lists the types that requests and answers are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from gradrule.common import tensor_codec
from gradrule.common.dtypes import NAMES
from gradrule.v1.tensor_pb2 import Dt
from gradrule_gateway.conversion import method_of
from gradrule_gateway.routes import ROUTES

_PACKAGE = "gradrule.v1."
_LISTED = {_PACKAGE + "NamedTensor": ("name",), _PACKAGE + "Gradient": ("x",), _PACKAGE + "JacobianBlock": ("y", "x")}
"""Messages that the compact form lists by name."""
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_MAX_DEPTH = 3

VALUE_TYPES = [
    number for number in NAMES if number not in (Dt.DT_RESOURCE, Dt.DT_VARIANT) and number in tensor_codec._BY_NUMBER
]
"""All element types that tensors of calls can have."""


def message_types() -> list[Any]:
    """Returns the descriptors of all messages that occur in requests and answers over HTTP, in a fixed order."""
    found: dict[str, Any] = {}
    waiting = [kind for route in ROUTES for kind in (method_of(route).input_type, method_of(route).output_type)]
    while waiting:
        kind = waiting.pop()
        if kind.full_name in found or not kind.full_name.startswith(_PACKAGE):
            continue
        if not kind.GetOptions().map_entry:
            found[kind.full_name] = kind
        waiting += [field.message_type for field in kind.fields if field.message_type is not None]
    return [found[name] for name in sorted(found)]


@st.composite
def messages(draw: st.DrawFn, kind: Any, *, with_tensors: bool = False, depth: int = 0) -> Any:
    """Draws a message.

    Args:
        draw: Hypothesis's function.
        kind: Descriptor of the message.
        with_tensors: Draw tensors that are valid, and names that are unique: what the compact form can hold.
        depth: How deep the message is in another one.
    """
    name = kind.full_name
    if name == "google.protobuf.Duration":
        return _duration(draw, kind)
    if name == "google.protobuf.Timestamp":
        return GetMessageClass(kind)(seconds=draw(st.integers(0, 253402300799)), nanos=draw(st.integers(0, 999999999)))
    if with_tensors and name == _PACKAGE + "Tensor":
        return tensor_codec.to_message(*draw(arrays()))
    if with_tensors and name == _PACKAGE + "TensorShape":
        sizes = draw(st.none() | st.lists(st.none() | st.integers(0, 2**63 - 1), max_size=3))
        return tensor_codec.shape_message(sizes)
    message = GetMessageClass(kind)()
    chosen = {oneof.name: draw(st.sampled_from([field.name for field in oneof.fields])) for oneof in kind.oneofs}
    for field in kind.fields:
        if field.containing_oneof is not None and chosen[field.containing_oneof.name] != field.name:
            continue
        if draw(st.booleans()):
            _set(draw, message, field, with_tensors=with_tensors, depth=depth)
    return message


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Any, int]:
    """Draws an array and its element type."""
    number = draw(st.sampled_from(VALUE_TYPES))
    dtype = tensor_codec.numpy_dtype(number)
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape, dtype=int))
    if dtype.kind == "O":
        flat = np.empty(size, object)
        flat[:] = [draw(st.binary(max_size=3) | _TEXT.map(str.encode)) for _ in range(size)]
        return flat.reshape(shape), number
    if dtype.kind == "b":
        return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool).reshape(shape), number
    content = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    if number in (Dt.DT_INT4, Dt.DT_UINT4, Dt.DT_INT2, Dt.DT_UINT2, Dt.DT_FLOAT4_E2M1FN):
        # Arrays of these types use the low bits of each byte.
        raw = np.frombuffer(content, np.uint8) & 1
        return raw.astype(dtype).reshape(shape), number
    array = np.frombuffer(content, dtype).reshape(shape).copy()
    if dtype.kind in "fc" or "float" in dtype.name:
        # A NaN in JSON is the only NaN; its bits are lost.
        with np.errstate(invalid="ignore"):
            array = np.where(array != array, np.zeros_like(array), array)
    return array, number


def _set(draw: st.DrawFn, message: Any, field: FieldDescriptor, *, with_tensors: bool, depth: int) -> None:
    kind: Any = field.message_type
    if kind is None:
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(_scalars(field), max_size=2)))
        else:
            setattr(message, field.name, draw(_scalars(field)))
        return
    if depth >= _MAX_DEPTH:
        return

    def inner(descriptor: Any) -> Any:
        return draw(messages(descriptor, with_tensors=with_tensors, depth=depth + 1))

    if kind.GetOptions().map_entry:
        target = getattr(message, field.name)
        for key in draw(st.lists(_scalars(kind.fields_by_name["key"]), max_size=2, unique=True)):
            of_value = kind.fields_by_name["value"]
            if of_value.message_type is not None:
                target[key].CopyFrom(inner(of_value.message_type))
            else:
                target[key] = draw(_scalars(of_value))
    elif field.is_repeated:
        items = [inner(kind) for _ in range(draw(st.integers(0, 2)))]
        if with_tensors and kind.full_name in _LISTED:
            for index, item in enumerate(items):
                for key in _LISTED[kind.full_name]:
                    setattr(item, key, getattr(item, key) + str(index))
        getattr(message, field.name).extend(items)
    else:
        getattr(message, field.name).CopyFrom(inner(kind))


def _duration(draw: st.DrawFn, kind: Any) -> Any:
    sign = draw(st.sampled_from([1, -1]))
    return GetMessageClass(kind)(
        seconds=sign * draw(st.integers(0, 315576000000)), nanos=sign * draw(st.integers(0, 999999999))
    )


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _INTEGERS:
        return st.integers(*_INTEGERS[kind])
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return st.floats(allow_nan=False)
    if kind == FieldDescriptor.CPPTYPE_FLOAT:
        # json_format refuses the largest float32, which it writes itself.
        return st.floats(-(2.0**127), 2.0**127, width=32) | st.sampled_from([float("inf"), float("-inf")])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    return st.binary(max_size=5) if field.type == FieldDescriptor.TYPE_BYTES else _TEXT
