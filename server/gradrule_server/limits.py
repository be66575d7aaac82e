"""Declares the limits on graphs and on resources, each with its default and the help text of its flag.

`settings` makes flags of these tables: a row here is all that a new limit needs besides the code that checks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LimitFlag:
    """The flag `--max-NAME` of a limit on graphs.

    Attributes:
        description: Help text of the flag.
        is_size: Whether the value is a number of bytes, which may have a unit (`64MiB`).
        below: The value must be smaller than this; None: any value is allowed.
    """

    description: str
    is_size: bool = False
    below: int | None = None


def _limit(default: int, description: str, *, is_size: bool = False, below: int | None = None) -> Any:
    """Declares a limit that has a flag."""
    return dataclasses.field(default=default, metadata={"flag": LimitFlag(description, is_size, below)})


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Limits for each node, in graphs, functions and rules alike.

    Attributes:
        trusted: Whether denied ops may run: the operator trusts all callers.
        rank: Largest rank of a shape. Kernels of most ops support no higher rank.
        node_outputs: Most outputs that a number in an attribute can request; a few bytes could request millions. Also
            limits the parallel iterations of a loop.
        listed_outputs: Most outputs that a list of types can request; it has a byte for each.
        constant_bytes: Largest size of a constant: a message of 91 bytes can declare gigabytes.
        unpacking: Memory that a parsed message may take for each of its bytes, besides `parsed_size.FREE_BYTES`.
    """

    trusted: bool = False
    rank: int = _limit(8, "Maximum rank of shapes and constants in a graph, and of tensors in requests.")
    node_outputs: int = _limit(1024, "Maximum number of outputs that a numeric attribute of a node can request.")
    listed_outputs: int = 65_536
    constant_bytes: int = _limit(
        256 * _MIB, "Maximum size of a constant in a graph, computed from its shape.", is_size=True
    )
    unpacking: int = _limit(
        10, "Maximum memory of a parsed message: 128 MiB plus this factor times the size of the message."
    )


