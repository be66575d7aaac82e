"""The one message of a call that gRPC is not asked to read by itself: it is counted and timed from its first byte."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc

from gradrule_server.front.calls import Context


async def read_one(context: Context, seconds: float) -> bytes | None:
    """The next message; None where there is none. `TimeoutError` where it is not all there in time.

    A read that is given up goes on until the call ends: gRPC would lose what comes for one that was cancelled.
    """
    reading: asyncio.Future[bytes | object] = asyncio.ensure_future(context.read())
    reading.add_done_callback(_retrieved)
    done, _ = await asyncio.wait({reading}, timeout=seconds)
    if not done:
        raise TimeoutError
    raw = reading.result()
    return None if raw is grpc.aio.EOF else cast(bytes, raw)


def _retrieved(reading: asyncio.Future[bytes | object]) -> None:
    if not reading.cancelled():
        reading.exception()
