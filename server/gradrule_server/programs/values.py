"""Values of variables: checked against the graph, named by their content, made ready for an engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradrule import _tensors
from gradrule._dtypes import name_of
from gradrule.v1 import errors_pb2, program_pb2, tensor_pb2
from gradrule_server import graphs
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.link.v1 import link_pb2
from gradrule_server.registry.blobs import BlobStore, check_name, not_found


@dataclass(frozen=True, slots=True)
class Values:
    """Values of the variables that a program needs.

    `content`: name, type, shape and hash of each, for the program's digest: equal whichever way the bytes came.
    """

    bound: list[link_pb2.BoundVariable] = field(default_factory=list)
    content: list[list[object]] = field(default_factory=list)
    blobs: tuple[str, ...] = ()


def bind(spec: program_pb2.ProgramSpec, expanded: graphs.Expanded, store: BlobStore, limits: graphs.Limits) -> Values:
    """The values that are needed; all that are given are checked.

    Raises FEED_DTYPE, FEED_SHAPE, INVALID_TENSOR, LIMIT_EXCEEDED, BLOB_NOT_FOUND.
    """
    findings: list[Finding] = []
    needed = {item.name for item in expanded.inputs}
    gone = store.missing(_blobs(spec.variables))
    if gone:
        raise not_found(gone)
    bound: list[link_pb2.BoundVariable] = []
    content: list[list[object]] = []
    for number, item in enumerate(spec.variables):
        variable = expanded.variables[item.name]
        field_name = f"spec.variables[{number}]"
        fault = value_fault(item.value, variable, store, limits)
        if fault is not None:
            reason, text = fault
            findings.append(Finding(reason, f"The value of variable {item.name!r} {text}.", item.name, field_name))
        elif variable.name in needed:
            tensor = tensor_pb2.TensorSpec(name=variable.name, dtype=variable.dtype, shape=variable.shape)
            bound.append(link_pb2.BoundVariable(spec=tensor, value=item.value))
            content.append([variable.name, *_content(item.value)])
    if findings:
        raise GradruleError(findings)
    return Values(bound, sorted(content, key=lambda entry: str(entry[0])), tuple(_blobs(bound)))


def _blobs(values: Iterable[tensor_pb2.NamedTensor | link_pb2.BoundVariable]) -> list[str]:
    return list(dict.fromkeys(item.value.blob.sha256 for item in values if item.value.HasField("blob")))


def value_fault(
    value: tensor_pb2.TensorSource,
    variable: graphs.GraphInput | tensor_pb2.TensorSpec,
    store: BlobStore,
    limits: graphs.Limits,
) -> tuple[errors_pb2.ErrorReason.ValueType, str] | None:
    """What is wrong with the value of a variable, as a clause (`has …`); None: nothing."""
    source = value.WhichOneof("source")
    if source is None:
        return errors_pb2.ERROR_REASON_INVALID_TENSOR, "holds no tensor"
    if source == "inline":
        dtype, shape = value.inline.dtype, value.inline.tensor_shape
        fault = graphs.tensor_fault(value.inline, limits)
    else:
        dtype, shape = value.blob.dtype, value.blob.shape
        fault = blob_fault(value.blob, store.size(value.blob.sha256), limits)
    if fault is not None:
        return fault
    if dtype != variable.dtype:
        return errors_pb2.ERROR_REASON_FEED_DTYPE, f"is {name_of(dtype)}, but the variable is {name_of(variable.dtype)}"
    got, wanted = _tensors.shape_tuple(shape), _tensors.shape_tuple(variable.shape)
    if wanted is not None and not _fits(got or (), wanted):
        return errors_pb2.ERROR_REASON_FEED_SHAPE, f"has shape {_text(got or ())}, but the variable has {_text(wanted)}"
    return None


def blob_fault(
    blob: tensor_pb2.BlobTensor, size: int, limits: graphs.Limits
) -> tuple[errors_pb2.ErrorReason.ValueType, str] | None:
    """What is wrong with a tensor that is a blob of so many bytes, as a clause (`has …`); None: nothing."""
    fault = graphs.shape_fault(blob.shape, limits, known=True)
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


def _content(value: tensor_pb2.TensorSource) -> list[object]:
    if value.HasField("blob"):
        dtype, shape, digest = value.blob.dtype, value.blob.shape, value.blob.sha256
        check_name(digest)
    else:
        dtype, shape = value.inline.dtype, value.inline.tensor_shape
        array = _tensors.to_numpy(value.inline)
        # Strings have no fixed size; what tells them apart is the message.
        data = value.inline.SerializeToString(deterministic=True) if array.dtype.hasobject else array.tobytes()
        digest = hashlib.sha256(data).hexdigest()
    return [dtype, [dim.size for dim in shape.dim], digest]


def _fits(got: Iterable[int | None], wanted: tuple[int | None, ...]) -> bool:
    sizes = tuple(got)
    return len(sizes) == len(wanted) and all(b is None or a == b for a, b in zip(sizes, wanted, strict=True))


def _text(shape: Iterable[int | None]) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"
