"""Sessions: variables that the server holds for the length of one stream, trained and evaluated there."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from gradrule import _blobs, _requests, _results, _sources
from gradrule._calls import Call
from gradrule._graph import Graph
from gradrule._names import bare
from gradrule._overrides import Overrides
from gradrule._requests import CallParams, Feeds, GradYs, Name, Names
from gradrule._results import Resolution, Timings
from gradrule._sources import GraphLike
from gradrule._specs import TensorSpec
from gradrule._status import error_of, error_of_status, serialized
from gradrule._transfer import Transfer
from gradrule.common.tensor_codec import Array, to_numpy
from gradrule.errors import BlobNotFoundError, InternalError, InvalidOptimizerError, UnavailableError
from gradrule.optimizers import Optimizer
from gradrule.v1 import evaluate_pb2, session_pb2
from gradrule.v1.tensor_pb2 import Dt

R = TypeVar("R")

METHOD = "/gradrule.v1.SessionService/RunSession"

_FLOATS = frozenset({Dt.DT_HALF, Dt.DT_BFLOAT16, Dt.DT_FLOAT, Dt.DT_DOUBLE, Dt.DT_COMPLEX64, Dt.DT_COMPLEX128})


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gives. loss: its value before the update. outputs: arrays by fetch, from before the update too.

    step: how many steps the session has made. overrides: which node got which rule, with the first step of its kind.
    """

    loss: Array
    outputs: Mapping[str, Array]
    step: int
    timings: Timings
    overrides: list[Resolution]


