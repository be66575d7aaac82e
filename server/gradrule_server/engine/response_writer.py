"""Writes answers as parts of their bytes, so that large tensors are not copied into messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

# `gradrule.common.tensor_packing` imports it at first use, when the process may no longer open files.
import zstandard  # noqa: F401

from gradrule.common import tensor_codec
from gradrule.common.dtypes import as_dt
from gradrule.common.tensor_packing import Packing, pack
from gradrule.common.wire_format import Parts, prefix, wrapped
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.engine.checks import MAX_ANSWER_BYTES
from gradrule_server.engine.client_memory import AnswerArea
from gradrule_server.engine.derivatives import DENSE, SPARSE, UNCONNECTED, DerivativeLayout, split_tensors
from gradrule_server.engine.program import as_array
from gradrule_server.errors import error
from gradrule_server.link.framing import Buffer

_EvaluateResponse = evaluate_pb2.EvaluateResponse
_JACOBIANS = (evaluate_pb2.DERIVATIVE_JACOBIAN, evaluate_pb2.DERIVATIVE_BATCH_JACOBIAN)
# Smaller tensors are copied: a copy costs less than one more part of the answer.
_LEAST_VIEWED_BYTES = 4096
# Size of a varint that holds a negative number; integers of less than a byte are written as varints.
_NARROW_INT_BYTES = 10

Result: TypeAlias = "tuple[int, Any]"
"""The element type (`Dt`) of a tensor, and its values: an array, or a NumPy scalar or bytes for one of rank 0."""


def results_of(tensors: Iterable[tf.Tensor]) -> list[Result]:
    """Returns tensors as results."""
    return [(tensor.dtype.base_dtype.as_datatype_enum, as_array(tensor)) for tensor in tensors]


class ResponseWriter:
    """Writes one answer.

    Args:
        packing: How tensors are packed; None: they are not.
        answer_area: Takes large tensors that are not packed, as far as they fit; None: there is none.
    """

    def __init__(self, packing: Packing | None = None, answer_area: AnswerArea | None = None) -> None:
        self._packing = packing
        self._area = answer_area if packing is None else None
        self._size = 0
        self.parts: list[Buffer] = []
        """The bytes of the message, in parts; large tensors are views of the results."""

    def add_outputs(
        self, names: Iterable[str], results: Iterable[Result], field: int = _EvaluateResponse.OUTPUTS_FIELD_NUMBER
    ) -> None:
        """Adds named tensors. `field`: their field in the message. Raises MESSAGE_TOO_LARGE."""
        for name, result in zip(names, results, strict=True):
            self._add_named(field, name, [result])

    def add_derivatives(
        self, kind: evaluate_pb2.Derivative.ValueType, layout: DerivativeLayout, results: Iterable[Result]
    ) -> None:
        """Adds derivatives of a kind to an `EvaluateResponse`. Raises MESSAGE_TOO_LARGE."""
        if kind == evaluate_pb2.DERIVATIVE_JVP:
            for (name,), _, values in split_tensors(layout, results):
                self._add_named(_EvaluateResponse.OUTPUT_TANGENTS_FIELD_NUMBER, name, values)
        elif kind in _JACOBIANS:
            block = evaluate_pb2.JacobianBlock
            for (y, x), form, values in split_tensors(layout, results):
                head = _text(block.Y_FIELD_NUMBER, y) + _text(block.X_FIELD_NUMBER, x)
                self._add_derivative(_EvaluateResponse.JACOBIANS_FIELD_NUMBER, head, block, form, values)
        else:
            self.add_gradients(layout, results, _EvaluateResponse.GRADIENTS_FIELD_NUMBER)

    def add_gradients(self, layout: DerivativeLayout, results: Iterable[Result], field: int) -> None:
        """Adds gradients. `field`: their field in the message. Raises MESSAGE_TOO_LARGE."""
        for (x,), form, values in split_tensors(layout, results):
            head = _text(evaluate_pb2.Gradient.X_FIELD_NUMBER, x)
            self._add_derivative(field, head, evaluate_pb2.Gradient, form, values)

    def _add_named(self, field: int, name: str, results: Sequence[Result]) -> None:
        """Adds a `NamedTensor`, without a value if there is no result."""
        message, source = tensor_pb2.NamedTensor, tensor_pb2.TensorSource
        parts: Parts = (_text(message.NAME_FIELD_NUMBER, name),)
        for result in results:
            value = self._place(source, source.INLINE_TENSOR_FIELD_NUMBER, result)
            parts = (*parts, *wrapped(message.VALUE_FIELD_NUMBER, value))
        self.parts += wrapped(field, parts)

    def _add_derivative(self, field: int, head: bytes, message: Any, form: str, results: Sequence[Result]) -> None:
        """Adds a gradient or a block of a Jacobian. `head`: its names."""
        if form == DENSE:
            value = self._place(message, message.DENSE_FIELD_NUMBER, results[0])
        elif form == SPARSE:
            sparse = tensor_pb2.SparseTensor
            numbers = (sparse.VALUES_FIELD_NUMBER, sparse.INDICES_FIELD_NUMBER, sparse.DENSE_SHAPE_FIELD_NUMBER)
            tensors = [wrapped(number, self._tensor(*result)) for number, result in zip(numbers, results, strict=True)]
            value = wrapped(message.SPARSE_FIELD_NUMBER, [part for tensor in tensors for part in tensor])
        else:
            is_unconnected = form == UNCONNECTED
            number = message.UNCONNECTED_FIELD_NUMBER if is_unconnected else message.NOT_DIFFERENTIABLE_FIELD_NUMBER
            value = wrapped(number, ())
        self.parts += wrapped(field, (head, *value))

    def _place(self, message: Any, number: int, result: Result) -> Parts:
        """Returns a field of a message with a tensor, or with a reference to it if it was written to shared memory."""
        dtype, array = result
        if self._area is not None and tensor_codec.is_plain(dtype):
            content = tensor_codec.content_of(np.asarray(array))
            offset = self._area.place(content)
            if offset is not None:
                shared = tensor_pb2.SharedMemoryTensor(
                    offset=offset,
                    size_bytes=len(content),
                    shape=tensor_codec.shape_message(array.shape),
                    dtype=as_dt(dtype),
                )
                return (_field(message.SHARED_MEMORY_FIELD_NUMBER, shared.SerializeToString()),)
        return wrapped(number, self._tensor(dtype, array))

    def _tensor(self, dtype: int, array: Any) -> Parts:
        """Returns a `Tensor`. Raises MESSAGE_TOO_LARGE."""
        is_plain = tensor_codec.is_plain(dtype)
        self._size += array.nbytes if is_plain else _listed_size(dtype, array)
        if self._size > MAX_ANSWER_BYTES:
            raise error(
                errors_pb2.ERROR_REASON_MESSAGE_TOO_LARGE,
                f"the answer's tensors take {self._size} bytes or more; a message holds at most {MAX_ANSWER_BYTES}",
                field="fetches",
            )
        if not is_plain:
            message = tensor_codec.to_message(np.asarray(array, tensor_codec.numpy_dtype(dtype)), dtype)
            return (message.SerializeToString(),)
        if self._packing is not None:
            packed = pack(dtype, np.asarray(array), self._packing)
            if packed is not None:
                return packed.head, packed.content
        is_small = array.nbytes < _LEAST_VIEWED_BYTES
        content: Buffer = array.tobytes() if is_small else tensor_codec.content_of(array)
        return _tensor_head(dtype, array.shape, len(content)), content


@lru_cache(1024)
def _tensor_head(dtype: int, shape: tuple[int, ...], size: int) -> bytes:
    """Returns a `Tensor` without its content. `size`: of the content, bytes."""
    message = tensor_pb2.Tensor(dtype=as_dt(dtype), tensor_shape=tensor_codec.shape_message(shape))
    return message.SerializeToString() + prefix(tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER, size)


def _listed_size(dtype: int, array: Any) -> int:
    """Returns an upper bound on the bytes that a tensor of strings or narrow integers takes in a message."""
    if dtype == tensor_pb2.DT_STRING:
        return sum(map(len, np.asarray(array, object).flat))
    return int(array.size) * _NARROW_INT_BYTES


def _text(number: int, text: str) -> bytes:
    return _field(number, text.encode())


def _field(number: int, content: bytes) -> bytes:
    """Returns a length-delimited field."""
    return prefix(number, len(content)) + content
