"""Reads the bytes of an `EvaluateResponse` without copying the tensors in it.

The answers of one program differ in the contents of tensors and in what follows the tensors, while names, types and
shapes stay the same. `AnswerReader` keeps the layout of the last answer, so that an answer of the same layout is
compared with it instead of being parsed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from gradrule._builder.names import bare
from gradrule.common import fast_paths, tensor_codec, tensor_packing, wire_format
from gradrule.common.dtypes import dtype_name
from gradrule.common.memory_regions import MIN_LARGE_BYTES, rounded_to_pages
from gradrule.errors import InternalError, InvalidTensorError
from gradrule.v1 import evaluate_pb2, tensor_pb2

GradientKind: TypeAlias = Literal["dense", "sparse", "unconnected", "not_differentiable"]

# Layouts with more bytes around the tensors are not kept: strings, or thousands of tensors.
_MAX_LAYOUT_BYTES = 64 * 1024

_OUTPUTS = evaluate_pb2.EvaluateResponse.OUTPUTS_FIELD_NUMBER
_GRADIENTS = evaluate_pb2.EvaluateResponse.GRADIENTS_FIELD_NUMBER
_FIELDS = (_OUTPUTS, _GRADIENTS)
# A `PullBackResponse` has no outputs.
_PULL_BACK_FIELDS = (0, evaluate_pb2.PullBackResponse.GRADIENTS_FIELD_NUMBER)
_NAME = tensor_pb2.NamedTensor.NAME_FIELD_NUMBER
_VALUE = tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER
_INLINE = tensor_pb2.TensorSource.INLINE_TENSOR_FIELD_NUMBER
_SHARED = tensor_pb2.TensorSource.SHARED_MEMORY_FIELD_NUMBER
_SHARED_GRADIENT = evaluate_pb2.Gradient.SHARED_MEMORY_FIELD_NUMBER
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER
_PACKED = tensor_pb2.Tensor.PACKED_FIELD_NUMBER
_PACKED_CONTENT = tensor_pb2.PackedTensor.CONTENT_FIELD_NUMBER
_X = evaluate_pb2.Gradient.X_FIELD_NUMBER
_KINDS: dict[int, GradientKind] = {
    evaluate_pb2.Gradient.DENSE_FIELD_NUMBER: "dense",
    evaluate_pb2.Gradient.SPARSE_FIELD_NUMBER: "sparse",
    evaluate_pb2.Gradient.UNCONNECTED_FIELD_NUMBER: "unconnected",
    evaluate_pb2.Gradient.NOT_DIFFERENTIABLE_FIELD_NUMBER: "not_differentiable",
}
_SPARSE_PARTS = (
    tensor_pb2.SparseTensor.VALUES_FIELD_NUMBER,
    tensor_pb2.SparseTensor.INDICES_FIELD_NUMBER,
    tensor_pb2.SparseTensor.DENSE_SHAPE_FIELD_NUMBER,
)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Locates a tensor in the bytes of an answer.

    Attributes:
        start: Start of the tensor's message.
        end: End of the tensor's message.
        dtype: Dtype of the values; None if the message must be parsed, because it does not hold them as bytes.
        count: Number of elements.
        shape: Shape of the tensor.
        content: Start of the values' bytes.
    """

    start: int
    end: int
    dtype: np.dtype[Any] | None
    count: int
    shape: tuple[int, ...]
    content: int

    def array(self, answer: Answer) -> tensor_codec.Array:
        """Returns the values as a new array. Raises `InvalidTensorError`."""
        data = answer.data
        if self.dtype is None:
            try:
                message = tensor_pb2.Tensor.FromString(data[self.start : self.end])
                return tensor_codec.to_numpy(message, writable=True)
            except (DecodeError, ValueError) as cause:
                raise InvalidTensorError(f"the server's answer: {cause}") from None
        # The bytes may be unaligned; the copy is aligned.
        return np.frombuffer(data, self.dtype, self.count, self.content).reshape(self.shape).copy()


