"""Builds the ASGI application: one handler for all routes of the table, health, the OpenAPI document, the console."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.staticfiles import StaticFiles

from gradrule.v1 import blob_pb2
from gradrule_gateway import conversion, graphs, json_text
from gradrule_gateway.budget import Budget, Share
from gradrule_gateway.callers import Callers
from gradrule_gateway.connections import Connections
from gradrule_gateway.converters import Converters
from gradrule_gateway.deadlines import Deadline, deadline_of
from gradrule_gateway.guard import Guard, Limits
from gradrule_gateway.problems import Problem, malformed
from gradrule_gateway.program_types import ProgramTypes
from gradrule_gateway.routes import ROUTES, Route
from gradrule_gateway.upstream import Metadata, Upstream

_R = TypeVar("_R")
_FORWARDED = ("authorization", "traceparent", "tracestate")
_HEALTH_TIMEOUT_S = 5.0
_FORMATS = ("compact", "base64", "proto")
_NO_CONSOLE = (
    "The console is not part of this installation. The HTTP API is at /v1, its description at /openapi.json.\n"
)


def create_app(
    upstream: Upstream,
    converters: Converters,
    limits: Limits,
    connections: Connections,
    *,
    insecure_tokens: bool = False,
) -> Guard:
    """Returns the application.

    Args:
        upstream: The connection to the server.
        converters: What converts bodies.
        limits: Limits on requests, and hosts and origins that may send them.
        connections: The open connections, for metrics.
        insecure_tokens: Send tokens unencrypted to a server on another machine.
    """
    budget = Budget(limits.max_requests, limits.max_bytes_in_flight)
    gateway = Gateway(upstream, converters, insecure_tokens=insecure_tokens)
    paths: dict[str, dict[str, Route]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = route
    routes: list[Any] = [
        StarletteRoute(path.replace("}", ":path}"), partial(_by_method, gateway, by_method), methods=sorted(by_method))
        for path, by_method in sorted(paths.items(), key=lambda entry: "{" in entry[0])
    ]
    routes += [
        StarletteRoute("/healthz", _health),
        StarletteRoute("/v1/health", gateway.server_health),
        StarletteRoute("/metrics", partial(gateway.metrics, lambda: _figures(connections, budget, converters))),
        StarletteRoute("/openapi.json", _openapi),
        StarletteRoute("/console/graph", gateway.read_graph, methods=["POST"]),
        StarletteRoute("/console/picture", gateway.draw_graph, methods=["POST"]),
    ]
    console = Path(__file__).parent / "console"
    # The default, not a route: a route for all paths would hide that a path has no such method.
    has_console = (console / "index.html").is_file()
    others: Any = ConsoleFiles(directory=console, html=True) if has_console else _no_console
    return Guard(Router(routes, redirect_slashes=False, default=others), limits, budget)


class ConsoleFiles(StaticFiles):
    """Serves the console's files. Their names stay after an upgrade, so browsers must ask whether they changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Returns a file, or 304 if the browser has it."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


