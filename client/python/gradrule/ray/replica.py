"""One replica of the deployment: starts a server, and forwards calls to it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from ray import serve

from gradrule._rpc import channels
from gradrule._rpc.local_server import LocalServer
from gradrule.errors import InvalidParamError
from gradrule.ray import rpcs
from gradrule.ray.autoscaling import REQUESTS
from gradrule.ray.rpcs import RPCS, Ending, Rpc
from gradrule.ray.stream_requests import StreamRequests

# Serve's handler shows what this logger writes.
_log = logging.getLogger("ray.serve")

_HEALTH_CHECK_S = 10.0
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Clients retry. A retry here would run a call again after its client has learned of the failure.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
_SETTINGS = {
    "host": "127.0.0.1",
    "port": 0,
    # A client's next call may go to another replica, which does not have its memory.
    "max_shared_bytes": 0,
    # All calls of a replica use one connection.
    "max_connection_streams": 100_000,
}
_REFUSED = {
    "config": "its settings are arguments of the application or variables GRADRULE_*",
    "tls_cert": "the gRPC proxies of Ray Serve do not encrypt; put a proxy that does in front of them",
    "tls_client_ca": "the gRPC proxies of Ray Serve do not encrypt, so use tokens; put a proxy that encrypts in front",
    "http_port": "Ray Serve does not forward it; start `gradrule gateway` beside the application",
}


class Replica:
    """Runs one server on the loopback interface and forwards each RPC to it, by the method of its name.

    The replica ends if its server does, so that Ray Serve starts another one.

    Args:
        settings: Flags of `gradrule serve`, with `_` for `-`. Variables `GRADRULE_*` of the replica hold too.

    Raises:
        InvalidParamError: The server refuses a setting, the replicas share no registry, or tokens are not encrypted.
        UnavailableError: The server did not start.
    """

    _server: LocalServer | None = None

    def __init__(self, settings: Mapping[str, Any]) -> None:
        for name, reason in _REFUSED.items():
            if _is_set(settings, name):
                raise InvalidParamError(f"a server in Ray Serve cannot have the setting {name}: {reason}")
        _check_credentials(settings)
        chosen = {**settings, **_SETTINGS}
        has_shared_registry = _is_set(settings, "registry")
        if (replicas := _max_replicas()) > 1:
            _check_shared_state(replicas, settings, has_shared_registry)
        if not has_shared_registry:
            # The data folder has the registry, so it must outlive the replica, and only one server can use it.
            chosen.setdefault("data_dir", _default_data_dir())
        if registry := chosen.pop("registry", ""):
            # The URL may have a password, which everybody on the node could read in the arguments of the process.
            os.environ["GRADRULE_REGISTRY"] = registry
        self._requests = 0
        self._is_stopping = False
        self._server = LocalServer(chosen, log_to_stderr=True, kills_children=True)
        self._target = self._server.start()
        threading.Thread(target=self._end_with_server, daemon=True, name="gradrule server").start()

    def __del__(self) -> None:
        """Drains and stops the server. Ray Serve calls this when it stops a replica."""
        self._is_stopping = True
        if self._server is not None:
            self._server.stop()

    async def check_health(self) -> None:
        """Raises `RuntimeError` or `grpc.RpcError` unless an engine is ready. Ray Serve calls this at intervals."""
        check: Any = self._channel.unary_unary(channels.HEALTH_METHOD)
        if await check(channels.HEALTH_REQUEST, timeout=_HEALTH_CHECK_S) != channels.HEALTH_SERVING:
            raise RuntimeError("no engine of the server is ready")

    def record_autoscaling_stats(self) -> dict[str, int]:
        """Returns what `autoscaling_policy` needs. Ray Serve calls this at intervals."""
        return {REQUESTS: self._requests}

    async def forward_unary(self, rpc: Rpc, request: Any, context: Any) -> Ending:
        """Forwards a call with one response. request: bytes, or an iterator of messages."""
        make = self._channel.stream_unary if rpc.has_request_stream else self._channel.unary_unary
        call: Any = make(rpc.path)(request, **call_options(context))
        self._requests += 1
        try:
            message = await call
        except grpc.aio.AioRpcError:
            # The code that follows reads the status of the call.
            message = None
        finally:
            self._requests -= 1
        return await _ending(call, message)

    async def forward_stream(self, rpc: Rpc, request: Any, context: Any) -> AsyncIterator[bytes | Ending]:
        """Forwards a call with a stream of responses. Yields them, and then how the call ended."""
        counter = StreamCounter(rpc, self._add_requests)
        make: Any
        if rpc.has_request_stream:
            request, make = counter.counted(request), self._channel.stream_stream
        else:
            make = self._channel.unary_stream
        call: Any = make(rpc.path)(request, **call_options(context))
        try:
            async for message in call:
                counter.count_response(message)
                yield message
        except grpc.aio.AioRpcError:
            # The code that follows reads the status of the call.
            pass
        finally:
            counter.close()
            call.cancel()
        yield await _ending(call, None)

    def _add_requests(self, change: int) -> None:
        self._requests += change

    @functools.cached_property
    def _channel(self) -> grpc.aio.Channel:
        # Created at the first call, since it belongs to the event loop that runs then.
        return grpc.aio.insecure_channel(self._target, options=_OPTIONS)

    def _end_with_server(self) -> None:
        assert self._server is not None
        code = self._server.wait()
        if not self._is_stopping:
            _log.error("the gradrule server of this replica ended with exit code %s; the replica ends too", code)
            os._exit(1)


class _Answer:
    """A message for Ray Serve, which calls `SerializeToString` and passes on what that returns."""

    def __init__(self, value: bytes | Ending) -> None:
        self._value = value

    def SerializeToString(self) -> bytes | Ending:
        return self._value


class StreamCounter:
    """Counts the requests of a stream that have no answer yet.

    A session counts as one request while it is open, since it holds memory of an engine. Streams of health checks and
    of reflection do not count.
    """

    def __init__(self, rpc: Rpc, add: Callable[[int], None]) -> None:
        self._requests = StreamRequests(rpc)
        self._add = add
        self._has_requests = rpc.path == rpcs.STREAM_EVALUATE
        self._pending = 0
        if rpc.path == rpcs.RUN_SESSION:
            self._change(1)

    async def counted(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yields the requests, and counts them."""
        async for request in requests:
            if self._has_requests:
                self._change(self._requests.change_by_request(request))
            yield request

    def count_response(self, response: bytes) -> None:
        """Counts a response."""
        if self._has_requests:
            self._change(self._requests.change_by_answer(response))

    def close(self) -> None:
        """Counts the requests of the stream no longer."""
        self._change(-self._pending)

    def _change(self, by: int) -> None:
        # The server also answers parts of requests that it refuses.
        by = max(by, -self._pending)
        self._pending += by
        self._add(by)


