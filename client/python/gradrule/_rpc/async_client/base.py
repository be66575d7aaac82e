"""Runs calls on one connection, and uploads the blobs that the server lacks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from gradrule import _progress
from gradrule._builder import blob_values
from gradrule._messages import rpc_calls
from gradrule._messages.error_status import closed_error, error_of, waiting_error
from gradrule._messages.transfer_options import PLAIN, Transfer
from gradrule._progress import Progress
from gradrule._results.status_report import ServerStatus, server_status
from gradrule._rpc import call_routes, channels, process_forks
from gradrule._rpc.async_client.sending import AsyncCallSender
from gradrule._rpc.async_transport import CHANNEL_CLOSED, guarded, run_in_thread, sleep
from gradrule._rpc.call_routes import Routes
from gradrule._rpc.shared_memory import SharedMemory
from gradrule.errors import EngineUnavailableError, GradruleError
from gradrule.v1 import admin_pb2

R = TypeVar("R")
M = TypeVar("M", bound=Message)

_HEALTH_CHECK_S = 0.1


class AsyncClientBase:
    """Runs calls on a connection to one server; base class of `AsyncClient`, which programs use."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        target: str,
        *,
        token: str | None,
        timeout: float,
        compile_timeout: float,
        stream: bool = True,
        transfer: Transfer = PLAIN,
        shared_memory: bool = True,
    ) -> None:
        self._channel = guarded(channel)
        self._metadata = channels.metadata(token) + transfer.metadata
        self._transfer = transfer
        self._timeout = timeout
        self._compile_timeout = compile_timeout
        routes = Routes(use_stream=stream)
        self._memory = SharedMemory(is_enabled=shared_memory)
        self._sender = AsyncCallSender(self._channel, self._metadata, routes, self._memory, target)
        self._stop_server: Callable[[], object] | None = None
        self.target = target

    @property
    def may_share_memory(self) -> bool:
        """Whether large tensors of calls go through memory that is shared with the server, as far as is known."""
        return self._transfer.packing is None and not self._memory.refusal

    async def find_missing_blobs(self, names: Iterable[str], *, timeout: float | None = None) -> list[str]:
        """Lists the blobs that the server does not have.

        Args:
            names: SHA-256 of the blobs, in hex.
            timeout: Seconds; default: that of `connect`.

        Returns:
            The names whose blobs the server does not have.
        """
        return await self._run(rpc_calls.find_missing(names), timeout)

    async def upload(self, value: Any, *, progress: Progress = None, timeout: float | None = None) -> str:
        """Sends a graph or a tensor unless the server has it.

        Calls upload missing blobs themselves; this method does it in advance.

        Args:
            value: A graph, a graph's bytes, an array or list of numbers, or a `Blob`.
            progress: A function that gets a `gr.ProgressReport` for each part that was sent; True: a bar, if standard
                error is a terminal or this is a notebook.
            timeout: Seconds, plus one for every MiB; default: that of `connect`.

        Returns:
            The SHA-256 of its bytes, in hex.

        Raises:
            InvalidTensorError: The value is not an array of numbers.
            QuotaExceededError: The tenant's blobs take too many bytes.
        """
        upload = rpc_calls.make_upload(value)
        await self._send_blobs({upload.sha256: upload.data}, timeout, progress)
        return upload.sha256

    async def server_status(self, *, timeout: float | None = None) -> ServerStatus:
        """Returns the state of the server: engines, queue, caches, tenants.

        Args:
            timeout: Seconds; default: that of `connect`.

        Raises:
            PermissionDeniedError: The caller may not read the status.
        """
        return await self._unary(
            "AdminService/GetServerStatus",
            admin_pb2.GetServerStatusRequest(),
            admin_pb2.GetServerStatusResponse,
            lambda response: server_status(response.status),
            timeout,
        )

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until an engine is ready.

        Args:
            timeout: Seconds; default: that of `connect`.

        Raises:
            UnavailableError: The server was not reached in time.
            EngineUnavailableError: The server was reached, but no engine was ready in time.
        """
        process_forks.require_grpc()
        ends_at = time.monotonic() + call_routes.call_timeout(timeout, self._timeout)
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(channels.HEALTH_METHOD)
        while True:
            left = ends_at - time.monotonic()
            try:
                answer = await check(
                    channels.HEALTH_REQUEST, timeout=max(left, 0.001), metadata=self._metadata, wait_for_ready=True
                )
            except grpc.RpcError as failure:
                if (error := waiting_error(failure, self.target)) is not None:
                    raise error from None
            except CHANNEL_CLOSED as cause:
                raise closed_error(self.target) from cause
            else:
                if answer == channels.HEALTH_SERVING:
                    return
            if left < _HEALTH_CHECK_S:
                raise EngineUnavailableError(f"the server at {self.target!r} has no engine ready")
            await sleep(_HEALTH_CHECK_S)

    async def close(self) -> None:
        """Closes the connection; running calls are cancelled. Stops the server of `local`."""
        try:
            await self._sender.close()
            await self._channel.close()
        finally:
            if self._stop_server is not None:
                await run_in_thread(self._stop_server)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.target!r}>"

    async def _unary(
        self, method: str, request: Message, response: type[M], decode: Callable[[M], R], timeout: float | None
    ) -> R:
        """Calls a method of a service and returns its decoded response.

        Args:
            method: `Service/Method`, without the package.
            request: The request.
            response: The class of the response.
            decode: Makes the result from the response.
            timeout: Seconds; None: the client's.
        """
        return await self._run(rpc_calls.unary(method, request, response, decode), timeout)

    async def _run(
        self,
        call: rpc_calls.Call[R],
        timeout: float | None,
        progress: Progress = None,
        *,
        ends_at: float = math.inf,
    ) -> R:
        """Sends a call, and the blobs that the server lacks for it. Raises the error of a failed call.

        Args:
            call: The call.
            timeout: Seconds; None: the client's. Uploads add to it, see `Upload.additional_s`.
            progress: As in `upload`.
            ends_at: The time at which the call ends even if its timeout is later, on the clock of `time.monotonic`.
        """
        seconds = min(self._limit(call, timeout), call_routes.remaining_s(ends_at))
        if call.blobs:
            ends_at = time.monotonic() + seconds
            return await self._follow(rpc_calls.call_steps(call), timeout, progress, ends_at=ends_at)
        return await self._sender.send(call, seconds)

    async def _follow(
        self,
        steps: Generator[rpc_calls.Call[Any] | blob_values.Upload, Any, R],
        timeout: float | None,
        progress: Progress = None,
        *,
        ends_at: float = math.inf,
        task: _progress.Task = _progress.SILENT,
    ) -> R:
        """Runs the steps that a generator yields, sends it their outcomes, and returns its result.

        Args:
            steps: The generator.
            timeout: Seconds for each step; None: the client's.
            progress: As in `upload`.
            ends_at: The time at which the steps end, on the clock of `time.monotonic`. Uploads add to it.
            task: Counts the steps.
        """
        try:
            step = next(steps)
            while True:
                if isinstance(step, blob_values.Upload):
                    ends_at += step.additional_s
                try:
                    outcome = await self._step(step, timeout, ends_at, progress)
                    task.advance()
                except GradruleError as refusal:
                    step = steps.throw(refusal)
                else:
                    step = steps.send(outcome)
        except StopIteration as end:
            found: R = end.value
            return found

    async def _step(
        self,
        step: rpc_calls.Call[Any] | blob_values.Upload,
        timeout: float | None,
        ends_at: float,
        progress: Progress,
    ) -> Any:
        if not isinstance(step, blob_values.Upload):
            return await self._run(step, timeout, ends_at=ends_at)
        seconds = call_routes.call_timeout(timeout, self._timeout) + step.additional_s
        deadline = min(seconds, call_routes.remaining_s(ends_at))
        try:
            send: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(
                blob_values.UPLOAD_METHOD
            )
            with _progress.start(progress, "uploading", len(step.data), "bytes") as task:
                return await send(step.pieces(task.advance), timeout=deadline, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of(failure, self.target) from None
        except CHANNEL_CLOSED as cause:
            raise closed_error(self.target) from cause

    async def _send_blobs(
        self,
        blobs: Mapping[str, blob_values.Data],
        timeout: float | None,
        progress: Progress = None,
        *,
        ends_at: float = math.inf,
    ) -> float:
        """Sends those blobs that the server lacks; returns the seconds that this adds to the timeout of their call.

        Args:
            blobs: By SHA-256.
            timeout: As in `_run`.
            progress: As in `upload`.
            ends_at: As in `_run`.
        """
        ends_at = min(ends_at, time.monotonic() + call_routes.call_timeout(timeout, self._timeout))
        return await self._follow(rpc_calls.upload_steps(blobs), timeout, progress, ends_at=ends_at)

    def _limit(self, call: rpc_calls.Call[Any], timeout: float | None) -> float:
        process_forks.require_grpc()
        return call_routes.limit(call, timeout, self._timeout, self._compile_timeout)
