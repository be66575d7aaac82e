"""Values of variables: checked against the variable's type and shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from gradrule import _tensors
from gradrule._dtypes import name_of
from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule_server.policy.bounds import Bounds
from gradrule_server.policy.tensors import shape_fault, tensor_fault


class Variable(Protocol):
    """What a value must fit."""

    @property
    def dtype(self) -> tensor_pb2.Dt.ValueType: ...

    @property
    def shape(self) -> tensor_pb2.TensorShape: ...


def value_fault(
    value: tensor_pb2.TensorSource,
    variable: Variable,
    blob_size: Callable[[str], int],
    bounds: Bounds,
) -> tuple[errors_pb2.ErrorReason.ValueType, str] | None:
    """What is wrong with the value of a variable, as a clause (`has …`); None: nothing."""
    source = value.WhichOneof("source")
    if source not in ("inline", "blob"):
        return errors_pb2.ERROR_REASON_INVALID_TENSOR, "holds no tensor, inline or as a blob"
    if source == "inline":
        dtype, shape = value.inline.dtype, value.inline.tensor_shape
        fault = tensor_fault(value.inline, bounds)
    else:
        dtype, shape = value.blob.dtype, value.blob.shape
        fault = blob_fault(value.blob, blob_size(value.blob.sha256), bounds)
    if fault is not None:
        return fault
    if dtype != variable.dtype:
        return errors_pb2.ERROR_REASON_FEED_DTYPE, f"is {name_of(dtype)}, but the variable is {name_of(variable.dtype)}"
    got, wanted = _tensors.shape_tuple(shape), _tensors.shape_tuple(variable.shape)
    if wanted is not None and not _fits(got or (), wanted):
        return errors_pb2.ERROR_REASON_FEED_SHAPE, f"has shape {_text(got or ())}, but the variable has {_text(wanted)}"
    return None


def blob_fault(
    blob: tensor_pb2.BlobTensor, size: int, bounds: Bounds
) -> tuple[errors_pb2.ErrorReason.ValueType, str] | None:
    """What is wrong with a tensor that is a blob of so many bytes, as a clause (`has …`); None: nothing."""
    fault = shape_fault(blob.shape, bounds, known=True)
    if fault is not None:
        return fault
    try:
        dtype = _tensors.numpy_dtype(blob.dtype)
    except ValueError as cause:
        return errors_pb2.ERROR_REASON_INVALID_TENSOR, f"cannot be a blob: {cause}"
    if dtype.hasobject:
        return errors_pb2.ERROR_REASON_INVALID_TENSOR, "is a blob of strings; strings travel inline"
    shape = [dim.size for dim in blob.shape.dim]
    wanted = math.prod(shape) * dtype.itemsize
    if size != wanted:
        what = f"{name_of(blob.dtype)} of shape {shape}"
        return errors_pb2.ERROR_REASON_INVALID_TENSOR, f"is a blob of {size} bytes, but {what} takes {wanted}"
    return None


def _fits(got: Iterable[int | None], wanted: tuple[int | None, ...]) -> bool:
    sizes = tuple(got)
    return len(sizes) == len(wanted) and all(b is None or a == b for a, b in zip(sizes, wanted, strict=True))


def _text(shape: Iterable[int | None]) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"
