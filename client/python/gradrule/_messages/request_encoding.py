"""Encodes requests of Evaluate: a header, which equal calls have in common, and the contents of their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self, TypeAlias

import numpy as np
from google.protobuf.duration_pb2 import Duration

from gradrule._builder import blob_values
from gradrule._builder.graph_sources import GraphLike
from gradrule._messages.call_arguments import CallParams, name_of_tensor
from gradrule._messages.feed_values import TypeOf, checked_value
from gradrule._messages.request_messages import add_params, pairs
from gradrule.common import tensor_codec, wire_format
from gradrule.common.dtypes import as_dt
from gradrule.common.memory_regions import MIN_LARGE_BYTES
from gradrule.common.tensor_packing import Packing, pack
from gradrule.errors import InvalidTensorError
from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2

TENSOR_FIELDS = ("feeds", "grad_ys", "tangents", "vectors")
Tensors: TypeAlias = "Mapping[str, Mapping[Any, Any] | None]"
"""Values by tensor, by field of the request."""
# What the header of a tensor depends on: the arguments of `RequestEncoder._tensor_header`.
_Described: TypeAlias = "tuple[str, Any, int, tuple[int, ...], Any, int, str]"

# Limits the memory for programs whose feeds have many different shapes.
_MAX_HEADERS = 1024
_FIELDS = evaluate_pb2.EvaluateRequest.DESCRIPTOR.fields_by_name
_HEADER, _CONTENTS, _SPEC = (_FIELDS[name].number for name in ("header", "contents", "spec"))
_NAME = tensor_pb2.NamedTensor.NAME_FIELD_NUMBER
_VALUE = tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER
_INLINE = tensor_pb2.TensorSource.INLINE_TENSOR_FIELD_NUMBER
_BLOB = tensor_pb2.TensorSource.BLOB_FIELD_NUMBER
_SHARED = tensor_pb2.TensorSource.SHARED_MEMORY_FIELD_NUMBER
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER
_PACKED = tensor_pb2.Tensor.PACKED_FIELD_NUMBER
_PACKED_CONTENT = tensor_pb2.PackedTensor.CONTENT_FIELD_NUMBER


@dataclasses.dataclass(slots=True)
class EncodedRequest:
    """Holds a request of Evaluate.

    Attributes:
        header: Bytes of an `EvaluateHeader`; it names no program if there is a `spec`.
        contents: Contents of the tensors that are no blobs, in the order of the header.
        blobs: Blobs that the request names, by SHA-256.
        spec: The program, if the request has an inline one. Such requests are sent in the plain form.
        run_timeout_s: Seconds after which a run of the compiled program ends; None: the deadline.
    """

    header: bytes
    contents: list[wire_format.Part]
    blobs: blob_values.Blobs
    spec: program_pb2.ProgramSpec | None = None
    run_timeout_s: float | None = None

    def set_spec(self, spec: program_pb2.ProgramSpec, blobs: blob_values.Blobs) -> None:
        """Makes the request one of an inline program. `blobs`: those that the program names."""
        self.spec = spec
        self.blobs = {**blobs, **self.blobs}

    def parts(self) -> wire_format.Parts:
        """Returns the bytes of the `EvaluateRequest`."""
        if self.spec is not None:
            return self._plain_parts(None, {})
        return _header_parts(self._whole_header(), self.contents)

    def with_own_contents(self) -> Self:
        """Returns the request with copies of its contents, so that the caller may change the arrays."""
        return dataclasses.replace(self, contents=[bytes(content) for content in self.contents])

    def sharable_contents(self) -> dict[int, wire_format.Part]:
        """Returns the contents that may lie in shared memory, by their index."""
        if not any(len(content) >= MIN_LARGE_BYTES for content in self.contents):
            return {}
        tensors = _with_contents(evaluate_pb2.EvaluateHeader.FromString(self.header))
        return {
            index: content
            for index, (tensor, content) in enumerate(zip(tensors, self.contents, strict=True))
            if len(content) >= MIN_LARGE_BYTES and not tensor.content_is_tensor
        }

    def parts_in_memory(self, use: evaluate_pb2.SharedMemoryUse, offsets: Mapping[int, int]) -> wire_format.Parts:
        """Returns the bytes of the `EvaluateRequest` with some of its contents in shared memory.

        Args:
            use: The memory, without the offsets.
            offsets: Offsets of contents in the memory, by their index.
        """
        if self.spec is not None:
            return self._plain_parts(use, offsets)
        header = evaluate_pb2.EvaluateHeader.FromString(self._whole_header())
        tensors = _with_contents(header)
        for index in offsets:
            tensors[index].in_shared_memory = True
        use.offsets.extend(offsets.values())
        others = [content for index, content in enumerate(self.contents) if index not in offsets]
        memory = evaluate_pb2.EvaluateRequest(shared_memory=use).SerializeToString()
        return [*_header_parts(header.SerializeToString(deterministic=True), others), memory]

    def _whole_header(self) -> bytes:
        return self.header if self.run_timeout_s is None else self.header + _run_timeout(self.run_timeout_s)

    def _plain_parts(
        self, use: evaluate_pb2.SharedMemoryUse | None, offsets: Mapping[int, int]
    ) -> list[wire_format.Part]:
        header = evaluate_pb2.EvaluateHeader.FromString(self._whole_header())
        others = {field.name: value for field, value in header.ListFields() if field.name not in TENSOR_FIELDS}
        request = evaluate_pb2.EvaluateRequest(shared_memory=use, **others)
        parts: list[wire_format.Part] = [request.SerializeToString()]
        if self.spec is not None:
            parts += wire_format.wrapped(_SPEC, [self.spec.SerializeToString()])
        contents = iter(enumerate(self.contents))
        for field in TENSOR_FIELDS:
            for tensor in getattr(header, field):
                index, content = (-1, b"") if tensor.blob_sha256 else next(contents)
                parts += _plain_tensor(_FIELDS[field].number, tensor, content, offsets.get(index))
        return parts


@dataclasses.dataclass(slots=True)
class EncodedForward:
    """Holds a request of a forward run. ttl_s: seconds that the server keeps it; None: the server's default."""

    evaluate: EncodedRequest
    ttl_s: float | None

    def parts(self) -> wire_format.Parts:
        """Returns the bytes of the `ForwardRequest`."""
        rest = evaluate_pb2.ForwardRequest()
        if self.ttl_s is not None:
            rest.ttl.FromNanoseconds(int(self.ttl_s * 1e9))
        evaluate = wire_format.wrapped(evaluate_pb2.ForwardRequest.EVALUATE_FIELD_NUMBER, self.evaluate.parts())
        return rest.SerializeToString(), *evaluate


