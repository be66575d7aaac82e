"""Errors on their way between the processes, and findings as messages."""

from __future__ import annotations

from collections.abc import Sequence

from gradrule.v1 import program_pb2
from gradrule_server.errors import Finding, GradruleError, Resource
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import ProgramNotLoaded


def finding_message(finding: Finding) -> program_pb2.Finding:
    """A finding as the API and the link tell it."""
    return program_pb2.Finding(reason=finding.reason, message=finding.message, node=finding.node, field=finding.field)


def fault_message(cause: GradruleError) -> link_pb2.Fault:
    """An error as an engine sends it."""
    return link_pb2.Fault(
        reason=cause.reason,
        message=cause.message,
        findings=[finding_message(item) for item in cause.findings],
        not_loaded=isinstance(cause, ProgramNotLoaded),
        retry_after_s=cause.retry_after_s,
        resources=[link_pb2.FaultResource(type=item.type, name=item.name) for item in _resources(cause)],
    )


def error_of(fault: link_pb2.Fault) -> GradruleError:
    """The error that an engine sent."""
    findings = [Finding(item.reason, item.message, item.node, item.field) for item in fault.findings] or [
        Finding(fault.reason, fault.message)
    ]
    if fault.not_loaded:
        return ProgramNotLoaded(findings)
    resources = [Resource(item.type, item.name) for item in fault.resources]
    return GradruleError(
        findings,
        fault.retry_after_s if fault.HasField("retry_after_s") else None,
        resources[0] if len(resources) == 1 else None,
        resources if len(resources) > 1 else (),
    )


def _resources(cause: GradruleError) -> Sequence[Resource]:
    return cause.resources or ([] if cause.resource is None else [cause.resource])
