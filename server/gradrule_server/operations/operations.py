"""Putting the parts together, as the settings ask for them, and their life beside the server's."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradrule.v1 import admin_pb2
from gradrule_server.operations import audit
from gradrule_server.operations.audit import AuditLog
from gradrule_server.operations.logs import AccessLog
from gradrule_server.operations.observer import Observer, Sink
from gradrule_server.operations.sources import Sources, snapshot
from gradrule_server.operations.status import server_status
from gradrule_server.operations.writing import Background

if TYPE_CHECKING:
    from gradrule_server.operations.exposition import MetricsPage
    from gradrule_server.operations.metrics import Metrics
    from gradrule_server.operations.tracing import Tracing

_TELL_LEFT_OUT_S = 10.0
# How long a server that stops waits for a log that takes nothing.
_DRAIN_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OperationsSettings:
    """What is asked for. metrics_port 0: no metrics; otel_endpoint empty: no traces; audit_log empty: into the log."""

    version: str
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    otel_endpoint: str = ""
    audit_log: str = ""


class Operations:
    """All that watches the server. `observer` is the front's."""

    def __init__(self, settings: OperationsSettings) -> None:
        """Raises `TracingRefused` where traces cannot be exported, `OSError` where the audit log cannot be opened."""
        self._settings = settings
        self._started_at = time.monotonic()
        self._sources: Sources | None = None
        self._access = AccessLog()
        self._audit = AuditLog()
        self._metrics: Metrics | None = None
        self._page: MetricsPage | None = None
        self._tracing: Tracing | None = None
        self._telling: asyncio.Task[None] | None = None
        audit.configure(settings.audit_log)
        self._lines, self._audit_lines = Background(logging.getLogger()), Background(audit.LOGGER)
        sinks: list[Sink] = [self._access, self._audit]
        if settings.metrics_port:
            # The extra packages are imported by those alone who ask for them.
            from gradrule_server.operations.metrics import Metrics

            self._metrics = Metrics()
            sinks.append(self._metrics)
        if settings.otel_endpoint:
            from gradrule_server.operations.tracing import Tracing, exporter_to

            self._tracing = Tracing(exporter_to(settings.otel_endpoint), settings.version)
            sinks.append(self._tracing)
        self.observer = Observer(sinks)

    def quarantined(self, detail: str) -> None:
        """A program is refused for a while from now on. `detail`: which, and why."""
        self._audit.quarantined(detail)
        if self._metrics is not None:
            self._metrics.quarantined()

    def status(self) -> admin_pb2.ServerStatus:
        """How the server is doing."""
        assert self._sources is not None, "the server is not put together yet"
        return server_status(self._sources, time.monotonic() - self._started_at)

    async def start(self, sources: Sources) -> None:
        """Serves the metrics. `OSError` where the address is taken."""
        self._sources = sources
        self._lines.start()
        self._audit_lines.start()
        self._telling = asyncio.create_task(self._tell_left_out(), name="operations")
        self._telling.add_done_callback(_report_failure)
        if self._metrics is not None:
            from gradrule_server.operations.exposition import MetricsPage

            self._page = MetricsPage(self._metrics.registry, self._refresh)
            await self._page.start(self._settings.metrics_host, self._settings.metrics_port)

    async def stop(self) -> None:
        """Tells what is left to be told, and stops; where nobody reads the log, for a few seconds at most."""
        if self._telling is not None:
            self._telling.cancel()
            # Whatever it died of, it was told of then.
            await asyncio.gather(self._telling, return_exceptions=True)
        if self._page is not None:
            await self._page.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if await self._drain():
            self._tell()
            await self._drain()

    async def _drain(self) -> bool:
        """Waits for a while until all lines are written; whether they are."""
        both = (asyncio.to_thread(lines.drain, _DRAIN_S) for lines in (self._lines, self._audit_lines))
        return all(await asyncio.gather(*both))

    def _refresh(self) -> None:
        if self._metrics is not None and self._sources is not None:
            self._metrics.show(snapshot(self._sources), self._audit.left_out)

    async def _tell_left_out(self) -> None:
        while True:
            await asyncio.sleep(_TELL_LEFT_OUT_S)
            self._tell()

    def _tell(self) -> None:
        """Tells what was left out, where that is written."""
        if self._lines.may_tell:
            self._access.tell_left_out()
            unwritten = self._lines.take_left_out()
            if unwritten:
                _log.warning("%d lines of the log were left out", unwritten)
        audited = self._audit_lines if self._settings.audit_log else self._lines
        self._audit.tell_left_out(self._audit_lines.take_left_out(), may_write=audited.may_tell)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (cause := task.exception()) is not None:
        _log.error("what logs leave out is not told any more", exc_info=cause)
