"""Converts JSON to request messages: protobuf's JSON mapping and the compact forms, by the messages' descriptors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from gradrule._builder.names import did_you_mean
from gradrule.common import tensor_codec
from gradrule.v1.tensor_pb2 import Tensor
from gradrule_gateway import tensors
from gradrule_gateway.problems import Problem, malformed
from gradrule_gateway.tensors import kind_of

# protobuf's parsers refuse deeper messages too.
_MAX_DEPTH = 100
# Unknown fields that one answer names; each costs a search for similar names.
_MAX_UNKNOWN = 20
MAX_TENSORS = 10_000
"""Maximum number of tensors in one list; each costs 10 to 30 µs, however small it is."""
_PACKAGE = "gradrule.v1."
_DTYPES = _PACKAGE + "Dt"
_SHAPE = _PACKAGE + "TensorShape"

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_FLOAT32 = 3.4028235677973366e38


@dataclass(frozen=True, slots=True)
class OpenTensor:
    """A tensor of a request whose element type the request does not give.

    Attributes:
        tensor: The tensor, with a type that holds all its values.
        path: Path of the tensor in the request.
        field: Name of the request's field that holds the tensor; empty if no tensor of a program has its type.
        name: Name of the tensor that the value is for.
    """

    tensor: Tensor
    path: str
    field: str
    name: str


def decode(message: Message, value: Any) -> list[OpenTensor]:
    """Fills an empty message from JSON. Returns its tensors without an element type; `tensors.set_dtype` sets it.

    Raises:
        Problem: The value does not follow the mapping; `violations` has the path of the field.
    """
    reader = _Reader()
    try:
        reader.message(message, value, "")
    except RecursionError:
        raise malformed("the body is nested too deeply") from None
    except Problem:
        reader.raise_unknown()
        raise
    reader.raise_unknown()
    return reader.open


def decode_fields(message: Message, texts: Iterable[tuple[str, str]]) -> None:
    """Fills scalar fields of a message from texts: query parameters, or parts of a path.

    Raises:
        Problem: A field is unknown, given twice, or its text is not valid.
    """
    reader = _Reader()
    seen = set()
    for key, text in texts:
        field = reader.field(message.DESCRIPTOR, key, key)
        if field.name in seen:
            raise malformed("the parameter is given twice", key)
        seen.add(field.name)
        if field.message_type is not None or field.is_repeated:
            raise malformed("this field cannot be a query parameter", key)
        value: Any = text
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            value = {"true": True, "false": False}.get(text, text)
        elif field.enum_type is not None and text.isdecimal():
            # As in protobuf's mapping, a number may stand for the name, also one that this version does not know.
            value = tensors.parse_integer(text)
        setattr(message, field.name, reader.scalar(field, value, key))


@cache
def _fields(descriptor: Descriptor) -> dict[str, FieldDescriptor]:
    return {field.json_name: field for field in descriptor.fields} | dict(descriptor.fields_by_name)


class _Reader:
    """Reads one request. Collects the tensors whose element type is open."""

    def __init__(self) -> None:
        self.open: list[OpenTensor] = []
        self._depth = 0
        self._unknown: list[Problem] = []
        self._special: dict[str, Callable[[Any, Any, str], bool]] = {
            "google.protobuf.Duration": self._time,
            "google.protobuf.Timestamp": self._time,
            _PACKAGE + "Tensor": self._tensor,
            _PACKAGE + "TensorSource": self._tensor_source,
            _PACKAGE + "ParamValue": self._param_value,
            _SHAPE: self._shape,
            _PACKAGE + "Gradient": self._gradient,
            _PACKAGE + "JacobianBlock": self._gradient,
        }

    def message(self, message: Any, value: Any, path: str) -> None:
        special = self._special.get(message.DESCRIPTOR.full_name)
        if special is not None and special(message, value, path):
            return
        if not isinstance(value, dict):
            raise malformed(f"expected an object ({message.DESCRIPTOR.name}), not {kind_of(value)}", path)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise malformed(f"messages are nested more than {_MAX_DEPTH} deep")
        seen: dict[str, str] = {}
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            try:
                field = self.field(message.DESCRIPTOR, key, where)
            except Problem as unknown:
                self._unknown.append(unknown)
                if len(self._unknown) == _MAX_UNKNOWN:
                    self.raise_unknown()
                continue
            if item is None and not _null_has_a_meaning(field):
                continue
            oneof = field.containing_oneof
            slot = field.name if oneof is None else oneof.name
            if slot in seen:
                raise malformed(f"{seen[slot]!r} is given too, and only one of them may be", where)
            seen[slot] = key
            self._field(message, field, item, where)
        self._depth -= 1

    def raise_unknown(self) -> None:
        """Raises the problem of all fields that do not exist, if there are any."""
        if len(self._unknown) > 1:
            detail = " ".join(problem.detail for problem in self._unknown)
            violations = [found for problem in self._unknown for found in problem.violations]
            raise Problem("MALFORMED_REQUEST", detail, violations=violations)
        if self._unknown:
            raise self._unknown[0]

    def field(self, descriptor: Any, key: str, where: str) -> FieldDescriptor:
        field = _fields(descriptor).get(key)
        if field is None:
            known = [field.json_name for field in descriptor.fields]
            raise malformed(f"{descriptor.name} has no field {key[:80]!r}.{did_you_mean(key[:80], known)}", where[:200])
        return field

    def _field(self, message: Any, field: FieldDescriptor, value: Any, path: str) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._map(getattr(message, field.name), field.message_type, value, path)
        elif field.is_repeated:
            self._repeated(getattr(message, field.name), field, value, path)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            self.message(inner, value, path)
        else:
            setattr(message, field.name, self.scalar(field, value, path))

    def _map(self, target: Any, entry: Descriptor, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise malformed(f"expected an object, not {kind_of(value)}", path)
        of_key, of_value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for text, item in value.items():
            where = f"{path}.{text}"
            key = self.scalar(of_key, text, where)
            if of_value.message_type is not None:
                inner = target[key]
                self.message(inner, item, where)
            else:
                target[key] = self.scalar(of_value, item, where)

    def _repeated(self, target: Any, field: FieldDescriptor, value: Any, path: str) -> None:
        kind = field.message_type.name if field.message_type is not None else ""
        if kind == "NamedTensor" and isinstance(value, dict | list) and len(value) > MAX_TENSORS:
            raise malformed(f"{len(value)} tensors are more than {MAX_TENSORS}", path)
        if isinstance(value, dict) and kind == "NamedTensor":
            for name, item in value.items():
                self._named(target.add(name=name), item, f"{path}.{name}", field.name)
            return
        if isinstance(value, dict) and kind == "Gradient":
            for name, item in value.items():
                self.message(target.add(x=name), item, f"{path}.{name}")
            return
        if isinstance(value, dict) and kind == "JacobianBlock":
            for y, row in value.items():
                if not isinstance(row, dict):
                    raise malformed(f"expected an object, not {kind_of(row)}", f"{path}.{y}")
                for x, item in row.items():
                    self.message(target.add(y=y, x=x), item, f"{path}.{y}.{x}")
            return
        if not isinstance(value, list):
            raise malformed(f"expected a list, not {kind_of(value)}", path)
        plain = _plain(field, value) if field.message_type is None else None
        if plain is not None:
            target.extend(plain)
            return
        for index, item in enumerate(value):
            where = f"{path}[{index}]"
            if item is None and kind != "TensorShape":
                raise malformed("null is not an element of a list", where)
            if field.message_type is None:
                target.append(self.scalar(field, item, where))
                continue
            before = len(self.open)
            inner = target.add()
            self.message(inner, item, where)
            if kind == "NamedTensor":
                # The name may follow the value in the text.
                self.open[before:] = [
                    OpenTensor(tensor.tensor, tensor.path, field.name, inner.name) for tensor in self.open[before:]
                ]

    def _named(self, entry: Any, value: Any, path: str, field: str) -> None:
        if value is None:
            return
        before = len(self.open)
        entry.value.SetInParent()
        self.message(entry.value, value, path)
        self.open[before:] = [
            OpenTensor(tensor.tensor, tensor.path, field, entry.name) for tensor in self.open[before:]
        ]

    def scalar(self, field: FieldDescriptor, value: Any, path: str) -> Any:
        kind = field.cpp_type
        if kind in _INTEGERS:
            return _integer(value, *_INTEGERS[kind], path)
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return _float(value, path, is_single=kind == FieldDescriptor.CPPTYPE_FLOAT)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            if not isinstance(value, bool):
                raise malformed(f"expected true or false, not {kind_of(value)}", path)
            return value
        if field.enum_type is not None:
            return _enum(field.enum_type, value, path)
        if not isinstance(value, str):
            raise malformed(f"expected a string, not {kind_of(value)}", path)
        if field.type == FieldDescriptor.TYPE_BYTES:
            try:
                return tensors.decode_base64(value)
            except ValueError as wrong:
                raise malformed(str(wrong), path) from None
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise malformed("the string has a lone surrogate, which is not a character", path) from None
        return value

    def _time(self, message: Any, value: Any, path: str) -> bool:
        if not isinstance(value, str):
            raise malformed(f"expected a string, not {kind_of(value)}", path)
        try:
            message.FromJsonString(value)
        except (ValueError, OverflowError):
            form = '"1.5s"' if message.DESCRIPTOR.name == "Duration" else '"2030-01-31T12:00:00Z"'
            raise malformed(f"{value[:40]!r} does not have the form {form}", path) from None
        return True

    def _tensor(self, message: Any, value: Any, path: str) -> bool:
        if not tensors.is_compact(value):
            return False
        if not tensors.read(message, value, path):
            self.open.append(OpenTensor(message, path, "", ""))
        return True

    def _tensor_source(self, message: Any, value: Any, path: str) -> bool:
        return tensors.is_compact(value) and self._tensor(message.inline_tensor, value, path)

    def _param_value(self, message: Any, value: Any, path: str) -> bool:
        if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
            message.number = _float(value, path, is_single=False)
            return True
        return tensors.is_compact(value) and self._tensor(message.tensor, value, path)

    def _shape(self, message: Any, value: Any, path: str) -> bool:
        if value is None:
            message.unknown_rank = True
            return True
        if not isinstance(value, list):
            return False
        if not all(size is None or (type(size) is int and 0 <= size < 2**63) for size in value):
            raise malformed("a shape is a list of sizes; null is an unknown size", path)
        message.CopyFrom(tensor_codec.shape_message(value))
        return True

    def _gradient(self, message: Any, value: Any, path: str) -> bool:
        return tensors.is_compact(value) and self._tensor(message.dense, value, path)


def _null_has_a_meaning(field: FieldDescriptor) -> bool:
    """Returns whether null is a value: the unknown rank of a shape. In protobuf's mapping it is a field without one."""
    return (
        field.message_type is not None
        and field.message_type.full_name == _SHAPE
        and field.containing_oneof is None
        and not field.is_repeated
    )


