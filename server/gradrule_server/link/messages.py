"""Builds the messages between front end and engine, and converts errors and call shapes to messages and back.

Payloads come in parts: large bytes, such as the tensors of a call, are not copied into messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradrule.common.wire_format import prefix
from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2, session_pb2, tensor_pb2
from gradrule_server.errors import Finding, GradruleError, NoMemoryLeft, Resource
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import ProgramNotLoaded

_REQUEST = link_pb2.RunRequest.REQUEST_FIELD_NUMBER


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


@dataclass(slots=True, eq=False)
class RunTemplate:
    """Builds the payloads of RUN frames of one program with equal params: only values and times differ.

    Attributes:
        settings: Bytes of a `RunRequest` with params and blob folder.
    """

    settings: bytes
    _head: bytes = field(default=b"", init=False)
    _size: int = field(default=-1, init=False)
    _prefix: bytes = field(default=b"", init=False)

    @classmethod
    def create(cls, params: Iterable[link_pb2.ParamSetting], blob_folder: str) -> RunTemplate:
        """Returns a template. `blob_folder`: as in `RunRequest`."""
        return cls(link_pb2.RunRequest(params=params, blob_folder=blob_folder).SerializeToString())

    def set_key(self, key: str) -> None:
        """Sets the program's key in the engine that runs the next calls."""
        self._head = self.settings + link_pb2.RunRequest(key=key).SerializeToString()

    def payload(self, received_ns: int, values: bytes) -> Sequence[bytes]:
        """Returns the payload for one call.

        Args:
            received_ns: When the call was received, CLOCK_MONOTONIC.
            values: Bytes of an `EvaluateRequest` with the call's tensors.
        """
        if self._size != len(values):
            self._size, self._prefix = len(values), prefix(_REQUEST, len(values))
        return self._head, link_pb2.RunRequest(received_ns=received_ns).SerializeToString(), self._prefix, values


def forward_payload(run: Sequence[bytes], handle: str) -> Sequence[bytes]:
    """Returns the payload of a FORWARD frame. `run`: a `RunRequest`. `handle`: name of the tensors that are kept."""
    rest = link_pb2.ForwardRequest(handle=handle).SerializeToString()
    return *_field(link_pb2.ForwardRequest.RUN_FIELD_NUMBER, run), rest


def pull_back_payload(handle: str, received_ns: int, request: bytes, blob_folder: str) -> Sequence[bytes]:
    """Returns the payload of a PULL_BACK frame. `request`: bytes of a `gradrule.v1.PullBackRequest`."""
    rest = link_pb2.PullBackRequest(handle=handle, received_ns=received_ns, blob_folder=blob_folder)
    return rest.SerializeToString(), *_field(link_pb2.PullBackRequest.REQUEST_FIELD_NUMBER, (request,))


def session_payload(
    session: str,
    action: Sequence[bytes],
    *,
    max_bytes: int,
    max_bytes_setting: str,
    blob_folder: str,
    deadline_ns: int,
) -> Sequence[bytes]:
    """Returns the payload of a SESSION frame; see `SessionRequest`.

    Args:
        session: Name of the session.
        action: The result of `session_run`, `session_assign` or `session_read`.
        max_bytes: Most bytes that the session may have.
        max_bytes_setting: The flag of the setting that limits `max_bytes`.
        blob_folder: Folder of the caller's blobs.
        deadline_ns: Time after which the action changes nothing, CLOCK_MONOTONIC.
    """
    head = link_pb2.SessionRequest(
        session=session,
        max_bytes=max_bytes,
        max_bytes_setting=max_bytes_setting,
        blob_folder=blob_folder,
        deadline_ns=deadline_ns,
    )
    return head.SerializeToString(), *action


def session_assign(variables: Iterable[link_pb2.BoundVariable], *, opens: bool) -> Sequence[bytes]:
    """Returns the part of a `SessionRequest` that sets variables. `opens`: whether it starts the session."""
    assign = link_pb2.SessionAssign(variables=variables, opens=opens)
    return (link_pb2.SessionRequest(assign=assign).SerializeToString(),)


def session_read(names: Iterable[str], packing: tensor_pb2.Packing | None, *, optimizer_state: bool) -> Sequence[bytes]:
    """Returns the part of a `SessionRequest` that reads variables, and the optimizer's state if requested.

    `packing`: how values are encoded.
    """
    read = link_pb2.SessionRead(variables=names, packing=packing, optimizer_state=optimizer_state)
    return (link_pb2.SessionRequest(read=read).SerializeToString(),)


def session_restore(
    state: session_pb2.OptimizerState, variables: Iterable[str], slots: Iterable[link_pb2.BoundVariable]
) -> Sequence[bytes]:
    """Returns the part of a `SessionRequest` that creates the optimizer. `slots`: the checked slots of the state."""
    restore = link_pb2.SessionRestore(optimizer=state.optimizer, step=state.step, variables=variables, slots=slots)
    return (link_pb2.SessionRequest(restore=restore).SerializeToString(),)


def session_run(
    run: Sequence[bytes],
    store: Iterable[str],
    optimizer: session_pb2.Optimizer | None,
    handle: str,
    available_bytes: tuple[int, str],
    loss: str,
) -> Sequence[bytes]:
    """Returns the part of a `SessionRequest` that runs a program.

    Args:
        run: A `RunRequest`.
        store: Variables that are set to the outputs.
        optimizer: Applies the gradients to their variables; None: the answer holds the gradients.
        handle: Name under which the engine keeps the tensors of a forward run; empty: it keeps none.
        available_bytes: Most bytes that it may keep under that name, and the flag of the setting that limits them.
        loss: With an optimizer, the output that must have one element.
    """
    rest = link_pb2.SessionRun(store=store, optimizer=optimizer, handle=handle, loss=loss)
    if handle:
        rest.max_kept_bytes, rest.max_kept_bytes_setting = available_bytes
    whole = (*_field(link_pb2.SessionRun.RUN_FIELD_NUMBER, run), rest.SerializeToString())
    return _field(link_pb2.SessionRequest.RUN_FIELD_NUMBER, whole)


def _field(number: int, parts: Sequence[bytes]) -> Sequence[bytes]:
    """Returns parts of a message as one field of another message."""
    return prefix(number, sum(map(len, parts))), *parts
