"""Reads the requests of calls: the plain form is translated to the one with a header, which engines read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.call_parts import MAX_FIELDS, encode_parts, find_parts, mixed_forms_error
from gradrule_server.link.messages import CallShape, canonical
from gradrule_server.link.v1 import link_pb2

MessageT = TypeVar("MessageT", bound=Message)


class ReadMessage(Protocol):
    """Parses bytes as a message, which may take a while; see `RequestPipeline.parse`."""

    def __call__(self, request_type: type[MessageT], raw: bytes) -> Awaitable[MessageT]: ...


MAX_TENSORS = MAX_FIELDS - 2
"""Most tensors of a call in either form; engines get a header and `shared_memory` besides."""

_TENSOR_FIELDS = {"feeds": "feed", "grad_ys": "grad_y", "tangents": "tangent", "vectors": "vector"}
# An output number with leading zeros: the engine knows the tensor by another name.
_PADDED_OUTPUT = re.compile(r"(.*):0+([0-9]+)")


@dataclass(slots=True, eq=False)
class EvaluateCall:
    """A call in the form that engines read, with what the front end needs to know about it.

    Attributes:
        header: Everything but the tensors' elements, the program of the call and the client's memory.
        contents: The elements, as in `EvaluateRequest.contents`.
        shared_memory: The client's memory that the call uses; None: none.
        spec: Bytes of the `ProgramSpec` of an inline program; None: the header names a stored program.
        raw: The bytes of a request that came with a header; `contents` is empty then.
    """

    header: evaluate_pb2.EvaluateHeader
    contents: list[bytes] = field(default_factory=list)
    shared_memory: evaluate_pb2.SharedMemoryUse | None = None
    spec: bytes | None = None
    raw: bytes | None = None

    @classmethod
    async def read(cls, raw: bytes, parse: ReadMessage) -> EvaluateCall:
        """Returns the call of an `EvaluateRequest` in either form."""
        parts = find_parts(raw)
        if parts is None:
            return translate(await parse(link_pb2.RawEvaluateRequest, raw))
        header = await parse(evaluate_pb2.EvaluateHeader, parts.header)
        return cls(header, shared_memory=parts.shared_memory, raw=raw)

    @property
    def header_bytes(self) -> bytes:
        """The bytes of the header, which are equal for equal calls."""
        return self.header.SerializeToString(deterministic=True)

    @property
    def values(self) -> Sequence[bytes]:
        """The bytes of an `EvaluateRequest` with a header, in parts."""
        if self.raw is not None:
            return (self.raw,)
        return encode_parts(self.header_bytes, self.contents, self.shared_memory)

    @property
    def shape(self) -> CallShape:
        """What of the call its program depends on. Raises UNKNOWN_FEED for repeated or invalid names."""
        header = self.header
        _check_count(sum(len(getattr(header, name)) for name in _TENSOR_FIELDS))
        return CallShape(
            _names(header.feeds, "feeds"),
            _names(header.grad_ys, "grad_ys"),
            header.derivative,
            _names(header.tangents, "tangents"),
            _names(header.vectors, "vectors"),
            header.stacked_grad_ys,
        )

    @property
    def blobs(self) -> list[str]:
        """The blobs that hold values of the call."""
        header = self.header
        given = (*header.feeds, *header.grad_ys, *header.tangents, *header.vectors)
        return [item.blob_sha256 for item in given if item.blob_sha256]


def translate(request: link_pb2.RawEvaluateRequest) -> EvaluateCall:
    """Returns the call of a request in the plain form. Raises MALFORMED_REQUEST or INVALID_TENSOR."""
    if request.HasField("header") or request.HasField("contents"):
        raise mixed_forms_error()
    _check_count(sum(len(getattr(request, name)) for name in _TENSOR_FIELDS))
    header = evaluate_pb2.EvaluateHeader(
        program=request.program,
        params=request.params,
        derivative=request.derivative,
        stacked_grad_ys=request.stacked_grad_ys,
        batching=request.batching if request.HasField("batching") else None,
        answer_packing=request.answer_packing if request.HasField("answer_packing") else None,
        run_timeout=request.run_timeout if request.HasField("run_timeout") else None,
    )
    call = EvaluateCall(header)
    call.spec = request.spec if request.HasField("spec") else None
    if request.HasField("shared_memory"):
        use = request.shared_memory
        # Without its offsets, which the plain form does not use.
        call.shared_memory = evaluate_pb2.SharedMemoryUse(
            memory=use.memory,
            request_bytes=use.request_bytes,
            answer_offset=use.answer_offset,
            answer_bytes=use.answer_bytes,
        )
    for name in _TENSOR_FIELDS:
        _translate_tensors(getattr(request, name), name, call)
    return call


def translate_pull_back(request: evaluate_pb2.PullBackRequest) -> EvaluateCall:
    """Returns the upstream gradients of a pull-back as a call. Raises INVALID_TENSOR or LIMIT_EXCEEDED."""
    _check_count(len(request.grad_ys))
    call = EvaluateCall(
        evaluate_pb2.EvaluateHeader(
            stacked_grad_ys=request.stacked_grad_ys,
            answer_packing=request.answer_packing if request.HasField("answer_packing") else None,
        )
    )
    _translate_tensors(request.grad_ys, "grad_ys", call)
    return call


def _translate_tensors(given: Iterable[tensor_pb2.NamedTensor], field: str, call: EvaluateCall) -> None:
    """Adds tensors to a call: their headers to a field of its header, and their contents."""
    headers = getattr(call.header, field)
    for item in given:
        header, source = headers.add(name=item.name), item.value.WhichOneof("source")
        if source == "inline_tensor":
            call.contents.append(_translate_inline(item.value.inline_tensor, header))
        elif source == "blob":
            blob = item.value.blob
            header.blob_sha256, header.dtype = blob.sha256, blob.dtype
            header.shape.extend(_sizes(blob.shape, f"{_TENSOR_FIELDS[field]} {item.name!r}", field))
        elif source == "shared_memory":
            _translate_shared(item, header, field, call)
        else:
            message = f"{_TENSOR_FIELDS[field]} {item.name!r} holds no tensor"
            raise error(errors_pb2.ERROR_REASON_INVALID_TENSOR, message, node=item.name, field=field)


def _translate_inline(tensor: tensor_pb2.Tensor, header: evaluate_pb2.TensorHeader) -> bytes:
    """Returns the content of a tensor, and sets the fields of its header."""
    if tensor.HasField("packed"):
        packed = tensor.packed
        header.dtype, header.compression, header.content_dtype = packed.dtype, packed.compression, packed.content_dtype
        header.shape.extend(dim.size for dim in packed.shape.dim)
        return packed.content
    header.dtype = tensor.dtype
    header.shape.extend(dim.size for dim in tensor.tensor_shape.dim)
    content = tensor.tensor_content
    if content and not tensor.tensor_shape.unknown_rank:
        return content
    # Only engines convert other forms, since the tensor can be much larger than its message.
    header.content_is_tensor = True
    return tensor.SerializeToString()


def _translate_shared(
    item: tensor_pb2.NamedTensor, header: evaluate_pb2.TensorHeader, field: str, call: EvaluateCall
) -> None:
    """Adds the offset of a tensor in shared memory to the call, and sets the fields of its header."""
    shared, where = item.value.shared_memory, f"{field}[{item.name!r}]"
    if call.shared_memory is None:
        message = f"{_TENSOR_FIELDS[field]} {item.name!r} lies in shared memory, which this request does not use"
        raise error(errors_pb2.ERROR_REASON_INVALID_TENSOR, message, node=item.name, field=field)
    sizes = _sizes(shared.shape, where, field)
    try:
        wanted = math.prod(sizes) * tensor_codec.numpy_dtype(shared.dtype).itemsize
    except ValueError as cause:
        raise _invalid(f"{where}: {cause}", field) from cause
    if not tensor_codec.is_plain(shared.dtype):
        raise _invalid(f"{where} is {dtype_name(shared.dtype)}; such tensors travel inline", field)
    if shared.size_bytes != wanted:
        raise _invalid(
            f"{where} has {shared.size_bytes} bytes in shared memory, but {dtype_name(shared.dtype)} of shape "
            f"{list(sizes)} takes {wanted}",
            field,
        )
    header.dtype, header.in_shared_memory = shared.dtype, True
    header.shape.extend(sizes)
    call.shared_memory.offsets.append(shared.offset)


def _sizes(shape: tensor_pb2.TensorShape, where: str, field: str) -> tuple[int, ...]:
    try:
        return tensor_codec.known_shape(shape)
    except ValueError as cause:
        raise _invalid(f"{where}: {cause}", field) from cause


def _check_count(tensors: int) -> None:
    """Raises LIMIT_EXCEEDED for more tensors than engines read: the loop handles each of them."""
    if tensors > MAX_TENSORS:
        raise error(
            errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
            f"the call has {tensors} tensors; {MAX_TENSORS} are the most",
            field="feeds",
        )


def _names(given: Iterable[evaluate_pb2.TensorHeader], field: str) -> frozenset[str]:
    """Returns canonical names. Raises UNKNOWN_FEED for repeated or invalid ones."""
    names = [canonical(item.name) for item in given]
    unique = frozenset(names)
    if len(names) != len(unique):
        [(twice, _)] = Counter(names).most_common(1)
        raise error(errors_pb2.ERROR_REASON_UNKNOWN_FEED, f"{field} name {twice!r} twice", node=twice, field=field)
    for name in unique:
        padded = _PADDED_OUTPUT.fullmatch(name)
        if padded is not None:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_FEED,
                f"{field} name {name!r}, which is not a valid tensor name; did you mean '{padded[1]}:{padded[2]}'?",
                field=field,
            )
    return unique


def _invalid(message: str, field: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_INVALID_TENSOR, message, field=field)