def _plain(field: FieldDescriptor, values: list[Any]) -> list[Any] | None:
    """Returns the elements of a list for a field; None if one of them needs the checks of `_Reader.scalar`.

    Has no loop in Python: lists of tensors' elements are long.
    """
    types = set(map(type, values))
    kind = field.cpp_type
    is_plain = False
    if not values:
        return None
    if kind in _INTEGERS or field.enum_type is not None:
        if kind in _INTEGERS and types == {str} and all(map(tensors.INTEGER.fullmatch, values)):
            values, types = list(map(int, values)), {int}
        low, high = _INTEGERS.get(kind, _INTEGERS[FieldDescriptor.CPPTYPE_INT32])
        is_plain = types == {int} and low <= min(values) and max(values) <= high
    elif kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        largest = _MAX_FLOAT32 if kind == FieldDescriptor.CPPTYPE_FLOAT else sys.float_info.max
        is_plain = types <= {int, float} and -largest < min(values) and max(values) < largest
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        is_plain = types == {bool}
    elif field.type == FieldDescriptor.TYPE_STRING:
        is_plain = types == {str} and "".join(values).isascii()
    return values if is_plain else None


def _integer(value: Any, low: int, high: int, path: str) -> int:
    number = value
    if isinstance(value, str):
        number = tensors.parse_integer(value)
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if type(number) is not int:
        raise malformed(f"expected an integer, not {_shown(value)}", path)
    if not low <= number <= high:
        raise malformed(f"expected an integer from {low} to {high}", path)
    return number


