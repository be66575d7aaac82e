"""Checks the values of variables against the graph and binds them for an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from gradrule.common import tensor_codec
from gradrule.v1 import program_pb2, tensor_pb2
from gradrule_server import graphs
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits, check_blob_name, missing_blobs, value_fault


class Blobs(Protocol):
    """Reads the caller's blobs by SHA-256."""

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the missing blobs, each once. Raises MALFORMED_REQUEST for a name that is not a hash."""
        ...

    def size(self, name: str) -> int:
        """Returns the size of a blob in bytes. Raises BLOB_NOT_FOUND."""
        ...

    def read(self, name: str) -> bytes:
        """Returns the bytes of a blob. Raises BLOB_NOT_FOUND."""
        ...


@dataclass(frozen=True, slots=True)
class Values:
    """The values of the variables that a program needs.

    `content`: name, type, shape and hash of each value, for the program's digest. It is equal for a value in a blob and
    the same value inline.
    """

    bound: list[link_pb2.BoundVariable] = field(default_factory=list)
    content: list[list[object]] = field(default_factory=list)
    blobs: tuple[str, ...] = ()


def bind(spec: program_pb2.ProgramSpec, expanded: graphs.Expanded, store: Blobs, limits: Limits) -> Values:
    """Checks all given values and returns those that the program needs.

    Raises FEED_DTYPE, FEED_SHAPE, INVALID_TENSOR, LIMIT_EXCEEDED, BLOB_NOT_FOUND.
    """
    findings: list[Finding] = []
    needed = {item.name for item in expanded.inputs}
    gone = store.missing(_blobs(spec.variables))
    if gone:
        raise missing_blobs(gone)
    bound: list[link_pb2.BoundVariable] = []
    content: list[list[object]] = []
    for number, item in enumerate(spec.variables):
        variable = expanded.variables[item.name]
        field_name = f"spec.variables[{number}]"
        fault = value_fault(item.value, variable, store.size, limits)
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


def _content(value: tensor_pb2.TensorSource) -> list[object]:
    if value.HasField("blob"):
        dtype, shape, digest = value.blob.dtype, value.blob.shape, value.blob.sha256
        check_blob_name(digest)
    else:
        dtype, shape = value.inline_tensor.dtype, value.inline_tensor.tensor_shape
        array = tensor_codec.to_numpy(value.inline_tensor)
        # Hash the message of a string array, because its memory holds pointers.
        data = value.inline_tensor.SerializeToString(deterministic=True) if array.dtype.hasobject else array.tobytes()
        digest = hashlib.sha256(data).hexdigest()
    return [dtype, [dim.size for dim in shape.dim], digest]
