"""Makes the requests of sessions and decodes their answers, for both clients."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from gradrule import optimizers
from gradrule._builder import blob_values, graph_sources
from gradrule._builder.graph import Graph
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.names import ByName, bare
from gradrule._builder.overrides import Overrides
from gradrule._builder.specs import TensorSpec
from gradrule._builder.variables import Variables
from gradrule._messages import call_arguments, derivatives, request_messages, rpc_calls
from gradrule._messages.call_arguments import CallParams, Feeds, Name, Names, NoGradient, ProgramArguments
from gradrule._messages.error_status import error_from_status_bytes, message_parts, parsed
from gradrule._messages.forward_calls import Forward
from gradrule._messages.rpc_calls import Call
from gradrule._messages.transfer_options import Transfer
from gradrule._progress import SILENT, Progress, Task
from gradrule._results import call_results
from gradrule._results.call_results import Resolution, Timings
from gradrule.common import wire_format
from gradrule.common.tensor_codec import Array, to_numpy
from gradrule.errors import GradruleError, InternalError, InvalidOptimizerError, SessionLostError
from gradrule.optimizers import Optimizer, OptimizerState
from gradrule.v1 import session_pb2
from gradrule.v1.tensor_pb2 import Dt

R = TypeVar("R")

METHOD = "/gradrule.v1.SessionService/RunSession"

_CALL = "call"
_REQUESTS = {
    field.name: field.number for field in session_pb2.RunSessionRequest.DESCRIPTOR.oneofs_by_name["request"].fields
}
_ANSWERS = {
    field.number: field.name for field in session_pb2.RunSessionResponse.DESCRIPTOR.oneofs_by_name["response"].fields
}
# Names of answers that differ from those of their requests.
_ANSWER_KINDS = {"start": "started", _CALL: "evaluate"}

_FLOATS = frozenset({Dt.DT_HALF, Dt.DT_BFLOAT16, Dt.DT_FLOAT, Dt.DT_DOUBLE, Dt.DT_COMPLEX64, Dt.DT_COMPLEX128})


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Holds the result of one training step.

    Attributes:
        loss: The loss before the update.
        outputs: Arrays by fetch, before the update.
        step: Number of steps that the session has run.
        timings: Durations of the step.
        overrides: The rule that each node got; only with the first step of its kind.
    """

    loss: Array
    outputs: Mapping[str, Array]
    step: int
    timings: Timings
    overrides: list[Resolution]


class SessionOptions(NamedTuple):
    """Holds the arguments of a session."""

    graph: GraphLike
    overrides: Overrides | None
    variables: Mapping[str, Any] | None
    no_gradient: NoGradient
    transfer: Transfer
    progress: Progress = None


