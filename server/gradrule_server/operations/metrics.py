"""Collects the metrics for Prometheus; `monitoring_port` serves them.

docs/guide/operating.md lists all metrics; a test compares. Labels have few values: RPCs, reasons, engines, caches, and
a limited number of tenants; the others are counted as `other`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradrule_server.limits import REPORTED_RESOURCES
from gradrule_server.link.engine import Engine
from gradrule_server.operations.request_record import UNKNOWN_TENANT, RequestRecord
from gradrule_server.operations.status import Sources

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

_ENGINE_GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "engine_up": ("1 where the engine is ready.", lambda engine: engine.is_ready),
    "engine_running_requests": ("Requests that run on the engine.", lambda engine: engine.running),
    "engine_waiting_requests": ("Requests that wait for the engine.", lambda engine: engine.waiting),
    "engine_programs": ("Programs that the engine holds.", lambda engine: engine.programs),
    "engine_resident_bytes": ("Memory of the engine's process.", lambda engine: engine.resident_bytes),
    "engine_uptime_seconds": ("Seconds since the engine's process became ready.", lambda engine: engine.uptime_s),
}


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


class Metrics(Collector):
    """A sink that counts ended requests, and the registry that Prometheus reads."""

    def __init__(self, tenants: TenantLabels | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it takes and returns nothing
        self.registry = CollectorRegistry()
        self.tenants = tenants or TenantLabels()
        self._requests = self._counter("requests", "Ended requests by reason; OK for success.", "rpc", "reason")
        self._tenant_requests = self._counter("tenant_requests", "Requests by tenant and outcome.", "tenant", "outcome")
        self._calls = self._counter("calls", "Ended calls of Evaluate by code path.", "path")
        self._received = self._counter("received_bytes", "Bytes of requests.", "rpc")
        self._sent = self._counter("sent_bytes", "Bytes of answers.", "rpc")
        self._hits = self._counter("cache_hits", "Lookups that found an entry.", "cache")
        self._misses = self._counter("cache_misses", "Lookups that found nothing.", "cache")
        self._quarantines = self._counter("quarantines", "Programs that were quarantined.")
        self._request_s = self._histogram("request", "Time from the first byte of a request to its answer.", "rpc")
        self._compile_s = self._histogram("compile", "Time to check and compile a program, of requests that did so.")
        self._queue_s = self._histogram("queue", "Time that a request waited for its engine.")
        self._run_s = self._histogram("run", "Time that a request ran in its engine, including copies of tensors.")
        self._state: Sequence[Metric] = ()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def __call__(self, request: RequestRecord) -> None:
        rpc = request.rpc
        self._requests.labels(rpc, request.reason).inc()
        self._tenant_requests.labels(self.tenants.label(request.tenant), "ok" if request.is_ok else "error").inc()
        self._request_s.labels(rpc).observe(request.seconds)
        if request.path is not None:
            self._calls.labels(request.path).inc()
        if request.bytes_in:
            self._received.labels(rpc).inc(request.bytes_in)
        if request.bytes_out:
            self._sent.labels(rpc).inc(request.bytes_out)
        if request.compile_ns:
            self._compile_s.observe(request.compile_ns / 1e9)
        if request.has_run:
            run = request.engine_run
            self._queue_s.observe(run.queue_ns / 1e9)
            self._run_s.observe(run.run_ns / 1e9)
        for cache, count in request.hits.items():
            self._hits.labels(cache).inc(count)
        for cache, count in request.misses.items():
            self._misses.labels(cache).inc(count)

    def count_quarantine(self) -> None:
        """Counts a quarantine."""
        self._quarantines.inc()

    def set_state(self, sources: Sources, audit_dropped: int) -> None:
        """Reads the server's state for the next collection, which may run in a thread. Must run on the event loop.

        Args:
            sources: What is read.
            audit_dropped: Lines that the audit log has dropped.
        """
        text = "Lines that the audit log dropped because there were too many or they could not be written."
        self._state = [
            *_engines(sources),
            *self._tenants_metrics(sources),
            *_caches(sources),
            *_server(sources),
            CounterMetricFamily("gradrule_audit_left_out", text, value=audit_dropped),
        ]

    def collect(self) -> Iterable[Metric]:
        return self._state

    def _tenants_metrics(self, sources: Sources) -> Iterator[Metric]:
        usages = sources.tenants()
        labels = [self.tenants.label(tenant.name) for tenant in usages]
        for resource in REPORTED_RESOURCES:
            used: collections.Counter[tuple[str, ...]] = collections.Counter()
            for label, tenant in zip(labels, usages, strict=True):
                used[(label,)] += tenant.used[resource.name]
            yield _family(GaugeMetricFamily, resource.gauge, resource.description, ("tenant",), used)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"gradrule_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"gradrule_{name}_seconds", text, labels, buckets=_DURATION_BUCKETS_S, registry=self.registry)


def _engines(sources: Sources) -> Iterator[Metric]:
    engines = sources.engines
    for name, (text, value_of) in _ENGINE_GAUGES.items():
        rows = {(str(engine.index), engines.device): value_of(engine) for engine in engines.engines}
        yield _family(GaugeMetricFamily, name, text, ("engine", "device"), rows)
    text = "Engines by what uses them: programs, sessions, handles (forward handles), or none."
    held = dict.fromkeys((("programs",), ("sessions",), ("handles",), ("none",)), 0)
    for engine in engines.engines:
        held[(engine.holder,)] += 1
    yield _family(GaugeMetricFamily, "engines", text, ("holder",), held)
    text = "Engines that ended unexpectedly."
    ends = {(str(index), reason): count for index, ends in engines.ended.items() for reason, count in ends.items()}
    yield _family(CounterMetricFamily, "engine_restarts", text, ("engine", "reason"), ends)
    text = "Engines that were taken from their tenants."
    evictions = {(reason,): engines.evictions.get(reason, 0) for reason in ("turn", "memory", "idle")}
    yield _family(CounterMetricFamily, "engine_evictions", text, ("reason",), evictions)
    text = "Helper processes that ended unexpectedly."
    helpers = {**engines.helper_ends, "gateway": sources.gateway_ends}
    ends = {(helper, reason): count for helper, ends in helpers.items() for reason, count in ends.items()}
    yield _family(CounterMetricFamily, "helper_restarts", text, ("helper", "reason"), ends)
    yield _gauge("engine_spares", "Engines that are ready to replace another one.", engines.spares_ready)
    yield _gauge("engines_limit", "Most engines of all tenants.", engines.max_engines)
    yield _gauge("engines_memory_bytes", "Memory of all engines and compile workers.", engines.used_bytes)
    yield _gauge("engines_memory_limit_bytes", "Most memory of these; 0: no limit.", engines.memory_share)
    yield _gauge("engine_waiting_tenants", "Tenants that wait for their turn on an engine.", engines.waiting_tenants)
    workers = engines.workers
    yield _gauge("compile_workers", "Processes that read graphs, of all tenants.", workers.count)
    yield _gauge("compile_workers_busy", "Compile workers that run a task.", workers.busy)
    yield _gauge("compile_waiting_tasks", "Tasks that wait for a compile worker.", workers.waiting)
    yield _gauge("compile_workers_resident_bytes", "Memory of all compile workers.", workers.resident_bytes)


def _caches(sources: Sources) -> Iterator[Metric]:
    caches = sources.caches()
    entries = {(cache.name,): cache.entries for cache in caches}
    yield _family(GaugeMetricFamily, "cache_entries", "Entries of the cache.", ("cache",), entries)
    held = {(cache.name,): cache.held_bytes for cache in caches}
    yield _family(GaugeMetricFamily, "cache_bytes", "Approximate memory of the cache.", ("cache",), held)
    evictions = {(cache.name, reason): count for cache in caches for reason, count in cache.evictions.items()}
    text = "Programs that the cache dropped."
    yield _family(CounterMetricFamily, "cache_evictions", text, ("cache", "reason"), evictions)
    blobs = sources.blob_cache()
    for name, text, value in (
        ("hits", "Blobs that calls needed and that were in the cache.", blobs.hits),
        ("fetches", "Blobs that were fetched from the object store.", blobs.fetches),
        ("fetch_failures", "Fetches from the object store that failed.", blobs.failures),
        ("fetched_bytes", "Bytes that were fetched from the object store.", blobs.fetched_bytes),
        ("fetch_seconds", "Seconds that fetches from the object store took.", blobs.fetch_s),
    ):
        yield CounterMetricFamily(f"gradrule_blob_cache_{name}", text, value=value)
    yield _gauge("blob_cache_bytes", "Disk space of the cache of blobs.", blobs.held_bytes)


def _server(sources: Sources) -> Iterator[Metric]:
    yield _gauge("requests_in_flight", "Requests in the server.", sources.in_flight())
    yield _gauge("requests_in_flight_limit", "Most requests at a time.", sources.max_in_flight)
    yield _gauge("quarantined_programs", "Programs in quarantine.", len(sources.quarantines()))
    text = "1 if the database of rules and programs could be used last, 0 if not."
    yield _gauge("registry_available", text, not sources.registry().problem)


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Mapping[Any, float],
) -> Metric:
    """Returns a metric with a value for each tuple of values of its labels."""
    family = kind(f"gradrule_{name}", text, labels=labels)
    for values, value in rows.items():
        family.add_metric(values, value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"gradrule_{name}", text, value=value)