class SessionBase:
    """What the sync and async sessions have in common: messages and what to make of answers."""

    def __init__(
        self,
        graph: GraphLike,
        overrides: Overrides | None,
        variables: Mapping[str, Any] | None,
        no_gradient: str,
        transfer: Transfer,
    ) -> None:
        self._transfer = transfer
        self._graph = graph
        self._words = _requests.Words(overrides=overrides, no_gradient=no_gradient)
        self._given = dict(variables or {})
        self._specs: Mapping[str, TensorSpec] = {}
        self._numbers: dict[str, int] = {}
        # Hashes of the bytes that the server was given.
        self._brought: set[str] = set()

    @property
    def variables(self) -> Mapping[str, TensorSpec]:
        """The variables, by name."""
        return self._specs

    def _type_of(self, name: str, needed: bool) -> int:
        number = self._numbers.get(bare(name))
        return _requests.types_of_graph(self._graph)(name, needed) if number is None else number

    def _start(self) -> Call[None]:
        blobs = _blobs.fed(self._given)
        # Overrides hold wherever something is differentiated, so the builder's own go along.
        spec, _ = _requests.program_spec(self._graph, self._words, blobs)
        start = session_pb2.StartSession(graph=spec.graph, overrides=spec.overrides, no_gradient=spec.no_gradient)
        if isinstance(self._graph, Graph):
            start.overrides.extend(override.message() for override in self._graph.node_overrides)
        start.variables.extend(item for item in spec.variables if item.name not in self._given)
        self._add_variables(start, self._given, "variables")
        return Call("start", start, session_pb2.SessionStarted.FromString, self._started, blobs)

    def _started(self, answer: session_pb2.SessionStarted) -> None:
        self._specs = _results.specs(answer.variables)
        self._numbers = {bare(spec.name): spec.dtype for spec in answer.variables}

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
            raise InvalidOptimizerError(f"an optimiser is one of gradrule.optimizers, not {type(optimizer).__name__}")
        names_given = _requests.names_of(variables, self._graph) or self._trainable()
        loss_name = _requests.name_of_tensor(loss, self._graph)
        names = _requests.names_of(fetches, self._graph)
        call = self._call(feeds, params)
        request = session_pb2.StepRequest(
            feeds=call.feeds,
            loss=loss_name,
            optimizer=optimizer.message(),
            variables=names_given,
            fetches=[loss_name, *names],
            params=call.params,
        )

        def decode(answer: session_pb2.StepResponse) -> StepResult:
            loss_value, *outputs = [to_numpy(item.value.inline) for item in answer.outputs]
            return StepResult(
                loss_value,
                _results.ByName(dict(zip(names, outputs, strict=True))),
                answer.step,
                _results.timings(answer.timings),
                _results.resolutions(answer.overrides),
            )

        return Call("step", request, session_pb2.StepResponse.FromString, decode, _blobs.fed(feeds))

    def _trainable(self) -> list[str]:
        """The variables that training changes, where the graph tells which it leaves alone."""
        if not isinstance(self._graph, Graph) or not self._graph.non_trainable:
            return []
        return [
            name
            for name in self._specs
            if name not in self._graph.non_trainable and self._numbers[bare(name)] in _FLOATS
        ]

    def _evaluate(
        self,
        feeds: Feeds | None,
        words: _requests.Words,
        params: CallParams | None,
    ) -> Call[_results.Result]:
        spec, values = _requests.program_spec(self._graph, words)
        call = self._call(feeds, params)
        request = session_pb2.SessionEvaluateRequest(feeds=call.feeds, fetches=spec.fetches, params=call.params)
        if spec.WhichOneof("derivative") == "vjp":
            request.vjp.CopyFrom(spec.vjp)
        for y, value in values.items():
            _requests.add_named_tensor(request, "grad_ys", y, value, self._type_of)
        blobs = _blobs.fed(feeds, words.grad_ys)

        def decode(answer: evaluate_pb2.EvaluateResponse) -> _results.Result:
            return _results.result(answer.SerializeToString())

        return Call("evaluate", request, evaluate_pb2.EvaluateResponse.FromString, decode, blobs)

    def _read(self, names: Iterable[Name] | Name) -> Call[Mapping[str, Array]]:
        request = session_pb2.ReadRequest(variables=_requests.names_of(names, self._graph))

        def decode(answer: session_pb2.ReadResponse) -> Mapping[str, Array]:
            return _results.ByName({item.name: to_numpy(item.value.inline) for item in answer.variables})

        return Call("read", request, session_pb2.ReadResponse.FromString, decode)

    def _assign(self, values: Mapping[Name, Any]) -> Call[None]:
        request = session_pb2.AssignRequest()
        self._add_variables(request, values, "values")
        answer = session_pb2.AssignResponse.FromString
        return Call("assign", request, answer, lambda _: None, _blobs.fed(values))

    def _saved(self, values: Mapping[str, Array]) -> Graph:
        graph = Graph.from_bytes(_sources.graph_bytes(self._graph))
        if isinstance(self._graph, Graph):
            graph.aliases.update(self._graph.aliases)
            graph.non_trainable.update(self._graph.non_trainable)
        graph.variables.update(values)
        return graph

    def _add_variables(self, request: Message, values: Mapping[Any, Any], what: str) -> None:
        for key, value in values.items():
            name = _requests.name_of_tensor(key, self._graph)
            _requests.add_named_tensor(request, "variables", name, value, self._type_of, what=what)

    def _call(self, feeds: Feeds | None, params: CallParams | None) -> evaluate_pb2.EvaluateRequest:
        return _requests.evaluate_request(feeds, self._type_of, params=params, graph=self._graph)

    def _unbrought(self, call: Call[Any]) -> _blobs.Blobs:
        return {name: data for name, data in call.blobs.items() if name not in self._brought}


