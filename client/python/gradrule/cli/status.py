"""Implements `gradrule status` and `gradrule health`: show the state of a server."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradrule._builder.names import counted
from gradrule.cli import output
from gradrule.cli.connection import connect_to_one_server, credentials, finish, seconds
from gradrule.cli.failures import FOUND

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gradrule._results.status_report import (
        EngineStatus,
        EngineUse,
        RegistryStatus,
        ServerStatus,
        TenantStatus,
        Usage,
    )

_INTERVAL_S = 1.0
_HEALTH_TIMEOUT_S = 5.0
# Values of `grpc.health.v1.HealthCheckResponse.ServingStatus`.
_SERVING = 1
_STATUS_NAMES = {0: "UNKNOWN", _SERVING: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_TENANTS = 20

ENGINE_COLUMNS = (
    *("engine", "tenant", "for", "device", "pid"),
    *("state", "up", "running", "waiting", "programs", "memory", "ended"),
)
ENGINE_USE_COLUMNS = ("engines", "their memory", "waiting tenants", "taken from tenants", "last")
WORKER_COLUMNS = ("compile workers", "busy", "waiting tasks", "memory")
REGISTRY_COLUMNS = ("rules and programs", "database", "blobs")
CACHE_COLUMNS = ("cache", "entries", "bytes")
TENANT_COLUMNS = ("tenant", "requests", "programs", "rules", "sessions", "handles", "session, handle, blob bytes")
QUARANTINE_COLUMNS = ("quarantined program", "for", "why")


def add_status(commands: Any) -> None:
    """Adds the command `status` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "status",
        help="show engines, registry, tenants of a server; tables update on a terminal and are printed once elsewhere",
    )
    parser.add_argument("--once", action="store_true", help="print the tables once, even on a terminal")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=seconds,
        default=_INTERVAL_S,
        help=f"time between updates of the tables [default: {_INTERVAL_S:g}]",
    )
    finish(parser, run_status)


def run_status(options: argparse.Namespace) -> int:
    """Shows the status once, or until Ctrl-C on a terminal; returns the exit code."""
    # Servers take turns otherwise, and each update would show another one.
    with connect_to_one_server(options) as client:
        if options.json:
            output.print_json(asdict(client.server_status()))
            return 0
        screen = output.console()
        status = client.server_status()
        if options.once or not screen.is_terminal:
            show(screen, status, options.target)
            return 0
        from rich.live import Live

        with Live(drawn(screen, status, options.target), auto_refresh=False) as live:
            while True:
                time.sleep(options.interval)
                live.update(drawn(screen, client.server_status(), options.target), refresh=True)


def show(screen: output.Screen, status: ServerStatus, target: str) -> None:
    """Prints the status as tables."""
    screen.print(_head(status, target))
    for columns, rows in _tables(status):
        output.table(screen, "", columns, rows)


def drawn(screen: output.Screen, status: ServerStatus, target: str) -> RenderableType:
    """Returns the status as tables for rich, as wide as the screen is now."""
    from rich.console import Group
    from rich.text import Text

    tables = (output.drawn_table("", columns, rows, width=screen.width) for columns, rows in _tables(status) if rows)
    return Group(Text(_head(status, target)), *tables)


def _head(status: ServerStatus, target: str) -> str:
    state = "ready" if status.ready else "no engine is ready"
    host = f" on {status.host}" if status.host else ""
    return (
        f"gradrule {status.version} at {target}{host}, TensorFlow {status.tensorflow_version or '?'}: {state}, "
        f"up {duration_text(status.uptime)}, {usage_text(status.requests)} requests, "
        f"{counted(status.spare_engines, 'spare engine')}"
    )


