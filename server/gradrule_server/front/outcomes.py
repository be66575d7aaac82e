"""How a call is told of: to those who watch, and to its caller when it fails."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import NoReturn

import grpc

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Context
from gradrule_server.front.status import DETAILS_KEY, code_of, status_of
from gradrule_server.operations.observer import ObservedRequest, Observer
from gradrule_server.operations.request_record import REQUEST_ID, RequestRecord

_log = logging.getLogger(__name__)

_PUSHBACK_KEY = "grpc-retry-pushback-ms"


def observed_of(observer: Observer, rpc: str, context: Context) -> ObservedRequest:
    """An RPC that begins; its caller learns the id under which the log has it."""
    observed = observer.rpc(rpc, context.invocation_metadata(), context.peer)
    context.set_trailing_metadata(((REQUEST_ID, observed.request.id),))
    return observed


MAX_COMPRESSED_BYTES = 256 * 1024
"""Longer answers are not compressed by gRPC.

It does so on the thread of the event loop, at 25 ms for each MiB, while all other calls wait. Tensors can be compressed
by engines.
"""


async def compress_answers(context: Context) -> None:
    """Has gRPC compress all further messages of a call.

    grpc.aio forgets it unless the call's initial metadata is sent here (https://github.com/grpc/grpc/issues/34690).
    """
    context.set_compression(grpc.Compression.Gzip)
    await context.send_initial_metadata(())


def when_done(context: Context, undo: Callable[[object], object]) -> None:
    """Calls `undo`, with the context, when gRPC is done with a call, its last bytes included."""
    context.add_done_callback(undo)  # type: ignore[arg-type]  # the stubs ask for a class of their own


def incident() -> GradruleError:
    """What a caller is told of an unforeseen failure: nothing may leak, and nothing may be lost."""
    number = secrets.token_hex(4)
    _log.exception("incident %s", number)
    return error(errors_pb2.ERROR_REASON_INTERNAL, f"the server failed; its log has more under incident {number}")


async def abort(context: Context, cause: GradruleError, request: RequestRecord) -> NoReturn:
    """Ends a call with the status of what went wrong."""
    status = status_of(cause)
    trailers: list[tuple[str, str | bytes]] = [
        (DETAILS_KEY, status.SerializeToString()),
        (REQUEST_ID, request.id),
    ]
    if cause.retry_after_s is not None:
        # Clients that try again by themselves wait for so long.
        trailers.append((_PUSHBACK_KEY, str(int(cause.retry_after_s * 1000))))
    await context.abort(code_of(cause.reason), status.message, trailing_metadata=tuple(trailers))
    raise AssertionError("abort always raises")
