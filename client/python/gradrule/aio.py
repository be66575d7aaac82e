"""The client for asyncio: the same methods as the sync one, awaited."""

from gradrule._rpc.async_client.client import AsyncClient, connect, local
from gradrule._rpc.async_client.programs import AsyncProgram

__all__ = ["AsyncClient", "AsyncProgram", "connect", "local"]
