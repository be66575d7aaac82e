"""Makes the requests of forward handles and decodes their answers, for both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from gradrule._messages import request_messages
from gradrule._messages.call_arguments import CallParams, Feeds, GradYs
from gradrule._messages.program_calls import ProgramBase
from gradrule._messages.rpc_calls import Call
from gradrule._messages.transfer_options import Transfer
from gradrule._results import call_results
from gradrule._results.answers import Answer, AnswerReader, labeller, read_gradients
from gradrule.common import wire_format
from gradrule.common.tensor_codec import Array
from gradrule.errors import GradruleError, HandleExpiredError, InternalError, InvalidParamError, UnavailableError
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
        *,
        repeat_if_lost: bool = True,
    ) -> None:
        if ttl is not None and not ttl > 0:
            raise InvalidParamError(f"ttl is in seconds, more than 0, not {ttl!r}")
        self._program, self._message, self._groups = program, program.message, program.groups
        self._transfer = transfer
        self._repeats = repeat_if_lost
        call = program._call(feeds, params, None, transfer=transfer)
        evaluate = [call.request.SerializeToString(), *(part for parts in call.large for part in parts)]
        self._request, self._blobs = evaluate_pb2.ForwardRequest(), call.blobs
        if repeat_if_lost:
            # Copied, because the request may be sent again after the caller changed the arrays.
            evaluate = [b"".join(evaluate)]
        self._large: Sequence[wire_format.Parts] = (
            wire_format.wrapped(evaluate_pb2.ForwardRequest.EVALUATE_FIELD_NUMBER, evaluate),
        )
        if ttl is not None:
            self._request.ttl.FromNanoseconds(int(ttl * 1e9))
        self._handle = ""
        self._held = evaluate_pb2.ForwardResponse()
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
        reader = self._program._answer_reader(self._transfer)

        def decode(answer: tuple[Answer, evaluate_pb2.ForwardResponse]) -> None:
            evaluated, self._held = answer
            self._result = self._program._decode(evaluated)
            self._handle = self._held.handle
            if not self._repeats:
                # The request holds views of the caller's arrays.
                self._large = ()

        return Call(
            "forward",
            self._request,
            lambda data: _read(data, reader),
            decode,
            self._blobs,
            on_stream=True,
            large=self._large,
        )

    def _must_repeat(self, lost: GradruleError | None) -> None:
        """Raises `HandleExpiredError` if the forward run must not be repeated.

        lost: why the server does not have it; None: it was closed.
        """
        self._handle = ""
        if self._repeats and self._program.repeatable:
            return
        why = "it was closed" if lost is None else lost.message
        reason = (
            "this handle was made with repeat_if_lost=False"
            if self._program.repeatable
            else "the program draws random numbers, and another run would draw others"
        )
        raise HandleExpiredError(
            f"the server no longer has the forward run ({why}). It is not repeated: {reason}. Run forward again and "
            "use the new outputs"
        ) from lost

    def _pull_back(self, grad_ys: GradYs | None, *, stacked: bool, close: bool) -> evaluate_pb2.PullBackRequest:
        values = request_messages.program_grad_ys(grad_ys, self._message)
        type_of = request_messages.types_of_specs(self._message.ys)
        request = request_messages.evaluate_request(None, type_of, grad_ys=values)
        pull_back = evaluate_pb2.PullBackRequest(grad_ys=request.grad_ys, stacked_grad_ys=stacked, close_handle=close)
        self._transfer.prepare(pull_back)
        return pull_back

    def _pulled_back(self, request: evaluate_pb2.PullBackRequest) -> Call[Gradients]:
        request.handle = self._handle

        label_of, keep_bfloat16 = labeller(self._message.aliases), self._transfer.keep_wire_dtype

        def decode(answer: Answer) -> Gradients:
            if request.close_handle:
                self._handle = ""
            return self._program._decode(answer).gradients

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
