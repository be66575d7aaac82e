"""Makes the requests of forward handles and decodes their answers, for both clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from gradrule._messages import request_messages
from gradrule._messages.call_arguments import CallParams, Feeds, GradYs
from gradrule._messages.program_calls import ProgramBase
from gradrule._messages.rpc_calls import Call
from gradrule._messages.transfer_options import Transfer
from gradrule._results import call_results
from gradrule.common import wire_format
from gradrule.common.tensor_codec import Array
from gradrule.errors import HandleExpiredError, InvalidParamError, UnavailableError
from gradrule.v1 import evaluate_pb2

R = TypeVar("R")

Gradients = Mapping[str, Any]
"""By x: an array, a `Sparse`, or None if no y depends on x."""

# Errors that mean that the server no longer has the handle, or that the stream of the handle has ended.
LOST = (HandleExpiredError, UnavailableError)


class ForwardBase:
    """Builds the requests of a forward run that the server keeps; base class of both forward handles."""

    def __init__(
        self,
        program: ProgramBase,
        feeds: Feeds | None,
        params: CallParams | None,
        ttl: float | None,
        transfer: Transfer,
    ) -> None:
        if ttl is not None and not ttl > 0:
            raise InvalidParamError(f"ttl is in seconds, more than 0, not {ttl!r}")
        self._message, self._groups = program.message, program.groups
        self._transfer = transfer
        call = program._call(feeds, params, None, transfer=transfer)
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
        return call_results.result(answer, aliases=self._message.aliases).outputs

    @property
    def bytes(self) -> int:
        """Bytes that the server keeps for the run on the device."""
        return self._held.size_bytes

    def _forward(self) -> Call[None]:
        def decode(answer: evaluate_pb2.ForwardResponse) -> None:
            self._transfer.unpack(answer)
            self._held, self._handle = answer, answer.handle

        answer = evaluate_pb2.ForwardResponse.FromString
        return Call("forward", self._request, answer, decode, self._blobs, on_stream=True, large=self._large)

    def _pull_back(self, grad_ys: GradYs | None, stacked: bool) -> evaluate_pb2.PullBackRequest:
        values = request_messages.program_grad_ys(grad_ys, self._message)
        type_of = request_messages.types_of_specs(self._message.ys)
        request = request_messages.evaluate_request(None, type_of, grad_ys=values)
        return evaluate_pb2.PullBackRequest(grad_ys=request.grad_ys, stacked_grad_ys=stacked)

    def _pulled_back(self, request: evaluate_pb2.PullBackRequest) -> Call[Gradients]:
        request.handle = self._handle

        def decode(answer: evaluate_pb2.PullBackResponse) -> Gradients:
            return call_results.regrouped(
                call_results.gradients_by_x(answer.gradients, self._message.aliases), self._groups
            )

        call = Call("pull_back", request, evaluate_pb2.PullBackResponse.FromString, decode, on_stream=True)
        return self._transfer.applied(call)

    def _closing(self) -> Call[None]:
        request = evaluate_pb2.CloseHandleRequest(handle=self._handle)
        self._handle = ""
        answer = evaluate_pb2.CloseHandleResponse.FromString
        return Call("close_handle", request, answer, lambda _: None, on_stream=True)
