"""Runs `gradrule gateway` beside the server: HTTP and JSON, in a process of its own that is a client like any other."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import sys
import time
from collections import Counter

from gradrule_server.recovery.endings import end_from_exit
from gradrule_server.settings import CLIENT_VARIABLES, Settings

_log = logging.getLogger(__name__)
_now = time.monotonic

_READY = b"gradrule gateway: listening on "
_START_S = 60.0
_STOP_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class GatewayError(OSError):
    """The gateway did not start."""


class HttpGateway:
    """A gateway process. If it ends, it is started again; the server and its gRPC port go on meanwhile.

    Args:
        settings: The settings of the server.
        server_port: Port of the server.
        ended: Counts the processes that ended unexpectedly, by reason.
    """

    def __init__(self, settings: Settings, server_port: int, ended: Counter[str]) -> None:
        self._settings = settings
        self._ended = ended
        self._server_port = server_port
        self._port = settings.http_port or 0
        self._process: asyncio.subprocess.Process | None = None
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Starts the process and returns its URL. Raises `GatewayError`."""
        url = await self._start_process()
        # A process that is started again keeps the port.
        self._port = int(url.rpartition(":")[2])
        self._supervising = asyncio.ensure_future(self._supervise())
        return url

    async def stop(self) -> None:
        """Stops the process; running requests get the drain time."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait({self._supervising})
        await self._stop_process()

    async def _supervise(self) -> None:
        pause = 0.0
        while True:
            started = _now()
            end = end_from_exit(await self._wait_for_end(), None, "")
            self._ended[end.reason] += 1
            # A gateway that worked is started again at once; only one that ends again and again has to wait.
            if _now() - started > _LONGEST_PAUSE_S:
                pause = 0.0
            _log.error("the HTTP gateway ended (%s); it starts again in %g s", end, pause)
            while True:
                await asyncio.sleep(pause)
                pause = min(max(2 * pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                try:
                    await self._start_process()
                    break
                except (GatewayError, OSError) as failure:
                    # OSError: the system lets no process start.
                    _log.error("%s; next try in %g s", failure, pause)
            _log.info("the HTTP gateway runs again")

    async def _wait_for_end(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def _start_process(self) -> str:
        # Settings of clients in the server's environment are not meant for its own gateway.
        environment = {key: value for key, value in os.environ.items() if key not in CLIENT_VARIABLES}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gradrule", "gateway"),
            *self._flags(),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal ends the server, which then stops the gateway.
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            await self._stop_process()
            raise GatewayError(f"the HTTP gateway was not ready within {_START_S:g} s") from None
        if not line.startswith(_READY):
            code = await process.wait()
            raise GatewayError(f"the HTTP gateway did not start (exit code {code}); its message is above")
        return line.removeprefix(_READY).decode().strip()

    async def _stop_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._settings.drain_s + _STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _flags(self) -> list[str]:
        settings = self._settings
        flags = {
            "--server": f"{_loopback(settings.host)}:{self._server_port}",
            "--host": settings.host,
            "--port": str(self._port),
            "--max-body-bytes": str(int(settings.max_message_bytes)),
            "--drain-s": f"{max(settings.drain_s, 0.1):g}",
            "--log-level": settings.log_level,
            "--log-format": settings.log_format,
            "--parent": str(os.getpid()),
        }
        if settings.tls_cert is not None:
            flags |= {
                "--tls-cert": str(settings.tls_cert),
                "--tls-key": str(settings.tls_key),
                "--server-cert": str(settings.tls_cert),
            }
        words = [word for flag, value in flags.items() for word in (flag, value)]
        for name in filter(None, map(str.strip, settings.http_allowed_hosts.split(","))):
            words += ["--allowed-host", name]
        return words


def _loopback(host: str) -> str:
    """Returns the address at which this machine reaches a server that listens on `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        # gRPC listens on IPv4 too if it listens on all addresses of IPv6.
        return "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host
