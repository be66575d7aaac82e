"""Converts response messages to JSON values: the compact forms, or protobuf's own mapping."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gradrule.common import tensor_codec
from gradrule.common.dtypes import NAMES
from gradrule_gateway import tensors

Format = Literal["compact", "base64", "proto"]
_PACKAGE = "gradrule.v1."
_DTYPES = _PACKAGE + "Dt"
# Graphs and their attributes are as TensorFlow's tools write them.
_AS_PROTOBUF = {_PACKAGE + "Graph", _PACKAGE + "AttrValue"}
_LONG = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}
_FLOATS = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}


def encode(message: Message, form: Format) -> Any:
    """Returns a message as JSON values.

    Args:
        message: The message.
        form: `proto`: protobuf's JSON mapping; `compact`: with nested lists, and objects by name; `base64`: the same
            with the elements of tensors in base64.
    """
    if form == "proto":
        return json_format.MessageToDict(message)
    return _Writer("list" if form == "compact" else "base64").message(message)


class _Writer:
    """Writes messages in compact form."""

    def __init__(self, elements: tensors.Elements) -> None:
        self._elements = elements
        self._special: dict[str, Callable[[Any], Any]] = {
            "google.protobuf.Duration": json_format.MessageToDict,
            "google.protobuf.Timestamp": json_format.MessageToDict,
            _PACKAGE + "Tensor": self._tensor,
            _PACKAGE + "TensorSource": self._tensor_source,
            _PACKAGE + "ParamValue": self._param_value,
            _PACKAGE + "TensorShape": self._shape,
        }

    def message(self, message: Any) -> Any:
        name = message.DESCRIPTOR.full_name
        if name in _AS_PROTOBUF:
            return json_format.MessageToDict(message)
        special = self._special.get(name)
        return self._fields(message) if special is None else special(message)

    def _fields(self, message: Any) -> dict[str, Any]:
        return {field.json_name: self._field(field, value) for field, value in message.ListFields()}

    def _field(self, field: FieldDescriptor, value: Any) -> Any:
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            of_value = kind.fields_by_name["value"]
            return {str(key): self._single(of_value, value[key]) for key in value}
        if not field.is_repeated:
            return self._single(field, value)
        if kind is not None and kind.full_name == _PACKAGE + "NamedTensor":
            return {entry.name: self._named(entry) for entry in value}
        if kind is not None and kind.full_name == _PACKAGE + "Gradient":
            return {entry.x: self._gradient(entry) for entry in value}
        if kind is not None and kind.full_name == _PACKAGE + "JacobianBlock":
            rows: dict[str, Any] = {}
            for entry in value:
                rows.setdefault(entry.y, {})[entry.x] = self._gradient(entry)
            return rows
        return [self._single(field, item) for item in value]

    def _single(self, field: FieldDescriptor, value: Any) -> Any:
        if field.message_type is not None:
            return self.message(value)
        if field.enum_type is not None:
            if field.enum_type.full_name == _DTYPES and value in NAMES:
                return NAMES[value]
            found = field.enum_type.values_by_number.get(value)
            return value if found is None else found.name
        if field.cpp_type in _LONG:
            return str(value)
        if field.cpp_type in _FLOATS:
            return _float(value, is_single=field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT)
        return base64.b64encode(value).decode() if field.type == FieldDescriptor.TYPE_BYTES else value

    def _tensor(self, message: Any) -> Any:
        try:
            return tensors.write(message, self._elements)
        except ValueError:
            # A packed tensor, or a type without values.
            return json_format.MessageToDict(message)

    def _tensor_source(self, message: Any) -> Any:
        return self._inner(message, "inline_tensor")

    def _inner(self, message: Any, field: str) -> Any:
        """Returns the tensor of a oneof alone; another case, or a tensor without a compact form, as an object."""
        if message.HasField(field):
            tensor = self._tensor(getattr(message, field))
            if tensors.is_compact(tensor):
                return tensor
        return self._fields(message)

    def _named(self, entry: Any) -> Any:
        return self._tensor_source(entry.value) if entry.HasField("value") else None

    def _gradient(self, entry: Any) -> Any:
        found = self._inner(entry, "dense")
        if not entry.HasField("dense"):
            # The keys of the object around it are the names.
            found = {key: value for key, value in found.items() if key not in ("x", "y")}
        return found

    def _param_value(self, message: Any) -> Any:
        if message.HasField("number"):
            return _float(message.number, is_single=False)
        return self._inner(message, "tensor")

    def _shape(self, message: Any) -> Any:
        if any(dim.name for dim in message.dim) or (message.unknown_rank and message.dim):
            return json_format.MessageToDict(message)
        sizes = tensor_codec.shape_tuple(message)
        return None if sizes is None else list(sizes)


def _float(value: float, *, is_single: bool) -> Any:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    # The digits that keep a float32, not those that keep the float64 that Python makes of it.
    return np.float32(value) if is_single else value
