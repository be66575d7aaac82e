"""Counts connections when they are accepted, and limits the time of TLS handshakes, headers and reading answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gradrule_gateway.callers import network_of
from gradrule_gateway.guard import SECURITY_HEADERS, problem_response
from gradrule_gateway.problems import Problem

_log = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_HEADER_S = 15.0
_CLOSE_S = 1.0
_LOG_EVERY_S = 60.0
_ACCEPTED_AT_ONCE = 32
_ACCEPT_AGAIN_S = 0.5


class Connections:
    """The open connections. At a limit, one that waits for its client is closed, the one that waits longest first.

    A connection waits during its TLS handshake, without a request, and while the client sends headers or a body or
    does not read its answer.

    Args:
        max_open: Maximum number of connections. One address (IPv6: /64) may have a quarter of them.
        idle_s: Time that a client may take to read a part of an answer, seconds.
    """

    def __init__(self, max_open: int, idle_s: float) -> None:
        self.idle_s = idle_s
        self.closed = Counter({"address": 0, "all": 0, "handshake": 0, "system": 0})
        """Connections that were closed because of a limit, by its name."""
        self.open: dict[Connection, str] = {}
        self._max_open = max_open
        self._max_of_address = max(1, max_open // 4)
        self._of_address: Counter[str] = Counter()
        # The one that waits longest is the first.
        self._waiting: dict[Connection, None] = {}
        self._logged_at = -_LOG_EVERY_S

    def add(self, connection: Connection, host: str) -> bool:
        """Adds a connection. Returns False if it must be closed, because no other waits for its client."""
        address = network_of(host)
        if self._of_address[address] >= self._max_of_address:
            self.count_closed("address", f"{self._max_of_address} connections of {address} (--max-connections)")
            oldest = next((each for each in self._waiting if self.open[each] == address), None)
        elif len(self.open) >= self._max_open:
            self.count_closed("all", f"{self._max_open} connections (--max-connections)")
            # Of the address that has most, so that a few addresses cannot close the connections of others.
            oldest = max(self._waiting, key=lambda each: self._of_address[self.open[each]], default=None)
        else:
            oldest = connection
        if oldest is None:
            return False
        if oldest is not connection:
            self.remove(oldest)
            oldest.abort()
        self.open[connection] = address
        self._of_address[address] += 1
        self._waiting[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Removes a connection that is closed."""
        address = self.open.pop(connection, None)
        self._waiting.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def set_waiting(self, connection: Connection, is_waiting: bool) -> None:
        """Records whether a connection waits for its client from now on."""
        self._waiting.pop(connection, None)
        if is_waiting and connection in self.open:
            self._waiting[connection] = None

    def count_closed(self, name: str, limit: str) -> None:
        """Counts a connection that a limit closes, and logs the first and then one each minute."""
        self.closed[name] += 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            number = sum(self.closed.values())
            _log.warning("clients reach the limit of %s; connections closed by limits so far: %d", limit, number)


class Listener:
    """Accepts connections and counts them before TLS starts. uvicorn closes it as a server of asyncio.

    Args:
        listening: The socket to accept from.
        connections: The open connections.
        create: Creates the protocol of a connection.
        context: The context of TLS; None: no TLS.
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        create: Callable[[], Connection],
        context: ssl.SSLContext | None,
    ) -> None:
        self._socket = listening
        self._all = connections
        self._create = create
        self._context = context
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accepts no more connections, and closes those whose handshake has not ended."""
        self._stop()
        for connection in list(self._all.open):
            if connection.transport is None:
                connection.abort()

    async def wait_closed(self) -> None:
        """Does nothing; uvicorn waits for connections itself."""

    def _start(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._accept)
        self._again: asyncio.TimerHandle | None = None

    def _stop(self) -> None:
        if self._again is not None:
            self._again.cancel()
        elif self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as failure:
                # No descriptor or memory is left.
                self._all.count_closed("system", f"the system: {failure.strerror or failure}")
                self._stop()
                self._again = self._loop.call_later(_ACCEPT_AGAIN_S, self._start)
                return
            connection = self._create()
            if self._all.add(connection, address[0]):
                connection.open(client, self._context)
            else:
                client.close()


class Connection(H11Protocol):
    """uvicorn's protocol, with limits on connections and on the time of headers and of reading answers.

    Args:
        connections: The open connections.
        arguments: uvicorn's arguments.
    """

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._all = connections
        self._socket: socket.socket | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = False

    def open(self, client: socket.socket, context: ssl.SSLContext | None) -> None:
        """Starts to serve an accepted socket, after the TLS handshake if there is a context."""
        client.setblocking(False)
        self._socket = client
        self._opening = asyncio.ensure_future(self._open(client, context))

    async def _open(self, client: socket.socket, context: ssl.SSLContext | None) -> None:
        limit_s = None if context is None else _HANDSHAKE_S
        try:
            await self.loop.connect_accepted_socket(lambda: self, client, ssl=context, ssl_handshake_timeout=limit_s)
        except ConnectionAbortedError:
            # The handshake took longer than its limit.
            self._all.count_closed("handshake", f"{limit_s:g} s for a TLS handshake")
        except OSError:
            # The client has gone, or speaks no TLS.
            pass
        finally:
            if self.transport is None:
                self._all.remove(self)
                client.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self._socket is not None:
            # Cancelling a handshake does not close its socket in uvloop.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._abort_after(_HEADER_S)

    def data_received(self, data: bytes) -> None:
        had_request = self._has_request()
        if self._timer is None and not had_request:
            self._abort_after(_HEADER_S)
        super().data_received(data)
        if self._has_request():
            is_waiting = bool(self.cycle.more_body)
            if not (had_request and is_waiting):
                self._all.set_waiting(self, is_waiting)
            if not had_request:
                self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._stop_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Closes the connection, after the answer if a request runs. uvicorn calls it when the gateway stops."""
        self._is_stopping = True
        super().shutdown()
        if self.transport.is_closing():
            self._abort_unread()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._all.set_waiting(self, True)
        self._abort_unread()

    def resume_writing(self) -> None:
        self._stop_timer()
        if self._has_request():
            self._all.set_waiting(self, bool(self.cycle.more_body))
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_timer()
        if self.transport.is_closing():
            self._abort_unread()
        else:
            self._all.set_waiting(self, not self._has_request() or bool(self.cycle.more_body))

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_unread()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not valid HTTP as all errors are answered, not with uvicorn's text."""
        wrong = sys.exception()
        status = wrong.error_status_hint if isinstance(wrong, h11.RemoteProtocolError) else 400
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = Problem(
                "MALFORMED_REQUEST", f"the request is not valid HTTP/1.1: {str(wrong)[:200]}", status=status
            )
            answer = problem_response(problem)
            headers = [*answer.raw_headers, *SECURITY_HEADERS, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=problem.body()["title"].encode()),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._abort_unread()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _abort_unread(self) -> None:
        """Closes the connection if the client does not read what is left to send, which would stay in memory.

        When the gateway stops and nothing is left to send, it waits only a moment: an idle client does not answer the
        end of TLS, and would hold the gateway up.
        """
        is_sent = not (self.flow.write_paused or self.transport.get_write_buffer_size())
        self._abort_after(_CLOSE_S if self._is_stopping and is_sent else self._all.idle_s)

    def _abort_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._abort_slow)

    def _abort_slow(self) -> None:
        self._timer = None
        if self.transport.get_write_buffer_size():
            host = self.client[0] if self.client else "a client"
            _log.info("%s did not read its answer for %g s; the connection is closed", host, self._all.idle_s)
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
