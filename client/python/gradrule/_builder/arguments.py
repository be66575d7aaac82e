"""Assigns the values given to the builder to an op's input arguments, and converts numbers and arrays to tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradrule._builder.attribute_values import natural
from gradrule._builder.handles import TensorHandle
from gradrule.common import tensor_codec
from gradrule.common.dtypes import without_ref
from gradrule.common.op_definitions import ArgDef, OpDef
from gradrule.errors import InvalidTensorError, TypeMismatchError
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import Tensor

Arguments = list[tuple[ArgDef, list[Any]]]


def assign_arguments(op: OpDef, given: Sequence[Any], by_name: Mapping[str, Any], where: str) -> Arguments:
    """Returns the values of each input argument. Raises `TypeMismatchError` if the number of values does not fit."""
    rest = [arg for arg in op.inputs if arg.name not in by_name]
    lists = [arg for arg in rest if _is_list(arg)]
    assigned = dict(by_name)
    if len(given) == len(rest) and (len(lists) != 1 or _is_sequence(given[rest.index(lists[0])])):
        assigned.update({arg.name: value for arg, value in zip(rest, given, strict=True)})
    elif len(lists) == 1 and len(given) >= len(rest) - 1:
        before = rest.index(lists[0])
        after = len(rest) - before - 1
        stop = len(given) - after
        values = [*given[:before], list(given[before:stop]), *given[stop:]]
        assigned.update({arg.name: value for arg, value in zip(rest, values, strict=True)})
    else:
        takes = ", ".join(f"{arg.name}{' (a list)' if _is_list(arg) else ''}" for arg in op.inputs)
        raise TypeMismatchError(
            f"{where} takes {f'{len(op.inputs)} inputs ({takes})' if takes else 'no inputs'}; "
            f"{len(given) + len(by_name)} {'is' if len(given) + len(by_name) == 1 else 'are'} given"
        )
    return [(arg, _entries(arg, assigned[arg.name])) for arg in op.inputs]


def _is_list(arg: ArgDef) -> bool:
    return bool(arg.number_attr or arg.type_list_attr)


def _is_sequence(value: Any) -> bool:
    """Returns whether a value given for a list argument is the whole list rather than its only entry."""
    return isinstance(value, list | tuple)


def _entries(arg: ArgDef, value: Any) -> list[Any]:
    if not _is_list(arg):
        return [value]
    return list(value) if _is_sequence(value) else [value]


class Conversion:
    """Converts numbers and arrays to tensors of the element types that a node's other inputs and attributes need."""

    def __init__(self, op: OpDef, attrs: Mapping[str, AttrValue], where: str) -> None:
        self._where = where
        self._types: dict[str, int] = {
            attr.name: attrs[attr.name].type for attr in op.attrs if attr.type == "type" and attr.name in attrs
        }
        self._defaults: dict[str, int] = {
            attr.name: attr.default.type for attr in op.attrs if attr.type == "type" and attr.default is not None
        }

    def set_types(self, arguments: Arguments) -> None:
        """Sets the type of each type attribute: as given, else the handles' type, the default, or the values' type."""
        values: dict[str, list[Any]] = {}
        for arg, entries in arguments:
            for entry in entries if arg.type_attr else ():
                if isinstance(entry, TensorHandle):
                    self._types.setdefault(arg.type_attr, without_ref(entry.number))
                else:
                    values.setdefault(arg.type_attr, []).append(entry)
        for name, entries in values.items():
            if name in self._types:
                continue
            arrays = [self._natural(entry) for entry in entries]
            typed = [array for array, entry in zip(arrays, entries, strict=True) if hasattr(entry, "dtype")]
            if typed:
                self._types[name] = tensor_codec.number_of_array(typed[0])
            elif name in self._defaults:
                self._types[name] = self._defaults[name]
            elif len({array.dtype for array in arrays}) == 1:
                self._types[name] = tensor_codec.number_of_array(arrays[0])
            else:
                floats = any(array.dtype.kind == "f" for array in arrays)
                self._types[name] = tensor_codec.dtype_number("float32" if floats else "int32")

    def to_message(self, arg: ArgDef, value: Any) -> Tensor:
        """Returns the tensor for a value. Raises `InvalidTensorError` if the value cannot have the needed type."""
        number = arg.type or self._types.get(arg.type_attr, 0)
        try:
            if not number:
                return tensor_codec.to_message(natural(value))
            return tensor_codec.to_message(tensor_codec.from_value(value, number), number)
        except ValueError as cause:
            raise InvalidTensorError(f"{self._where}: input {arg.name!r}: {cause}") from None

    def _natural(self, value: Any) -> tensor_codec.Array:
        try:
            return natural(value)
        except ValueError as cause:
            raise InvalidTensorError(f"{self._where}: {cause}") from None