def _float(value: Any, path: str, *, is_single: bool) -> float:
    if isinstance(value, str):
        if value in _FLOATS:
            return _FLOATS[value]
        try:
            value = float(value) if len(value) < 64 and value.strip() == value and "_" not in value else None
        except ValueError:
            value = None
        if value is None or not math.isfinite(value):
            raise malformed('expected a number, "NaN", "Infinity" or "-Infinity", not another string', path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed(f"expected a number, not {kind_of(value)}", path)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or (is_single and abs(number) >= _MAX_FLOAT32):
        raise malformed("the number is too large", path)
    return number


def _enum(kind: EnumDescriptor, value: Any, path: str) -> int:
    if isinstance(value, str):
        found = kind.values_by_name.get(value)
        if found is None:
            # `USER` is short for `RULE_KIND_USER`.
            found = kind.values_by_name.get(_prefix(kind) + value)
        if found is None and kind.full_name == _DTYPES:
            try:
                return tensors.dtype_number(value)
            except ValueError as wrong:
                raise malformed(str(wrong), path) from None
        if found is None:
            known = list(kind.values_by_name)
            raise malformed(f"{kind.name} has no value {value[:80]!r}.{did_you_mean(value[:80], known)}", path)
        return int(found.number)
    if type(value) is not int:
        raise malformed(f"expected the name of a value of {kind.name}, not {kind_of(value)}", path)
    return _integer(value, -(2**31), 2**31 - 1, path)


@cache
def _prefix(kind: EnumDescriptor) -> str:
    """Returns what the names of all values start with: `RULE_KIND_`."""
    return kind.values[0].name.removesuffix("UNSPECIFIED")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float) else kind_of(value)
