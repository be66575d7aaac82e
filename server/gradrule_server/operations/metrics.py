"""Prometheus' metrics: counted as requests end, and read from the sources when somebody asks.

Their names and meanings are listed in docs/operations.md; a test compares. Labels have few values: RPCs, reasons,
engines, caches, and tenants up to a number, beyond which they are `other`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradrule_server.operations.request import UNKNOWN_TENANT, Request
from gradrule_server.operations.sources import EngineStatus, Snapshot, WorkerStatus, held
from gradrule_server.operations.tallies import Spread, Tally

OTHER = "other"
MAX_TENANTS = 50

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 600.0)

_ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStatus], float]]] = {
    "engine_up": ("1 where the engine is ready.", lambda engine: engine.is_ready),
    "engine_running_requests": ("Requests that run on the engine.", lambda engine: engine.running),
    "engine_waiting_requests": ("Requests that wait for the engine.", lambda engine: engine.waiting),
    "engine_programs": ("Programs that the engine holds.", lambda engine: engine.programs),
    "engine_jit_programs": (
        "Programs of which the engine runs calls with XLA.",
        lambda engine: engine.jit_programs,
    ),
    "engine_resident_bytes": ("Memory of the engine's process.", lambda engine: engine.resident_bytes),
    "engine_uptime_seconds": ("Since when the engine's process is ready.", lambda engine: engine.uptime_s),
}

_TENANT_GAUGES = {
    "in_flight": ("tenant_requests_in_flight", "Requests of the tenant's in the server."),
    "programs": ("programs", "Programs that are kept."),
    "rules": ("rules", "USER rules that are kept."),
    "sessions": ("sessions", "Sessions that are open."),
    "session_bytes": ("session_bytes", "Bytes of sessions."),
    "handles": ("handles", "Forward handles that are kept."),
    "handle_bytes": ("handle_bytes", "Bytes of forward handles."),
    "blob_bytes": ("blob_bytes", "Bytes of blobs."),
}


class TenantLabels:
    """Labels of tenants: a tenant's name for the first so many, `other` for all that come later.

    Callers that are not known have an empty label.
    """

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, tenant: str) -> str:
        """The label of a tenant."""
        if tenant in self._known or tenant == UNKNOWN_TENANT:
            return tenant
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(tenant)
        return tenant


class Metrics:
    """A sink that counts, and the registry that Prometheus reads."""

    def __init__(self, tenants: TenantLabels | None = None) -> None:
        self.registry = CollectorRegistry()
        self.tenants = tenants or TenantLabels()
        self._requests = _tally("requests", "Requests that have ended, by their reason or OK.", "rpc", "reason")
        self._of_tenants = _tally("tenant_requests", "Requests by tenant and outcome.", "tenant", "outcome")
        self._received = _tally("received_bytes", "Bytes of requests.", "rpc")
        self._sent = _tally("sent_bytes", "Bytes of answers.", "rpc")
        self._hits = _tally("cache_hits", "Lookups that found what they sought.", "cache")
        self._misses = _tally("cache_misses", "Lookups that found nothing.", "cache")
        self._quarantines = _tally("quarantines", "Programs that were refused from then on.")
        self._request_s = _spread("request_seconds", "From a request's first byte to its answer.", "rpc")
        self._compile_s = _spread("compile_seconds", "Checking and compiling, where there was any.")
        self._queue_s = _spread("queue_seconds", "From handing on until an engine took a request up.")
        self._run_s = _spread("run_seconds", "Running in an engine, copies of tensors included.")
        self._figures = Figures(self.tenants, self._told)
        self.registry.register(self._figures)
        ProcessCollector(registry=self.registry)

    def __call__(self, request: Request) -> None:
        rpc = request.rpc
        self._requests.add(rpc, request.reason)
        self._of_tenants.add(self.tenants.of(request.tenant), "ok" if request.is_ok else "error")
        self._request_s.add(request.seconds, rpc)
        if request.bytes_in:
            self._received.add(rpc, by=request.bytes_in)
        if request.bytes_out:
            self._sent.add(rpc, by=request.bytes_out)
        if request.compile_ns:
            self._compile_s.add(request.compile_ns / 1e9)
        if request.has_run:
            run = request.engine_run
            self._queue_s.add(run.queue_ns / 1e9)
            self._run_s.add(run.run_ns / 1e9)
        for cache, count in request.hits.items():
            self._hits.add(cache, by=count)
        for cache, count in request.misses.items():
            self._misses.add(cache, by=count)

    def quarantined(self) -> None:
        """Counts a quarantine."""
        self._quarantines.add()

    def show(self, snapshot: Snapshot, left_out: int) -> None:
        """What the next reading tells of the server's state. left_out: lines that the audit log left out."""
        self._figures.snapshot, self._figures.left_out = snapshot, left_out

    def _told(self) -> Iterator[Metric]:
        for tally in (self._requests, self._of_tenants, self._received, self._sent, self._hits, self._misses):
            yield tally.metric()
        yield self._quarantines.metric()
        for spread in (self._request_s, self._compile_s, self._queue_s, self._run_s):
            yield spread.metric()


