"""Defines sessions, which train and evaluate variables that the server holds while a stream is open."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from gradrule import _progress
from gradrule._builder import blob_values
from gradrule._builder.graph import Graph
from gradrule._messages import derivatives
from gradrule._messages.call_arguments import (
    CallParams,
    Feeds,
    GradYs,
    GroupedNames,
    Name,
    Names,
    ProgramArguments,
    UnconnectedGradients,
)
from gradrule._messages.error_status import closed_error
from gradrule._messages.rpc_calls import Call
from gradrule._messages.session_calls import SessionBase, SessionOptions, StepResult
from gradrule._results import call_results
from gradrule._rpc import call_routes, stream_messages
from gradrule._rpc.async_client.base import AsyncClientBase
from gradrule._rpc.async_client.forward import AsyncForwardHandle
from gradrule._rpc.async_transport import CHANNEL_CLOSED, AsyncSessionStream, Lock
from gradrule._rpc.stream_messages import StreamLostError
from gradrule.common.tensor_codec import Array
from gradrule.errors import (
    BlobNotFoundError,
    DeadlineExceededError,
    GradruleError,
    UnavailableError,
    UnsupportedError,
)
from gradrule.optimizers import Optimizer

R = TypeVar("R")


class AsyncSession(SessionBase):
    """Trains variables that the server holds: `async with client.session(graph) as s` releases them after the block.

    Calls run one after the other: a call that is made while another runs waits, and its timeout starts after that.
    """

    def __init__(self, client: AsyncClientBase, options: SessionOptions) -> None:
        super().__init__(options)
        self._client = client
        self._stream: AsyncSessionStream | None = None
        # Held while a call runs. A step's message depends on the number of steps that were answered.
        self._lock = Lock()
        self._is_running = False

    async def __aenter__(self) -> Self:
        try:
            await self._run(self._start(), None)
        except BaseException:
            self.close()
            raise
        self._task = _progress.start(self._progress, "training", None, "steps")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session; the server releases its variables."""
        self._task.close()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    async def step(
        self,
        feeds: Feeds | None,
        loss: Name,
        optimizer: Optimizer,
        *,
        fetches: Names = (),
        variables: Names = (),
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> StepResult:
        """Updates the variables once, so that a loss becomes smaller.

        Args:
            feeds: As in `AsyncClient.evaluate`.
            loss: A tensor with one element, such as a mean of the losses of examples.
            optimizer: An optimizer of `gradrule.optimizers`.
            fetches: Tensors to return, computed before the update.
            variables: Variables to update; default: all float variables that the loss depends on, except those that
                the graph marks as not trainable.
            params: As in `AsyncClient.evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            The loss before the update, and the fetches.

        Raises:
            InvalidDerivativeError: `loss` has several elements, or depends on none of the variables.
            InvalidOptimizerError: `optimizer` is not an optimizer, or a setting is out of range.
            GradruleError: As in `AsyncClient.evaluate`.
        """
        result = await self._run_next(
            lambda: self._step(feeds, loss, optimizer, variables, fetches, params), timeout, math.inf
        )
        # Outside the lock: the function that gets the report may call the session.
        if self._progress:
            self._task.advance(loss=float(result.loss.item()))
        return result

    async def evaluate(
        self,
        feeds: Feeds | None = None,
        fetches: Names = (),
        *,
        ys: Names = (),
        xs: GroupedNames = (),
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        params: CallParams | None = None,
        dense_gradients: bool = False,
        stacked_grad_ys: bool = False,
        timeout: float | None = None,
    ) -> call_results.Result:
        """Computes outputs and gradients with the session's variables; values that the graph assigns are kept.

        Args:
            feeds: As in `AsyncClient.evaluate`.
            fetches: As in `AsyncClient.evaluate`.
            ys: As in `AsyncClient.evaluate`.
            xs: As in `AsyncClient.evaluate`; variables too.
            grad_ys: As in `AsyncClient.evaluate`.
            stop_gradients: As in `AsyncClient.evaluate`.
            unconnected_gradients: As in `AsyncClient.evaluate`.
            params: As in `AsyncClient.evaluate`.
            dense_gradients: As in `AsyncClient.evaluate`.
            stacked_grad_ys: As in `AsyncClient.evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            As `AsyncClient.evaluate`.

        Raises:
            GradruleError: As in `AsyncClient.evaluate`.
        """
        arguments = ProgramArguments(
            fetches, ys, xs, grad_ys, stop_gradients, unconnected_gradients, dense_gradients=dense_gradients
        )
        return await self._run(self._evaluate(feeds, arguments, params, stacked_grad_ys), timeout)

    async def jvp(
        self,
        feeds: Feeds | None,
        tangents: Feeds,
        *,
        ys: Names,
        xs: Names,
        stop_gradients: Names = (),
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> derivatives.Tangents:
        """Computes Jacobian-vector products with the session's variables; values that the graph assigns are kept.

        Args:
            feeds: As in `AsyncClient.evaluate`.
            tangents: As in `AsyncClient.jvp`.
            ys: As in `AsyncClient.jvp`.
            xs: As in `AsyncClient.jvp`; variables too.
            stop_gradients: As in `AsyncClient.evaluate`.
            params: As in `AsyncClient.evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            As `AsyncClient.jvp`.

        Raises:
            GradruleError: As in `AsyncClient.jvp`.
        """
        arguments = ProgramArguments((), ys, xs, None, stop_gradients)
        return await self._run(self._jvp(feeds, tangents, arguments, params), timeout)

    async def jacobian(
        self,
        feeds: Feeds | None = None,
        *,
        ys: Names,
        xs: GroupedNames,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        params: CallParams | None = None,
        batched: bool = False,
        timeout: float | None = None,
    ) -> derivatives.Jacobians:
        """Computes Jacobians with the session's variables; values that the graph assigns are kept.

        Args:
            feeds: As in `AsyncClient.evaluate`.
            ys: As in `AsyncClient.evaluate`.
            xs: As in `AsyncClient.evaluate`; variables too.
            stop_gradients: As in `AsyncClient.evaluate`.
            unconnected_gradients: As in `AsyncClient.evaluate`.
            params: As in `AsyncClient.evaluate`.
            batched: As in `AsyncClient.jacobian`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            As `AsyncClient.jacobian`.

        Raises:
            GradruleError: As in `AsyncClient.jacobian`.
        """
        arguments = ProgramArguments((), ys, xs, None, stop_gradients, unconnected_gradients)
        return await self._run(self._jacobian(feeds, arguments, params, batched), timeout)

    async def hvp(
        self,
        feeds: Feeds | None,
        vectors: Feeds,
        *,
        ys: Names,
        xs: GroupedNames,
        grad_ys: GradYs | None = None,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        params: CallParams | None = None,
        timeout: float | None = None,
    ) -> derivatives.Products:
        """Computes Hessian-vector products with the session's variables; values that the graph assigns are kept.

        Args:
            feeds: As in `AsyncClient.evaluate`.
            vectors: As in `AsyncClient.hvp`.
            ys: As in `AsyncClient.evaluate`.
            xs: As in `AsyncClient.evaluate`; variables too.
            grad_ys: As in `AsyncClient.hvp`.
            stop_gradients: As in `AsyncClient.evaluate`.
            unconnected_gradients: As in `AsyncClient.evaluate`.
            params: As in `AsyncClient.evaluate`.
            timeout: Seconds; default: that of `connect`.

        Returns:
            As `AsyncClient.hvp`.

        Raises:
            GradruleError: As in `AsyncClient.hvp`.
        """
        arguments = ProgramArguments((), ys, xs, grad_ys, stop_gradients, unconnected_gradients)
        return await self._run(self._hvp(feeds, vectors, arguments, params), timeout)

    async def forward(
        self,
        feeds: Feeds | None = None,
        fetches: Names = (),
        *,
        ys: Names,
        xs: GroupedNames,
        stop_gradients: Names = (),
        unconnected_gradients: UnconnectedGradients = "none",
        params: CallParams | None = None,
        dense_gradients: bool = False,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> AsyncForwardHandle:
        """Runs the forward pass once with the session's variables; the handle's `vjp` pulls back any number of times.

        The handle keeps the values of this run: later steps and assignments do not change what it pulls back. It is
        valid until it is closed, expires, or the session ends. Values that the graph assigns are kept.

        Args:
            feeds: As in `AsyncClient.evaluate`.
            fetches: As in `AsyncClient.evaluate`.
            ys: As in `AsyncClient.evaluate`.
            xs: As in `AsyncClient.evaluate`; variables too.
            stop_gradients: As in `AsyncClient.evaluate`.
            unconnected_gradients: As in `AsyncClient.evaluate`.
            params: As in `AsyncClient.evaluate`.
            dense_gradients: As in `AsyncClient.evaluate`.
            ttl: As in `AsyncProgram.forward`.
            timeout: Seconds, also the default of the handle's calls; default: that of `connect`.

        Raises:
            InvalidParamError: `ttl` is not positive.
            QuotaExceededError: The server keeps too many handles, or too many bytes for them.
            GradruleError: As in `AsyncClient.evaluate`.
        """
        arguments = ProgramArguments(
            fetches, ys, xs, None, stop_gradients, unconnected_gradients, dense_gradients=dense_gradients
        )
        forward = self._forward(feeds, arguments, params)
        handle = AsyncForwardHandle(self, forward, ttl, timeout, self._transfer)
        await handle._run_forward(timeout)
        return handle

    async def read(self, names: Iterable[Name] | Name = (), *, timeout: float | None = None) -> Mapping[str, Array]:
        """Returns values of variables.

        Args:
            names: Names of the variables; default: all.
            timeout: Seconds; default: that of `connect`.

        Returns:
            Arrays by variable.

        Raises:
            UnknownTensorError: A name is not a variable.
        """
        return await self._run(self._read(names), timeout)

    async def assign(self, values: Mapping[Name, Any], *, timeout: float | None = None) -> None:
        """Assigns values to variables; after an error, no variable is changed.

        Args:
            values: Arrays by variable, of its dtype and shape.
            timeout: Seconds; default: that of `connect`.

        Raises:
            UnknownTensorError: A name is not a variable.
            FeedDtypeError: An array has another dtype than its variable.
            FeedShapeError: An array has another shape than its variable.
        """
        await self._run(self._assign(values), timeout)

    async def save(self, *, optimizer_state: bool = True, timeout: float | None = None) -> Graph:
        """Returns the graph with the current values of the variables.

        A session of this graph continues with them, and with the optimizer's slots and number of steps.

        Args:
            optimizer_state: Whether to add the state of the optimizer, `Graph.optimizer_state`.
            timeout: Seconds; default: that of `connect`.
        """
        return await self._run(self._save(optimizer_state), timeout)

    async def _run(self, call: Call[R], timeout: float | None, *, ends_at: float = math.inf) -> R:
        return await self._run_next(lambda: call, timeout, ends_at)

    async def _run_next(self, make_call: Callable[[], Call[R]], timeout: float | None, ends_at: float) -> R:
        """Makes and runs a call, once no other call runs.

        Raises `UnsupportedError` in a signal handler or finalizer that has interrupted a call of this thread.
        """
        async with self._lock:
            # Threads may take this lock again while they hold it.
            if self._is_running:
                raise UnsupportedError(
                    "a signal handler or finalizer has interrupted a call of this session, which must end first: let "
                    "the handler set a variable, and call the session after that call"
                )
            self._is_running = True
            try:
                return await self._run_locked(make_call(), timeout, ends_at)
            finally:
                self._is_running = False

    def _limit(self, call: Call[Any], timeout: float | None) -> float:
        return self._client._limit(call, timeout)

    async def _run_locked(self, call: Call[R], timeout: float | None, ends_at: float) -> R:
        if self._stream is None and call.method != "start":
            raise UnavailableError("the session is not open; use it as `async with client.session(graph) as s`")
        ends_at = min(ends_at, time.monotonic() + self._limit(call, timeout))
        ends_at += await self._upload(self._not_uploaded(call), timeout, ends_at)
        try:
            return await self._exchange(call, timeout, ends_at)
        except BlobNotFoundError:
            if not call.blobs:
                raise
        # A server with little space may have evicted the blobs.
        ends_at += await self._upload(call.blobs, timeout, ends_at)
        return await self._exchange(call, timeout, ends_at)

    async def _upload(self, blobs: Mapping[str, blob_values.Data], timeout: float | None, ends_at: float) -> float:
        """Sends those blobs that the server lacks; returns the seconds that this adds to the timeout of their call."""
        if not blobs:
            return 0.0
        added_s = await self._client._send_blobs(blobs, timeout, ends_at=ends_at)
        self._uploaded.update(blobs)
        return added_s

    async def _exchange(self, call: Call[R], timeout: float | None, ends_at: float) -> R:
        run_timeout = self._client._timeout if timeout is None else None
        seconds = call_routes.remaining_s(ends_at)
        data = self._message(call, seconds, run_timeout)
        if call.method == "start":
            # A refused start has ended its stream.
            self.close()
            try:
                self._stream = AsyncSessionStream(self._client._channel, self._client._metadata, self._client.target)
            except CHANNEL_CLOSED as cause:
                raise closed_error(self._client.target) from cause
        assert self._stream is not None
        try:
            # Servers answer late requests themselves, so one that does not hangs. They do not count transfers.
            transfer_s = (len(data) + self._state_bytes) * blob_values.SECONDS_PER_BYTE
            answer = await self._stream.exchange(data, seconds + transfer_s + stream_messages.GRACE_S)
        except StreamLostError as lost:
            raise self._ended(call, lost.cause) from None
        except TimeoutError:
            self.close()
            raise DeadlineExceededError(f"no answer within {seconds:.3g} s; the session is closed") from None
        except GradruleError:
            raise
        except BaseException:
            # After an interrupt, the answer may still arrive, and the next message would get it.
            self.close()
            raise
        return self._decoded(call, answer)
