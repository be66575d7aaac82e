"""Writes the calls of one program as bytes.

What a tensor needs besides its content (name, type, shape, lengths) is the same in every call that gives a tensor of
that type and shape, so it is made once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradrule._builder import blob_values
from gradrule._messages import request_messages
from gradrule.common import fast_paths, large_tensors, tensor_codec, wire_format
from gradrule.common.tensor_packing import Packing, pack
from gradrule.v1 import evaluate_pb2, program_pb2

_FEEDS = evaluate_pb2.EvaluateRequest.FEEDS_FIELD_NUMBER
_GRAD_YS = evaluate_pb2.EvaluateRequest.GRAD_YS_FIELD_NUMBER
_STACKED = evaluate_pb2.EvaluateRequest(stacked_grad_ys=True).SerializeToString()
_FIELD_NAMES = {_FEEDS: "feeds", _GRAD_YS: "grad_ys"}
# Programs that are fed ever new shapes must not fill the memory.
_MAX_HEADS = 1024


class ProgramEncoder:
    """Writes the calls of a program. Safe to share between threads."""

    def __init__(self, program: program_pb2.Program) -> None:
        self._program = program
        self._type_of = request_messages.types_of_specs([*program.inputs, *program.ys])
        self._heads: dict[Any, bytes] = {}
        self._keeps_heads = fast_paths.is_enabled("request-heads")

    def encode(
        self,
        feeds: request_messages.Feeds | None,
        params: request_messages.CallParams | None = None,
        grad_ys: request_messages.GradYs | None = None,
        stacked_grad_ys: bool = False,
        packing: Packing | None = None,
    ) -> tuple[list[wire_format.Part], blob_values.Blobs]:
        """Returns the bytes of an `EvaluateRequest` without its target, and the blobs that it names.

        packing: packing of the feeds and of the answer. Raises what `request_messages.evaluate_request` raises.
        """
        parts: list[wire_format.Part] = []
        blobs: blob_values.Blobs = {}
        if feeds is not None:
            for key, value in request_messages.pairs(feeds, "feeds"):
                self._add(parts, blobs, _FEEDS, key, value, packing)
        if grad_ys is not None:
            for y, value in request_messages.program_grad_ys(grad_ys, self._program).items():
                self._add(parts, blobs, _GRAD_YS, y, value, packing)
        if params is not None:
            parts.append(request_messages.evaluate_request(None, self._type_of, params=params).SerializeToString())
        if stacked_grad_ys:
            parts.append(_STACKED)
        if packing is not None:
            parts.append(evaluate_pb2.EvaluateRequest(answer_packing=packing.message()).SerializeToString())
        return parts, blobs

    def _add(
        self,
        parts: list[wire_format.Part],
        blobs: blob_values.Blobs,
        field: int,
        key: Any,
        value: Any,
        packing: Packing | None,
    ) -> None:
        if packing is None and type(value) is np.ndarray:
            # An array of a type and shape for which there is a head was checked when the head was made.
            head = self._heads.get((field, key, value.dtype, value.shape))
            if head is not None:
                parts += (head, _content(value))
                return
        name = request_messages.name_of_tensor(key, self._program)
        if isinstance(value, blob_values.Blob):
            parts.append(self._message(field, name, value))
            blobs[value.sha256] = value.data
            return
        where = f"{_FIELD_NAMES[field]}[{name!r}]"
        array = request_messages.array_of(value, self._type_of(name, not request_messages.is_array(value)), where)
        if not (array.nbytes and tensor_codec.has_plain_bytes(array)):
            parts.append(self._message(field, name, array))
            return
        packed = None if packing is None else pack(tensor_codec.number_of_array(array), array, packing)
        if packed is not None:
            parts += (large_tensors.named(field, name, packed.head, len(packed.content)), packed.content)
            return
        head = self._heads.get((field, key, array.dtype, array.shape))
        if head is None:
            head = large_tensors.head(field, name, array)
            if self._keeps_heads and tensor_codec.is_little_endian(array):
                if len(self._heads) >= _MAX_HEADS:
                    self._heads.clear()
                self._heads[field, key, array.dtype, array.shape] = head
        parts += (head, _content(array))

    def _message(self, field: int, name: str, value: Any) -> bytes:
        """Returns the field for a value that is no array of plain bytes: strings, blobs, arrays without elements."""
        request = evaluate_pb2.EvaluateRequest()
        request_messages.add_named_tensor(request, _FIELD_NAMES[field], name, value, self._type_of)
        return request.SerializeToString()


def _content(array: tensor_codec.Array) -> wire_format.Part:
    """Returns an array's bytes: of a small one a copy, which is quicker made than a view, of a large one a view."""
    if array.nbytes < large_tensors.MIN_LARGE_BYTES and tensor_codec.is_little_endian(array):
        return array.tobytes()
    return tensor_codec.content_of(array)
