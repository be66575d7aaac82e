"""Makes the requests of forward handles and decodes their answers, for both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from gradrule._builder.graph_sources import GraphLike
from gradrule._messages import request_messages
from gradrule._messages.call_arguments import CallParams, Feeds, GradYs
from gradrule._messages.feed_values import TypeOf
from gradrule._messages.program_calls import ProgramBase
from gradrule._messages.request_encoding import EncodedForward, EncodedRequest
from gradrule._messages.rpc_calls import Call
from gradrule._messages.transfer_options import Transfer
from gradrule._results import call_results
from gradrule._results.answers import Answer, AnswerReader, labeller, read_gradients
from gradrule.common import wire_format
from gradrule.common.tensor_codec import Array
from gradrule.errors import (
    GradruleError,
    HandleExpiredError,
    InternalError,
    InvalidParamError,
    SessionLostError,
    UnavailableError,
)
from gradrule.v1 import evaluate_pb2

R = TypeVar("R")

Gradients = Mapping[str, Any]
"""By x: an array, a `Sparse`, or None if no y depends on x."""

# Errors that mean that the server no longer has the handle, or that its stream or session has ended.
LOST = (HandleExpiredError, UnavailableError, SessionLostError)


class Forward(NamedTuple):
    """Describes a forward run.

    Attributes:
        call: The call of Evaluate that the run is a part of.
        graph: Resolves the names of upstream gradients.
        ys: Names of the ys.
        type_of: Returns the element type of a y.
        aliases: Names of tensors by alias.
        groups: Groups of the xs; None if the xs were given as a list.
        why_unique: Why another run, if the server has lost this one, gives other gradients; empty if it does not.
        in_session: Whether a session runs it.
    """

    call: Call[Any]
    graph: GraphLike
    ys: Sequence[str]
    type_of: TypeOf
    aliases: Mapping[str, str]
    groups: call_results.Groups
    why_unique: str
    in_session: bool = False


def of_program(
    program: ProgramBase,
    feeds: Feeds | None,
    params: CallParams | None,
    transfer: Transfer,
    *,
    repeat_if_lost: bool = True,
) -> Forward:
    """Returns a forward run of a program."""
    message = program.message
    call = program._call(feeds, params, None, transfer=transfer)
    ys, type_of = [spec.name for spec in message.ys], request_messages.types_of_specs(message.ys)
    why_unique = "" if repeat_if_lost else "the handle was made with repeat_if_lost=False"
    if not program.repeatable:
        why_unique = "the program draws random numbers, and another run would draw others"
    return Forward(call, message, ys, type_of, message.aliases, program.groups, why_unique)


class ForwardBase:
    """Builds the requests of a forward run that the server keeps; base class of both forward handles."""

    def __init__(self, forward: Forward, ttl: float | None, transfer: Transfer) -> None:
        if ttl is not None and not ttl > 0:
            raise InvalidParamError(f"ttl is in seconds, more than 0, not {ttl!r}")
        self._what, self._transfer = forward, transfer
        call = forward.call
        assert isinstance(call.request, EncodedRequest)
        # Copied if the request may be sent again after the caller changed the arrays.
        evaluate = call.request if forward.why_unique else call.request.with_own_contents()
        self._request, self._blobs = EncodedForward(evaluate, ttl), call.blobs
        self._handle = ""
        self._held = evaluate_pb2.ForwardResponse()
        self._reader = call.reader or AnswerReader(labeller(forward.aliases), keep_bfloat16=transfer.keep_wire_dtype)
        self._details = call_results.ProgramDetails(forward.aliases)
        self._result: call_results.Result | None = None

    @property
    def outputs(self) -> Mapping[str, Array]:
        """Arrays of the last forward run, by fetch."""
        return {} if self._result is None else self._result.outputs

    @property
    def bytes(self) -> int:
        """Bytes that the server keeps for the run on the device."""
        return self._held.size_bytes

    @property
    def is_open(self) -> bool:
        """Whether the run was neither closed nor found to be lost."""
        return bool(self._handle)

    def _forward(self) -> Call[None]:
        def decode(answer: tuple[Answer, evaluate_pb2.ForwardResponse]) -> None:
            evaluated, self._held = answer
            self._result = call_results.Result(evaluated, self._details)
            self._handle = self._held.handle
            if self._what.why_unique:
                # The request holds views of the caller's arrays, and is not sent again.
                self._request.evaluate.contents = []

        return Call(
            "forward",
            self._request,
            lambda data: _read(data, self._reader),
            decode,
            self._blobs,
            on_stream=True,
            may_compile=True,
        )

    def _forget_lost_run(self, lost: GradruleError | None) -> None:
        """Raises `HandleExpiredError` if the forward run must not be repeated; in a session, the error of the call.

        lost: why the server does not have it; None: it was closed.
        """
        self._handle = ""
        why_unique = self._what.why_unique
        if not why_unique:
            return
        if lost is not None and self._what.in_session:
            raise lost
        raise HandleExpiredError(
            f"the server no longer has the forward run ({'it was closed' if lost is None else lost.message}). "
            f"It is not repeated: {why_unique}. Run forward again and use the new outputs"
        ) from lost

    def _pull_back(self, grad_ys: GradYs | None, *, stacked: bool, close: bool) -> evaluate_pb2.PullBackRequest:
        values = request_messages.upstream_values(grad_ys, self._what.ys, self._what.graph)
        pull_back = evaluate_pb2.PullBackRequest(stacked_grad_ys=stacked, close_handle=close)
        request_messages.add_named_tensors(pull_back, "grad_ys", values, self._what.type_of, None)
        if self._transfer.packing is not None:
            self._transfer.pack(pull_back)
            pull_back.answer_packing.CopyFrom(self._transfer.packing.message())
        return pull_back

    def _pulled_back(self, request: evaluate_pb2.PullBackRequest) -> Call[Gradients]:
        request.handle = self._handle

        label_of, keep_bfloat16 = labeller(self._what.aliases), self._transfer.keep_wire_dtype

        def decode(answer: Answer) -> Gradients:
            if request.close_handle:
                self._handle = ""
            return call_results.Result(answer, self._details, self._what.groups).gradients

        return Call(
            "pull_back",
            request,
            lambda data: read_gradients(data, label_of, keep_bfloat16=keep_bfloat16),
            decode,
            on_stream=True,
        )

    def _closing(self) -> Call[None]:
        request = evaluate_pb2.CloseHandleRequest(handle=self._handle)
        self._handle = ""
        answer = evaluate_pb2.CloseHandleResponse.FromString
        return Call("close_handle", request, answer, lambda _: None, on_stream=True)


def _read(data: bytes, reader: AnswerReader) -> tuple[Answer, evaluate_pb2.ForwardResponse]:
    """Returns the evaluation in the bytes of a `ForwardResponse`, and the other fields."""
    evaluated, others, before = b"", [], 0
    try:
        for number, start, end in wire_format.fields(data, 0, len(data)):
            if number == evaluate_pb2.ForwardResponse.EVALUATE_FIELD_NUMBER:
                evaluated = data[start:end]
            else:
                others.append(data[before:end])
            before = end
        held = evaluate_pb2.ForwardResponse.FromString(b"".join(others))
    except (DecodeError, wire_format.MalformedError) as cause:
        raise InternalError(f"the server's answer cannot be read: {cause}") from None
    return reader.read(evaluated), held