class Gateway:
    """Serves RPCs over HTTP.

    Args:
        upstream: The connection to the server.
        converters: What converts bodies.
        insecure_tokens: Send tokens unencrypted to a server on another machine.
    """

    def __init__(self, upstream: Upstream, converters: Converters, *, insecure_tokens: bool) -> None:
        self._upstream = upstream
        self._callers = Callers(upstream)
        self._types = ProgramTypes(upstream)
        self._converters = converters
        self._health: asyncio.Future[bool] | None = None
        self._may_send_tokens = upstream.may_send_tokens or insecure_tokens

    async def call(self, route: Route, request: Request) -> Response:
        """Runs the RPC of a route. Raises `Problem`."""
        deadline = deadline_of(request.headers, route)
        form, query = _format(request)
        metadata = self._metadata(request)
        share: Share = request.state.share
        async with deadline.enforced():
            await self._identify(request, metadata, deadline)
            if route.body == "bytes":
                answer, request_id = await self._upload(route, request, metadata, deadline)
            elif route.body == "json":
                if query:
                    raise malformed("a request with a body has no query parameters except format", query[0][0])
                _check_content_type(request)
                body = await request.body()
                share.start()
                run_json = self._call_json(route, body, metadata, deadline, share)
                answer, request_id = await _unless_disconnected(request, run_json)
            else:
                message = conversion.decode_parameters(route, request.path_params, query)
                share.start()
                run = self._upstream.unary(
                    route.grpc_path, message.SerializeToString(), metadata, deadline.remaining_s()
                )
                answer, request_id = await _unless_disconnected(request, run)
            share.take(len(answer))
            text = await _unless_disconnected(request, self._converters.encode(share.caller, route, answer, form))
            share.give(len(answer))
        return _json(share, text, {"x-request-id": request_id} if request_id else {})

    async def server_health(self, request: Request) -> Response:
        """Answers whether an engine of the server is ready."""
        if self._health is None or self._health.done():
            # All who ask at the same time get one answer.
            self._health = asyncio.ensure_future(self._upstream.is_serving(_HEALTH_TIMEOUT_S))
        serving = await asyncio.shield(self._health)
        body = json_text.dump({"status": "SERVING" if serving else "NOT_SERVING"})
        return Response(body, 200 if serving else 503, media_type="application/json")

    async def metrics(self, figures: Callable[[], Mapping[str, int]], request: Request) -> Response:
        """Answers with metrics in Prometheus' text format. Raises `Problem`."""
        deadline = Deadline(time.monotonic() + _HEALTH_TIMEOUT_S)
        async with deadline.enforced():
            await self._identify(request, self._metadata(request), deadline)
        return PlainTextResponse("".join(f"gradrule_gateway_{name} {value}\n" for name, value in figures().items()))

    async def read_graph(self, request: Request) -> Response:
        """Stores a graph for the console and describes it. Raises `Problem`."""
        deadline = deadline_of(request.headers, graphs.COMPILE)
        metadata = self._metadata(request)
        share: Share = request.state.share
        async with deadline.enforced():
            graphs.check_content_type(request)
            await self._identify(request, metadata, deadline)
            body = await request.body()
            share.start()
            run = graphs.store_uploaded(self._upstream, self._converters, share.caller, body, metadata)
            return _json(share, await _unless_disconnected(request, run))

    async def draw_graph(self, request: Request) -> Response:
        """Explains a program for the console, with a picture of its graph. Raises `Problem`."""
        deadline = deadline_of(request.headers, graphs.COMPILE)
        metadata = self._metadata(request)
        share: Share = request.state.share
        async with deadline.enforced():
            _check_content_type(request)
            await self._identify(request, metadata, deadline)
            given = await request.body()
            share.start()
            reading = self._converters.run(share.caller, graphs.decode_request, given)
            body, structure = await _unless_disconnected(request, reading)
            run = self._call_json(graphs.COMPILE, body, metadata, deadline, share)
            answer, _ = await _unless_disconnected(request, run)
            text = await _unless_disconnected(
                request, self._converters.run(share.caller, graphs.draw, answer, structure)
            )
        return _json(share, text)

    async def _identify(self, request: Request, metadata: Metadata, deadline: Deadline) -> None:
        """Finds the caller before the body is awaited. Raises `Problem` if the server does not accept the caller."""
        host = request.client.host if request.client else ""
        share: Share = request.state.share
        share.caller = await self._callers.find(metadata, host, deadline.remaining_s())

    async def _call_json(
        self, route: Route, body: bytes, metadata: Metadata, deadline: Deadline, share: Share
    ) -> tuple[bytes, str]:
        decoded = await self._converters.decode(share.caller, route, body)
        message, kept, key = decoded.message, False, b""
        if route.rpc == "GradientService/Evaluate" and deadline.is_default and not message.HasField("run_timeout"):
            # As the clients do: only compiling may use the longer deadline.
            message.run_timeout.FromSeconds(30)
        types: conversion.Types = {}
        if decoded.open:
            types, key, kept = await self._types.find(message, metadata, deadline)
        size = 0
        try:
            if decoded.open:
                await self._converters.close_types(share.caller, route, decoded, types)
            size = message.ByteSize()
            share.take(size)
            request = conversion.encode_request(message)
            return await self._upstream.unary(route.grpc_path, request, metadata, deadline.remaining_s())
        except Problem as problem:
            if not kept or problem.reason != "FEED_DTYPE":
                raise
        finally:
            share.give(size)
        # Another program has this name now.
        self._types.forget(key)
        return await self._call_json(route, body, metadata, deadline, share)

    async def _upload(
        self, route: Route, request: Request, metadata: Metadata, deadline: Deadline
    ) -> tuple[bytes, str]:
        async def parts() -> AsyncIterator[bytes]:
            yield blob_pb2.UploadBlobRequest(sha256=request.path_params[route.path_field]).SerializeToString()
            async for chunk in request.stream():
                if chunk:
                    yield blob_pb2.UploadBlobRequest(data=chunk).SerializeToString()

        return await self._upstream.upload(route.grpc_path, parts(), metadata, deadline.remaining_s())

    def _metadata(self, request: Request) -> Metadata:
        found = []
        for name in _FORWARDED:
            values = request.headers.getlist(name)
            if len(values) > 1:
                raise malformed("the header occurs more than once", name)
            for value in values:
                if not value.isascii() or not value.isprintable():
                    raise malformed("the header has characters other than printable ASCII", name)
                found.append((name, value))
        if not self._may_send_tokens and any(name == "authorization" for name, _ in found):
            raise Problem(
                "UNAUTHENTICATED",
                "the gateway does not send credentials over an unencrypted connection to another machine; its operator "
                "sets --tls or --insecure-token",
            )
        return found