def _tables(status: ServerStatus) -> Iterator[tuple[tuple[str, ...], list[list[str]]]]:
    """Returns columns and rows of each table."""
    yield ENGINE_COLUMNS, [_engine_row(engine) for engine in status.engines]
    if status.engine_use.engines.limit:
        yield ENGINE_USE_COLUMNS, [_engine_use_row(status.engine_use)]
    workers = status.compile_workers
    counts = (workers.count, workers.busy, workers.waiting)
    yield WORKER_COLUMNS, [[*map(str, counts), size_text(workers.resident_bytes)]]
    if status.registry.database:
        yield REGISTRY_COLUMNS, [_registry_row(status.registry)]
    yield (
        CACHE_COLUMNS,
        [[cache.name, usage_text(cache.entries), bytes_text(cache.size_bytes)] for cache in status.caches],
    )
    tenants = [_tenant_row(tenant) for tenant in status.tenants[:_MOST_TENANTS]]
    if status.tenant_count > _MOST_TENANTS:
        tenants.append([f"and {status.tenant_count - _MOST_TENANTS} tenants more", *[""] * (len(TENANT_COLUMNS) - 1)])
    yield TENANT_COLUMNS, tenants
    quarantined = [[item.digest, duration_text(item.remaining), item.reason] for item in status.quarantined_programs]
    yield QUARANTINE_COLUMNS, quarantined


def _engine_row(engine: EngineStatus) -> list[str]:
    return [
        str(engine.index),
        engine.tenant,
        "sessions" if engine.holds_sessions else "programs",
        engine.device,
        str(engine.pid or ""),
        "ready" if engine.ready else "starting",
        duration_text(engine.uptime) if engine.ready else "",
        str(engine.running),
        str(engine.waiting),
        str(engine.programs),
        size_text(engine.resident_bytes),
        ", ".join(f"{reason} {count}" for reason, count in sorted(engine.ended.items())),
    ]


def _engine_use_row(use: EngineUse) -> list[str]:
    return [
        usage_text(use.engines),
        bytes_text(use.memory_bytes),
        str(use.waiting_tenants),
        ", ".join(f"{reason} {count}" for reason, count in sorted(use.evictions.items())) or "none",
        "" if use.since_eviction is None else f"{duration_text(use.since_eviction)} ago",
    ]


def _registry_row(registry: RegistryStatus) -> list[str]:
    state = "available"
    if registry.problem:
        state = f"unavailable for {duration_text(registry.unavailable_for or 0)}: {registry.problem}"
    return [registry.database, state, registry.blobs]


def _tenant_row(tenant: TenantStatus) -> list[str]:
    sizes = (tenant.session_bytes, tenant.handle_bytes, tenant.blob_bytes)
    counts = (tenant.requests, tenant.programs, tenant.rules, tenant.sessions, tenant.handles)
    return [tenant.name, *map(usage_text, counts), ", ".join(map(bytes_text, sizes))]


def usage_text(usage: Usage) -> str:
    """Formats `3 of 256`, or `3` without a limit."""
    return f"{usage.used} of {usage.limit}" if usage.limit else str(usage.used)


def bytes_text(usage: Usage) -> str:
    """Formats `1.5 MiB of 2.0 GiB`."""
    return f"{size_text(usage.used)} of {size_text(usage.limit)}" if usage.limit else size_text(usage.used)


def size_text(size: float) -> str:
    """Formats `1.5 MiB`."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size:.0f} {_UNITS[unit]}"


def duration_text(span_s: float) -> str:
    """Formats seconds: `59 s`, `3 min 20 s`, `5 h 3 min`, `2 d 1 h`."""
    whole = int(span_s)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def add_health(commands: Any) -> None:
    """Adds the command `health` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "health", help="check whether a server is ready (exit code 0) or not (1); no answer: 4"
    )
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", help="the same as --target")
    finish(parser, run_health, f"{_HEALTH_TIMEOUT_S:g}")


def run_health(options: argparse.Namespace) -> int:
    """Prints the status of `gradrule.v1.GradientService` from `grpc.health.v1`; needs only grpc."""
    import grpc

    from gradrule._messages.error_status import error_of
    from gradrule._rpc import channels

    target, secured = channels.endpoint(options.address or options.target, credentials(options))
    address, timeout = channels.address(target), options.timeout or _HEALTH_TIMEOUT_S
    with grpc.insecure_channel(address) if secured is None else grpc.secure_channel(address, secured) as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(channels.HEALTH_METHOD)
        try:
            answer = check(channels.HEALTH_REQUEST, timeout=timeout)
        except grpc.RpcError as cause:
            raise error_of(cause, target) from None
    # The answer is one enum in field 1; proto3 omits a zero.
    number = answer[1] if len(answer) > 1 else 0
    name = _STATUS_NAMES.get(number, str(number))
    if options.json:
        output.print_json({"status": name})
    else:
        print(name)
    return 0 if number == _SERVING else FOUND