@dataclass(frozen=True, slots=True)
class Limits(NodeLimits):
    """Limits for a whole graph, besides those for each node.

    Attributes:
        nodes: Most nodes of a graph with its functions, as sent.
        inlined_nodes: Most nodes after calls are inlined, and loop bodies and branches are copied for each use.
        inlined_bytes: Most bytes of names and attributes that inlining may add.
        call_depth: Largest depth of calls, loops and branches within each other.
        graph_bytes: Largest graph that is uploaded as a blob. Graphs in messages are limited by the message.
        attr_bytes: Most bytes of attributes that functions get from their calls; they can double with each level.
        selections: Largest product of nodes and overrides: selecting needs a byte for each pair.
        engine_bytes: Memory of an engine; 0: not limited.
    """

    nodes: int = _limit(200_000, "Maximum number of nodes in a graph, its functions included.")
    inlined_nodes: int = _limit(1_000_000, "Maximum number of nodes in a graph after function calls are inlined.")
    inlined_bytes: int = _limit(
        32 * _MIB,
        "Maximum size of the names, attributes and constants that inlining of calls adds to a graph.",
        is_size=True,
    )
    call_depth: int = _limit(32, "Maximum nesting depth of function calls, loops and branches.")
    graph_bytes: int = _limit(_GIB, "Maximum size of a graph that was uploaded as a blob.", is_size=True, below=2**31)
    attr_bytes: int = 4 * _MIB
    selections: int = _limit(10_000_000, "Maximum of a program's number of nodes times its number of overrides.")
    engine_bytes: int = 0

    def to_values(self) -> dict[str, int]:
        """Returns the values by name, to be sent to another process."""
        return {name: int(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_values(cls, values: Mapping[str, int]) -> Limits:
        """Returns the limits that `to_values` of another process described."""
        numbers = {name: value for name, value in values.items() if name != "trusted"}
        return cls(bool(values["trusted"]), **numbers)


GRAPH_LIMIT_FLAGS: dict[str, tuple[Any, LimitFlag]] = {
    field.name: (field.default, field.metadata["flag"])
    for field in dataclasses.fields(Limits)
    if "flag" in field.metadata
}
"""The limits of `Limits` that have a flag: name → default and flag."""


MEMORY_SHARES = {"engines": 0.6, "bytes_in_flight": 0.25, "shared_bytes": 0.1}
"""How the settings that are `auto` divide the memory of the machine or container.

The rest is for the front end itself, with rules and caches. `docs/guide/operating.md` has this table too.
"""

ARRIVING_PER_BYTE = 3
"""Bytes of requests that may arrive, or wait until they may run, for each byte of running requests and of answers."""

HELD_PER_BYTE = 10
"""Bytes of memory for each byte of running requests and of answers. Measured: 3.7 for calls with small answers, 5.3 for
answers as large as their requests. Python and the memory that the engine shares hold the request; that memory, Python
and gRPC the answer. The others are for requests that arrive or wait, of which one copy exists, and for the message that
gRPC hands over, of which three exist for a moment."""


@dataclass(frozen=True, slots=True)
class TenantResource:
    """A resource that is limited for the whole server (`--max-NAME`) and for each tenant (`--tenant-NAME`).

    Attributes:
        name: Its name in the settings and in the message `TenantStatus`.
        what: The resource as a plural noun, for error messages.
        default: Default of the server's limit; where `is_share`, the largest.
        help: What the limits bound, as a noun phrase for the help text of both flags.
        help_more: More for the help text of the server's flag only.
        is_size: Whether the limits are numbers of bytes, which may have a unit (`64MiB`).
        can_be_zero: Whether the server's limit may be 0, which turns the resource off.
        server_setting: Name of the server's setting; empty: `max_NAME`.
        has_quota: Whether a `Quota` counts it; the others are counted by admission control and the blob store.
        gauge: Name of its Prometheus gauge, without the prefix; empty if status and metrics do not report it.
        description: Description of the gauge.
    """

    name: str
    what: str
    default: int
    help: str
    help_more: str = ""
    is_size: bool = False
    can_be_zero: bool = False
    server_setting: str = ""
    has_quota: bool = True
    gauge: str = ""
    description: str = ""

    @property
    def is_share(self) -> bool:
        """Whether the server's limit is a share of the memory by default; see `MEMORY_SHARES`."""
        return self.name in MEMORY_SHARES

    @property
    def max_setting(self) -> str:
        """Name of the setting that limits the whole server."""
        return self.server_setting or f"max_{self.name}"

    @property
    def tenant_setting(self) -> str:
        """Name of the setting that limits each tenant."""
        return f"tenant_{self.name}"


TENANT_RESOURCES = (
    TenantResource(
        "requests",
        "requests at a time",
        256,
        "concurrent requests",
        "; further requests are refused with OVERLOADED",
        server_setting="max_concurrent_requests",
        has_quota=False,
        gauge="tenant_requests_in_flight",
        description="Requests of the tenant's in the server.",
    ),
    TenantResource(
        "bytes_in_flight",
        "bytes of requests at a time",
        2 * _GIB,
        "total size of concurrent requests",
        "; further requests wait for room, and are refused with OVERLOADED shortly before their deadline; auto: 2.5 % "
        "of the memory, because a request takes ten times its size with those that wait",
        is_size=True,
        has_quota=False,
    ),
    TenantResource("streams", "streams", 1024, "open streams, sessions included"),
    TenantResource(
        "programs", "programs", 10_000, "stored programs", gauge="programs", description="Programs that are kept."
    ),
    TenantResource(
        "rules", "rules", 10_000, "stored USER rules", gauge="rules", description="USER rules that are kept."
    ),
    TenantResource(
        "registry_bytes", "bytes of rules and programs", 8 * _GIB, "size of stored rules and programs", is_size=True
    ),
    TenantResource(
        "sessions", "sessions", 64, "open sessions", gauge="sessions", description="Sessions that are open."
    ),
    TenantResource(
        "session_bytes",
        "bytes of sessions",
        4 * _GIB,
        "total size of sessions (variables and optimizer state)",
        is_size=True,
        gauge="session_bytes",
        description="Bytes of sessions.",
    ),
    TenantResource(
        "handles",
        "forward handles",
        1024,
        "forward handles",
        gauge="handles",
        description="Forward handles that are kept.",
    ),
    TenantResource(
        "handle_bytes",
        "bytes of forward handles",
        _GIB,
        "device memory of forward handles",
        is_size=True,
        gauge="handle_bytes",
        description="Bytes of forward handles.",
    ),
    TenantResource("blobs", "blobs", 100_000, "stored blobs (uploaded graphs and weights)", has_quota=False),
    TenantResource(
        "blob_bytes",
        "bytes of blobs",
        8 * _GIB,
        "disk space of blobs",
        is_size=True,
        has_quota=False,
        gauge="blob_bytes",
        description="Bytes of blobs.",
    ),
    TenantResource(
        "shared_bytes",
        "bytes of shared memory",
        16 * _GIB,
        "memory that clients on this host share with the server for large tensors",
        ", used or not, at least 64 MiB for each client; 0 disables shared memory; auto: 10 % of the memory",
        is_size=True,
        can_be_zero=True,
    ),
)
"""All resources that are limited for each tenant; settings, quotas, metrics and status follow this table."""

QUOTA_RESOURCES = tuple(resource for resource in TENANT_RESOURCES if resource.has_quota)
REPORTED_RESOURCES = tuple(resource for resource in TENANT_RESOURCES if resource.gauge)
