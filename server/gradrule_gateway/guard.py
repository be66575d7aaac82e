"""Checks each request before it is handled, limits what requests use, and logs them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gradrule_gateway import json_text
from gradrule_gateway.logs import fields
from gradrule_gateway.problems import CONTENT_TYPE, Problem

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_access = logging.getLogger("gradrule.access")
_log = logging.getLogger(__name__)

_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
        b"connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
_CORS_METHODS = b"GET, POST, PUT, DELETE"
_CORS_HEADERS = b"authorization, content-type, grpc-timeout"
_CORS_EXPOSED = b"retry-after, x-request-id"
_SEND_PART = 1 << 20
MAX_HEADER_BYTES = 32 * 1024
"""Maximum total size of the headers of a request."""
_BUSY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on requests.

    Attributes:
        hosts: Allowed values of the header `Host`, without port, in lower case; `*` allows all.
        origins: Origins whose pages may use the API from a browser (CORS).
        max_body_bytes: Longest body in JSON.
        max_requests: Requests that are handled at the same time.
        max_bytes_in_flight: Total size of the bodies that are handled at the same time.
        idle_s: Time that a client may take for the next bytes of a body, or to read a part of an answer, seconds.
    """

    hosts: frozenset[str] = frozenset({"localhost", "127.0.0.1", "[::1]"})
    origins: frozenset[str] = field(default_factory=frozenset)
    max_body_bytes: int = 64 << 20
    max_requests: int = 256
    max_bytes_in_flight: int = 512 << 20
    idle_s: float = 30.0


