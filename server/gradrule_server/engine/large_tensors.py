"""Cuts large tensors out of the bytes of a request, so that parsing does not copy them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from gradrule.common.wire_format import LENGTH_DELIMITED, MalformedError, fields, prefix
from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2

LargeTensors: TypeAlias = Mapping[tuple[str, int], memoryview]
"""Bytes of tensors (packed ones still packed), by their repeated field and their index in it.

They last as long as the request.
"""

NO_LARGE_TENSORS: LargeTensors = MappingProxyType({})
_LEAST_BYTES = 16 * 1024

# Field numbers on the path from a frame's message to the request in it, and from a tensor's field to its bytes.
_CALL = link_pb2.RunRequest.REQUEST_FIELD_NUMBER
_WAYS: dict[Kind, Sequence[int]] = {
    Kind.RUN: (_CALL,),
    Kind.FORWARD: (link_pb2.ForwardRequest.RUN_FIELD_NUMBER, _CALL),
    Kind.PULL_BACK: (link_pb2.PullBackRequest.REQUEST_FIELD_NUMBER,),
    Kind.SESSION: (link_pb2.SessionRequest.RUN_FIELD_NUMBER, link_pb2.SessionRun.RUN_FIELD_NUMBER, _CALL),
}
_TENSOR = (tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER, tensor_pb2.TensorSource.INLINE_TENSOR_FIELD_NUMBER)
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER
_PACKED = tensor_pb2.Tensor.PACKED_FIELD_NUMBER
_PACKED_CONTENT = tensor_pb2.PackedTensor.CONTENT_FIELD_NUMBER
_EVALUATE = {
    evaluate_pb2.EvaluateRequest.DESCRIPTOR.fields_by_name[name].number: name
    for name in ("feeds", "grad_ys", "tangents", "vectors")
}
_PULL_BACK = {evaluate_pb2.PullBackRequest.GRAD_YS_FIELD_NUMBER: "grad_ys"}


class CutPayload(NamedTuple):
    """The message of a frame without the bytes of its large tensors, and these bytes."""

    payload: bytes
    contents: LargeTensors


class _Unusual(MalformedError):
    """The message has one tensor in several parts, which protobuf allows; it is parsed as a whole."""


_Change: TypeAlias = Callable[[memoryview, int], "bytes | memoryview | None"]
"""Makes the new value of a field from its value and its index; None drops the field."""


def cut_large_tensors(kind: Kind, payload: bytes | memoryview) -> CutPayload:
    """Cuts large tensors out of a payload; returns a small payload unchanged."""
    if isinstance(payload, bytes):
        return CutPayload(payload, NO_LARGE_TENSORS)
    way = _WAYS.get(kind)
    if way is None:
        return CutPayload(bytes(payload), NO_LARGE_TENSORS)
    names = _PULL_BACK if kind is Kind.PULL_BACK else _EVALUATE
    contents: dict[tuple[str, int], memoryview] = {}
    try:
        return CutPayload(_without_tensors(names, contents, way, payload, 0), contents)
    except MalformedError:
        return CutPayload(bytes(payload), {})


def _without_tensors(
    names: Mapping[int, str],
    contents: dict[tuple[str, int], memoryview],
    way: Sequence[int],
    value: memoryview,
    before: int,
) -> bytes:
    """Returns the message without the large tensors in these fields of the request at the end of the path."""
    if before:
        raise _Unusual
    if way:
        return _changed(value, {way[0]: partial(_without_tensors, names, contents, way[1:])})

    def cut(name: str, entry: memoryview, index: int) -> bytes | memoryview:
        def keep(content: memoryview, before: int) -> None:
            if before or (name, index) in contents:
                raise _Unusual
            contents[name, index] = content

        return entry if len(entry) < _LEAST_BYTES else _without_content(keep, _TENSOR, entry, 0)

    return _changed(value, {number: partial(cut, name) for number, name in names.items()})


def _without_content(
    keep: Callable[[memoryview, int], None], way: Sequence[int], value: memoryview, before: int
) -> bytes:
    """Returns the message without the bytes at the end of the path, which are kept."""
    if before:
        raise _Unusual
    if way:
        return _changed(value, {way[0]: partial(_without_content, keep, way[1:])})
    return _changed(value, {_CONTENT: keep, _PACKED: partial(_without_packed_content, keep)})


def _without_packed_content(keep: Callable[[memoryview, int], None], value: memoryview, before: int) -> bytes:
    if before:
        raise _Unusual
    return _changed(value, {_PACKED_CONTENT: keep})


def _changed(message: memoryview, changes: Mapping[int, _Change]) -> bytes:
    """Returns the message with other values in some of its fields."""
    parts: list[bytes | memoryview] = []
    seen = dict.fromkeys(changes, 0)
    position = 0
    for number, start, end in fields(message, 0, len(message)):
        before, position = position, end
        change = changes.get(number)
        if change is None:
            parts.append(message[before:end])
            continue
        if message[before] & 7 != LENGTH_DELIMITED:
            raise _Unusual
        changed = change(message[start:end], seen[number])
        seen[number] += 1
        if changed is not None:
            parts += [prefix(number, len(changed)), changed]
    return b"".join(parts)
