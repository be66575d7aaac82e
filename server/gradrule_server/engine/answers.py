"""Tensors into the messages of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from gradrule.common import tensor_codec
from gradrule.common.tensor_packing import Packing, pack
from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.engine.built import Built
from gradrule_server.engine.question import DENSE, SPARSE, UNCONNECTED, WIDTHS

_JACOBIANS = (evaluate_pb2.DERIVATIVE_JACOBIAN, evaluate_pb2.DERIVATIVE_BATCH_JACOBIAN)


def write_derivatives(
    response: evaluate_pb2.EvaluateResponse, built: Built, tensors: Sequence[tf.Tensor], packing: Packing | None
) -> None:
    """All derivatives of a program, whose tensors come in the order of its layout."""
    rest = iter(tensors)
    for names, form in built.layout:
        values = [next(rest) for _ in range(WIDTHS[form])]
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
    """One gradient in its form."""
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
    """A value of any type, packed where that is asked and makes it smaller."""
    # A scalar string comes as bytes, not as an array.
    array = np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None)
    packed = None if packing is None else pack(tensor.dtype.as_datatype_enum, array, packing)
    if packed is not None:
        message.ParseFromString(b"".join(packed))
        return
    tensor_codec.write_message(message, array)
    if tensor.dtype.is_quantized:
        # In NumPy such values are plain integers.
        message.dtype = tensor.dtype.as_datatype_enum
