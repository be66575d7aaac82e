"""Collects the metrics for Prometheus; `monitoring_port` serves them.

docs/guide/operating.md lists all metrics; a test compares. Labels have few values: RPCs, reasons, engines, caches, and
a limited number of tenants; the others are counted as `other`.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gradrule_server.limits import REPORTED_RESOURCES
from gradrule_server.link.monitor import EngineStatus
from gradrule_server.operations.request_record import UNKNOWN_TENANT, RequestRecord
from gradrule_server.operations.status import BlobCache, Snapshot, WorkerStatus

Labels = tuple[str, ...]

OTHER = "other"
MAX_TENANTS = 50

_DURATION_BUCKETS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    600.0,
)

_ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStatus], float]]] = {
    "engine_up": ("1 where the engine is ready.", lambda engine: engine.is_ready),
    "engine_running_requests": ("Requests that run on the engine.", lambda engine: engine.running),
    "engine_waiting_requests": ("Requests that wait for the engine.", lambda engine: engine.waiting),
    "engine_programs": ("Programs that the engine holds.", lambda engine: engine.programs),
    "engine_jit_programs": (
        "Programs whose calls the engine runs with XLA.",
        lambda engine: engine.jit_programs,
    ),
    "engine_resident_bytes": ("Memory of the engine's process.", lambda engine: engine.resident_bytes),
    "engine_uptime_seconds": ("Seconds since the engine's process became ready.", lambda engine: engine.uptime_s),
}


class EventLoopCounter:
    """A counter that one thread increases, without a lock; readers on other threads copy the values first.

    A request adds to a dozen counters, and prometheus_client's own counters lock on each call.

    Args:
        name: The metric's name without `_total`.
        text: Its description.
        labels: Names of its labels; `add` takes their values in this order.
    """

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Increases the counter of these label values."""
        counts = self._counts
        counts[labels] = counts.get(labels, 0.0) + by

    def metric(self) -> Metric:
        """Returns the values for Prometheus."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.copy().items():
            family.add_metric(labels, count)
        return family


class EventLoopHistogram:
    """A histogram, see `EventLoopCounter`.

    Args:
        name: The metric's name.
        text: Its description.
        bounds: Upper bounds of the buckets, ascending; larger values are counted in one more bucket.
        labels: Names of its labels; `add` takes their values in this order.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._labels = labels
        self._counts: dict[Labels, list[float]] = {} if labels else {(): self._zeros()}

    def add(self, value: float, *labels: str) -> None:
        """Adds a value to the bucket that it belongs to."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = self._zeros()
        counts[bisect.bisect_left(self._bounds, value)] += 1
        counts[-1] += value

    def metric(self) -> Metric:
        """Returns the values for Prometheus, whose buckets include all smaller values."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, own in self._counts.copy().items():
            *counts, total = own.copy()
            buckets = list(zip(names, itertools.accumulate(counts), strict=True))
            family.add_metric(labels, buckets, total)
        return family

    def _zeros(self) -> list[float]:
        """Returns counts for all buckets, followed by the sum of the values."""
        return [0.0] * (len(self._bounds) + 2)


class TenantLabels:
    """Gives the first tenants their name as a label, and all later ones `other`.

    Callers that are not authenticated have an empty label.
    """

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._known: set[str] = set()

    def label(self, tenant: str) -> str:
        """Returns the label of a tenant."""
        if tenant in self._known or tenant == UNKNOWN_TENANT:
            return tenant
        if len(self._known) >= self._max_tenants:
            return OTHER
        self._known.add(tenant)
        return tenant


