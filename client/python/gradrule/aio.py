"""The async twin of the client: the same words, awaited."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from gradrule import _blobs, _calls, _channel, _deadlines, _requests, _security
from gradrule._aio_derivatives import AsyncDerivatives, AsyncProgramDerivatives
from gradrule._aio_sending import AsyncCallSender
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.overrides import Overrides
from gradrule._builder.rules import Params, Rule
from gradrule._comparison import compare
from gradrule._comparison.comparisons import Comparison
from gradrule._forward import AsyncForwardHandle
from gradrule._groups import groups_of
from gradrule._local import LocalServer
from gradrule._program import merged
from gradrule._requests import CallParams, Feeds, GradYs, GroupedNames, Names
from gradrule._results import call_results, explanations, rule_infos
from gradrule._results.status_report import ServerStatus
from gradrule._routes import Routes
from gradrule._sessions import METHOD as SESSION_METHOD
from gradrule._sessions import AsyncSession
from gradrule._shared_memory import SharedMemory
from gradrule._status import error_of, waiting_error
from gradrule._transfer import PLAIN, Transfer
from gradrule.errors import (
    EngineUnavailableError,
    GradruleError,
    InvalidParamError,
    UnavailableError,
)

__all__ = ["AsyncClient", "AsyncProgram", "connect", "local"]

R = TypeVar("R")

_POLL_S = 0.1


def connect(
    target: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    token: str | None = None,
    timeout: float = 30.0,
    insecure_token: bool = False,
    stream: bool = True,
    transfer: Transfer = PLAIN,
    shared_memory: bool = True,
) -> AsyncClient:
    """`gradrule.connect` for asyncio. Call it where the event loop runs."""
    timeout = _deadlines.seconds(timeout)
    _security.check_token(target, token, is_encrypted=credentials is not None, insecure_token=insecure_token)
    if credentials is None:
        channel = grpc.aio.insecure_channel(
            _channel.address(target), options=_channel.OPTIONS, compression=transfer.grpc_compression
        )
    else:
        channel = grpc.aio.secure_channel(
            _channel.address(target), credentials, options=_channel.OPTIONS, compression=transfer.grpc_compression
        )
    return AsyncClient(
        channel, target, token=token, timeout=timeout, stream=stream, transfer=transfer, shared_memory=shared_memory
    )


def local(**settings: Any) -> AsyncLocal:
    """`gradrule.local` for asyncio: `async with gr.aio.local() as client`."""
    return AsyncLocal(LocalServer(settings))


class AsyncLocal:
    """A server of one's own, for the length of an `async with`."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._client: AsyncClient | None = None

    async def __aenter__(self) -> AsyncClient:
        self._client = connect(await asyncio.to_thread(self._server.start))
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._client is not None:
                await self._client.close()
        finally:
            await asyncio.to_thread(self._server.stop)