class RequestEncoder:
    """Encodes requests of Evaluate for one graph or program. Safe to share between threads.

    Headers are kept, so that a call with the names, types and shapes of an earlier one only takes a look-up.

    Args:
        graph: The graph or program of the tensors; resolves aliases.
        type_of: Returns the element type of a tensor.
    """

    def __init__(self, graph: GraphLike, type_of: TypeOf) -> None:
        self._graph = graph
        self._type_of = type_of
        self._program = graph.name if isinstance(graph, program_pb2.Program) else ""
        self._headers: dict[tuple[Any, ...], bytes] = {}
        # Dtypes of the arrays that were sent last, by key: an array of this dtype needs no check and no conversion.
        self._dtypes: dict[Any, np.dtype[Any]] = {}

    def encode(
        self,
        tensors: Tensors,
        params: CallParams | None = None,
        *,
        stacked_grad_ys: bool = False,
        derivative: evaluate_pb2.Derivative.ValueType = evaluate_pb2.DERIVATIVE_UNSPECIFIED,
        packing: Packing | None = None,
    ) -> EncodedRequest:
        """Returns the request of a call.

        Args:
            tensors: Values by tensor, by field.
            params: Values of the rules' params by label.
            stacked_grad_ys: Whether the upstream gradients have an additional first axis.
            derivative: Kind of the derivative.
            packing: Packing of the tensors and of the answer.

        Raises:
            GradruleError: A value is not valid.
        """
        found: list[_Described] = []
        contents: list[wire_format.Part] = []
        blobs: blob_values.Blobs = {}
        for field in TENSOR_FIELDS:
            values = tensors.get(field)
            if values is None:
                continue
            for key, value in pairs(values, field):
                # By identity: NumPy says that float64 equals None.
                if type(value) is not np.ndarray or value.dtype is not self._dtypes.get(key):
                    name = name_of_tensor(key, self._graph)
                    value = checked_value(value, name, self._type_of, f"{field}[{name!r}]")
                    if isinstance(value, blob_values.Blob):
                        blobs[value.sha256] = value.data
                        found.append((field, key, value.number, value.shape, 0, 0, value.sha256))
                        continue
                    self._dtypes[key] = value.dtype
                number = tensor_codec.number_of_dtype(value.dtype)
                packed = None if packing is None else pack(number, value, packing)
                if packed is None:
                    found.append((field, key, number, value.shape, 0, 0, ""))
                    contents.append(_content(value, number, field, key))
                else:
                    how = packed.message
                    found.append((field, key, number, value.shape, how.compression, how.content_dtype, ""))
                    contents.append(packed.content)
        request_key = (*found, stacked_grad_ys, derivative, packing)
        header = self._headers.get(request_key)
        if header is None:
            if len(self._headers) >= _MAX_HEADERS:
                self._headers.clear()
                self._dtypes.clear()
            message = evaluate_pb2.EvaluateHeader(
                program=self._program, stacked_grad_ys=stacked_grad_ys, derivative=derivative
            )
            if packing is not None:
                message.answer_packing.CopyFrom(packing.message())
            for tensor in found:
                getattr(message, tensor[0]).append(self._tensor_header(*tensor))
            header = self._headers[request_key] = message.SerializeToString()
        if params is not None:
            message = evaluate_pb2.EvaluateHeader()
            add_params(message, params)
            header += message.SerializeToString(deterministic=True)
        return EncodedRequest(header, contents, blobs)

    def _tensor_header(
        self,
        _field: str,
        key: Any,
        number: int,
        shape: tuple[int, ...],
        compression: tensor_pb2.Compression.ValueType,
        content_dtype: int,
        blob_sha256: str,
    ) -> evaluate_pb2.TensorHeader:
        return evaluate_pb2.TensorHeader(
            name=name_of_tensor(key, self._graph),
            dtype=as_dt(number),
            shape=shape,
            compression=compression,
            content_dtype=as_dt(content_dtype),
            blob_sha256=blob_sha256,
            content_is_tensor=not (blob_sha256 or tensor_codec.is_plain(number)),
        )


