"""Limits the open connections of the gateway, and the time that clients may take for headers and for reading."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
import time
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gradrule_gateway.guard import SECURITY_HEADERS, problem_response
from gradrule_gateway.problems import Problem

_log = logging.getLogger(__name__)

_HEADER_S = 15.0
_CLOSE_S = 1.0
_LOG_EVERY_S = 60.0


class Connections:
    """The open connections. At a limit, the one that has been without a request for the longest time is closed.

    Args:
        max_open: Maximum number of connections. One address (IPv6: /64) may have a quarter of them.
        idle_s: Time that a client may take to read a part of an answer, seconds.
    """

    def __init__(self, max_open: int, idle_s: float) -> None:
        self.idle_s = idle_s
        self._max_open = max_open
        self._max_of_address = max(1, max_open // 4)
        self._open: dict[Connection, str] = {}
        self._of_address: Counter[str] = Counter()
        # The one without a request for the longest time is the first.
        self._idle: dict[Connection, None] = {}
        self._closed = 0
        self._logged_at = 0.0

    def add(self, connection: Connection, host: str) -> bool:
        """Adds a connection. Returns False if it must be closed, because all others are in use."""
        address = _network(host)
        if self._of_address[address] >= self._max_of_address:
            limit = f"{self._max_of_address} connections of {address}"
            oldest = next((each for each in self._idle if self._open[each] == address), None)
        elif len(self._open) >= self._max_open:
            limit = f"{self._max_open} connections"
            oldest = next(iter(self._idle), None)
        else:
            limit, oldest = "", None
        if limit:
            self._log(limit)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.transport.abort()
        self._open[connection] = address
        self._of_address[address] += 1
        self._idle[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Removes a connection that is closed."""
        address = self._open.pop(connection, None)
        self._idle.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def set_idle(self, connection: Connection, is_idle: bool) -> None:
        """Tells whether a connection is without a request."""
        self._idle.pop(connection, None)
        if is_idle and connection in self._open:
            self._idle[connection] = None

    def _log(self, limit: str) -> None:
        self._closed += 1
        now = time.monotonic()
        if self._closed == 1 or now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            _log.warning("the limit of %s (--max-connections) is reached; %d were closed so far", limit, self._closed)


class Connection(H11Protocol):
    """uvicorn's protocol, with limits on connections and on the time of headers and of reading answers.

    Args:
        connections: The open connections.
        arguments: uvicorn's arguments.
    """

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._all = connections
        self._header_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._is_stopping = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._all.add(self, self.client[0] if self.client else ""):
            self._await_headers()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and not self._has_request():
            self._await_headers()
        super().data_received(data)
        if self._has_request():
            self._all.set_idle(self, False)
            self._stop_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._stop_header_timer()
        self._stop_abort_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Closes the connection, after the answer if a request runs. uvicorn calls it when the gateway stops."""
        self._is_stopping = True
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        self._stop_abort_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_header_timer()
        if self.transport.is_closing():
            self._abort_later()
        elif not self._has_request():
            self._all.set_idle(self, True)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

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
        self._abort_later()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(_HEADER_S, self._close_slow)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_slow(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing() and not self._has_request():
            self.transport.close()
            self._abort_later()

    def _abort_later(self) -> None:
        """Closes the connection if the client does not read what is left to send, which would stay in memory.

        When the gateway stops and nothing is left to send, it waits only a moment: an idle client does not answer the
        end of TLS, and would hold the gateway up.
        """
        self._stop_abort_timer()
        is_sent = not (self.flow.write_paused or self.transport.get_write_buffer_size())
        wait_s = _CLOSE_S if self._is_stopping and is_sent else self._all.idle_s
        self._abort_timer = self.loop.call_later(wait_s, self._abort)

    def _abort(self) -> None:
        if self.transport.get_write_buffer_size():
            host = self.client[0] if self.client else "a client"
            _log.info("%s did not read its answer for %g s; the connection is closed", host, self._all.idle_s)
        self.transport.abort()

    def _stop_abort_timer(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None


def _network(host: str) -> str:
    """Returns the address that limits are counted for: of IPv6, the network that one client may use."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    # A socket for IPv4 and IPv6 reports clients of IPv4 as ::ffff:192.0.2.1, of which all have one network.
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((address, 64), strict=False))