class Figures(Collector):
    """What was counted, and the server's state as it was told last."""

    def __init__(self, tenants: TenantLabels, counted: Callable[[], Iterator[Metric]]) -> None:
        self._tenants = tenants
        self._counted = counted
        self.snapshot: Snapshot | None = None
        self.left_out = 0

    def collect(self) -> Iterable[Metric]:
        yield from self._counted()
        snapshot = self.snapshot
        if snapshot is not None:
            yield from _engines(snapshot)
            yield from _workers(snapshot.workers)
            yield from self._of_tenants(snapshot)
            yield from _caches(snapshot)
            yield _gauge("requests_in_flight", "Requests in the server.", snapshot.queue.in_flight)
            yield _gauge("requests_in_flight_limit", "Most requests at a time.", snapshot.queue.max_in_flight)
            yield _gauge("quarantined_programs", "Programs that are refused at the moment.", len(snapshot.quarantined))
            text = "Lines that the audit log left out: there were too many, or they could not be written."
            yield CounterMetricFamily("gradrule_audit_left_out", text, value=self.left_out)

    def _of_tenants(self, snapshot: Snapshot) -> Iterator[Metric]:
        sums: dict[str, dict[str, int]] = {}
        for tenant in snapshot.tenants:
            own = sums.setdefault(self._tenants.of(tenant.name), dict.fromkeys(_TENANT_GAUGES, 0))
            for name in _TENANT_GAUGES:
                own[name] += held(tenant, name)
        for name, (metric, text) in _TENANT_GAUGES.items():
            family = GaugeMetricFamily(f"gradrule_{metric}", text, labels=["tenant"])
            for label, own in sums.items():
                family.add_metric([label], own[name])
            yield family


def _engines(snapshot: Snapshot) -> Iterator[Metric]:
    for name, (text, value_of) in _ENGINE_GAUGES.items():
        family = GaugeMetricFamily(f"gradrule_{name}", text, labels=["engine", "device"])
        for engine in snapshot.engines:
            family.add_metric([str(engine.index), engine.device], value_of(engine))
        yield family
    restarts = CounterMetricFamily(
        "gradrule_engine_restarts",
        "Engines that ended otherwise than by order of the server.",
        labels=["engine", "reason"],
    )
    for index, counts in snapshot.ended.items():
        for reason, count in counts.items():
            restarts.add_metric([str(index), reason], count)
    yield restarts
    yield _gauge("engine_spares", "Engines that are ready to take another's place.", snapshot.spares)


def _workers(found: WorkerStatus) -> Iterator[Metric]:
    yield _gauge("compile_workers", "Processes that read graphs, of all tenants.", found.count)
    yield _gauge("compile_workers_busy", "Compile workers that are at a task.", found.busy)
    yield _gauge("compile_waiting_tasks", "Tasks that wait for a compile worker.", found.waiting)
    yield _gauge("compile_workers_resident_bytes", "Memory of all compile workers.", found.resident_bytes)


def _caches(snapshot: Snapshot) -> Iterator[Metric]:
    entries = GaugeMetricFamily("gradrule_cache_entries", "What the cache holds.", labels=["cache"])
    held_bytes = GaugeMetricFamily("gradrule_cache_bytes", "Roughly the bytes that it takes.", labels=["cache"])
    for cache in snapshot.caches:
        entries.add_metric([cache.name], cache.entries)
        held_bytes.add_metric([cache.name], cache.held_bytes)
    yield from (entries, held_bytes)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"gradrule_{name}", text, value=value)


def _tally(name: str, text: str, *labels: str) -> Tally:
    return Tally(f"gradrule_{name}", text, *labels)


def _spread(name: str, text: str, *labels: str) -> Spread:
    return Spread(f"gradrule_{name}", text, _SECONDS, *labels)
