"""Translates requests of header and contents to the plain form, with protobuf's own messages only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradrule._messages.error_status import message_parts
from gradrule._messages.request_encoding import EncodedRequest
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, tensor_pb2

FIELDS = ("feeds", "grad_ys", "tangents", "vectors")
OTHERS = ("derivative", "stacked_grad_ys")
MESSAGES = ("batching", "answer_packing", "run_timeout")


def sent(request: Any) -> evaluate_pb2.EvaluateRequest:
    """Returns the message that a request is sent as."""
    parts, size = message_parts(request)
    data = b"".join(parts)
    assert len(data) == size
    return evaluate_pb2.EvaluateRequest.FromString(data)


def plain(request: EncodedRequest) -> evaluate_pb2.EvaluateRequest:
    """Returns the plain form of a request, without an inline program."""
    return translated(evaluate_pb2.EvaluateRequest(header=request.header, contents=map(bytes, request.contents)))


def translated(message: evaluate_pb2.EvaluateRequest) -> evaluate_pb2.EvaluateRequest:
    """Returns a message of header and contents in the plain form."""
    header = evaluate_pb2.EvaluateHeader.FromString(message.header)
    found = evaluate_pb2.EvaluateRequest()
    if header.program:
        found.program = header.program
    for name in OTHERS:
        setattr(found, name, getattr(header, name))
    for name in MESSAGES:
        if header.HasField(name):
            getattr(found, name).CopyFrom(getattr(header, name))
    for label, values in header.params.items():
        found.params[label].CopyFrom(values)
    if message.HasField("shared_memory"):
        found.shared_memory.CopyFrom(message.shared_memory)
        found.shared_memory.ClearField("offsets")
    contents, offsets = iter(message.contents), iter(message.shared_memory.offsets)
    for name in FIELDS:
        for tensor in getattr(header, name):
            source = _source(tensor, contents, offsets)
            getattr(found, name).append(tensor_pb2.NamedTensor(name=tensor.name, value=source))
    assert not [*contents, *offsets]
    return found


def _source(
    tensor: evaluate_pb2.TensorHeader, contents: Iterator[bytes], offsets: Iterator[int]
) -> tensor_pb2.TensorSource:
    shape = tensor_codec.shape_message(tensor.shape)
    if tensor.blob_sha256:
        return tensor_pb2.TensorSource(
            blob=tensor_pb2.BlobTensor(sha256=tensor.blob_sha256, dtype=tensor.dtype, shape=shape)
        )
    if tensor.in_shared_memory:
        size = tensor_codec.numpy_dtype(tensor.dtype).itemsize
        for dimension in tensor.shape:
            size *= dimension
        return tensor_pb2.TensorSource(
            shared_memory=tensor_pb2.SharedMemoryTensor(
                offset=next(offsets), size_bytes=size, dtype=tensor.dtype, shape=shape
            )
        )
    content = next(contents)
    inline = tensor_pb2.Tensor(dtype=tensor.dtype, tensor_shape=shape, tensor_content=content)
    if tensor.content_is_tensor:
        inline = tensor_pb2.Tensor.FromString(content)
        assert (inline.dtype, [dim.size for dim in inline.tensor_shape.dim]) == (tensor.dtype, [*tensor.shape])
    elif tensor.compression or tensor.content_dtype:
        inline = tensor_pb2.Tensor(
            packed=tensor_pb2.PackedTensor(
                dtype=tensor.dtype,
                shape=shape,
                content_dtype=tensor.content_dtype,
                compression=tensor.compression,
                content=content,
            )
        )
    return tensor_pb2.TensorSource(inline_tensor=inline)
