"""Offers the client for asyncio; its methods are those of the sync client."""

from gradrule._rpc.async_client.client import AsyncClient, connect, local
from gradrule._rpc.async_client.programs import AsyncProgram

__all__ = ["AsyncClient", "AsyncProgram", "connect", "local"]
