"""Writes the answers of programs.

`ResponseWriter` encodes names and types once per program, and shapes once per set of shapes. The functions below it
write the tensors of forward runs and sessions into messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from gradrule.common import tensor_codec
from gradrule.common.tensor_packing import Packing, pack
from gradrule.common.wire_format import prefix, varint
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
# Number of sets of shapes whose encoding is kept.
_MAX_KEPT = 64
NARROW_INTS = frozenset({"int2", "uint2", "int4", "uint4"})
"""Element types that are written as varints."""
NARROW_INT_BYTES = 10
"""Size of a varint that holds a negative number."""
_NANOSECONDS = 1_000_000_000

_Tree: TypeAlias = "bytes | _Tensor | tuple[int, list[_Tree]]"
"""Part of a message: encoded fields, a tensor, or a field that holds a message."""


class _Tensor(NamedTuple):
    """The place of a result: its number, its field when inline, and its field when in shared memory.

    `shared` is None if the result cannot be in shared memory.
    """

    number: int
    inline: int
    shared: int | None


class ResponseWriter:
    """Encodes the outputs and derivatives of a built program as the bytes of an `EvaluateResponse`. Thread-safe."""

    def __init__(self, built: BuiltProgram, dtypes: Sequence[tf.DType], device: str) -> None:
        self._numbers = [dtype.base_dtype.as_datatype_enum for dtype in dtypes]
        self._tree = list(_tree(built))
        self._device = _field(_EvaluateResponse.DEVICE_FIELD_NUMBER, device.encode())
        self._is_plain = all(_is_plain(number) for number in self._numbers)
        # By the shapes of all results: what stands before each tensor's bytes, in the order of the results.
        self._kept: dict[tuple[tuple[int, ...], ...], tuple[list[bytes], bytes]] = {}

    def size_of(self, results: Arrays) -> int:
        """Returns an upper bound on the bytes that the results take in a message."""
        if self._is_plain:
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
        found: tuple[list[bytes], bytes] | None
        if packing is not None:
            found, contents = self._packed(results, packing)
        elif answer_area is not None and self._is_plain:
            return self._write_shared(results, queue_ns, started_ns, answer_area)
        elif self._is_plain:
            shapes = tuple([result.shape for result in results])
            found = self._kept.get(shapes)
            if found is None:
                sizes = [int(result.nbytes) for result in results]
                heads = [_head(*item) for item in zip(self._numbers, shapes, sizes, strict=True)]
                found = self._encoded(heads, sizes)
                if len(self._kept) >= _MAX_KEPT:
                    self._kept.clear()
                self._kept[shapes] = found
            contents = [_content(result) for result in results]
        else:
            heads, contents = [], []
            for number, result in zip(self._numbers, results, strict=True):
                heads.append(_message(number, result))
                contents.append(b"")
            found = self._encoded(heads, [0] * len(heads))
        return self._joined(*found, contents, queue_ns, started_ns)

    def _write_shared(self, results: Arrays, queue_ns: int, started_ns: int, answer_area: AnswerArea) -> list[Buffer]:
        contents = [_content(result) for result in results]
        may_share = [tensor.shared is not None for tensor in _tensors_of(self._tree)]
        placed = answer_area.place([content if may else b"" for content, may in zip(contents, may_share, strict=True)])
        heads: list[bytes] = []
        shared: list[bytes | None] = []
        for index, (number, result, offset) in enumerate(zip(self._numbers, results, placed, strict=True)):
            size = int(result.nbytes)
            heads.append(_head(number, result.shape, size))
            shared.append(None if offset is None else _placed(number, result.shape, offset, size))
            if offset is not None:
                contents[index] = b""
        before, rest = self._encoded(heads, list(map(len, contents)), shared)
        return self._joined(before, rest, contents, queue_ns, started_ns)

    def _joined(
        self, before: Sequence[bytes], rest: bytes, contents: Sequence[Buffer], queue_ns: int, started_ns: int
    ) -> list[Buffer]:
        parts: list[Buffer] = []
        for head, content in zip(before, contents, strict=True):
            parts += (head, content)
        parts.append(rest + self._device + _timings(queue_ns, time.monotonic_ns() - started_ns))
        return parts

    def _packed(self, results: Arrays, packing: Packing) -> tuple[tuple[list[bytes], bytes], list[Buffer]]:
        """Returns the bytes around the contents, and the contents, packed where that makes them smaller."""
        heads: list[bytes] = []
        contents: list[Buffer] = []
        for number, result in zip(self._numbers, results, strict=True):
            if not _is_plain(number):
                heads.append(_message(number, result))
                contents.append(b"")
                continue
            array = np.asarray(result)
            packed = pack(number, array, packing)
            heads.append(_head(number, array.shape, array.nbytes) if packed is None else packed.head)
            contents.append(_content(array) if packed is None else packed.content)
        return self._encoded(heads, [len(content) for content in contents]), contents

    def _encoded(
        self, heads: Sequence[bytes], sizes: Sequence[int], shared: Sequence[bytes | None] = ()
    ) -> tuple[list[bytes], bytes]:
        """Returns the bytes before the content of each result, and the bytes after the last content.

        shared: references to results in shared memory, which have no content here.
        """
        before: list[bytes] = []
        piece: list[bytes] = []

        def size_of(node: _Tree) -> int:
            if isinstance(node, bytes):
                return len(node)
            if isinstance(node, _Tensor):
                there = shared[node.number] if shared else None
                if there is not None:
                    return len(_field(node.shared or 0, there))
                size = len(heads[node.number]) + sizes[node.number]
                return len(prefix(node.inline, size)) + size
            size = sum(map(size_of, node[1]))
            return len(prefix(node[0], size)) + size

        def encode(node: _Tree) -> None:
            if isinstance(node, bytes):
                piece.append(node)
            elif isinstance(node, _Tensor):
                there = shared[node.number] if shared else None
                if there is not None:
                    piece.append(_field(node.shared or 0, there))
                else:
                    size = len(heads[node.number]) + sizes[node.number]
                    piece.extend((prefix(node.inline, size), heads[node.number]))
                before.append(b"".join(piece))
                piece.clear()
            else:
                piece.append(prefix(node[0], sum(map(size_of, node[1]))))
                for child in node[1]:
                    encode(child)

        for node in self._tree:
            encode(node)
        return before, b"".join(piece)


def _tree(built: BuiltProgram) -> Iterator[_Tree]:
    """Yields the fields of a program's response, the results in their order."""
    count = 0
    for name in built.outputs:
        yield (_EvaluateResponse.OUTPUTS_FIELD_NUMBER, _named(name, [count]))
        count += 1
    for names, form in built.layout:
        results = list(range(count, count + WIDTHS[form]))
        count += len(results)
        if built.kind == evaluate_pb2.DERIVATIVE_JVP:
            yield (_EvaluateResponse.OUTPUT_TANGENTS_FIELD_NUMBER, _named(names[0], results))
        elif built.kind in _JACOBIANS:
            block = evaluate_pb2.JacobianBlock
            y, x = names
            head = _field(block.Y_FIELD_NUMBER, y.encode()) + _field(block.X_FIELD_NUMBER, x.encode())
            yield (_EvaluateResponse.JACOBIANS_FIELD_NUMBER, [head, _value(block, form, results)])
        else:
            head = _field(evaluate_pb2.Gradient.X_FIELD_NUMBER, names[0].encode())
            value = _value(evaluate_pb2.Gradient, form, results)
            yield (_EvaluateResponse.GRADIENTS_FIELD_NUMBER, [head, value])


