"""Settings of `gradrule serve`: flag > environment `GRADRULE_*` > default; unknown ones are refused.

The model's fields are the only list: flags, environment names and help are made from it (`settings_reading`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from gradrule.common.fast_paths import disabled_paths
from gradrule_server.limits import Limits
from gradrule_server.settings_reading import (
    SettingsError,
    environment_name,
    flag_name,
    one_line,
    parse_flags,
    read_environment,
)

_MEBIBYTE = 1024 * 1024
_LIMITS = Limits()
LEAST_MEMORY = 1024 * _MEBIBYTE
"""Bytes that an engine must be given."""


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """`gradrule` under `$XDG_DATA_HOME` (ignored where relative, as its specification asks) or `~/.local/share`.

    Raises `SettingsError` where the user has no home folder.
    """
    xdg = Path(environ.get("XDG_DATA_HOME", ""))
    if xdg.is_absolute():
        return xdg / "gradrule"
    try:
        home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError:
        raise SettingsError(
            "The data folder has no default: HOME is not set and user "
            f"{os.getuid()} has no home folder; name the folder with --data-dir or GRADRULE_DATA_DIR"
        ) from None
    return home / ".local" / "share" / "gradrule"


def _of_tenant(what: str) -> Any:
    """A setting that bounds each tenant."""
    return Field(
        None,
        gt=0,
        description=f"{what} of one tenant. Unless given: a quarter of what the server has, or all of it where it asks "
        "for no credentials.",
    )


class Settings(BaseModel):
    """All settings of a server. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8470, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|gpu:\d+)$")] = Field(
        "auto", description="Where programs run: auto, cpu or gpu:N."
    )
    data_dir: Path = Field(
        default_factory=lambda: default_data_dir(os.environ), description="Folder of the registry; made where missing."
    )
    max_message_bytes: ByteSize = Field(
        ByteSize(64 * _MEBIBYTE), ge=1024, lt=2**31, description="Largest message, as bytes or as 64MiB."
    )
    max_concurrent_requests: PositiveInt = Field(256, description="Requests at a time; more are answered OVERLOADED.")
    default_deadline_s: PositiveFloat = Field(30.0, description="Seconds for a request that sets no deadline.")
    max_deadline_s: PositiveFloat = Field(600.0, description="Seconds that a request's deadline is cut to.")
    sandbox: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether engines give up files, network, processes: auto (where possible), on (or no start), off.",
    )
    engine_threads: PositiveInt = Field(8, description="Requests that an engine runs at a time.")
    max_batch_size: PositiveInt = Field(
        64, description="Examples of one program's waiting requests that are run together at most; 1: none are."
    )
    max_batch_delay_ms: float = Field(
        100.0,
        ge=0,
        description="Milliseconds that a request waits at most, while its program runs, for a run to end or for others "
        "to run with; 0: it runs as soon as a thread is free.",
    )
    jit_after_s: float = Field(
        1.0,
        ge=0,
        description="Seconds that a program with jit=auto runs, in all calls with equal shapes, before XLA compiles it "
        "in the background; 0: never.",
    )
    engines: PositiveInt = Field(
        1, description="Engines for programs per tenant. A tenant gets one more for its sessions."
    )
    max_engines: Literal["auto"] | PositiveInt = Field(
        "auto",
        description="Engines of all tenants; auto: one for each 768 MiB of memory, at least 4, or 8 on a GPU. "
        "Spares and trials come on top.",
    )
    spares: int = Field(
        1, ge=0, description="Engines that are kept ready for a new tenant, or in place of one that dies."
    )
    memory_limit: Literal["auto"] | Annotated[ByteSize, Field(ge=0)] = Field(
        "auto", description="Bytes that an engine may take; auto: a share of the machine's, 0: any."
    )
    heartbeat_s: float = Field(1.0, ge=0, description="Seconds between two questions whether an engine lives; 0: none.")
    quarantine_s: float = Field(
        60.0, ge=0, description="Seconds for which a program is refused that has ended two engines; 0: never."
    )
    program_cache: PositiveInt = Field(256, description="Programs that an engine keeps loaded.")
    program_cache_bytes: ByteSize = Field(
        ByteSize(2048 * _MEBIBYTE),
        gt=0,
        description="Roughly the bytes of the programs that an engine keeps loaded; the front end keeps as many for "
        "all tenants.",
    )
    max_handle_bytes: ByteSize = Field(
        ByteSize(1024 * _MEBIBYTE), gt=0, description="Bytes that forward handles keep on the device, of all streams."
    )
    max_handles: PositiveInt = Field(1024, description="Forward handles at a time, of all streams.")
    handle_ttl_s: PositiveFloat = Field(60.0, description="Seconds that a forward handle is kept after its last use.")
    max_sessions: PositiveInt = Field(64, description="Sessions at a time.")
    max_session_bytes: ByteSize = Field(
        ByteSize(4096 * _MEBIBYTE), gt=0, description="Bytes of all sessions: variables and slots of optimisers."
    )
    drain_s: float = Field(20.0, ge=0, description="Seconds that running requests get after SIGTERM.")
    max_nodes: PositiveInt = Field(_LIMITS.nodes, description="Nodes of a graph, its functions included.")
    max_inlined_nodes: PositiveInt = Field(
        _LIMITS.inlined_nodes, description="Nodes of a graph after its calls are inlined."
    )
    max_inlined_bytes: ByteSize = Field(
        ByteSize(_LIMITS.inlined_bytes),
        gt=0,
        description="Bytes of names and attributes, constants included, that inlining calls may add to a graph.",
    )
    trust: Literal["sandbox", "full"] = Field(
        "sandbox", description="sandbox: only ops that were reviewed run; full: every caller may run all ops."
    )
    max_node_outputs: PositiveInt = Field(
        _LIMITS.node_outputs, description="Outputs that a number in an attribute may ask for."
    )
    max_constant_bytes: ByteSize = Field(
        ByteSize(_LIMITS.constant_bytes), gt=0, description="Bytes of a constant in a graph, as its shape says."
    )
    max_rank: PositiveInt = Field(
        _LIMITS.rank, description="Rank of shapes and constants in a graph, and of what calls feed."
    )
    max_unpacking: PositiveInt = Field(
        _LIMITS.unpacking,
        description="Memory that a message may take once it is read: 128 MiB and so many times its size.",
    )
    max_selections: PositiveInt = Field(_LIMITS.selections, description="Nodes of a program times its overrides.")
    max_call_depth: PositiveInt = Field(
        _LIMITS.call_depth, description="Depth of calls, loops and branches within each other."
    )
    max_rules: PositiveInt = Field(10_000, description="USER rules that the registry keeps.")
    max_programs: PositiveInt = Field(10_000, description="Programs that the registry keeps.")
    max_registry_bytes: ByteSize = Field(
        ByteSize(8192 * _MEBIBYTE), gt=0, description="Bytes of rules and programs that the registry keeps."
    )
    max_blob_bytes: ByteSize = Field(
        ByteSize(8192 * _MEBIBYTE),
        gt=0,
        description="Bytes that blobs (uploaded graphs and weights) may take on the disk.",
    )
    max_blobs: PositiveInt = Field(100_000, description="Blobs that are kept.")
    max_graph_bytes: ByteSize = Field(
        ByteSize(_LIMITS.graph_bytes), gt=0, lt=2**31, description="Bytes of a graph that was uploaded as a blob."
    )
    max_streams: PositiveInt = Field(1024, description="Streams at a time: persistent ones and sessions.")
    max_bytes_in_flight: ByteSize = Field(
        ByteSize(2048 * _MEBIBYTE), gt=0, description="Bytes of requests at a time; more are answered OVERLOADED."
    )
    max_shared_bytes: ByteSize = Field(
        ByteSize(16384 * _MEBIBYTE),
        ge=0,
        description="Bytes of memory that clients on this host may share with the server for large tensors, counted by "
        "its size, used or not, at least 64 MiB for each; 0: none.",
    )
    tenant_requests: PositiveInt | None = _of_tenant("Requests at a time")
    tenant_bytes_in_flight: ByteSize | None = _of_tenant("Bytes of requests at a time")
    tenant_streams: PositiveInt | None = _of_tenant("Streams at a time")
    tenant_shared_bytes: ByteSize | None = _of_tenant("Bytes of memory that clients on this host may share")
    tenant_rules: PositiveInt | None = _of_tenant("USER rules")
    tenant_programs: PositiveInt | None = _of_tenant("Programs")
    tenant_registry_bytes: ByteSize | None = _of_tenant("Bytes of rules and programs")
    tenant_sessions: PositiveInt | None = _of_tenant("Sessions at a time")
    tenant_session_bytes: ByteSize | None = _of_tenant("Bytes of sessions")
    tenant_handles: PositiveInt | None = _of_tenant("Forward handles at a time")
    tenant_handle_bytes: ByteSize | None = _of_tenant("Bytes of forward handles")
    tenant_blob_bytes: ByteSize | None = _of_tenant("Bytes that blobs may take on the disk,")
    tenant_blobs: PositiveInt | None = _of_tenant("Blobs")
    tls_cert: Path | None = Field(None, description="Certificate chain in PEM; the server then speaks TLS alone.")
    tls_key: Path | None = Field(None, description="Private key of the certificate, in PEM.")
    tls_client_ca: Path | None = Field(
        None,
        description="Authorities in PEM by whom clients' certificates are signed; clients without one are then "
        "refused, and where no tokens are taken the certificate names the tenant.",
    )
    tokens: Path | None = Field(
        None, description="File of bearer tokens, as `gradrule token new` writes it; each call then needs one."
    )
    jwt_key: Path | None = Field(None, description="Public keys in PEM of whoever signs JSON Web Tokens.")
    jwt_jwks: Path | None = Field(None, description="The same as a JSON Web Key Set.")
    jwt_issuer: str = Field("", description="Who signs JSON Web Tokens: their `iss`.")
    jwt_audience: str = Field("", description="For whom JSON Web Tokens are: what their `aud` must hold.")
    jwt_tenant_claim: str = Field("sub", min_length=1, description="Claim of JSON Web Tokens that names the tenant.")
    tls_client_name: Literal["auto", "uri", "dns", "email", "common-name"] = Field(
        "auto",
        description="Name of a client's certificate that is its tenant: its only alternative name of the type uri, dns "
        "or email, its common-name, or auto: its only name of these three types or, where it has no alternative names, "
        "its common name.",
    )
    admin_tenants: str = Field(
        "", description="Tenants, separated by commas, whose JSON Web Tokens or certificates are administrators'."
    )
    insecure_tokens: bool = Field(
        False, description="Whether tokens may come unencrypted from other machines, where something else encrypts."
    )
    max_connections: PositiveInt = Field(4096, description="Connections at a time.")
    max_unauthenticated_connections: PositiveInt = Field(
        128,
        description="Connections of one address (IPv6: of one /64) on which no caller has authenticated; the oldest "
        "beyond these are closed.",
    )
    unauthenticated_idle_s: PositiveFloat = Field(
        60.0,
        description="Seconds without a call after which a connection is closed on which no caller has authenticated.",
    )
    max_connection_streams: PositiveInt = Field(1000, description="Calls at a time on one connection; more wait.")
    max_metadata_bytes: ByteSize = Field(ByteSize(8 * 1024), ge=1024, description="Metadata of a call.")
    handshake_timeout_s: PositiveFloat = Field(10.0, description="Seconds for a client to connect.")
    keepalive_s: PositiveFloat = Field(
        30.0, description="Seconds of silence after which a client is asked whether it is there still."
    )
    keepalive_timeout_s: PositiveFloat = Field(20.0, description="Seconds for its answer.")
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        description="Seconds, a tenth more or less, after which clients must connect anew, so that they spread over "
        "replicas; 0: never.",
    )
    max_connection_age_grace_s: PositiveFloat = Field(
        600.0, description="Seconds that calls and streams of such a connection get to end."
    )
    stall_s: PositiveFloat = Field(
        60.0,
        description="Seconds after which a stream ends whose client does not read its answers, and a second more for "
        "each MiB; an answer that is read by nobody takes its connection with it.",
    )
    reflection: bool = Field(True, description="Whether the server tells its services by gRPC reflection.")
    admin: bool = Field(True, description="Whether the server answers AdminService, which tells how it is doing.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of Prometheus' metrics at /metrics; 0: none.")
    metrics_host: str = Field("127.0.0.1", min_length=1, description="Address to serve metrics on.")
    otel_endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$")] = Field(
        "", description="Collector that gets OpenTelemetry traces by gRPC: http://host:4317; empty: none."
    )
    audit_log: str = Field(
        "", description="File that audit lines are appended to; - is standard output, empty the server's log."
    )
    disabled_fast_paths: str = Field(
        "", description="Fast paths of calls that are off, for diagnosis: names of some, comma-separated, or all."
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Form of the log: json, text, or auto: text on a terminal, else json."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")

    @model_validator(mode="after")
    def _deadlines_in_order(self) -> Self:
        if self.default_deadline_s > self.max_deadline_s:
            raise ValueError(
                f"default_deadline_s ({self.default_deadline_s:g}) is more than "
                f"max_deadline_s ({self.max_deadline_s:g})"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_enough(self) -> Self:
        if self.memory_limit != "auto" and 0 < self.memory_limit < LEAST_MEMORY:
            raise ValueError(
                f"memory_limit ({self.memory_limit} bytes) is less than an engine takes by itself: {LEAST_MEMORY} is "
                f"the least, 0 is no limit"
            )
        return self

    @model_validator(mode="after")
    def _engines_fit(self) -> Self:
        if self.max_engines != "auto" and self.max_engines <= self.engines:
            raise ValueError(
                f"max_engines ({self.max_engines}) must be more than engines ({self.engines}): a tenant with sessions "
                "has one engine more"
            )
        return self

    @model_validator(mode="after")
    def _credentials_fit(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca asks clients for certificates, which needs TLS: give tls_cert and tls_key")
        if self.takes_jwts and not (self.jwt_issuer and self.jwt_audience):
            raise ValueError(
                "jwt_key and jwt_jwks need jwt_issuer and jwt_audience: a token that somebody else signed, or signed "
                "for something else, would be taken otherwise"
            )
        if not self.takes_jwts and (self.jwt_issuer or self.jwt_audience):
            raise ValueError("jwt_issuer and jwt_audience say nothing without jwt_key or jwt_jwks")
        if self.takes_tokens and self.tls_cert is None and not is_loopback(self.host) and not self.insecure_tokens:
            raise ValueError(
                f"tokens would come unencrypted to {self.host}: give tls_cert and tls_key, or insecure_tokens where "
                "something else encrypts"
            )
        return self

    @field_validator("disabled_fast_paths")
    @classmethod
    def _fast_paths_exist(cls, text: str) -> str:
        disabled_paths(text)
        return text

    @property
    def takes_jwts(self) -> bool:
        """Whether JSON Web Tokens are credentials."""
        return self.jwt_key is not None or self.jwt_jwks is not None

    @property
    def takes_tokens(self) -> bool:
        """Whether each call needs a token, of either kind."""
        return self.tokens is not None or self.takes_jwts

    @property
    def is_open(self) -> bool:
        """Whether the server asks for no credentials."""
        return not self.takes_tokens and self.tls_client_ca is None

    def of_tenant(self, name: str) -> int:
        """The bound of each tenant: `tenant_NAME`, or its default."""
        given: int | None = getattr(self, f"tenant_{name}")
        if given is not None:
            return given
        of_server: int = getattr(self, _OF_SERVER.get(name, f"max_{name}"))
        return of_server if self.is_open else max(1, of_server // 4)

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Settings from flags (without the program's name) and the environment.

        `--help` prints all of them and raises `SystemExit(0)`. Raises `SettingsError`.
        """
        fallbacks: dict[str, object] = {}
        # Where there is no default, one is needed only where none is given, and then the field raises this again.
        with contextlib.suppress(SettingsError):
            fallbacks["data_dir"] = default_data_dir(environ)
        flags = parse_flags(cls.model_fields, argv, fallbacks)
        variables = read_environment(cls.model_fields, environ)
        sources = {name: environment_name(name) for name in variables} | {name: flag_name(name) for name in flags}
        try:
            return cls.model_validate(fallbacks | variables | flags)
        except ValidationError as refusal:
            raise SettingsError(one_line(refusal, sources, _EXPECTED)) from refusal


_OF_SERVER = {"requests": "max_concurrent_requests"}
"""The server's bound by the tenant's, where they are not called alike."""

_EXPECTED = {
    "otel_endpoint": "expected http://HOST:PORT or https://HOST:PORT",
    "device": "expected auto, cpu or gpu:N, gpu:0 for example",
    "max_engines": "expected auto or a number from 2",
    "memory_limit": "expected auto or a number of bytes, 8GiB for example",
}
"""What a setting expects, where the reason would not tell."""


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