class SessionBase:
    """Makes a session's requests and decodes its answers; the base of `Session` and `AsyncSession`."""

    def __init__(self, options: SessionOptions) -> None:
        self._transfer = options.transfer
        self._graph = options.graph
        self._words = ProgramArguments(overrides=options.overrides, no_gradient=options.no_gradient)
        self._given = dict(options.variables or {})
        self._types = request_messages.types_of_graph(self._graph)
        # The server has the graph, so calls only say what to compute.
        spec = functools.partial(_requested_spec, self._graph)
        self._source = request_messages.Source(self._graph, self._type_of, spec)
        self._specs: Mapping[str, TensorSpec] = {}
        self._numbers: dict[str, int] = {}
        self._state_bytes = 0
        # Number of completed steps.
        self._steps = 0
        self._progress = options.progress
        self._task: Task = SILENT
        # Hashes of the blobs that were sent to the server.
        self._uploaded: set[str] = set()

    @property
    def variables(self) -> Mapping[str, TensorSpec]:
        """Dtypes and shapes of the variables, by name."""
        return self._specs

    def _type_of(self, name: str, needed: bool) -> int:
        number = self._numbers.get(bare(name))
        return self._types(name, needed) if number is None else number

    def _start(self) -> Call[None]:
        blobs = blob_values.blobs_in(self._given)
        # The session differentiates later, so the overrides recorded by the builder are sent too.
        spec, _ = request_messages.program_spec(self._graph, self._words, blobs)
        start = session_pb2.StartSession(graph=spec.graph, overrides=spec.overrides, no_gradient=spec.no_gradient)
        if isinstance(self._graph, Graph):
            start.overrides.extend(request_messages.overrides_of_graph(self._graph))
        start.variables.extend(item for item in spec.variables if item.name not in self._given)
        self._add_variables(start, self._given, "variables")
        if isinstance(self._graph, Graph) and self._graph.optimizer_state is not None:
            start.optimizer_state.CopyFrom(_state_message(self._graph.optimizer_state, blobs))
        return Call("start", start, session_pb2.SessionStarted.FromString, self._started, blobs, may_compile=True)

    def _started(self, answer: session_pb2.SessionStarted) -> None:
        self._specs = call_results.specs(answer.variables)
        self._numbers = {bare(spec.name): spec.dtype for spec in answer.variables}
        self._steps = answer.step
        self._state_bytes = answer.size_bytes

    def _step(
        self,
        feeds: Feeds | None,
        loss: Name,
        optimizer: Optimizer,
        variables: Names,
        fetches: Names,
        params: CallParams | None,
    ) -> Call[StepResult]:
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            known = f"; write gr.optimizers.{kind}(...)" if kind in optimizers.__all__ else ""
            raise InvalidOptimizerError(f"an optimizer is one of gradrule.optimizers, not {kind}{known}")
        names_given = call_arguments.names_of(variables, self._graph) or self._trainable()
        loss_name = call_arguments.name_of_tensor(loss, self._graph)
        given = call_arguments.flat_list(fetches)
        tensors = call_arguments.names_of(given, self._graph)
        # Results have the names that the caller gave.
        names = [name if isinstance(name, str) else tensor for name, tensor in zip(given, tensors, strict=True)]
        request = session_pb2.StepRequest(
            loss=loss_name,
            optimizer=optimizer.message(self._steps),
            variables=names_given,
            fetches=[loss_name, *tensors],
        )
        values = dict(request_messages.pairs(feeds or {}, "feeds"))
        request_messages.add_named_tensors(request, "feeds", values, self._type_of, self._graph)
        request_messages.add_params(request, params)

        def decode(answer: session_pb2.StepResponse) -> StepResult:
            self._steps = answer.step
            loss_value, *outputs = [to_numpy(item.value.inline_tensor) for item in answer.outputs]
            return StepResult(
                loss_value,
                ByName(dict(zip(names, outputs, strict=True)), call_arguments.aliases_of(self._graph)),
                answer.step,
                call_results.timings(answer.timings),
                call_results.resolutions(answer.overrides),
            )

        blobs = blob_values.blobs_in(feeds)
        return Call(
            "step", request, self._transfer.reader_of(session_pb2.StepResponse), decode, blobs, may_compile=True
        )

    def _trainable(self) -> list[str]:
        """Returns the variables to train; empty if the graph marks none as not trainable."""
        if not isinstance(self._graph, Graph) or not self._graph.non_trainable:
            return []
        return [
            name
            for name in self._specs
            if name not in self._graph.non_trainable and self._numbers[bare(name)] in _FLOATS
        ]

    def _evaluate(
        self, feeds: Feeds | None, arguments: ProgramArguments, params: CallParams | None, stacked_grad_ys: bool
    ) -> Call[call_results.Result]:
        call = rpc_calls.evaluate(self._source, feeds, params, arguments, stacked_grad_ys, self._transfer)
        return call._replace(method=_CALL)

    def _jvp(
        self, feeds: Feeds | None, tangents: Feeds, arguments: ProgramArguments, params: CallParams | None
    ) -> Call[derivatives.Tangents]:
        call = derivatives.jvp(self._source, feeds, tangents, params, arguments, self._transfer)
        return call._replace(method=_CALL)

    def _jacobian(
        self, feeds: Feeds | None, arguments: ProgramArguments, params: CallParams | None, batched: bool
    ) -> Call[derivatives.Jacobians]:
        call = derivatives.jacobian(self._source, feeds, params, arguments, self._transfer, batched=batched)
        return call._replace(method=_CALL)

    def _hvp(
        self, feeds: Feeds | None, vectors: Feeds, arguments: ProgramArguments, params: CallParams | None
    ) -> Call[derivatives.Products]:
        call = derivatives.hvp(self._source, feeds, vectors, params, arguments, self._transfer)
        return call._replace(method=_CALL)

    def _forward(self, feeds: Feeds | None, arguments: ProgramArguments, params: CallParams | None) -> Forward:
        graph = self._graph
        return Forward(
            rpc_calls.evaluate(self._source, feeds, params, arguments, transfer=self._transfer),
            graph,
            call_arguments.names_of(arguments.ys, graph),
            self._type_of,
            call_arguments.given_aliases(graph, arguments),
            call_arguments.groups_of(arguments.xs, graph),
            "the session's variables may have other values by then",
            in_session=True,
        )

    def _read(self, names: Iterable[Name] | Name) -> Call[Mapping[str, Array]]:
        request = session_pb2.ReadRequest(variables=call_arguments.names_of(names, self._graph))

        def decode(answer: session_pb2.ReadResponse) -> Mapping[str, Array]:
            return ByName({item.name: to_numpy(item.value.inline_tensor) for item in answer.variables})

        return Call("read", request, self._transfer.reader_of(session_pb2.ReadResponse), decode)

    def _assign(self, values: Mapping[Name, Any]) -> Call[None]:
        request = session_pb2.AssignRequest()
        self._add_variables(request, values, "values")
        answer = session_pb2.AssignResponse.FromString
        return Call("assign", request, answer, lambda _: None, blob_values.blobs_in(values))

    def _save(self, optimizer_state: bool) -> Call[Graph]:
        request = session_pb2.ReadRequest(optimizer_state=optimizer_state)

        def decode(answer: session_pb2.ReadResponse) -> Graph:
            values = {item.name: to_numpy(item.value.inline_tensor) for item in answer.variables}
            graph = self._saved(values)
            if answer.HasField("optimizer_state"):
                graph.optimizer_state = _read_state(answer.optimizer_state)
            return graph

        return Call("read", request, self._transfer.reader_of(session_pb2.ReadResponse), decode)

    def _saved(self, values: Mapping[str, Array]) -> Graph:
        graph = Graph.from_bytes(graph_sources.graph_bytes(self._graph))
        if isinstance(self._graph, Graph):
            graph.aliases.update(self._graph.aliases)
            graph.non_trainable.update(self._graph.non_trainable)
        graph.variables.update(values)
        return graph

    def _add_variables(self, request: Message, values: Mapping[Any, Any], what: str) -> None:
        request_messages.add_named_tensors(request, "variables", values, self._type_of, self._graph, what)

    def _not_uploaded(self, call: Call[Any]) -> blob_values.Blobs:
        return {name: data for name, data in call.blobs.items() if name not in self._uploaded}

    def _message(self, call: Call[Any], timeout: float, run_timeout: float | None) -> bytes:
        rest = session_pb2.RunSessionRequest()
        rest.timeout.FromNanoseconds(int(timeout * 1e9))
        if run_timeout is not None and call.may_compile:
            rest.run_timeout.FromNanoseconds(int(run_timeout * 1e9))
        packing = self._transfer.packing
        if packing is not None:
            if isinstance(call.request, Message):
                # In place: the request may be sent again.
                self._transfer.pack(call.request)
            rest.answer_packing.CopyFrom(packing.message())
        parts, _ = message_parts(call.request)
        return b"".join((rest.SerializeToString(), *wire_format.wrapped(_REQUESTS[call.method], parts)))

    def _ended(self, call: Call[Any], cause: GradruleError) -> GradruleError:
        """Returns the error of a call whose stream has ended: SESSION_LOST if the server held a session and is gone."""
        if call.method == "start" or cause.code is not grpc.StatusCode.UNAVAILABLE:
            return cause
        return SessionLostError(
            f"the server that held the session has closed the connection ({cause.message}), so its variables are lost; "
            f"the last answered step is {self._steps}; start another session with the values that you read last"
        )

    def _decoded(self, call: Call[R], data: bytes) -> R:
        kind, start, end = "nothing", 0, 0
        try:
            for field, begin, stop in wire_format.fields(data, 0, len(data)):
                if field in _ANSWERS:
                    kind, start, end = _ANSWERS[field], begin, stop
        except wire_format.MalformedError as cause:
            raise InternalError(f"the server's answer cannot be read: {cause}") from None
        if kind == "status":
            raise error_from_status_bytes(data[start:end])
        if kind != _ANSWER_KINDS.get(call.method, call.method):
            raise InternalError(f"the server answered a {call.method} with {kind}")
        return parsed(call.answer, call.decode, data[start:end])


def _requested_spec(graph: GraphLike, arguments: ProgramArguments, _: blob_values.Blobs) -> request_messages.Spec:
    return request_messages.requested_spec(graph, arguments)


def _state_message(state: OptimizerState, blobs: blob_values.Blobs) -> session_pb2.OptimizerState:
    """Returns the message of an optimizer's state; the bytes of large slots are added to `blobs`."""
    slots = Variables(lambda _: 0)
    slots.update(state.slots)
    return session_pb2.OptimizerState(
        optimizer=session_pb2.Optimizer(name=state.name, settings=state.settings),
        step=state.step,
        variables=state.variables,
        slots=slots.messages(blobs),
    )


def _read_state(message: session_pb2.OptimizerState) -> OptimizerState:
    return OptimizerState(
        message.optimizer.name,
        dict(message.optimizer.settings),
        message.step,
        tuple(message.variables),
        {item.name: to_numpy(item.value.inline_tensor) for item in message.slots},
    )