def _tensors_of(nodes: Iterable[_Tree]) -> Iterator[_Tensor]:
    """Yields all tensors of the tree, in their order."""
    for node in nodes:
        if isinstance(node, _Tensor):
            yield node
        elif isinstance(node, tuple):
            yield from _tensors_of(node[1])


def _named(name: str, results: Sequence[int]) -> list[_Tree]:
    """Returns the fields of a `NamedTensor`, without a value if there is no result."""
    encoded: _Tree = _field(tensor_pb2.NamedTensor.NAME_FIELD_NUMBER, name.encode())
    source = tensor_pb2.TensorSource
    tensors: list[_Tree] = [
        _Tensor(result, source.INLINE_TENSOR_FIELD_NUMBER, source.SHARED_MEMORY_FIELD_NUMBER) for result in results
    ]
    return [encoded, (tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER, tensors)] if results else [encoded]


def _value(message: Any, form: str, results: Sequence[int]) -> _Tree:
    """Returns the value of a gradient or of a block of a Jacobian."""
    if form == DENSE:
        return _Tensor(results[0], message.DENSE_FIELD_NUMBER, message.SHARED_MEMORY_FIELD_NUMBER)
    if form == SPARSE:
        sparse = tensor_pb2.SparseTensor
        numbers = (sparse.VALUES_FIELD_NUMBER, sparse.INDICES_FIELD_NUMBER, sparse.DENSE_SHAPE_FIELD_NUMBER)
        parts: list[_Tree] = [_Tensor(result, number, None) for number, result in zip(numbers, results, strict=True)]
        return (message.SPARSE_FIELD_NUMBER, parts)
    number = message.UNCONNECTED_FIELD_NUMBER if form == UNCONNECTED else message.NOT_DIFFERENTIABLE_FIELD_NUMBER
    return _field(number, b"")


def _size_of(result: Any) -> int:
    values = np.asarray(result, object if isinstance(result, (bytes, str)) else None)
    if values.dtype.hasobject:
        return sum(len(value) for value in values.flat)
    return int(values.size) * (NARROW_INT_BYTES if values.dtype.name in NARROW_INTS else values.dtype.itemsize)


def _is_plain(number: int) -> bool:
    """Returns whether tensors of an element type are written as bytes."""
    return tensor_codec.has_plain_bytes(np.empty(0, tensor_codec.numpy_dtype(number)))


def _head(number: int, shape: Sequence[int], size: int) -> bytes:
    """Returns a `Tensor` without its content."""
    message = tensor_pb2.Tensor(tensor_shape=tensor_codec.shape_message(shape))
    message.dtype = number  # type: ignore[assignment]
    content = prefix(tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER, size)
    return message.SerializeToString() + content


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
        message.ParseFromString(b"".join(packed))
        return
    tensor_codec.write_message(message, array)
    if tensor.dtype.is_quantized:
        # In NumPy such values are plain integers.
        message.dtype = tensor.dtype.as_datatype_enum