@dataclass(frozen=True, slots=True)
class SharedPlace(TensorPlace):
    """Locates a tensor in shared memory; `content` is an offset in that memory."""

    def array(self, answer: Answer) -> tensor_codec.Array:
        """Returns the values in the memory, which only this array uses. Raises `InvalidTensorError`."""
        if self.dtype is None or answer.room is None:
            raise InvalidTensorError("the server's answer: a tensor is in shared memory, but this call shares none")
        try:
            return answer.room.array(self.content, self.dtype, self.shape, self.count * self.dtype.itemsize)
        except ValueError as cause:
            raise InvalidTensorError(f"the server's answer: {cause}") from None


@dataclass(frozen=True, slots=True)
class PackedPlace(TensorPlace):
    """Locates a packed tensor. message: the tensor without content. keep_bfloat16: see `tensor_packing.unpack`."""

    message: tensor_pb2.PackedTensor
    keep_bfloat16: bool

    def array(self, answer: Answer) -> tensor_codec.Array:
        """Returns the values, unpacked. Raises `InvalidTensorError`."""
        content = memoryview(answer.data)[self.content : self.end]
        try:
            array = tensor_packing.unpack(self.message, content=content, keep_bfloat16=self.keep_bfloat16)
        except ValueError as cause:
            raise InvalidTensorError(f"the server's answer: {cause}") from None
        return array if array.flags.writeable else array.copy()


