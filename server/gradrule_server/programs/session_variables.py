"""Describes the variables of a session: their names and sizes, and checks of values that callers give."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule_server.errors import Finding, GradruleError, did_you_mean, error
from gradrule_server.link.messages import canonical
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits, value_fault
from gradrule_server.registry.blobs import BlobStore


class SessionVariables:
    """The variables of one session's graph.

    Args:
        variables: The variables, which a compile worker has found.
        blobs: The tenant's blobs.
        limits: The limits on values.
    """

    def __init__(self, variables: Sequence[link_pb2.GraphVariable], blobs: BlobStore, limits: Limits) -> None:
        self.items = variables
        self.names = {name: item.names[0] for item in variables for name in item.names}
        """The name of the variable, by name and alias."""
        self._blobs = blobs
        self._limits = limits

    def find(self, text: str, field: str) -> str:
        """Returns the name of the variable with this name or alias. Raises UNKNOWN_TENSOR."""
        found = self.names.get(canonical(text))
        if found is None:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_TENSOR,
                f"the graph has no variable {text!r}.{did_you_mean(text, self.names)}",
                field=field,
            )
        return found

    def known_bytes(self, names: Collection[str] | None = None) -> int:
        """Returns the bytes of the variables with known shapes. `names`: of these variables; None: of all."""
        return sum(
            math.prod(max(0, dim.size) for dim in item.shape.dim) * tensor_codec.numpy_dtype(item.dtype).itemsize
            for item in self.items
            if (names is None or item.names[0] in names) and item.differentiable
        )

    def check_values(self, given: Sequence[tensor_pb2.NamedTensor], field: str) -> list[link_pb2.BoundVariable]:
        """Checks values against their variables. Raises `GradruleError` with all findings. Blocks."""
        self._blobs.verify([item.value.blob.sha256 for item in given if item.value.HasField("blob")])
        by_name = {item.names[0]: item for item in self.items}
        findings: list[Finding] = []
        bound: dict[str, link_pb2.BoundVariable] = {}
        for number, item in enumerate(given):
            where = f"{field}[{number}]"
            name = self.find(item.name, where)
            variable = by_name[name]
            spec = tensor_pb2.TensorSpec(name=name, dtype=variable.dtype, shape=variable.shape)
            fault = value_fault(item.value, spec, self._blobs.size, self._limits)
            if fault is None and name in bound:
                fault = errors_pb2.ERROR_REASON_UNKNOWN_FEED, "is given twice"
            if fault is not None:
                findings.append(Finding(fault[0], f"the value of variable {item.name!r} {fault[1]}", item.name, where))
            bound[name] = link_pb2.BoundVariable(spec=spec, value=item.value)
        if findings:
            raise GradruleError(findings)
        return list(bound.values())