def _content(array: tensor_codec.Array, number: int, field: str, key: Any) -> wire_format.Part:
    """Returns an array's bytes: a copy for small arrays, which is faster than a view, and a view for large ones."""
    if not tensor_codec.is_plain(number):
        try:
            return tensor_codec.to_message(array).SerializeToString()
        except ValueError as cause:
            raise InvalidTensorError(f"{field}[{key!r}]: {cause}") from None
    if array.nbytes < MIN_LARGE_BYTES and tensor_codec.is_little_endian(array):
        return array.tobytes()
    return tensor_codec.content_of(array)


def _with_contents(header: evaluate_pb2.EvaluateHeader) -> list[evaluate_pb2.TensorHeader]:
    """Returns the tensors of a header that have an entry in the contents, in their order."""
    return [tensor for field in TENSOR_FIELDS for tensor in getattr(header, field) if not tensor.blob_sha256]


def _header_parts(header: bytes, contents: list[wire_format.Part]) -> wire_format.Parts:
    parts: list[wire_format.Part] = [wire_format.prefix(_HEADER, len(header)), header]
    for content in contents:
        parts += (wire_format.prefix(_CONTENTS, len(content)), content)
    return parts


def _plain_tensor(
    field: int, tensor: evaluate_pb2.TensorHeader, content: wire_format.Part, offset: int | None
) -> wire_format.Parts:
    """Returns the bytes of a field of `NamedTensor`; the content is a part of its own, so that it is not copied.

    Args:
        field: Number of the field.
        tensor: The tensor.
        content: Its content; empty for a blob.
        offset: Offset of the content in shared memory; None: it is sent.
    """
    shape = tensor_codec.shape_message(tensor.shape)
    path: tuple[int, ...] = (_INLINE,)
    if tensor.blob_sha256:
        path = (_BLOB,)
        head = tensor_pb2.BlobTensor(sha256=tensor.blob_sha256, dtype=tensor.dtype, shape=shape).SerializeToString()
    elif offset is not None:
        path = (_SHARED,)
        head = tensor_pb2.SharedMemoryTensor(
            offset=offset, size_bytes=len(content), dtype=tensor.dtype, shape=shape
        ).SerializeToString()
        content = b""
    elif tensor.content_is_tensor:
        head = b""
    elif tensor.compression or tensor.content_dtype:
        path = (_PACKED, _INLINE)
        head = tensor_pb2.PackedTensor(
            dtype=tensor.dtype, shape=shape, content_dtype=tensor.content_dtype, compression=tensor.compression
        ).SerializeToString() + wire_format.prefix(_PACKED_CONTENT, len(content))
    else:
        head = tensor_pb2.Tensor(dtype=tensor.dtype, tensor_shape=shape).SerializeToString()
        head += wire_format.prefix(_CONTENT, len(content))
    for number in (*path, _VALUE):
        head = wire_format.prefix(number, len(head) + len(content)) + head
    name = tensor.name.encode()
    head = wire_format.prefix(_NAME, len(name)) + name + head
    return wire_format.prefix(field, len(head) + len(content)) + head, content


@lru_cache(64)
def _run_timeout(seconds: float) -> bytes:
    timeout = Duration()
    timeout.FromNanoseconds(int(seconds * 1e9))
    return evaluate_pb2.EvaluateHeader(run_timeout=timeout).SerializeToString()