class Session(SessionBase):
    """Server-held variables. `with client.session(graph) as s`: they live as long as the block.

    Not for several threads at once: messages are answered one after the other.
    """

    def __init__(
        self,
        open_stream: Callable[..., Any],
        send_blobs: Callable[[Mapping[str, _blobs.Data], float | None], None],
        deadline: Callable[[float | None], float],
        graph: GraphLike,
        overrides: Overrides | None,
        variables: Mapping[str, Any] | None,
        no_gradient: str,
        transfer: Transfer,
    ) -> None:
        super().__init__(graph, overrides, variables, no_gradient, transfer)
        self._open = open_stream
        self._send_blobs = send_blobs
        self._deadline = deadline
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stream: Any = None

    def __enter__(self) -> Self:
        try:
            self._run(self._start(), None)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session; the server lets its variables go."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._outgoing.put(None)
            stream.cancel()

    def step(
        self,
        feeds: Feeds | None,
        loss: Name,
        optimizer: Optimizer,
        fetches: Names = (),
        *,
        variables: Names = (),
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> StepResult:
        """Minimises a loss: one update of the variables by an optimiser of `gradrule.optimizers`.

        loss: a tensor; one that is no scalar is summed. variables: which to update; default: all float ones that the
        loss depends on and that are trainable as far as the graph tells. fetches, params: as in `evaluate`.
        """
        return self._run(self._step(feeds, loss, optimizer, variables, fetches, params), timeout)

    def evaluate(
        self,
        feeds: Feeds | None = None,
        fetches: Names = (),
        ys: Names = (),
        xs: Names = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        params: CallParams | None = None,
        timeout: float | None = None,
        dense_gradients: bool = False,
    ) -> _results.Result:
        """As `Client.evaluate`, with the session's variables; what the graph assigns to them is kept."""
        words = _requests.Words(
            fetches, ys, xs, grad_ys, stop_gradients, unconnected_gradients, dense_gradients=dense_gradients
        )
        return self._run(self._evaluate(feeds, words, params), timeout)

    def read(self, names: Iterable[Name] | Name = (), *, timeout: float | None = None) -> Mapping[str, Array]:
        """Values of variables, of all if none is named."""
        return self._run(self._read(names), timeout)

    def assign(self, values: Mapping[Name, Any], *, timeout: float | None = None) -> None:
        """Gives variables values, all or none."""
        self._run(self._assign(values), timeout)

    def save(self, *, timeout: float | None = None) -> Graph:
        """The graph with the variables' present values, to be evaluated, or written by its `save`."""
        return self._saved(self.read(timeout=timeout))

    def _run(self, call: Call[R], timeout: float | None) -> R:
        if self._stream is None and call.method != "start":
            raise UnavailableError("the session is not open; use it as `with client.session(graph) as s`")
        self._bring(self._unbrought(call), timeout)
        try:
            return self._ask(call, timeout)
        except BlobNotFoundError:
            if not call.blobs:
                raise
        # A server that is short of room may have let them go.
        self._bring(call.blobs, timeout)
        return self._ask(call, timeout)

    def _bring(self, blobs: Mapping[str, _blobs.Data], timeout: float | None) -> None:
        if blobs:
            self._send_blobs(blobs, timeout)
            self._brought.update(blobs)

    def _ask(self, call: Call[R], timeout: float | None) -> R:
        data = _message(call, self._deadline(timeout), self._transfer)
        if call.method == "start":
            # A refused start has ended its stream.
            self.close()
            self._outgoing = queue.SimpleQueue()
            self._stream = self._open(iter(self._outgoing.get, None))
        try:
            self._outgoing.put(data)
            answer = next(self._stream)
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except StopIteration:
            raise UnavailableError("the server has ended the session") from None
        except BaseException:
            # An interrupt leaves an answer on its way, which the next message would take for its own.
            self.close()
            raise
        return _decoded(call, answer, self._transfer)


class AsyncSession(SessionBase):
    """`Session` for asyncio: `async with client.session(graph) as s`."""

    def __init__(
        self,
        open_stream: Callable[..., Any],
        send_blobs: Callable[[Mapping[str, _blobs.Data], float | None], Awaitable[None]],
        deadline: Callable[[float | None], float],
        graph: GraphLike,
        overrides: Overrides | None,
        variables: Mapping[str, Any] | None,
        no_gradient: str,
        transfer: Transfer,
    ) -> None:
        super().__init__(graph, overrides, variables, no_gradient, transfer)
        self._open = open_stream
        self._send_blobs = send_blobs
        self._deadline = deadline
        self._stream: Any = None

    async def __aenter__(self) -> Self:
        try:
            await self._run(self._start(), None)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As `Session.close`."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def step(
        self,
        feeds: Feeds | None,
        loss: Name,
        optimizer: Optimizer,
        fetches: Names = (),
        *,
        variables: Names = (),
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> StepResult:
        """As `Session.step`."""
        return await self._run(self._step(feeds, loss, optimizer, variables, fetches, params), timeout)

    async def evaluate(
        self,
        feeds: Feeds | None = None,
        fetches: Names = (),
        ys: Names = (),
        xs: Names = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        params: CallParams | None = None,
        timeout: float | None = None,
        dense_gradients: bool = False,
    ) -> _results.Result:
        """As `Session.evaluate`."""
        words = _requests.Words(
            fetches, ys, xs, grad_ys, stop_gradients, unconnected_gradients, dense_gradients=dense_gradients
        )
        return await self._run(self._evaluate(feeds, words, params), timeout)

    async def read(self, names: Iterable[Name] | Name = (), *, timeout: float | None = None) -> Mapping[str, Array]:
        """As `Session.read`."""
        return await self._run(self._read(names), timeout)

    async def assign(self, values: Mapping[Name, Any], *, timeout: float | None = None) -> None:
        """As `Session.assign`."""
        await self._run(self._assign(values), timeout)

    async def save(self, *, timeout: float | None = None) -> Graph:
        """As `Session.save`."""
        return self._saved(await self.read(timeout=timeout))

    async def _run(self, call: Call[R], timeout: float | None) -> R:
        if self._stream is None and call.method != "start":
            raise UnavailableError("the session is not open; use it as `async with client.session(graph) as s`")
        await self._bring(self._unbrought(call), timeout)
        try:
            return await self._ask(call, timeout)
        except BlobNotFoundError:
            if not call.blobs:
                raise
        # A server that is short of room may have let them go.
        await self._bring(call.blobs, timeout)
        return await self._ask(call, timeout)

    async def _bring(self, blobs: Mapping[str, _blobs.Data], timeout: float | None) -> None:
        if blobs:
            await self._send_blobs(blobs, timeout)
            self._brought.update(blobs)

    async def _ask(self, call: Call[R], timeout: float | None) -> R:
        data = _message(call, self._deadline(timeout), self._transfer)
        if call.method == "start":
            # A refused start has ended its stream.
            self.close()
            self._stream = self._open()
        stream = self._stream
        try:
            # Reading tells why a stream ended that takes no more.
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError):
                await stream.write(data)
            answer = await stream.read()
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except asyncio.CancelledError:
            # An answer may be on its way, which the next message would take for its own.
            self.close()
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                # It was the stream that was cancelled, with its channel.
                raise UnavailableError("the client is closed, and the session with it") from None
            raise
        except BaseException:
            self.close()
            raise
        if answer is grpc.aio.EOF:
            await stream.code()
            raise UnavailableError(await stream.details() or "the server has ended the session")
        return _decoded(call, answer, self._transfer)


def _message(call: Call[Any], timeout: float, transfer: Transfer) -> bytes:
    packing = transfer.packing
    if packing is not None:
        # The request may be sent again.
        transfer.pack(call.request)
    kind: dict[str, Any] = {call.method: call.request}
    request = session_pb2.RunSessionRequest(**kind)
    request.timeout.FromNanoseconds(int(timeout * 1e9))
    if packing is not None:
        request.answer_packing.CopyFrom(packing.message())
    return serialized(request)


def _decoded(call: Call[R], data: bytes, transfer: Transfer) -> R:
    try:
        answer = session_pb2.RunSessionResponse.FromString(data)
    except DecodeError as cause:
        raise InternalError(f"the server's answer cannot be read: {cause}") from None
    kind = answer.WhichOneof("response")
    if kind == "status":
        raise error_of_status(answer.status)
    expected = "started" if call.method == "start" else call.method
    if kind != expected:
        raise InternalError(f"the server answered a {call.method} with {kind}")
    transfer.unpack(answer)
    return call.decode(getattr(answer, kind))
