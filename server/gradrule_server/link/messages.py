"""Builds the messages between front end and engine, and converts errors and call shapes to messages and back.

Payloads come in parts: large bytes, such as the tensors of a call, are not copied into messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule_server.errors import Finding, GradruleError, NoMemoryLeft, Resource
from gradrule_server.link.framing import Buffer
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import ProgramNotLoaded

# The length of the message, and when the front end read the request.
_PREFIX = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a program depends on of a call's structure, but not of its values.

    Names are canonical: `y`, not `y:0`.

    Attributes:
        feeds: Names of the fed tensors.
        grad_ys: Names of the tensors whose upstream gradient is given.
        derivative: What is computed.
        tangents: Names of the xs that have a tangent; empty: all have, if the derivative takes tangents.
        vectors: The same for vectors.
        stacked_grad_ys: Whether grad_ys have one more dimension, along which they are stacked.
        session: Whether variables have the values of a session, and the graph may assign to them.
        split: Whether only the forward part runs now, and is pulled back later with grad_ys that are given then.
    """

    feeds: frozenset[str] = frozenset()
    grad_ys: frozenset[str] = frozenset()
    derivative: evaluate_pb2.Derivative.ValueType = evaluate_pb2.DERIVATIVE_UNSPECIFIED
    tangents: frozenset[str] = frozenset()
    vectors: frozenset[str] = frozenset()
    stacked_grad_ys: bool = False
    session: bool = False
    split: bool = False


def canonical(name: str) -> str:
    """Returns the canonical name of a tensor: `y:0` and `y` are the same tensor."""
    return name.removesuffix(":0")


def shape_message(call: CallShape) -> link_pb2.CallShape:
    """Returns a call shape as a message."""
    return link_pb2.CallShape(
        feeds=call.feeds,
        grad_ys=call.grad_ys,
        derivative=call.derivative,
        tangents=call.tangents,
        vectors=call.vectors,
        stacked_grad_ys=call.stacked_grad_ys,
        session=call.session,
        split=call.split,
    )


def read_call_shape(message: link_pb2.CallShape) -> CallShape:
    """Returns the call shape that a message holds."""
    return CallShape(
        feeds=frozenset(message.feeds),
        grad_ys=frozenset(message.grad_ys),
        derivative=message.derivative,
        tangents=frozenset(message.tangents),
        vectors=frozenset(message.vectors),
        stacked_grad_ys=message.stacked_grad_ys,
        session=message.session,
        split=message.split,
    )


def sampled_gradient(index: int) -> str:
    """Returns the name under which a call that samples a rule fetches the gradient of an input."""
    return f"sampled_gradient_{index}"


def finding_message(finding: Finding) -> program_pb2.Finding:
    """Returns a finding as a message of the API, which the link uses as well."""
    return program_pb2.Finding(reason=finding.reason, message=finding.message, node=finding.node, field=finding.field)


def fault_message(cause: GradruleError) -> link_pb2.Fault:
    """Returns an error as an engine sends it."""
    resources = cause.resources or ([] if cause.resource is None else [cause.resource])
    return link_pb2.Fault(
        reason=cause.reason,
        message=cause.message,
        findings=[finding_message(item) for item in cause.findings],
        not_loaded=isinstance(cause, ProgramNotLoaded),
        no_memory=isinstance(cause, NoMemoryLeft),
        holds_nothing=isinstance(cause, NoMemoryLeft) and cause.holds_nothing,
        retry_after_s=cause.retry_after_s,
        resources=[link_pb2.FaultResource(type=item.type, name=item.name) for item in resources],
    )


def read_fault(payload: bytes) -> GradruleError:
    """Parses the error that an engine sent. Raises `DecodeError` or `ValueError` if it is malformed."""
    fault = link_pb2.Fault.FromString(payload)
    return error_from_fault(fault)


def error_from_fault(fault: link_pb2.Fault) -> GradruleError:
    """Returns the error that a message holds. Raises `ValueError` if it names an unknown reason."""
    for reason in (fault.reason, *(item.reason for item in fault.findings)):
        # Raises `ValueError` for a number that is no reason.
        errors_pb2.ErrorReason.Name(reason)
    findings: Sequence[Finding] = [
        Finding(item.reason, item.message, item.node, item.field) for item in fault.findings
    ] or [Finding(fault.reason, fault.message)]
    if fault.not_loaded:
        return ProgramNotLoaded(findings)
    if fault.no_memory:
        return NoMemoryLeft(findings, holds_nothing=fault.holds_nothing)
    resources = [Resource(item.type, item.name) for item in fault.resources]
    return GradruleError(
        findings,
        fault.retry_after_s if fault.HasField("retry_after_s") else None,
        resources[0] if len(resources) == 1 else None,
        resources if len(resources) > 1 else (),
    )


def compile_payload(request: bytes, key: str) -> Sequence[bytes]:
    """Returns the payload of a COMPILE frame. `request`: bytes of a `CompileRequest`, whose key is replaced."""
    # Concatenating messages merges them; the last key is used.
    return request, link_pb2.CompileRequest(key=key).SerializeToString()


def describe_only(request: bytes) -> bytes:
    """Returns a `CompileRequest`, as bytes, after which the engine describes the program and does not keep it."""
    return request + link_pb2.CompileRequest(describe_only=True).SerializeToString()


def unload_payload(key: str) -> bytes:
    """Returns the payload of an UNLOAD frame. `key`: the program's key in the engine."""
    return link_pb2.UnloadRequest(key=key).SerializeToString()


def release_payload(handle: str) -> bytes:
    """Returns the payload of a RELEASE or END_SESSION frame. `handle`: name of the handle or session."""
    return link_pb2.ReleaseRequest(handle=handle).SerializeToString()


def with_values(message: bytes, received_ns: int, values: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the payload of a RUN, FORWARD, PULL_BACK or SESSION frame.

    Args:
        message: Bytes of the message of the frame.
        received_ns: When the front end read the request, CLOCK_MONOTONIC.
        values: Bytes of an `EvaluateRequest` with a header, in parts. Empty for an action of a session without tensors.
    """
    return _PREFIX.pack(len(message), received_ns) + message, *values


class ReceivedRequest(NamedTuple):
    """The payload of a frame that `with_values` wrote.

    Attributes:
        message: Bytes of the message of the frame.
        received_ns: When the front end read the request, CLOCK_MONOTONIC.
        values: Bytes of an `EvaluateRequest` with a header.
    """

    message: bytes
    received_ns: int
    values: Buffer


def split_values(payload: Buffer) -> ReceivedRequest:
    """Reads the payload of a RUN, FORWARD, PULL_BACK or SESSION frame. Raises `ValueError` if it is malformed."""
    try:
        size, received_ns = _PREFIX.unpack_from(payload)
    except struct.error as cause:
        raise ValueError(f"no message with values: {cause}") from None
    end = _PREFIX.size + size
    return ReceivedRequest(bytes(payload[_PREFIX.size : end]), received_ns, payload[end:])
