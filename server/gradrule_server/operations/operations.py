"""Creates metrics, traces and logs as the settings ask for, and runs them beside the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradrule.v1 import admin_pb2
from gradrule_server.concurrency import start_logged_task
from gradrule_server.operations import audit
from gradrule_server.operations.audit import AuditLog
from gradrule_server.operations.log_writing import BackgroundWriter
from gradrule_server.operations.logs import AccessLog
from gradrule_server.operations.request_record import Observer, Sink
from gradrule_server.operations.status import Sources, server_status, shown_digest
from gradrule_server.recovery.crash_history import Quarantine

if TYPE_CHECKING:
    from gradrule_server.operations.metrics import Metrics
    from gradrule_server.operations.monitoring_port import MonitoringPort
    from gradrule_server.operations.tracing import Tracing

_REPORT_DROPPED_S = 10.0
# How long a stopping server waits until a blocked log has taken all lines.
_DRAIN_S = 2.0

_log = logging.getLogger(__name__)


class Operations:
    """Metrics, traces, logs and status of a server. The front end uses `observer`.

    Args:
        version: The server's version, for traces.
        metrics_host: Address of metrics and health checks.
        metrics_port: Port of metrics and health checks; 0: none.
        otel_endpoint: Collector of traces; empty: no traces.
        audit_log: File of the audit log; empty: audit lines go to the server's log.

    Raises:
        TracingUnavailableError: Traces cannot be exported.
        OSError: The audit log cannot be opened.
    """

    def __init__(
        self,
        version: str,
        *,
        metrics_host: str = "127.0.0.1",
        metrics_port: int = 0,
        otel_endpoint: str = "",
        audit_log: str = "",
    ) -> None:
        self._address = metrics_host, metrics_port
        self._started_at = time.monotonic()
        self._sources: Sources | None = None
        self._access = AccessLog()
        self._audit = AuditLog()
        self._metrics: Metrics | None = None
        self._port: MonitoringPort | None = None
        self._tracing: Tracing | None = None
        self._reporting: asyncio.Task[None] | None = None
        audit.configure(audit_log)
        self._lines, self._audit_lines = BackgroundWriter(logging.getLogger()), BackgroundWriter(audit.LOGGER)
        self._audited = self._audit_lines if audit_log else self._lines
        sinks: list[Sink] = [self._access, self._audit]
        if metrics_port:
            # Import optional packages only if the settings ask for them.
            from gradrule_server.operations.metrics import Metrics

            self._metrics = Metrics()
            sinks.append(self._metrics)
        if otel_endpoint:
            from gradrule_server.operations.tracing import Tracing, exporter_to

            self._tracing = Tracing(exporter_to(otel_endpoint), version)
            sinks.append(self._tracing)
        self.observer = Observer(sinks)

    def record_quarantine(self, found: Quarantine) -> None:
        """Logs and counts a quarantine."""
        digest = shown_digest(found)
        _log.warning("programs of the graph %s are refused: %s", digest, found.cause)
        self._audit.log_quarantine(f"{digest}: {found.cause}")
        if self._metrics is not None:
            self._metrics.count_quarantine()

    def status(self) -> admin_pb2.ServerStatus:
        """Returns the server's status."""
        assert self._sources is not None, "the server has not started yet"
        return server_status(self._sources, time.monotonic() - self._started_at)

    async def start(self, sources: Sources, is_ready: Callable[[], bool]) -> None:
        """Starts to write logs in the background, and to serve metrics and health checks.

        Args:
            sources: Where metrics and status are read.
            is_ready: Returns whether the server accepts calls.

        Raises:
            OSError: If the address is in use.
        """
        self._sources = sources
        self._lines.start()
        self._audit_lines.start()
        self._reporting = start_logged_task(
            self._keep_reporting_dropped(), "operations", _log.error, "dropped lines of logs are no longer reported"
        )
        if self._metrics is not None:
            from gradrule_server.operations.monitoring_port import MonitoringPort

            self._port = MonitoringPort(self._metrics.registry, self._refresh_metrics, is_ready)
            await self._port.start(*self._address)

    async def stop(self) -> None:
        """Reports dropped lines, exports remaining spans and stops; waits a few seconds at most for blocked logs."""
        if self._reporting is not None:
            self._reporting.cancel()
            # A failure of the task was logged when it ended.
            await asyncio.gather(self._reporting, return_exceptions=True)
        if self._port is not None:
            await self._port.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if await self._drain():
            self._report_dropped()
            await self._drain()

    async def _drain(self) -> bool:
        """Waits for a limited time until all lines are written; returns whether they are."""
        both = (asyncio.to_thread(lines.drain, _DRAIN_S) for lines in (self._lines, self._audit_lines))
        return all(await asyncio.gather(*both))

    def _refresh_metrics(self) -> None:
        if self._metrics is not None and self._sources is not None:
            self._metrics.set_state(self._sources, self._audit.dropped)

    async def _keep_reporting_dropped(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_DROPPED_S)
            self._report_dropped()

    def _report_dropped(self) -> None:
        """Logs how many lines each log has dropped, if that line would be written."""
        if self._lines.can_write:
            self._access.log_dropped()
            unwritten = self._lines.take_dropped()
            if unwritten:
                _log.warning("%d lines of the log were left out", unwritten)
        self._audit.log_dropped(self._audit_lines.take_dropped(), may_write=self._audited.can_write)
