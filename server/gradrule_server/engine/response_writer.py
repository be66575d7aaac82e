"""Writes the answers of programs.

`ResponseWriter` encodes names once per program, and shapes once per shape. The functions below it
write the tensors of forward runs and sessions into messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from gradrule.common import tensor_codec
from gradrule.common.tensor_packing import Packing, pack
from gradrule.common.wire_format import prefix, varint, wrapped
from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.engine.client_memory import AnswerArea
from gradrule_server.engine.derivatives import DENSE, SPARSE, UNCONNECTED, WIDTHS, split_tensors
from gradrule_server.engine.program import Arrays, BuiltProgram
from gradrule_server.link.framing import Buffer

_EvaluateResponse = evaluate_pb2.EvaluateResponse
_Timings = evaluate_pb2.Timings
_JACOBIANS = (evaluate_pb2.DERIVATIVE_JACOBIAN, evaluate_pb2.DERIVATIVE_BATCH_JACOBIAN)
# Smaller tensors are copied: a copy costs less than one more part of the answer.
_LEAST_VIEWED_BYTES = 4096
# Number of shapes whose encoding is kept.
_MAX_KEPT = 64
NARROW_INTS = frozenset({"int2", "uint2", "int4", "uint4"})
"""Element types that are written as varints."""
NARROW_INT_BYTES = 10
"""Size of a varint that holds a negative number."""
_NANOSECONDS = 1_000_000_000

_Parts: TypeAlias = "Sequence[Buffer]"


class _Result(NamedTuple):
    """An encoded result. `is_shared`: whether it is a reference to shared memory."""

    parts: _Parts
    is_shared: bool = False


class _Entry(NamedTuple):
    """A field of the message.

    Attributes:
        results: Number of its results.
        may_share: Whether they can be in shared memory.
        encode: Returns the field with these results.
    """

    results: int
    may_share: bool
    encode: Callable[[Sequence[_Result]], _Parts]


class ResponseWriter:
    """Encodes the outputs and derivatives of a built program as the bytes of an `EvaluateResponse`. Thread-safe."""

    def __init__(self, built: BuiltProgram, dtypes: Sequence[tf.DType], device: str) -> None:
        self._numbers = [dtype.base_dtype.as_datatype_enum for dtype in dtypes]
        self._entries = list(_entries(built))
        self._may_share = [entry.may_share for entry in self._entries for _ in range(entry.results)]
        self._device = _field(_EvaluateResponse.DEVICE_FIELD_NUMBER, device.encode())
        self._plain = [_is_plain(number) for number in self._numbers]
        self._heads: dict[tuple[int, tuple[int, ...]], bytes] = {}

    def size_of(self, results: Arrays) -> int:
        """Returns an upper bound on the bytes that the results take in a message."""
        if all(self._plain):
            return sum([result.nbytes for result in results])
        return sum(map(_size_of, results))

    def write(
        self,
        results: Arrays,
        queue_ns: int,
        started_ns: int,
        *,
        packing: Packing | None = None,
        answer_area: AnswerArea | None = None,
    ) -> list[Buffer]:
        """Returns the parts of the message, in order; large tensors are views of the results.

        queue_ns: nanoseconds that the call waited. started_ns: monotonic time at which its run started. packing: how
        tensors are packed. answer_area: takes large tensors that are not packed, as far as they fit.
        """
        encoded: list[_Result] = []
        for index, result in enumerate(results):
            area = answer_area if self._may_share[index] and packing is None else None
            encoded.append(self._encode(index, result, packing, area))
        parts: list[Buffer] = []
        start = 0
        for entry in self._entries:
            parts += entry.encode(encoded[start : start + entry.results])
            start += entry.results
        parts.append(self._device + _timings(queue_ns, time.monotonic_ns() - started_ns))
        return parts

    def _encode(self, index: int, result: Any, packing: Packing | None, area: AnswerArea | None) -> _Result:
        number = self._numbers[index]
        if not self._plain[index]:
            return _Result((_message(number, result),))
        if packing is not None:
            packed = pack(number, np.asarray(result), packing)
            if packed is not None:
                return _Result((packed.head, packed.content))
        content = _content(result)
        offset = None if area is None else area.place(content)
        if offset is not None:
            return _Result((_placed(number, result.shape, offset, int(result.nbytes)),), True)
        return _Result((self._head(number, result.shape, len(content)), content))

    def _head(self, number: int, shape: tuple[int, ...], size: int) -> bytes:
        """Returns a `Tensor` without its content. `size`: of the content, which the shape determines."""
        found = self._heads.get((number, shape))
        if found is None:
            message = tensor_pb2.Tensor(tensor_shape=tensor_codec.shape_message(shape))
            message.dtype = number  # type: ignore[assignment]
            found = message.SerializeToString() + prefix(tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER, size)
            if len(self._heads) >= _MAX_KEPT:
                self._heads.clear()
            self._heads[number, shape] = found
        return found


def _entries(built: BuiltProgram) -> Iterator[_Entry]:
    """Yields the fields of a program's response, in the order of their results."""
    for name in built.outputs:
        yield _Entry(1, True, partial(_named, _EvaluateResponse.OUTPUTS_FIELD_NUMBER, _name(name)))
    for names, form in built.layout:
        count = WIDTHS[form]
        if built.kind == evaluate_pb2.DERIVATIVE_JVP:
            yield _Entry(count, True, partial(_named, _EvaluateResponse.OUTPUT_TANGENTS_FIELD_NUMBER, _name(names[0])))
        elif built.kind in _JACOBIANS:
            block, field = evaluate_pb2.JacobianBlock, _EvaluateResponse.JACOBIANS_FIELD_NUMBER
            head = _field(block.Y_FIELD_NUMBER, names[0].encode()) + _field(block.X_FIELD_NUMBER, names[1].encode())
            yield _Entry(count, True, partial(_derivative, field, head, block, form))
        else:
            gradient, field = evaluate_pb2.Gradient, _EvaluateResponse.GRADIENTS_FIELD_NUMBER
            head = _field(gradient.X_FIELD_NUMBER, names[0].encode())
            yield _Entry(count, form != SPARSE, partial(_derivative, field, head, gradient, form))