class AsyncClient(AsyncDerivatives):
    """`gradrule.Client` for asyncio: the same methods with the same words, awaited."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        target: str,
        *,
        token: str | None,
        timeout: float,
        stream: bool = True,
        transfer: Transfer = PLAIN,
        shared_memory: bool = True,
    ) -> None:
        self._channel = channel
        self._metadata = _channel.metadata(token) + transfer.metadata
        self._transfer = transfer
        self._timeout = timeout
        routes = Routes(use_stream=stream)
        self._memory = SharedMemory(is_wanted=shared_memory)
        self._sender = AsyncCallSender(channel, self._metadata, routes, self._memory, self._closed)
        self.target = target

    # Rules.

    async def create_rule(
        self,
        name: str,
        expression: str | None = None,
        *,
        graph: GraphLike | None = None,
        params: Params | Iterable[str] | None = None,
        gradient: Rule | None = None,
        description: str = "",
        timeout: float | None = None,
    ) -> rule_infos.RuleInfo:
        """As `Client.create_rule`."""
        return await self._run(_calls.create_rule(name, expression, graph, params, gradient, description), timeout)

    async def get_rule(self, name: str, *, timeout: float | None = None) -> rule_infos.RuleInfo:
        """As `Client.get_rule`."""
        return await self._run(_calls.get_rule(name), timeout)

    async def list_rules(self, kind: str | None = None, *, timeout: float | None = None) -> list[rule_infos.RuleInfo]:
        """As `Client.list_rules`."""
        rules, token = await self._run(_calls.list_rules(kind, ""), timeout)
        while token:
            more, token = await self._run(_calls.list_rules(kind, token), timeout)
            rules += more
        return rules

    async def delete_rule(self, name: str, *, timeout: float | None = None) -> None:
        """As `Client.delete_rule`."""
        await self._run(_calls.delete_rule(name), timeout)

    async def list_presets(self, *, timeout: float | None = None) -> list[rule_infos.PresetInfo]:
        """As `Client.list_presets`."""
        return await self._run(_calls.list_presets(), timeout)

    async def sample_rule(
        self,
        rule: str | Rule,
        *,
        x: Any = None,
        y: Any = None,
        dy: Any = None,
        params: Params | None = None,
        op_type: str | None = None,
        attrs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> rule_infos.SampleResult:
        """As `Client.sample_rule`."""
        values = {"x": x, "y": y, "dy": dy, **more}
        return await self._run(_calls.sample_rule(rule, values, params, op_type, attrs), timeout)

    # Evaluation.

    async def evaluate(
        self,
        graph: GraphLike,
        feeds: Feeds | None = None,
        fetches: Names = (),
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
        dense_gradients: bool = False,
        stacked_grad_ys: bool = False,
        batching: bool = True,
        jit: str = "off",
        transfer: Transfer | None = None,
    ) -> call_results.Result:
        """As `Client.evaluate`."""
        words = _requests.Words(
            fetches,
            ys,
            xs,
            grad_ys,
            stop_gradients,
            unconnected_gradients,
            overrides,
            no_gradient,
            rewrites,
            dense_gradients=dense_gradients,
            batching=batching,
            jit=jit,
        )
        chosen = self._transfer if transfer is None else transfer.of_call()
        call = _calls.evaluate(graph, feeds, params, words, stacked_grad_ys, chosen)
        return await self._run(call, timeout)

    async def explain(
        self,
        graph: GraphLike,
        feeds: Feeds | None = None,
        fetches: Names = (),
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        params: CallParams | None = None,
        timeout: float | None = None,
        dense_gradients: bool = False,
    ) -> explanations.Explanation:
        """As `Client.explain`."""
        words = _requests.Words(
            fetches,
            ys,
            xs,
            grad_ys,
            stop_gradients,
            unconnected_gradients,
            overrides,
            no_gradient,
            rewrites,
            dense_gradients=dense_gradients,
        )
        return await self._run(_calls.explain(graph, feeds, params, words), timeout)

    async def compare(
        self,
        graph: GraphLike,
        feeds: Feeds | None,
        ys: Names,
        xs: Names,
        overrides: Mapping[str, Overrides | None],
        *,
        grad_ys: GradYs | None = None,
        finite_differences: bool = True,
        rewrites: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Comparison:
        """As `Client.compare`."""
        steps = compare.plan(graph, feeds, ys, xs, overrides, grad_ys, finite_differences, rewrites)
        return await self._follow(steps, timeout)

    # Sessions.

    def session(
        self,
        graph: GraphLike,
        *,
        overrides: Overrides | None = None,
        variables: Mapping[str, Any] | None = None,
        no_gradient: str = "error",
    ) -> AsyncSession:
        """As `Client.session`; `async with client.session(graph) as s`."""
        return AsyncSession(
            self._open_session,
            self._send_blobs,
            self._deadline,
            graph,
            overrides,
            variables,
            no_gradient,
            self._transfer,
        )

    # Programs.

    async def compile(
        self,
        graph: GraphLike,
        *,
        fetches: Names = (),
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: str = "none",
        overrides: Overrides | None = None,
        no_gradient: str = "error",
        rewrites: Sequence[str] = (),
        name: str | None = None,
        timeout: float | None = None,
        dense_gradients: bool = False,
        batching: bool = True,
        jit: str = "off",
    ) -> AsyncProgram:
        """As `Client.compile`."""
        words = _requests.Words(
            fetches,
            ys,
            xs,
            grad_ys,
            stop_gradients,
            unconnected_gradients,
            overrides,
            no_gradient,
            rewrites,
            dense_gradients=dense_gradients,
            batching=batching,
            jit=jit,
        )
        message = await self._run(_calls.compile_program(graph, name, words), timeout)
        return AsyncProgram(self, message, groups_of(xs, graph))

    async def program(self, name: str, *, timeout: float | None = None) -> AsyncProgram:
        """As `Client.program`."""
        return AsyncProgram(self, await self._run(_calls.get_program(name), timeout))

    async def list_programs(self, *, timeout: float | None = None) -> list[AsyncProgram]:
        """As `Client.list_programs`."""
        messages, token = await self._run(_calls.list_programs(""), timeout)
        while token:
            more, token = await self._run(_calls.list_programs(token), timeout)
            messages += more
        return [AsyncProgram(self, message) for message in messages]

    async def delete_program(self, name: str, *, timeout: float | None = None) -> None:
        """As `Client.delete_program`."""
        await self._run(_calls.delete_program(name), timeout)

    # Blobs.

    async def find_missing_blobs(self, names: Iterable[str], *, timeout: float | None = None) -> list[str]:
        """As `Client.find_missing_blobs`."""
        return await self._run(_blobs.find_missing(names), timeout)

    async def upload(self, value: Any, *, timeout: float | None = None) -> str:
        """As `Client.upload`."""
        wanted = _calls.upload(value)
        await self._follow(_blobs.uploads({wanted.sha256: wanted.data}), timeout)
        return wanted.sha256

    # The server.

    async def server_status(self, *, timeout: float | None = None) -> ServerStatus:
        """As `Client.server_status`."""
        return await self._run(_calls.server_status(), timeout)

    # The connection.

    async def wait_ready(self, timeout: float | None = None) -> None:
        """As `Client.wait_ready`."""
        limit = time.monotonic() + _deadlines.of_call(timeout, self._timeout)
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_channel.HEALTH_METHOD)
        while True:
            left = limit - time.monotonic()
            try:
                answer = await check(
                    _channel.HEALTH_REQUEST, timeout=max(left, 0.001), metadata=self._metadata, wait_for_ready=True
                )
            except grpc.RpcError as failure:
                if (error := waiting_error(failure, self.target)) is not None:
                    raise error from None
            except grpc.aio.UsageError as cause:
                raise self._closed() from cause
            else:
                if answer == _channel.HEALTH_SERVING:
                    return
            if left < _POLL_S:
                raise EngineUnavailableError(f"the server at {self.target!r} has no engine ready")
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """As `Client.close`."""
        await self._sender.close()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.target!r}>"

    def _open_session(self) -> Any:
        try:
            return self._channel.stream_stream(SESSION_METHOD)(metadata=self._metadata)
        except grpc.aio.UsageError as cause:
            raise self._closed() from cause

    async def _send_blobs(self, blobs: Mapping[str, _blobs.Data], timeout: float | None) -> None:
        await self._follow(_blobs.uploads(blobs), timeout)

    def _deadline(self, timeout: float | None) -> float:
        return _deadlines.of_call(timeout, self._timeout)

    async def _run(self, call: _calls.Call[R], timeout: float | None) -> R:
        return await (self._follow(_blobs.steps(call), timeout) if call.blobs else self._once(call, timeout))

    async def _follow(self, steps: Generator[_calls.Call[Any] | _blobs.Upload, Any, R], timeout: float | None) -> R:
        """Takes one step after the other; what comes of them."""
        try:
            step = next(steps)
            while True:
                try:
                    outcome = await self._step(step, timeout)
                except GradruleError as refusal:
                    step = steps.throw(refusal)
                else:
                    step = steps.send(outcome)
        except StopIteration as end:
            found: R = end.value
            return found

    async def _step(self, step: _calls.Call[Any] | _blobs.Upload, timeout: float | None) -> Any:
        if not isinstance(step, _blobs.Upload):
            return await self._run(step, timeout)
        deadline = step.deadline(_deadlines.of_call(timeout, self._timeout))
        try:
            send: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(_blobs.UPLOAD_METHOD)
            return await send(step.pieces(), timeout=deadline, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except grpc.aio.UsageError as cause:
            raise self._closed() from cause

    async def _once(self, call: _calls.Call[R], timeout: float | None) -> R:
        return await self._sender.send(call, _deadlines.of_call(timeout, self._timeout))

    def _closed(self) -> UnavailableError:
        return UnavailableError(f"the client of {self.target!r} is closed")


class AsyncProgram(AsyncProgramDerivatives):
    """`gradrule.Program` for asyncio."""

    _client: AsyncClient

    def __init__(self, client: AsyncClient, message: Any, groups: call_results.Groups = None) -> None:
        super().__init__(message, groups)
        self._client = client

    async def __call__(self, feeds: Feeds | None = None, /, **named: Any) -> call_results.Result:
        """Runs the program on feeds given as a dict or by keyword."""
        return await self.evaluate(merged(feeds, named))

    async def evaluate(
        self,
        feeds: Feeds | None = None,
        *,
        params: CallParams | None = None,
        grad_ys: GradYs | None = None,
        stacked_grad_ys: bool = False,
        timeout: float | None = None,
        transfer: Transfer | None = None,
    ) -> call_results.Result:
        """As `Program.evaluate`."""
        chosen = self._client._transfer if transfer is None else transfer.of_call()
        return await self._client._run(self._call(feeds, params, grad_ys, stacked_grad_ys, chosen), timeout)

    async def forward(
        self,
        feeds: Feeds | None = None,
        *,
        params: CallParams | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
        transfer: Transfer | None = None,
    ) -> AsyncForwardHandle:
        """As `Program.forward`; `async with await p.forward(…) as h`."""
        chosen = self._client._transfer if transfer is None else transfer.of_call()
        return await AsyncForwardHandle(self._client._run, self, feeds, params, ttl, timeout, chosen).run()

    async def map(
        self,
        feeds: Iterable[Feeds] | AsyncIterable[Feeds],
        in_flight: int = 16,
        *,
        params: CallParams | None = None,
        timeout: float | None = None,
        transfer: Transfer | None = None,
    ) -> AsyncIterator[call_results.Result]:
        """As `Program.map`; `async for result in p.map(…)`. The feeds may come from an async iterable too."""
        if in_flight < 1:
            raise InvalidParamError(f"in_flight is at least 1, not {in_flight}")
        chosen = self._client._transfer if transfer is None else transfer.of_call()
        pending: deque[asyncio.Task[call_results.Result]] = deque()
        try:
            async for one in _each(feeds):
                if len(pending) >= in_flight:
                    yield await pending.popleft()
                call = _calls.with_own_arrays(self._call(one, params, None, transfer=chosen))
                pending.append(asyncio.ensure_future(self._client._run(call, timeout)))
            while pending:
                yield await pending.popleft()
        finally:
            for task in pending:
                task.cancel()
            # Their outcome is nobody's any more, but an unread failure would be reported as lost.
            await asyncio.gather(*pending, return_exceptions=True)

    async def delete(self, *, timeout: float | None = None) -> None:
        """As `Program.delete`."""
        await self._client.delete_program(self.name, timeout=timeout)


async def _each(feeds: Iterable[Feeds] | AsyncIterable[Feeds]) -> AsyncIterator[Feeds]:
    if isinstance(feeds, AsyncIterable):
        async for one in feeds:
            yield one
    else:
        for one in feeds:
            yield one