@dataclass(frozen=True, slots=True)
class GradientPlace:
    """Locates a gradient: one tensor if it is dense, three if it is sparse, otherwise none."""

    kind: GradientKind
    tensors: tuple[TensorPlace, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Locates the tensors of an answer.

    Attributes:
        outputs: Outputs by their names in the result.
        gradients: Gradients by the names of the xs in the result.
        kinds: Kinds of the gradients by the same names.
        around: Bytes before and between the contents of tensors, each with its position.
        end: End of the tensors.
    """

    outputs: Mapping[str, TensorPlace]
    gradients: Mapping[str, GradientPlace]
    kinds: Mapping[str, GradientKind]
    around: tuple[tuple[int, bytes], ...]
    end: int

    def fits(self, data: bytes) -> bool:
        """Returns whether the tensors of an answer are at the same positions."""
        starts_with = data.startswith
        for position, part in self.around:
            if not starts_with(part, position):
                return False
        return len(data) >= self.end


class Answer:
    """Holds an answer.

    Attributes:
        data: Bytes of the answer.
        layout: Positions of the tensors in the bytes.
        rest: Message with all fields but the tensors.
        room: Shared memory with tensors of the answer; None if the call shares none.
    """

    __slots__ = ("data", "layout", "rest", "room")

    def __init__(self, data: bytes, layout: Layout, rest: evaluate_pb2.EvaluateResponse) -> None:
        self.data = data
        self.layout = layout
        self.rest = rest
        self.room: SharedRoom | None = None


class SharedRoom(Protocol):
    """Types the shared memory into which the server wrote tensors of an answer."""

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], size: int) -> tensor_codec.Array:
        """Returns the array at an offset. Raises `ValueError` if the memory does not contain it."""
        ...


class AnswerReader:
    """Reads the answers of one program. Safe to share between threads.

    Args:
        label_of: Returns a tensor's name in the result from its name in the answer.
        keep_bfloat16: Whether float32 tensors that were rounded to bfloat16 are returned as bfloat16.
    """

    def __init__(self, label_of: Callable[[str], str], *, keep_bfloat16: bool = False) -> None:
        self._label_of = label_of
        self._keep_bfloat16 = keep_bfloat16
        self._last: Layout | None = None
        self._keeps_layout = fast_paths.is_enabled("answer-layouts")
        self.was_used = False
        """Whether an answer was read."""
        self.room_bytes = 0
        """Bytes that the large tensors of the last answer need in shared memory, each on separate pages."""

    def read(self, data: bytes) -> Answer:
        """Finds the tensors of an answer. Raises `InternalError` if the bytes are not an answer."""
        layout = self._last
        try:
            if layout is not None and layout.fits(data):
                rest = evaluate_pb2.EvaluateResponse.FromString(data[layout.end :])
                if not (rest.outputs or rest.gradients):
                    return Answer(data, layout, rest)
            layout, others = _scan(data, self._label_of, self._keep_bfloat16, _FIELDS)
            rest = evaluate_pb2.EvaluateResponse.FromString(others)
            self.room_bytes, self.was_used = _room_bytes(layout), True
        except (DecodeError, wire_format.MalformedError, UnicodeDecodeError) as cause:
            raise InternalError(f"the server's answer cannot be read: {cause}") from None
        # If other fields are between the tensors, the bytes after the last tensor are not the whole rest.
        is_usual = len(others) == len(data) - layout.end
        if self._keeps_layout and is_usual and sum(len(part) for _, part in layout.around) <= _MAX_LAYOUT_BYTES:
            self._last = layout
        return Answer(data, layout, rest)


def read_gradients(data: bytes, label_of: Callable[[str], str], *, keep_bfloat16: bool = False) -> Answer:
    """Finds the gradients in the bytes of a `PullBackResponse`. Arguments as for `AnswerReader`.

    Raises `InternalError` if the bytes are not an answer.
    """
    try:
        layout, _ = _scan(data, label_of, keep_bfloat16, _PULL_BACK_FIELDS)
    except (DecodeError, wire_format.MalformedError, UnicodeDecodeError) as cause:
        raise InternalError(f"the server's answer cannot be read: {cause}") from None
    return Answer(data, layout, evaluate_pb2.EvaluateResponse())


def labels(aliases: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the alias of each tensor that has one; the first alias if it has several."""
    return {bare(tensor): alias for alias, tensor in reversed(list((aliases or {}).items()))}


def labeller(aliases: Mapping[str, str] | None) -> Callable[[str], str]:
    """Returns a function from a tensor's name to its name in the result: its alias, if it has one."""
    known = labels(aliases)
    return lambda name: known.get(bare(name), name)


def _scan(
    data: bytes, label_of: Callable[[str], str], keep: bool, tensor_fields: tuple[int, int]
) -> tuple[Layout, bytes]:
    """Returns the layout of an answer, and the bytes of all fields but the tensors.

    tensor_fields: numbers of the fields of outputs and gradients.
    """
    outputs_field, gradients_field = tensor_fields
    outputs: dict[str, TensorPlace] = {}
    gradients: dict[str, GradientPlace] = {}
    others: list[bytes] = []
    before = end = 0
    for number, start, stop in wire_format.fields(data, 0, len(data)):
        if number == outputs_field:
            name, place = _output(data, start, stop, keep)
            outputs[label_of(name)] = place
        elif number == gradients_field:
            name, gradient = _gradient(data, start, stop, keep)
            gradients[label_of(name)] = gradient
        else:
            others.append(data[before:stop])
        if number in tensor_fields:
            end = stop
        before = stop
    places = [*outputs.values(), *(place for gradient in gradients.values() for place in gradient.tensors)]
    kinds = {x: gradient.kind for x, gradient in gradients.items()}
    return Layout(outputs, gradients, kinds, _around(data, places, end), end), b"".join(others)


def _around(data: bytes, places: list[TensorPlace], end: int) -> tuple[tuple[int, bytes], ...]:
    """Returns the bytes before `end` that are not content of a tensor, each with its position."""
    found: list[tuple[int, bytes]] = []
    position = 0
    own = [place for place in places if place.dtype is not None and not isinstance(place, SharedPlace)]
    for place in sorted(own, key=lambda place: place.content):
        found.append((position, data[position : place.content]))
        position = place.end
    if position < end:
        found.append((position, data[position:end]))
    return tuple(found)


def _output(data: bytes, start: int, stop: int, keep: bool) -> tuple[str, TensorPlace]:
    name, place = "", TensorPlace(0, 0, None, 0, (), 0)
    for number, begin, end in wire_format.fields(data, start, stop):
        if number == _NAME:
            name = data[begin:end].decode()
        elif number == _VALUE:
            for inner, first, last in wire_format.fields(data, begin, end):
                if inner == _INLINE:
                    place = _tensor(data, first, last, keep)
                elif inner == _SHARED:
                    place = _shared_tensor(data, first, last)
    return name, place


def _shared_tensor(data: bytes, start: int, stop: int) -> TensorPlace:
    """Locates a tensor in shared memory. Raises `InvalidTensorError`."""
    message = tensor_pb2.SharedMemoryTensor.FromString(data[start:stop])
    try:
        dtype, shape = tensor_codec.numpy_dtype(message.dtype), tensor_codec.known_shape(message.shape)
    except ValueError as cause:
        raise InvalidTensorError(f"the server's answer: {cause}") from None
    count = math.prod(shape)
    if dtype.kind == "O" or message.size_bytes != count * dtype.itemsize:
        name = dtype_name(message.dtype)
        raise InvalidTensorError(
            f"the server's answer: {message.size_bytes} bytes of shared memory do not fit {name} of shape {list(shape)}"
        )
    return SharedPlace(start, stop, dtype, count, shape, message.offset)


def _room_bytes(layout: Layout) -> int:
    """Returns the bytes that the large tensors of an answer take in shared memory."""
    places = [*layout.outputs.values()]
    places += [place.tensors[0] for place in layout.gradients.values() if place.kind == "dense"]
    sizes = [place.count * place.dtype.itemsize for place in places if place.dtype is not None]
    return sum(rounded_to_pages(size) for size in sizes if size >= MIN_LARGE_BYTES)


def _gradient(data: bytes, start: int, stop: int, keep: bool) -> tuple[str, GradientPlace]:
    name, gradient = "", GradientPlace("unconnected", ())
    for number, begin, end in wire_format.fields(data, start, stop):
        if number == _X:
            name = data[begin:end].decode()
        elif number == _SHARED_GRADIENT:
            gradient = GradientPlace("dense", (_shared_tensor(data, begin, end),))
        elif (kind := _KINDS.get(number)) == "dense":
            gradient = GradientPlace(kind, (_tensor(data, begin, end, keep),))
        elif kind == "sparse":
            parts = {
                inner: _tensor(data, first, last, keep) for inner, first, last in wire_format.fields(data, begin, end)
            }
            if not all(part in parts for part in _SPARSE_PARTS):
                raise wire_format.MalformedError("a sparse gradient lacks a part")
            gradient = GradientPlace(kind, tuple(parts[part] for part in _SPARSE_PARTS))
        elif kind is not None:
            gradient = GradientPlace(kind, ())
    return name, gradient


def _tensor(data: bytes, start: int, stop: int, keep: bool) -> TensorPlace:
    """Locates a tensor. Raises `InvalidTensorError` if its bytes do not fit its type and shape."""
    content = size = 0
    head: list[bytes] = []
    before = start
    for number, begin, end in wire_format.fields(data, start, stop):
        if number == _CONTENT:
            content, size = begin, end - begin
        elif number == _PACKED:
            return _packed(data, begin, end, keep)
        else:
            head.append(data[before:end])
        before = end
    # `stop` is the end of the content only if the content is the last field.
    if not size or content + size != stop:
        return TensorPlace(start, stop, None, 0, (), 0)
    message = tensor_pb2.Tensor.FromString(b"".join(head))
    try:
        dtype, shape = tensor_codec.numpy_dtype(message.dtype), tensor_codec.known_shape(message.tensor_shape)
    except ValueError as cause:
        raise InvalidTensorError(f"the server's answer: {cause}") from None
    if dtype.kind == "O" or not np.little_endian:
        return TensorPlace(start, stop, None, 0, (), 0)
    count = math.prod(shape)
    if size != count * dtype.itemsize:
        name = dtype_name(message.dtype)
        raise InvalidTensorError(
            f"the server's answer: {size} bytes do not fit {name} of shape {list(shape)}: {count * dtype.itemsize}"
        )
    return TensorPlace(start, stop, dtype, count, shape, content)


def _packed(data: bytes, start: int, stop: int, keep: bool) -> PackedPlace:
    """Locates a packed tensor. Raises `MalformedError` if its content is not its last field."""
    before = start
    for number, begin, end in wire_format.fields(data, start, stop):
        if number == _PACKED_CONTENT and end == stop:
            message = tensor_pb2.PackedTensor.FromString(data[start:before])
            # A dtype must be set, so that the bytes around the content become part of the layout.
            return PackedPlace(start, stop, np.dtype(np.uint8), end - begin, (), begin, message, keep)
        before = end
    raise wire_format.MalformedError("a packed tensor does not end with its content")