def _name(name: str) -> bytes:
    return _field(tensor_pb2.NamedTensor.NAME_FIELD_NUMBER, name.encode())


def _named(field: int, head: bytes, results: Sequence[_Result]) -> _Parts:
    """Returns a `NamedTensor`, without a value if there is no result. `head`: its name."""
    if not results:
        return (_field(field, head),)
    ((parts, is_shared),) = results
    source = tensor_pb2.TensorSource
    number = source.SHARED_MEMORY_FIELD_NUMBER if is_shared else source.INLINE_TENSOR_FIELD_NUMBER
    return wrapped(field, (head, *wrapped(tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER, wrapped(number, parts))))


def _derivative(field: int, head: bytes, message: Any, form: str, results: Sequence[_Result]) -> _Parts:
    """Returns a gradient or a block of a Jacobian. `head`: its names."""
    if form == DENSE:
        ((parts, is_shared),) = results
        value = wrapped(message.SHARED_MEMORY_FIELD_NUMBER if is_shared else message.DENSE_FIELD_NUMBER, parts)
    elif form == SPARSE:
        sparse = tensor_pb2.SparseTensor
        numbers = (sparse.VALUES_FIELD_NUMBER, sparse.INDICES_FIELD_NUMBER, sparse.DENSE_SHAPE_FIELD_NUMBER)
        tensors = [wrapped(number, result.parts) for number, result in zip(numbers, results, strict=True)]
        value = wrapped(message.SPARSE_FIELD_NUMBER, [part for tensor in tensors for part in tensor])
    else:
        value = wrapped(
            message.UNCONNECTED_FIELD_NUMBER if form == UNCONNECTED else message.NOT_DIFFERENTIABLE_FIELD_NUMBER, ()
        )
    return wrapped(field, (head, *value))


def _size_of(result: Any) -> int:
    values = np.asarray(result, object if isinstance(result, (bytes, str)) else None)
    if values.dtype.hasobject:
        return sum(len(value) for value in values.flat)
    return int(values.size) * (NARROW_INT_BYTES if values.dtype.name in NARROW_INTS else values.dtype.itemsize)


