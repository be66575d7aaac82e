"""Calls the server: raw bytes over one gRPC connection, with the caller's credential."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from gradrule._messages.error_status import error_of
from gradrule._rpc import channels
from gradrule_gateway.problems import Problem

Metadata = Sequence[tuple[str, str]]
_REQUEST_ID = "x-request-id"
_DETAILS = "grpc-status-details-bin"
# Time for the answer to an upload after its last byte.
_ANSWER_S = 60.0
_RECONNECT_S = 5.0
# Time that calls may go on over a connection that was replaced.
_LONGEST_CALL_S = 3600.0
# A cheap call that needs a credential.
_FIND_MISSING = "/gradrule.v1.BlobService/FindMissingBlobs"


class Upstream:
    """A connection to the server.

    Args:
        target: Address of the server, `host:port`.
        credentials: TLS credentials; None: not encrypted.
        server_name: Name in the server's certificate, if it is not the host of the target; empty: the host.

    Raises:
        InvalidParamError: The target is not an address.
    """

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = "") -> None:
        self.target, credentials = channels.endpoint(target, credentials)
        self.may_send_tokens = credentials is not None or channels.is_local(self.target)
        self._channel = self._connect(credentials, server_name)
        self._closing: set[asyncio.Task[None]] = set()

    def _connect(self, credentials: grpc.ChannelCredentials | None, server_name: str) -> grpc.aio.Channel:
        options = [*channels.OPTIONS]
        if server_name:
            options.append(("grpc.ssl_target_name_override", server_name))
        address = channels.address(self.target)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)

    async def reconnect(self, credentials: grpc.ChannelCredentials, server_name: str) -> None:
        """Replaces the connection once a new one with other credentials is established; running calls go on.

        Raises:
            TimeoutError: The server does not accept the credentials, or they do not accept its certificate, within 5 s.
        """
        renewed = self._connect(credentials, server_name)
        try:
            async with asyncio.timeout(_RECONNECT_S):
                await renewed.channel_ready()
        except BaseException:
            await renewed.close()
            raise
        old, self._channel = self._channel, renewed
        closing = asyncio.ensure_future(old.close(_LONGEST_CALL_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def unary(self, path: str, request: bytes, metadata: Metadata, timeout_s: float | None) -> tuple[bytes, str]:
        """Runs a unary call; returns the answer and the server's id of the request. Raises `Problem`."""
        method: Any = self._channel.unary_unary(path)
        call = method(request, metadata=tuple(metadata), timeout=timeout_s)
        return await _answer(call, self.target)

    async def upload(
        self, path: str, requests: AsyncIterator[bytes], metadata: Metadata, timeout_s: float | None
    ) -> tuple[bytes, str]:
        """Runs a client-streaming call; returns the answer and the server's id of the request.

        Raises:
            Problem: The call failed, or the iterator of requests raised it.
        """
        method: Any = self._channel.stream_unary(path)
        call = method(metadata=tuple(metadata), timeout=timeout_s)
        writing = asyncio.ensure_future(_write(call, requests))
        answering = asyncio.ensure_future(_answer(call, self.target))
        try:
            await asyncio.wait({writing, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                writing.result()
            # Without a deadline, nothing else would end the wait for a server that hangs.
            async with asyncio.timeout(_ANSWER_S if timeout_s is None else None):
                return await answering
        except TimeoutError:
            raise Problem(
                "DEADLINE_EXCEEDED", f"the server has not answered within {_ANSWER_S:g} s after the last byte"
            ) from None
        finally:
            writing.cancel()
            answering.cancel()
            # Nobody may read the body after this.
            await asyncio.gather(writing, answering, return_exceptions=True)

    async def check_credential(self, metadata: Metadata, timeout_s: float | None) -> None:
        """Asks the server whether it accepts the caller's credential. Raises `Problem`."""
        await self.unary(_FIND_MISSING, b"", metadata, timeout_s)

    async def is_serving(self, timeout_s: float) -> bool:
        """Returns whether an engine of the server is ready. Raises `Problem`."""
        answer, _ = await self.unary(channels.HEALTH_METHOD, channels.HEALTH_REQUEST, (), timeout_s)
        return answer == channels.HEALTH_SERVING


async def _write(call: Any, requests: AsyncIterator[bytes]) -> None:
    async for request in requests:
        try:
            await call.write(request)
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The server has answered already; the answer says why.
            return
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        await call.done_writing()


async def _answer(call: Any, target: str) -> tuple[bytes, str]:
    try:
        answer: bytes = await call
        trailers = await call.trailing_metadata()
    except grpc.RpcError as failure:
        raise _problem(failure, target) from None
    return answer, _request_id(trailers)


def _request_id(metadata: Any) -> str:
    return next((str(value) for key, value in metadata or () if key == _REQUEST_ID), "")


def _problem(failure: grpc.RpcError, target: str) -> Problem:
    call = cast(Any, failure)
    error = error_of(failure, target)
    violations = [] if error.details[0].message == error.message and not error.details[0].field else error.details
    headers = {_REQUEST_ID: error.request_id} if error.request_id else {}
    return Problem(
        error.reason,
        error.message,
        code=error.code_name,
        violations=violations,
        metadata=_metadata(call.trailing_metadata()),
        retry_after_s=error.retry_delay,
        headers=headers,
    )


def _metadata(trailers: Any) -> dict[str, str]:
    """Returns the metadata of the ErrorInfo in the trailers, and the names of missing resources."""
    found: dict[str, str] = {}
    for key, value in trailers or ():
        if key != _DETAILS:
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            break
        info, resource = error_details_pb2.ErrorInfo(), error_details_pb2.ResourceInfo()
        resources = []
        for detail in status.details:
            if detail.Unpack(info):
                found.update(info.metadata)
            elif detail.Unpack(resource):
                resources.append(resource.resource_name)
        if resources:
            found["resources"] = ",".join(resources)
    return found