class Guard:
    """ASGI middleware around the application; every failure becomes a problem."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._requests = 0
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A WebSocket.
            await send({"type": "websocket.close", "code": 1008})
            return
        exchange = _Exchange(self, scope, receive, send)
        await exchange.run()

    def problem(self, scope: Scope) -> Problem | None:
        """Returns why a request is refused before its body is read."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if "*" not in self._limits.hosts and _without_port(host) not in self._limits.hosts:
            return Problem(
                "PERMISSION_DENIED",
                f"the host {host[:200]!r} is not allowed; the gateway's --allowed-host lists the allowed ones",
            )
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return Problem(
                "MALFORMED_REQUEST", f"the headers are longer than {MAX_HEADER_BYTES} bytes in total", status=431
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes and scope["method"] != "PUT":
            return self.too_large()
        if self._requests >= self._limits.max_requests:
            return Problem(
                "OVERLOADED",
                "the gateway is handling the maximum number of requests",
                status=503,
                retry_after_s=_BUSY_RETRY_S,
            )
        return None

    def too_large(self) -> Problem:
        """Returns the problem of a body that is too long."""
        return Problem("MESSAGE_TOO_LARGE", f"the body is longer than {self._limits.max_body_bytes} bytes")


class _Exchange:
    """One request and its answer."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard = guard
        self._limits = guard._limits
        self._scope, self._receive, self._send = scope, receive, send
        self._status = 0
        self._bytes_in = self._bytes_out = self._held = 0
        self._body_ended = False
        self._reason = "OK"
        self._detail = ""
        self._request_id = ""
        self._origin = self._allowed_origin()

    async def run(self) -> None:
        started = time.perf_counter()
        guard = self._guard
        refused = guard.problem(self._scope)
        guard._requests += 1
        try:
            if refused is not None:
                await self._answer(refused)
            elif self._is_preflight():
                await self._preflight()
            else:
                # With an app in the scope, Starlette raises for unknown paths and methods.
                await guard._app({**self._scope, "app": guard}, self.receive, self.send)
        except Problem as problem:
            await self._answer(problem)
        except HTTPException as failure:
            await self._answer(_routing_problem(self._scope, failure))
        except ClientDisconnect:
            self._status, self._reason = 499, "CANCELLED"
        except _SlowClient:
            self._status, self._reason = self._status or 408, "CANCELLED"
            raise
        except Exception:
            _log.exception("a request failed: %s %s", self._scope["method"], self._scope["path"])
            await self._answer(Problem("INTERNAL", "the gateway failed; its log has the cause"))
        finally:
            guard._requests -= 1
            guard._bytes -= self._held
            self._write_log(time.perf_counter() - started)

    async def receive(self) -> Any:
        """Receives a message of the client; parts of a body within the limits."""
        if self._body_ended:
            return await self._receive()
        try:
            async with asyncio.timeout(self._limits.idle_s):
                message = await self._receive()
        except TimeoutError:
            raise Problem(
                "DEADLINE_EXCEEDED",
                f"no bytes of the body arrived for {self._limits.idle_s:g} seconds",
                status=408,
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.request":
            self._count(len(message.get("body", b"")))
            self._body_ended = not message.get("more_body", False)
        return message

    def _count(self, size: int) -> None:
        self._bytes_in += size
        if self._scope["method"] == "PUT":
            # Passed on part by part.
            return
        if self._bytes_in > self._limits.max_body_bytes:
            raise self._guard.too_large()
        self._held += size
        self._guard._bytes += size
        if self._guard._bytes > self._limits.max_bytes_in_flight:
            raise Problem(
                "OVERLOADED",
                "the gateway is handling the maximum number of bytes",
                status=503,
                retry_after_s=_BUSY_RETRY_S,
            )

    async def send(self, message: Any) -> None:
        """Sends a message to the client: headers with those of security, a body in parts, each within a time."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [*message.get("headers", ()), *_SECURITY_HEADERS, *self._cors_headers()]
            self._request_id = next((value.decode("latin-1") for name, value in headers if name == b"x-request-id"), "")
            if not self._body_ended and self._status >= 400:
                # The rest of the body would be read as the next request.
                headers.append((b"connection", b"close"))
            await self._send({**message, "headers": headers})
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        self._bytes_out += len(body)
        view = memoryview(body)
        for start in range(0, max(len(body), 1), _SEND_PART):
            part = view[start : start + _SEND_PART]
            is_last = start + _SEND_PART >= len(body)
            try:
                async with asyncio.timeout(self._limits.idle_s):
                    await self._send(
                        {"type": "http.response.body", "body": bytes(part), "more_body": more or not is_last}
                    )
            except TimeoutError:
                raise _SlowClient from None

    async def _answer(self, problem: Problem) -> None:
        self._reason, self._detail = problem.reason, problem.detail
        if self._status:
            # The answer has begun: closing the connection is all that is left.
            raise problem
        await problem_response(problem)(self._scope, self.receive, self.send)

    def _allowed_origin(self) -> bytes:
        origin = next((value for name, value in self._scope["headers"] if name == b"origin"), b"")
        return origin if origin.decode("latin-1") in self._limits.origins else b""

    def _is_preflight(self) -> bool:
        return self._scope["method"] == "OPTIONS" and bool(self._origin)

    async def _preflight(self) -> None:
        headers = [
            (b"access-control-allow-methods", _CORS_METHODS),
            (b"access-control-allow-headers", _CORS_HEADERS),
            (b"access-control-max-age", b"600"),
        ]
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body"})

    def _cors_headers(self) -> list[tuple[bytes, bytes]]:
        if not self._limits.origins:
            return []
        found = [(b"vary", b"Origin")]
        if self._origin:
            found += [
                (b"access-control-allow-origin", self._origin),
                (b"access-control-expose-headers", _CORS_EXPOSED),
            ]
        return found

    def _write_log(self, seconds: float) -> None:
        method, path = self._scope["method"], self._scope["path"]
        is_asset = method == "GET" and self._status < 400 and not path.startswith("/v1/")
        _access.log(
            logging.DEBUG if is_asset else logging.INFO,
            "%s %s %s%s",
            method,
            path,
            self._reason,
            f": {self._detail}" if self._detail else "",
            extra=fields(
                request_id=self._request_id,
                status=self._status,
                reason=self._reason,
                seconds=round(seconds, 6),
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
            ),
        )


class _SlowClient(Exception):
    """The client does not read its answer; the connection is closed."""


def problem_response(problem: Problem) -> Response:
    """Returns the answer of a problem."""
    return Response(
        json_text.dump(problem.body()), problem.status, media_type=CONTENT_TYPE, headers=problem.all_headers()
    )


def _routing_problem(scope: Scope, failure: HTTPException) -> Problem:
    """Returns the problem of a path or a method without a route."""
    status = failure.status_code
    if status == 405:
        detail, code = f"{scope['method']} is not possible for this path", "UNIMPLEMENTED"
    else:
        detail, code = f"there is nothing at {scope['path'][:200]!r}; /openapi.json lists all paths", "NOT_FOUND"
    return Problem("UNSUPPORTED", detail, code=code, status=status, headers=dict(failure.headers or {}))


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and (":" not in name or name.endswith("]")) else host