class Metrics:
    """A sink that counts ended requests, and the registry that Prometheus reads."""

    def __init__(self, tenants: TenantLabels | None = None) -> None:
        self.registry = CollectorRegistry()
        self.tenants = tenants or TenantLabels()
        self._requests = _counter("requests", "Ended requests by reason; OK for success.", "rpc", "reason")
        self._tenant_requests = _counter("tenant_requests", "Requests by tenant and outcome.", "tenant", "outcome")
        self._calls = _counter("calls", "Ended calls of Evaluate by code path.", "path")
        self._received = _counter("received_bytes", "Bytes of requests.", "rpc")
        self._sent = _counter("sent_bytes", "Bytes of answers.", "rpc")
        self._hits = _counter("cache_hits", "Lookups that found an entry.", "cache")
        self._misses = _counter("cache_misses", "Lookups that found nothing.", "cache")
        self._quarantines = _counter("quarantines", "Programs that were quarantined.")
        self._request_s = _histogram("request_seconds", "Time from the first byte of a request to its answer.", "rpc")
        self._compile_s = _histogram("compile_seconds", "Time to check and compile a program, of requests that did so.")
        self._queue_s = _histogram("queue_seconds", "Time that a request waited for its engine.")
        self._run_s = _histogram("run_seconds", "Time that a request ran in its engine, including copies of tensors.")
        self._collector = StateCollector(self.tenants, self._counted)
        self.registry.register(self._collector)
        ProcessCollector(registry=self.registry)

    def __call__(self, request: RequestRecord) -> None:
        rpc = request.rpc
        self._requests.add(rpc, request.reason)
        self._tenant_requests.add(self.tenants.label(request.tenant), "ok" if request.is_ok else "error")
        self._request_s.add(request.seconds, rpc)
        if request.path is not None:
            self._calls.add(request.path)
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

    def count_quarantine(self) -> None:
        """Counts a quarantine."""
        self._quarantines.add()

    def set_state(self, snapshot: Snapshot, audit_dropped: int) -> None:
        """Sets the server's state for the next collection. `audit_dropped`: lines that the audit log has dropped."""
        self._collector.snapshot, self._collector.audit_dropped = snapshot, audit_dropped

    def _counted(self) -> Iterator[Metric]:
        requests = (self._requests, self._tenant_requests, self._calls)
        for counter in (*requests, self._received, self._sent, self._hits, self._misses):
            yield counter.metric()
        yield self._quarantines.metric()
        for histogram in (self._request_s, self._compile_s, self._queue_s, self._run_s):
            yield histogram.metric()


class StateCollector(Collector):
    """Yields all counters, and gauges of the last state that was set."""

    def __init__(self, tenants: TenantLabels, counted: Callable[[], Iterator[Metric]]) -> None:
        self._tenants = tenants
        self._counted = counted
        self.snapshot: Snapshot | None = None
        self.audit_dropped = 0

    def collect(self) -> Iterable[Metric]:
        yield from self._counted()
        snapshot = self.snapshot
        if snapshot is not None:
            yield from _engines(snapshot)
            yield from _workers(snapshot.workers)
            yield from self._tenants_metrics(snapshot)
            yield from _caches(snapshot)
            yield from _blob_cache(snapshot.blob_cache)
            yield _gauge("requests_in_flight", "Requests in the server.", snapshot.queue.in_flight)
            yield _gauge("requests_in_flight_limit", "Most requests at a time.", snapshot.queue.max_in_flight)
            yield _gauge("quarantined_programs", "Programs in quarantine.", len(snapshot.quarantined))
            text = "1 if the database of rules and programs could be used last, 0 if not."
            yield _gauge("registry_available", text, not snapshot.registry.problem)
            text = "Lines that the audit log dropped because there were too many or they could not be written."
            yield CounterMetricFamily("gradrule_audit_left_out", text, value=self.audit_dropped)

    def _tenants_metrics(self, snapshot: Snapshot) -> Iterator[Metric]:
        labels = [self._tenants.label(tenant.name) for tenant in snapshot.tenants]
        for resource in REPORTED_RESOURCES:
            family = GaugeMetricFamily(f"gradrule_{resource.gauge}", resource.description, labels=["tenant"])
            sums = dict.fromkeys(labels, 0)
            for label, tenant in zip(labels, snapshot.tenants, strict=True):
                sums[label] += tenant.used[resource.name]
            for label, used in sums.items():
                family.add_metric([label], used)
            yield family


