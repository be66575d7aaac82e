"""Converts what callers give for a node's inputs and attributes to tensors and attribute values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule._builder.array_values import is_array, read_array
from gradrule._builder.handles import Node, TensorHandle
from gradrule._builder.names import did_you_mean
from gradrule.common import op_definitions, tensor_codec
from gradrule.common.dtypes import as_dt, without_ref
from gradrule.common.op_definitions import ArgDef, AttrDef, OpDef
from gradrule.errors import InvalidAttrError, InvalidGraphError, InvalidTensorError, TypeMismatchError
from gradrule.v1.graph_pb2 import AttrValue, NameAttrList
from gradrule.v1.tensor_pb2 import Tensor, TensorShape

if TYPE_CHECKING:
    from gradrule._builder.graph import Graph

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


def control_input_names(graph: Graph, given: Any, where: str) -> list[str]:
    """Returns the control inputs of a node as `^name`.

    Args:
        graph: The graph of the node.
        given: A node or handle, or several.
        where: Start of error messages.

    Raises:
        TypeMismatchError: An entry is not a node or handle.
        InvalidGraphError: A node belongs to another graph.
    """
    names = []
    for control in [given] if isinstance(given, Node | TensorHandle) else given:
        node = control.node if isinstance(control, TensorHandle) else control
        if not isinstance(node, Node):
            raise TypeMismatchError(
                f"{where}: control_inputs are nodes or handles, not {control!r}; g.node(name) finds a node"
            )
        if node.graph is not graph:
            raise InvalidGraphError(f"{where}: control input {node.name!r} belongs to another graph")
        names.append(f"^{node.name}")
    return names


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
                return tensor_codec.to_message(tensorflow_array(value))
            return tensor_codec.to_message(tensor_codec.from_value(value, number), number)
        except ValueError as cause:
            raise InvalidTensorError(f"{self._where}: input {arg.name!r}: {cause}") from None

    def _natural(self, value: Any) -> tensor_codec.Array:
        try:
            return tensorflow_array(value)
        except ValueError as cause:
            raise InvalidTensorError(f"{self._where}: {cause}") from None


def attr_value(attr: AttrDef, value: Any, where: str) -> AttrValue:
    """Returns the message for one attribute; `where` starts error messages. Raises `InvalidAttrError`."""
    if isinstance(value, AttrValue):
        return value
    try:
        if attr.type.startswith("list("):
            if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
                raise TypeError(f"is no list: {value!r}")
            field, convert = _CONVERTERS[attr.type[5:-1]]
            return AttrValue(list=AttrValue.ListValue(**{field: [convert(entry) for entry in value]}))
        field, convert = _CONVERTERS[attr.type]
        return AttrValue(**{field: convert(value)})
    except (TypeError, ValueError, OverflowError) as cause:
        raise InvalidAttrError(f"{where}: attribute {attr.name!r} is of type {attr.type}: {cause}") from None


def attr_values(op: OpDef, attrs: Mapping[str, Any], where: str) -> dict[str, AttrValue]:
    """Returns the messages for a node's attributes; `where` starts error messages.

    Raises:
        InvalidAttrError: the op has no attribute of a name, or a value does not fit.
    """
    known = {attr.name: attr for attr in op.attrs}
    messages: dict[str, AttrValue] = {}
    for name, value in attrs.items():
        if name in known:
            messages[name] = attr_value(known[name], value, where)
        elif name.startswith("_"):
            messages[name] = undeclared_attr_value(name, value, where)
        else:
            raise InvalidAttrError(
                f"{where} has no attribute {name!r}; it has: {', '.join(known)}.{did_you_mean(name, known)}"
            )
    return messages


def attr_of_op(op_type: str, name: str, value: Any, where: str) -> AttrValue:
    """Returns the message for an attribute of an op type.

    If the op type is a group or empty, the first op type that declares the attribute decides its type.

    Raises:
        InvalidAttrError: no op type declares the attribute, or the value does not fit.
    """
    own = op_definitions.find(op_type)
    known = (
        [own] if own is not None else [op for op in map(op_definitions.find, op_definitions.names()) if op is not None]
    )
    declared = next((attr for op in known for attr in op.attrs if attr.name == name), None)
    if declared is None:
        raise InvalidAttrError(f"{where}: {op_type if own else 'no op type'} has no attribute {name!r}")
    return attr_value(declared, value, where)


def undeclared_attr_value(name: str, value: Any, where: str) -> AttrValue:
    """Returns the message for an undeclared attribute (`_name`): a message, bool, int, float, bytes or string."""
    if isinstance(value, AttrValue):
        return value
    for python_type, field in ((bool, "b"), (int, "i"), (float, "f"), (bytes, "s")):
        if isinstance(value, python_type):
            return AttrValue(**{field: value})  # type: ignore[arg-type]  # the field fits the type just tested
    if isinstance(value, str):
        return AttrValue(s=value.encode())
    raise InvalidAttrError(f"{where}: attribute {name!r} must be a bool, number or string, not {type(value).__name__}")


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{value!r} is no integer")
    return int(value.__index__())


def _number(value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{value!r} is no bool")
    return bool(value)


def _string(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value.encode()


def _type(value: Any) -> int:
    return as_dt(tensor_codec.dtype_number(value))


def _shape(value: Any) -> TensorShape:
    if isinstance(value, TensorShape):
        return value
    if value is None:
        return tensor_codec.shape_message(None)
    sizes = [value] if hasattr(value, "__index__") else list(value)
    return tensor_codec.shape_message(None if size is None else _integer(size) for size in sizes)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else tensor_codec.to_message(tensorflow_array(value))


def _function(value: Any) -> NameAttrList:
    if isinstance(value, NameAttrList):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no function's name")
    return NameAttrList(name=value)


def array_of_type(value: Any, dtype: tensor_codec.DtypeLike, where: str) -> tensor_codec.Array:
    """Converts a value to an array of an element type; None: the type of `natural`. Raises `InvalidTensorError`."""
    try:
        array = (
            tensorflow_array(value)
            if dtype is None
            else tensor_codec.from_value(value, tensor_codec.dtype_number(dtype))
        )
        # Refuse arrays that have no element type of TensorFlow.
        tensor_codec.number_of_array(array)
    except ValueError as cause:
        raise InvalidTensorError(f"{where}: {cause}") from None
    return array


def tensorflow_array(value: Any) -> tensor_codec.Array:
    """Converts a value to an array as TensorFlow does: floats to float32, ints to int32; arrays keep their type."""
    if is_array(value):
        return read_array(value)
    array = tensor_codec.natural_array(value)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.kind in "iu":
        try:
            return tensor_codec.from_value(value, tensor_codec.dtype_number("int32"))
        except ValueError:
            return array
    return array


_CONVERTERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("i", _integer),
    "float": ("f", _number),
    "bool": ("b", _boolean),
    "string": ("s", _string),
    "type": ("type", _type),
    "shape": ("shape", _shape),
    "tensor": ("tensor", _tensor),
    "func": ("func", _function),
}
