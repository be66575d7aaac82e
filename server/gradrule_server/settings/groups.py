"""Declares all settings of `gradrule serve`, in the groups that `--help` shows.

Flags, environment variables, keys of the configuration file and help texts follow from these fields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, PositiveFloat, PositiveInt, create_model

from gradrule_server.limits import GRAPH_LIMIT_FLAGS, TENANT_RESOURCES, TenantResource
from gradrule_server.settings.sources import SettingsError

_MIB = 1 << 20


class SettingsGroup(BaseModel):
    """Base of all groups. `title` and `note` are shown by `--help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    title: ClassVar[str]
    note: ClassVar[str] = ""


def _with_fields(fields: Mapping[str, Any]) -> Callable[[type[Any]], Any]:
    """Class decorator that adds fields to a group."""

    def add(group: type[Any]) -> Any:
        return create_model(group.__name__, __base__=group, __module__=group.__module__, **fields)

    return add


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Returns `gradrule` under `$XDG_DATA_HOME` or `~/.local/share`; the XDG specification ignores relative paths.

    Raises:
        SettingsError: If the user has no home directory.
    """
    xdg = Path(environ.get("XDG_DATA_HOME", ""))
    if xdg.is_absolute():
        return xdg / "gradrule"
    try:
        home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError:
        raise SettingsError(
            "The data directory has no default: HOME is not set and user "
            f"{os.getuid()} has no home directory. Set --data-dir or GRADRULE_DATA_DIR"
        ) from None
    return home / ".local" / "share" / "gradrule"


def _without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


ListenAddress = Annotated[str, Field(min_length=1), AfterValidator(_without_brackets)]
"""An address to listen on. IPv6 may stand in brackets, which the value does not have."""


class Listening(SettingsGroup):
    """Where the server listens, and limits on connections."""

    title = "Listening and connections"

    host: ListenAddress = Field("127.0.0.1", description="Address to listen on; :: means all, of IPv4 and IPv6.")
    port: int = Field(8470, ge=0, le=65535, description="Port to listen on; 0 selects a free port.")
    tls_cert: Path | None = Field(
        None, description="TLS certificate chain, PEM. The server then accepts TLS connections only."
    )
    tls_key: Path | None = Field(None, description="Private key of the TLS certificate, PEM.")
    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of HTTP and JSON, on the same address: starts `gradrule gateway` beside the server; 0 "
        "selects a free port.",
    )
    http_allowed_hosts: str = Field(
        "",
        description="Names by which clients may call the HTTP port (header Host), besides localhost and the address "
        "that the server listens on, comma-separated; * allows all.",
    )
    max_message_bytes: ByteSize = Field(
        ByteSize(64 * _MIB), ge=1024, lt=2**31, description="Maximum size of a gRPC message."
    )
    max_metadata_bytes: ByteSize = Field(ByteSize(8 * 1024), ge=1024, description="Maximum size of a call's metadata.")
    max_connections: PositiveInt = Field(4096, description="Maximum number of open connections.")
    max_unauthenticated_connections: PositiveInt = Field(
        128,
        description="Maximum number of connections per client address (IPv6: per /64) without an authenticated call; "
        "the server closes the oldest ones first.",
    )
    unauthenticated_idle_s: PositiveFloat = Field(
        60.0, description="Idle time after which a connection without an authenticated call is closed, seconds."
    )
    max_connection_streams: PositiveInt = Field(
        1000, description="Maximum number of concurrent calls on a connection; further calls wait."
    )
    handshake_timeout_s: PositiveFloat = Field(10.0, description="Timeout of connection handshakes, seconds.")
    keepalive_s: PositiveFloat = Field(30.0, description="Idle time before the server sends a keepalive ping, seconds.")
    keepalive_timeout_s: PositiveFloat = Field(60.0, description="Timeout of the answer to a keepalive ping, seconds.")
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        description="Age at which a connection is closed, seconds (varied by 10 %), so that clients reconnect and "
        "spread over replicas; 0 disables. Streams of evaluations end then too, and clients open others.",
    )
    max_connection_age_grace_s: PositiveFloat = Field(
        600.0,
        description="Time that calls and sessions get to finish before an aged connection closes, seconds; then "
        "sessions are lost.",
    )


class Security(SettingsGroup):
    """Who may call, and what callers may run."""

    title = "Security"

    tokens: Path | None = Field(
        None, description="File of bearer tokens, written by `gradrule token new`. Every call then needs a token."
    )
    tls_client_ca: Path | None = Field(
        None,
        description="Certificate authorities that sign client certificates, PEM. Clients without a certificate are "
        "rejected. Without tokens, the certificate determines the tenant.",
    )
    tls_client_name: Literal["auto", "uri", "dns", "email", "common-name"] = Field(
        "auto",
        description="Name in a client certificate that is the tenant: the only uri, dns or email alternative name, "
        "or the common-name; auto: the only alternative name of these types, or the common name if there are no "
        "alternative names.",
    )
    jwt_key: Path | None = Field(None, description="Public keys that verify JSON Web Tokens, PEM.")
    jwt_jwks: Path | None = Field(None, description="Public keys that verify JSON Web Tokens, JSON Web Key Set.")
    jwt_issuer: str = Field("", description="Required issuer (`iss`) of JSON Web Tokens.")
    jwt_audience: str = Field("", description="Required audience (`aud`) of JSON Web Tokens.")
    jwt_tenant_claim: str = Field("sub", min_length=1, description="Claim of a JSON Web Token that names the tenant.")
    admin_tenants: str = Field(
        "", description="Tenants whose JSON Web Tokens or certificates have administrator rights, comma-separated."
    )
    insecure_tokens: bool = Field(
        False,
        description="Accept tokens over unencrypted connections from other machines; for use behind a proxy that "
        "terminates TLS.",
    )
    sandbox: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Sandbox of engine processes (no files, network or other processes): auto uses what the kernel "
        "supports, on refuses to start without it.",
    )
    trust: Literal["sandbox", "full"] = Field(
        "sandbox", description="Ops that callers may run: sandbox allows reviewed ops only, full allows all ops."
    )
    reflection: bool = Field(True, description="Serve gRPC reflection.")
    admin: bool = Field(True, description="Serve AdminService, which reports the server's status.")


class Requests(SettingsGroup):
    """Times of requests, and running them together."""

    title = "Requests"

    default_deadline_s: PositiveFloat = Field(30.0, description="Deadline of requests that set none, seconds.")
    max_deadline_s: PositiveFloat = Field(600.0, description="Maximum deadline, seconds; longer ones are shortened.")
    stall_s: PositiveFloat = Field(
        60.0,
        description="Time after which a stream ends if its client does not read responses, seconds, plus 1 s per MiB; "
        "an unread response closes the connection.",
    )
    drain_s: float = Field(20.0, ge=0, description="Time that running requests get to finish after SIGTERM, seconds.")
    handle_ttl_s: PositiveFloat = Field(
        60.0, description="Time that a forward handle is kept after its last use, seconds."
    )
    session_idle_s: float = Field(
        300.0,
        ge=0,
        description="Time after which a session ends that gets no message, seconds; 0 disables.",
    )
    max_batch_size: PositiveInt = Field(
        64,
        description="Maximum number of examples in a dynamic batch of a program that declares batching; 1 disables it.",
    )
    max_batch_delay_ms: float = Field(
        100.0,
        ge=0,
        description="Maximum time that a request waits for a batch while its program is running, milliseconds; 0 "
        "disables waiting.",
    )


class Engines(SettingsGroup):
    """The processes that run programs."""

    title = "Engines"

    device: Annotated[str, Field(pattern=r"^(auto|cpu|gpu:\d+)$")] = Field(
        "auto", description="Device that runs programs: auto, cpu or gpu:N."
    )
    engines: PositiveInt = Field(
        1, description="Engines per tenant for programs. Each tenant has one more engine for its sessions."
    )
    max_engines: Literal["auto"] | PositiveInt = Field(
        "auto",
        description="Maximum number of engines of all tenants, without spares and trial engines; auto: one per "
        "64 MiB of memory, 4 to 128, on a GPU 8. Fewer start if memory is short.",
    )
    spares: int = Field(
        1, ge=0, description="Engines kept ready for new tenants and as replacements of crashed ones; 0 disables."
    )
    engine_threads: PositiveInt = Field(8, description="Maximum number of requests that an engine runs concurrently.")
    memory_limit: Literal["auto"] | Annotated[ByteSize, Field(ge=0)] = Field(
        "auto", description="Memory limit of an engine; auto: a share of the machine's memory, 0: no limit."
    )
    heartbeat_s: float = Field(1.0, ge=0, description="Engine health-check interval, seconds; 0 disables.")
    quarantine_s: float = Field(
        60.0,
        ge=0,
        description="Time for which a program that crashed an engine is refused, seconds; 0 disables.",
    )
    program_cache: PositiveInt = Field(256, description="Maximum number of programs that an engine keeps loaded.")
    program_cache_bytes: ByteSize = Field(
        ByteSize(2048 * _MIB),
        gt=0,
        description="Maximum memory of the programs that an engine keeps loaded, and of those that the front end "
        "caches for all tenants.",
    )


class Storage(SettingsGroup):
    """Where rules and programs are stored."""

    title = "Storage"

    data_dir: Path = Field(
        default_factory=lambda: default_data_dir(os.environ),
        description="Directory of stored rules, programs and blobs; created if missing.",
    )
    registry: str = Field(
        "",
        repr=False,
        description="PostgreSQL database of rules and programs that servers share: postgresql://user@host/database. "
        "Without it: SQLite in the data directory.",
    )
    blobs: str = Field(
        "",
        description="Object store of blobs that servers share: s3://bucket/prefix or file:///folder. Without it: "
        "the data directory.",
    )
    blob_cache_bytes: ByteSize = Field(
        ByteSize(8192 * _MIB),
        gt=0,
        description="Maximum disk space of the copies of blobs that a server with --blobs keeps in its data directory.",
    )


def _limit_type(resource: TenantResource) -> Any:
    """Returns the type of the server's limit of a resource."""
    bound = Field(ge=0) if resource.can_be_zero else Field(gt=0)
    limit: Any = Annotated[ByteSize, bound] if resource.is_size else Annotated[int, bound]
    return Literal["auto"] | limit if resource.is_share else limit


@_with_fields(
    {
        resource.max_setting: (
            _limit_type(resource),
            Field(
                "auto" if resource.is_share else ByteSize(resource.default) if resource.is_size else resource.default,
                description=f"Maximum {'' if resource.is_size else 'number of '}{resource.help}{resource.help_more}.",
            ),
        )
        for resource in TENANT_RESOURCES
    }
)
class ServerLimits(SettingsGroup):
    """Limits on each `TenantResource`, over all tenants."""

    title = "Server limits"
    note = "Limits over all tenants."


@_with_fields(
    {
        f"max_{name}": (
            ByteSize if flag.is_size else int,
            Field(ByteSize(default) if flag.is_size else default, gt=0, lt=flag.below, description=flag.description),
        )
        for name, (default, flag) in GRAPH_LIMIT_FLAGS.items()
    }
)
class GraphLimits(SettingsGroup):
    """Limits on one graph or program: those of `limits.Limits`."""

    title = "Graph limits"
    note = "Limits on each graph and its overrides."


class Logging(SettingsGroup):
    """What the server reports of itself."""

    title = "Logging, metrics and tracing"

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum level of log lines.")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Format of the log; auto: text on a terminal, otherwise json."
    )
    audit_log: str = Field(
        "", description="File that the audit log is appended to; - is standard output. Without it: the server's log."
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of Prometheus metrics (/metrics) and health checks (/livez, /readyz) over HTTP; 0 disables.",
    )
    metrics_host: ListenAddress = Field(
        "127.0.0.1",
        description="Address to serve metrics and health checks on; :: means all, of IPv4 and IPv6.",
    )
    otel_endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$")] = Field(
        "", description="OpenTelemetry collector that receives traces over gRPC, such as http://host:4317."
    )


class Development(SettingsGroup):
    """For finding faults of the server itself."""

    title = "Development"

    disabled_fast_paths: str = Field(
        "", description="Fast paths of calls to turn off, for diagnosis: comma-separated names, or all."
    )


@_with_fields(
    {
        resource.tenant_setting: (
            (ByteSize if resource.is_size else int) | None,
            Field(
                None,
                gt=0,
                description=f"Maximum {'' if resource.is_size else 'number of '}{resource.help}, per tenant.",
            ),
        )
        for resource in TENANT_RESOURCES
    }
)
class TenantLimits(SettingsGroup):
    """Limits on each `TenantResource`, per tenant."""

    title = "Tenant limits"
    note = "Each limit that is not set is --tenant-share of the server's limit."

    tenant_share: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = Field(
        "auto",
        description="Share of the server's limits that one tenant may use, between 0 and 1; auto: 0.25 with "
        "credentials, 1 without.",
    )