def _engines(snapshot: Snapshot) -> Iterator[Metric]:
    for name, (text, value_of) in _ENGINE_GAUGES.items():
        family = GaugeMetricFamily(f"gradrule_{name}", text, labels=["engine", "device"])
        for engine in snapshot.engines:
            family.add_metric([str(engine.index), engine.device], value_of(engine))
        yield family
    restarts = CounterMetricFamily(
        "gradrule_engine_restarts",
        "Engines that ended unexpectedly.",
        labels=["engine", "reason"],
    )
    for index, counts in snapshot.ended.items():
        for reason, count in counts.items():
            restarts.add_metric([str(index), reason], count)
    yield restarts
    yield _gauge("engine_spares", "Engines that are ready to replace another one.", snapshot.spares)
    text = "Engines by what uses them: programs, sessions, handles (forward handles), or none."
    holders = GaugeMetricFamily("gradrule_engines", text, labels=["holder"])
    held = Counter(engine.holder for engine in snapshot.engines)
    for holder in ("programs", "sessions", "handles", "none"):
        holders.add_metric([holder], held[holder])
    yield holders
    yield _gauge("engines_limit", "Most engines of all tenants.", snapshot.max_engines)
    evictions = CounterMetricFamily(
        "gradrule_engine_evictions", "Engines that were taken from their tenants.", labels=["reason"]
    )
    for reason in ("turn", "memory", "idle"):
        evictions.add_metric([reason], snapshot.evictions.get(reason, 0))
    yield evictions
    yield _gauge("engines_memory_bytes", "Memory of all engines and compile workers.", snapshot.used_bytes)
    yield _gauge("engines_memory_limit_bytes", "Most memory of these; 0: no limit.", snapshot.memory_share)
    yield _gauge("engine_waiting_tenants", "Tenants that wait for their turn on an engine.", snapshot.waiting_tenants)
    helpers = CounterMetricFamily(
        "gradrule_helper_restarts", "Helper processes that ended unexpectedly.", labels=["helper", "reason"]
    )
    for helper, ends in snapshot.helper_ends.items():
        for reason, count in ends.items():
            helpers.add_metric([helper, reason], count)
    yield helpers


def _workers(found: WorkerStatus) -> Iterator[Metric]:
    yield _gauge("compile_workers", "Processes that read graphs, of all tenants.", found.count)
    yield _gauge("compile_workers_busy", "Compile workers that run a task.", found.busy)
    yield _gauge("compile_waiting_tasks", "Tasks that wait for a compile worker.", found.waiting)
    yield _gauge("compile_workers_resident_bytes", "Memory of all compile workers.", found.resident_bytes)


def _caches(snapshot: Snapshot) -> Iterator[Metric]:
    entries = GaugeMetricFamily("gradrule_cache_entries", "Entries of the cache.", labels=["cache"])
    held_bytes = GaugeMetricFamily("gradrule_cache_bytes", "Approximate memory of the cache.", labels=["cache"])
    evictions = CounterMetricFamily(
        "gradrule_cache_evictions", "Programs that the cache dropped.", labels=["cache", "reason"]
    )
    for cache in snapshot.caches:
        entries.add_metric([cache.name], cache.entries)
        held_bytes.add_metric([cache.name], cache.held_bytes)
        for reason, count in cache.evictions.items():
            evictions.add_metric([cache.name, reason], count)
    yield from (entries, held_bytes, evictions)


def _blob_cache(cache: BlobCache) -> Iterator[Metric]:
    for name, text, value in (
        ("hits", "Blobs that calls needed and that were in the cache.", cache.hits),
        ("fetches", "Blobs that were fetched from the object store.", cache.fetches),
        ("fetch_failures", "Fetches from the object store that failed.", cache.failures),
        ("fetched_bytes", "Bytes that were fetched from the object store.", cache.fetched_bytes),
        ("fetch_seconds", "Seconds that fetches from the object store took.", cache.fetch_s),
    ):
        yield CounterMetricFamily(f"gradrule_blob_cache_{name}", text, value=value)
    yield _gauge("blob_cache_bytes", "Disk space of the cache of blobs.", cache.held_bytes)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"gradrule_{name}", text, value=value)


def _counter(name: str, text: str, *labels: str) -> EventLoopCounter:
    return EventLoopCounter(f"gradrule_{name}", text, *labels)


def _histogram(name: str, text: str, *labels: str) -> EventLoopHistogram:
    return EventLoopHistogram(f"gradrule_{name}", text, _DURATION_BUCKETS_S, *labels)
