"""A bare unary echo in grpcio, sync or asyncio: `python echo_server.py sync|aio` prints its port and serves.

It is what the wire and the interpreter cost without any work, so it registers raw bytes and nothing else.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

METHOD = "/bench.Echo/Call"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _handler(behaviour: Any) -> grpc.GenericRpcHandler:
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(behaviour)
    return grpc.method_handlers_generic_handler("bench.Echo", {"Call": method})


def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    return request


async def echo_async(request: bytes, context: Any) -> bytes:
    return request


def serve_sync() -> None:
    server = grpc.server(ThreadPoolExecutor(max_workers=32), options=OPTIONS)
    server.add_generic_rpc_handlers((_handler(echo),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    server.stop(0).wait()


async def serve_aio() -> None:
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((_handler(echo_async),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    if sys.argv[1] == "sync":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        serve_sync()
    else:
        asyncio.run(serve_aio())
