"""Checks each request before it is handled, limits what requests use, and logs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gradrule_gateway import json_text
from gradrule_gateway.budget import Budget, Share
from gradrule_gateway.logs import fields
from gradrule_gateway.problems import CONTENT_TYPE, Problem

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_now = time.monotonic
_access = logging.getLogger("gradrule.access")
_log = logging.getLogger(__name__)

SECURITY_HEADERS = (
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
# Slowest rate at which the bytes of a body may arrive on average, per second.
_MIN_RATE = 4096
# Longest time for which the rest of a refused body is read.
_DISCARD_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on requests.

    Attributes:
        hosts: Allowed values of the header `Host`, without port, in lower case; `*` allows all.
        origins: Origins whose pages may use the API from a browser (CORS).
        max_body_bytes: Longest body in JSON.
        max_requests: Requests that are handled at the same time, half of them of one caller. A request counts when its
            body is complete; only RPCs count, uploads excepted.
        max_bytes_in_flight: Total size of the bodies, converted requests and answers that are kept at the same time,
            three quarters of it of one caller.
        max_connections: Connections that may be open. One address may have a quarter of them.
        idle_s: Time that a client may take for the next bytes of a body, or to read a part of an answer, seconds.
    """

    hosts: frozenset[str] = frozenset({"localhost", "127.0.0.1", "[::1]"})
    origins: frozenset[str] = field(default_factory=frozenset)
    max_body_bytes: int = 64 << 20
    max_requests: int = 256
    max_bytes_in_flight: int = 512 << 20
    max_connections: int = 1024
    idle_s: float = 30.0


class Guard:
    """ASGI middleware around the application; every failure becomes a problem."""

    def __init__(self, app: Any, limits: Limits, budget: Budget) -> None:
        self._app = app
        self._limits = limits
        self._budget = budget

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
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Proxies disagree on which of the two counts, so a part of the body could pass as another request.
            return Problem("MALFORMED_REQUEST", "a request has either Content-Length or Transfer-Encoding")
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.lower() != "identity":
            return Problem(
                "UNSUPPORTED",
                f"bodies have no Content-Encoding, not {encoding[:80]!r}",
                code="INVALID_ARGUMENT",
                status=415,
                headers={"accept-encoding": "identity"},
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limits.max_body_bytes and scope["method"] != "PUT":
            return self.too_large()
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
        self._bytes_in = self._bytes_out = 0
        self._share = Share(guard._budget)
        self._is_upload = scope["method"] == "PUT"
        self._is_given_up = False
        self._waiting: asyncio.Timeout | None = None
        names = dict(scope["headers"])
        self._body_ended = b"transfer-encoding" not in names and names.get(b"content-length", b"0") == b"0"
        # Time that the client may still let pass, seconds; bytes that arrive add to it.
        self._patience_s = guard._limits.idle_s
        self._reason = "OK"
        self._detail = ""
        self._request_id = ""
        self._origin = self._allowed_origin()

    async def run(self) -> None:
        started = time.perf_counter()
        guard = self._guard
        refused = guard.problem(self._scope)
        try:
            if refused is not None:
                await self._answer(refused)
            elif self._is_preflight():
                await self._preflight()
            else:
                # With an app in the scope, Starlette raises for unknown paths and methods.
                state = {**self._scope.get("state", {}), "share": self._share}
                await guard._app({**self._scope, "app": guard, "state": state}, self.receive, self.send)
        except Problem as problem:
            await self._answer(problem)
        except HTTPException as failure:
            await self._answer(_routing_problem(self._scope, failure))
        except ClientDisconnect:
            self._status, self._reason = 499, "CANCELLED"
        except Exception:
            _log.exception("a request failed: %s %s", self._scope["method"], self._scope["path"])
            await self._answer(Problem("INTERNAL", "the gateway failed; its log has the cause"))
        finally:
            self._share.release()
            self._write_log(time.perf_counter() - started)

    async def receive(self) -> Any:
        """Receives a message of the client; parts of a body within the limits."""
        if self._body_ended:
            return await self._receive()
        started = _now()
        self._share.await_body(self._give_up)
        try:
            async with asyncio.timeout(self._patience_s) as self._waiting:
                message = await self._receive()
        except TimeoutError:
            raise self._late() from None
        finally:
            self._waiting = None
        if self._is_given_up:
            # The message arrived at the same time.
            raise self._late()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            left = self._patience_s - (_now() - started) + size / _MIN_RATE
            self._patience_s = max(0.0, min(left, self._limits.idle_s))
            self._body_ended = not message.get("more_body", False)
            self._count(size)
            if self._body_ended:
                self._share.end_body()
        return message

    def _give_up(self) -> None:
        """Ends the wait for the rest of the body, because other requests need the bytes."""
        self._is_given_up = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def _late(self) -> Problem:
        closing = {"connection": "close"}
        if self._is_given_up:
            return Problem(
                "OVERLOADED",
                "the gateway keeps the maximum number of bytes, and this body was the oldest that had not arrived",
                status=503,
                retry_after_s=1.0,
                headers=closing,
            )
        return Problem(
            "DEADLINE_EXCEEDED",
            f"the bytes of the body arrived too slowly: fewer than {_MIN_RATE} per second, or none for "
            f"{self._limits.idle_s:g} seconds",
            status=408,
            headers=closing,
        )

    def _count(self, size: int) -> None:
        self._bytes_in += size
        if self._is_upload:
            # Passed on part by part.
            return
        if self._bytes_in > self._limits.max_body_bytes:
            raise self._guard.too_large()
        self._share.take(size)

    async def send(self, message: Any) -> None:
        """Sends a message to the client: headers with those of security, a body in parts."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [*message.get("headers", ()), *SECURITY_HEADERS, *self._cors_headers()]
            self._request_id = next((value.decode("latin-1") for name, value in headers if name == b"x-request-id"), "")
            if not self._body_ended:
                # The rest of the body would be read as the next request.
                headers = [header for header in headers if header[0] != b"connection"] + [(b"connection", b"close")]
            await self._send({**message, "headers": headers})
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        self._bytes_out += len(body)
        view = memoryview(body)
        for start in range(0, len(body), _SEND_PART):
            part = bytes(view[start : start + _SEND_PART])
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        if not more:
            if not self._body_ended and self._status not in (408, 499):
                await self._discard_body()
            await self._send({"type": "http.response.body"})

    async def _discard_body(self) -> None:
        """Reads what the client still sends of a refused body.

        If the connection were closed before, the client's system would report an error instead of the answer.
        """
        self._share.release()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while (await self._receive()).get("more_body", False):
                    pass

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