async def _by_method(gateway: Gateway, by_method: dict[str, Route], request: Request) -> Response:
    # Starlette answers HEAD where there is GET.
    return await gateway.call(by_method["GET" if request.method == "HEAD" else request.method], request)


def _json(share: Share, text: bytes, headers: Mapping[str, str] | None = None) -> Response:
    # The bytes are kept until the client has read them.
    share.take(len(text))
    return Response(text, media_type="application/json", headers=headers)


async def _unless_disconnected(request: Request, run: Awaitable[_R]) -> _R:
    """Returns the result of a call; cancels the call when the client closes the connection."""
    call = asyncio.ensure_future(run)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            gone.result()
            raise ClientDisconnect
        return call.result()
    finally:
        for task in (call, gone):
            task.cancel()
        # What the call uses is given back before the request is done.
        await asyncio.gather(call, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _format(request: Request) -> tuple[Any, list[tuple[str, str]]]:
    """Returns the format of the answer, and the other query parameters."""
    given = [value for key, value in request.query_params.multi_items() if key == "format"]
    others = [(key, value) for key, value in request.query_params.multi_items() if key != "format"]
    form = given[-1] if given else "compact"
    if form not in _FORMATS or len(given) > 1:
        raise malformed(f"expected one of {', '.join(_FORMATS)}", "format")
    return form, others


def _check_content_type(request: Request) -> None:
    given = ", ".join(request.headers.getlist("content-type"))
    kind, *parameters = (part.strip().lower().replace('"', "") for part in given.split(";"))
    charsets = [text for text in parameters if text.startswith("charset=")]
    if kind != "application/json" or charsets not in ([], ["charset=utf-8"]):
        raise Problem(
            "UNSUPPORTED",
            f"expected Content-Type: application/json, not {given[:80] or 'none'!r}",
            code="INVALID_ARGUMENT",
            status=415,
        )


def _figures(connections: Connections, budget: Budget, converters: Converters) -> dict[str, int]:
    """Returns metrics of the gateway by name."""
    found = {
        "connections": len(connections.open),
        "requests_in_flight": budget.requests,
        "bytes_in_flight": budget.used,
        "conversions_waiting": converters.slots.waiting,
    }
    return found | {f'connections_closed_total{{limit="{name}"}}': count for name, count in connections.closed.items()}


async def _health(request: Request) -> Response:
    return Response(b'{"status":"SERVING"}', media_type="application/json")


async def _openapi(request: Request) -> Response:
    return Response(_openapi_text(), media_type="application/json")


@cache
def _openapi_text() -> bytes:
    return resources.files("gradrule_gateway").joinpath("openapi.json").read_bytes()


async def _no_console(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] != "/":
        raise HTTPException(404)
    await PlainTextResponse(_NO_CONSOLE, 404)(scope, receive, send)