def call_options(context: Any) -> dict[str, Any]:
    """Returns metadata and timeout of the call to the server."""
    metadata, timeout = [], None
    for key, value in context.invocation_metadata():
        if key == rpcs.TIMEOUT:
            timeout = max(0.0, float(value))
        elif key not in rpcs.FOR_PROXY and not key.startswith(("grpc-", "user-agent", ":")):
            metadata.append((key, value))
    return {"metadata": metadata, "timeout": timeout}


async def _ending(call: Any, message: bytes | None) -> Ending:
    """Returns how a call to the server ended."""
    code, details = await call.code(), await call.details()
    trailers = tuple((key, value) for key, value in await call.trailing_metadata() or ())
    if code is grpc.StatusCode.UNAVAILABLE and not trailers:
        # A server adds the id of the request. gRPC's own text would tell a client that it has the wrong address.
        details = "the server of a replica has ended; Ray Serve starts another one, so the call may be sent again"
    return Ending(code.name, details or "", trailers, message)


def _value(settings: Mapping[str, Any], name: str) -> str:
    """Returns a setting, from the arguments of the application or the environment; empty: it has no value."""
    value = settings.get(name)
    return os.environ.get(f"GRADRULE_{name.upper()}", "") if value is None else str(value)


def _is_set(settings: Mapping[str, Any], name: str) -> bool:
    return _value(settings, name) != ""


def _check_credentials(settings: Mapping[str, Any]) -> None:
    """Warns of servers that everybody can call. The server itself listens on the loopback interface, so it does not.

    Raises:
        InvalidParamError: Clients would send tokens unencrypted.
    """
    if not any(_is_set(settings, name) for name in ("tokens", "jwt_key", "jwt_jwks")):
        _log.warning(
            "the gRPC proxies of Ray Serve listen on all addresses of their nodes, and the servers ask for no "
            "credentials (setting tokens): everybody who can reach them may run graphs"
        )
    elif _value(settings, "insecure_tokens").lower() in ("", "0", "no", "off", "false"):
        raise InvalidParamError(
            "tokens would be sent unencrypted to the gRPC proxies of Ray Serve: put a proxy that encrypts in front of "
            "them, close their port to others, and set insecure_tokens to true"
        )


def _check_shared_state(replicas: int, settings: Mapping[str, Any], has_shared_registry: bool) -> None:
    """Raises `InvalidParamError` unless several replicas can run with these settings."""
    if not has_shared_registry:
        raise InvalidParamError(
            f"{replicas} replicas need a registry that they share: set the argument `registry` of the application, or "
            "GRADRULE_REGISTRY on all nodes, to a postgresql:// URL. Without it, set num_replicas to 1"
        )
    if settings.get("data_dir"):
        raise InvalidParamError(
            f"{replicas} replicas cannot share the folder {settings['data_dir']} (data_dir), which one server locks: "
            "leave the setting out. Each replica then has a temporary folder"
        )


def _max_replicas() -> int:
    """Returns how many replicas the deployment of this one may have."""
    config = serve.get_replica_context()._deployment_config
    return int(config.autoscaling_config.max_replicas if config.autoscaling_config else config.num_replicas)


def _default_data_dir() -> str:
    """Returns the data folder that `gradrule serve` has by default."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.environ.get("GRADRULE_DATA_DIR") or os.path.join(base, "gradrule")


def _add_methods() -> None:
    """Adds one method for each RPC to `Replica`; Ray Serve calls a method by the name of the RPC."""

    def unary(rpc: Rpc) -> Any:
        async def method(self: Replica, request: Any, grpc_context: Any) -> _Answer:
            try:
                return _Answer(await self.forward_unary(rpc, request, grpc_context))
            except asyncio.CancelledError:
                raise
            except Exception as failure:
                return _Answer(_failure(failure))

        return method

    def stream(rpc: Rpc) -> Any:
        async def method(self: Replica, request: Any, grpc_context: Any) -> AsyncIterator[_Answer]:
            try:
                async for answer in self.forward_stream(rpc, request, grpc_context):
                    yield _Answer(answer)
            except asyncio.CancelledError:
                raise
            except Exception as failure:
                yield _Answer(_failure(failure))

        return method

    for rpc in RPCS:
        method = (stream if rpc.has_response_stream else unary)(rpc)
        method.__name__ = rpc.method
        setattr(Replica, rpc.method, method)


def _failure(failure: Exception) -> Ending:
    _log.exception("a call was not forwarded", exc_info=failure)
    return Ending(grpc.StatusCode.INTERNAL.name, "the replica failed to forward the call; its log has more", ())


_add_methods()
