"""Reads and checks the requests of a session: the variables that they name, their values, and the specs of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from gradrule.common import wire_format
from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2, session_pb2, tensor_pb2
from gradrule_server.errors import Finding, GradruleError, did_you_mean, error
from gradrule_server.link.messages import canonical
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits, check_parsed_size, value_fault
from gradrule_server.registry.blobs import BlobStore

# Fields of a spec that a session has since its start, by number.
_OF_SESSION = {
    field.number: name
    for name, field in program_pb2.ProgramSpec.DESCRIPTOR.fields_by_name.items()
    if name in ("graph", "overrides", "variables", "no_gradient")
}


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

    async def check_values(self, given: Sequence[tensor_pb2.NamedTensor], field: str) -> list[link_pb2.BoundVariable]:
        """Checks values against their variables. Raises `GradruleError` with all findings."""
        async with self._blobs.acquired([item.value.blob.sha256 for item in given if item.value.HasField("blob")]):
            return await asyncio.to_thread(self._check_values, given, field)

    def _check_values(self, given: Sequence[tensor_pb2.NamedTensor], field: str) -> list[link_pb2.BoundVariable]:
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

    async def check_slots(self, state: session_pb2.OptimizerState, field: str) -> list[link_pb2.BoundVariable]:
        """Checks the values of an optimizer's slots; the engine checks names and shapes."""
        blobs = [item.value.blob.sha256 for item in state.slots if item.value.HasField("blob")]
        async with self._blobs.acquired(blobs):
            return await asyncio.to_thread(self._check_slots, state, field)

    def _check_slots(self, state: session_pb2.OptimizerState, field: str) -> list[link_pb2.BoundVariable]:
        findings: list[Finding] = []
        bound = []
        for number, item in enumerate(state.slots):
            tensor = item.value.blob if item.value.HasField("blob") else item.value.inline_tensor
            shape = tensor_pb2.TensorShape(unknown_rank=True)
            spec = tensor_pb2.TensorSpec(name=item.name, dtype=tensor.dtype, shape=shape)
            fault = value_fault(item.value, spec, self._blobs.size, self._limits)
            if fault is not None:
                where = f"{field}.slots[{number}]"
                findings.append(Finding(fault[0], f"the value of slot {item.name!r} {fault[1]}", item.name, where))
            bound.append(link_pb2.BoundVariable(spec=spec, value=item.value))
        if findings:
            raise GradruleError(findings)
        return bound


def read_spec(spec: bytes | None, limits: Limits) -> program_pb2.ProgramSpec:
    """Returns the spec of a call in a session, which has no graph. Raises MALFORMED_REQUEST.

    `spec`: Bytes of the `ProgramSpec`; None: the call has none.
    """
    if spec is None:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            "a call in a session has a spec with fetches and a derivative, and names no stored program",
            field="target",
        )
    try:
        # Only compile workers parse graphs.
        given = {number for number, _, _ in wire_format.fields(spec, 0, len(spec))} & _OF_SESSION.keys()
        if not given:
            check_parsed_size(spec, program_pb2.ProgramSpec, limits, field="spec")
            return program_pb2.ProgramSpec.FromString(spec)
    except (DecodeError, wire_format.MalformedError) as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the bytes are not a valid gradrule.v1.ProgramSpec", field="spec"
        ) from cause
    name = _OF_SESSION[min(given)]
    raise error(
        errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
        f"the spec of a call in a session has {name}, which the session has since its start: omit it",
        field=f"spec.{name}",
    )


def apply_settings(header: evaluate_pb2.EvaluateHeader, settings: link_pb2.RawSessionRequest) -> None:
    """Applies the settings of the message that holds a call."""
    if settings.HasField("answer_packing"):
        header.answer_packing.CopyFrom(settings.answer_packing)
    if settings.HasField("run_timeout"):
        header.run_timeout.CopyFrom(settings.run_timeout)


def blob_name(graph: bytes) -> str:
    """Returns the blob of a `GraphSource`, empty if it has none. Raises MALFORMED_REQUEST."""
    try:
        return link_pb2.RawGraphSource.FromString(graph).blob_sha256
    except DecodeError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            "the bytes are not a valid gradrule.v1.GraphSource",
            field="start.graph",
        ) from cause