def _is_plain(number: int) -> bool:
    """Returns whether tensors of an element type are written as bytes."""
    return tensor_codec.has_plain_bytes(np.empty(0, tensor_codec.numpy_dtype(number)))


def _placed(number: int, shape: Sequence[int], offset: int, size: int) -> bytes:
    """Returns the encoded reference to a result that was written into shared memory."""
    message = tensor_pb2.SharedMemoryTensor(offset=offset, size_bytes=size, shape=tensor_codec.shape_message(shape))
    message.dtype = number  # type: ignore[assignment]
    return message.SerializeToString()


def _content(array: Any) -> Buffer:
    if array.nbytes < _LEAST_VIEWED_BYTES:
        content: bytes = array.tobytes()
        return content
    return tensor_codec.content_of(array)


def _message(number: int, result: Any) -> bytes:
    """Returns a whole `Tensor`, of any element type."""
    message = tensor_pb2.Tensor()
    tensor_codec.write_message(message, np.asarray(result, tensor_codec.numpy_dtype(number)))
    message.dtype = number  # type: ignore[assignment]
    return message.SerializeToString()


def _field(number: int, content: bytes) -> bytes:
    """Returns a length-delimited field."""
    return prefix(number, len(content)) + content


def _timings(queue_ns: int, run_ns: int) -> bytes:
    queue = _field(_Timings.QUEUE_FIELD_NUMBER, _duration(queue_ns))
    return _field(_EvaluateResponse.TIMINGS_FIELD_NUMBER, queue + _field(_Timings.RUN_FIELD_NUMBER, _duration(run_ns)))


def _duration(nanoseconds: int) -> bytes:
    """Returns a `google.protobuf.Duration`."""
    seconds, nanos = divmod(nanoseconds, _NANOSECONDS)
    if not seconds:
        return b"\x10" + varint(nanos)
    return b"\x08" + varint(seconds) + b"\x10" + varint(nanos)


def write_derivatives(
    response: evaluate_pb2.EvaluateResponse, built: BuiltProgram, tensors: Sequence[tf.Tensor], packing: Packing | None
) -> None:
    """Adds all derivatives of a program to a response. `tensors` are in the order of the program's layout."""
    for names, form, values in split_tensors(built.layout, tensors):
        if built.kind == evaluate_pb2.DERIVATIVE_JVP:
            tangent = response.output_tangents.add(name=names[0])
            if values:
                write_tensor(tangent.value.inline_tensor, values[0], packing)
        elif built.kind in _JACOBIANS:
            _write_block(response.jacobians.add(y=names[0], x=names[1]), form, values, packing)
        else:
            write_gradient(response.gradients.add(x=names[0]), form, values, packing)


def write_gradient(
    message: evaluate_pb2.Gradient, form: str, values: Sequence[tf.Tensor], packing: Packing | None
) -> None:
    """Writes one gradient: dense, sparse, unconnected or not differentiable."""
    if form == SPARSE:
        parts = (message.sparse.values, message.sparse.indices, message.sparse.dense_shape)
        for part, value in zip(parts, values, strict=True):
            write_tensor(part, value, packing)
    else:
        _write_block(message, form, values, packing)


def _write_block(
    message: evaluate_pb2.Gradient | evaluate_pb2.JacobianBlock,
    form: str,
    values: Sequence[tf.Tensor],
    packing: Packing | None,
) -> None:
    if form == DENSE:
        write_tensor(message.dense, values[0], packing)
    elif form == UNCONNECTED:
        message.unconnected.SetInParent()
    else:
        message.not_differentiable.SetInParent()


def write_tensor(message: tensor_pb2.Tensor, tensor: tf.Tensor, packing: Packing | None = None) -> None:
    """Writes a tensor of any type; packs it if `packing` is given and makes it smaller."""
    # TensorFlow returns a scalar string as bytes, not as an array.
    array = np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None)
    packed = None if packing is None else pack(tensor.dtype.as_datatype_enum, array, packing)
    if packed is not None:
        message.ParseFromString(packed.head + packed.content)
        return
    tensor_codec.write_message(message, array)
    if tensor.dtype.is_quantized:
        # In NumPy such values are plain integers.
        message.dtype = tensor.dtype.as_datatype_enum
