"""Makes the requests of forward handles and decodes their answers, for both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from gradrule._builder.graph_sources import GraphLike
from gradrule._messages import request_messages
from gradrule._messages.call_arguments import CallParams, Feeds, GradYs
from gradrule._messages.program_calls import ProgramBase
from gradrule._messages.request_messages import TypeOf
from gradrule._messages.rpc_calls import Call
from gradrule._messages.transfer_options import Transfer
from gradrule._results import call_results
from gradrule.common import wire_format
from gradrule.common.tensor_codec import Array
from gradrule.errors import HandleExpiredError, InvalidParamError, SessionLostError, UnavailableError
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
        may_repeat: Whether another run, if the server has lost this one, gives the same gradients.
    """

    call: Call[Any]
    graph: GraphLike
    ys: Sequence[str]
    type_of: TypeOf
    aliases: Mapping[str, str]
    groups: call_results.Groups
    may_repeat: bool


def of_program(program: ProgramBase, feeds: Feeds | None, params: CallParams | None, transfer: Transfer) -> Forward:
    """Returns a forward run of a program."""
    message = program.message
    call = program._call(feeds, params, None, transfer=transfer)
    ys, type_of = [spec.name for spec in message.ys], request_messages.types_of_specs(message.ys)
    return Forward(call, message, ys, type_of, message.aliases, program.groups, may_repeat=True)


class ForwardBase:
    """Builds the requests of a forward run that the server keeps; base class of both forward handles."""

    def __init__(self, forward: Forward, ttl: float | None, transfer: Transfer) -> None:
        if ttl is not None and not ttl > 0:
            raise InvalidParamError(f"ttl is in seconds, more than 0, not {ttl!r}")
        self._what, self._transfer = forward, transfer
        call = forward.call
        evaluate = [call.request.SerializeToString(), *(part for parts in call.large for part in parts)]
        self._request, self._blobs = evaluate_pb2.ForwardRequest(), call.blobs
        # Copied, because the request may be sent again after the caller changed the arrays.
        self._large = (wire_format.wrapped(evaluate_pb2.ForwardRequest.EVALUATE_FIELD_NUMBER, [b"".join(evaluate)]),)
        if ttl is not None:
            self._request.ttl.FromNanoseconds(int(ttl * 1e9))
        self._handle = ""
        self._held = evaluate_pb2.ForwardResponse()

    @property
    def outputs(self) -> Mapping[str, Array]:
        """Arrays of the last forward run, by fetch."""
        answer = self._held.evaluate.SerializeToString()
        return call_results.result(answer, aliases=self._what.aliases).outputs

    @property
    def bytes(self) -> int:
        """Bytes that the server keeps for the run on the device."""
        return self._held.size_bytes

    def _forward(self) -> Call[None]:
        def decode(answer: evaluate_pb2.ForwardResponse) -> None:
            self._transfer.unpack(answer)
            self._held, self._handle = answer, answer.handle

        answer = evaluate_pb2.ForwardResponse.FromString
        large = self._large
        return Call(
            "forward", self._request, answer, decode, self._blobs, on_stream=True, large=large, may_compile=True
        )

    def _pull_back(self, grad_ys: GradYs | None, stacked: bool) -> evaluate_pb2.PullBackRequest:
        values = request_messages.upstream_values(grad_ys, self._what.ys, self._what.graph)
        request = request_messages.evaluate_request(None, self._what.type_of, grad_ys=values)
        return evaluate_pb2.PullBackRequest(grad_ys=request.grad_ys, stacked_grad_ys=stacked)

    def _pulled_back(self, request: evaluate_pb2.PullBackRequest) -> Call[Gradients]:
        request.handle = self._handle

        def decode(answer: evaluate_pb2.PullBackResponse) -> Gradients:
            gradients = call_results.gradients_by_x(answer.gradients, self._what.aliases)
            return call_results.regrouped(gradients, self._what.groups)

        call = Call("pull_back", request, evaluate_pb2.PullBackResponse.FromString, decode, on_stream=True)
        return self._transfer.applied(call)

    def _closing(self) -> Call[None]:
        request = evaluate_pb2.CloseHandleRequest(handle=self._handle)
        self._handle = ""
        answer = evaluate_pb2.CloseHandleResponse.FromString
        return Call("close_handle", request, answer, lambda _: None, on_stream=True)
