"""Loads and checks the settings of `gradrule serve`: flag > environment > file > preset > default."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import ValidationError, field_validator, model_validator

from gradrule.common.fast_paths import disabled_paths
from gradrule_server.errors import did_you_mean
from gradrule_server.limits import GRAPH_LIMIT_FLAGS, HELD_PER_BYTE, MEMORY_SHARES, TENANT_RESOURCES
from gradrule_server.link.operating_system import available_memory
from gradrule_server.registry.database_url import check_url
from gradrule_server.settings import groups, sources
from gradrule_server.settings.command_line import format_config, parse_flags
from gradrule_server.settings.sources import PRESETS, SettingsError, one_line

_MIN_ENGINE_MEMORY = 1 << 30

_RESOURCES = {resource.name: resource for resource in TENANT_RESOURCES}


class Settings(
    groups.Listening,
    groups.Security,
    groups.Requests,
    groups.Engines,
    groups.Storage,
    groups.ServerLimits,
    groups.GraphLimits,
    groups.Logging,
    groups.Development,
    groups.TenantLimits,
):
    """All settings of a server. Frozen."""

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Reads settings from flags (without the program's name), the environment, a file and a preset.

        Prints and raises `SystemExit(0)` for `--help` and `--print-config`.

        Raises:
            SettingsError: If a setting is unknown or has a wrong value.
        """
        defaults: dict[str, object] = {}
        # Without a home directory there is no default; the field raises the same error if no other source has a value.
        with contextlib.suppress(SettingsError):
            defaults["data_dir"] = groups.default_data_dir(environ)
        flags = parse_flags(GROUPS, argv, defaults)
        print_config = flags.pop("print_config", False)
        variables = sources.read_environment(cls.model_fields, environ)
        config_variable = variables.pop("config", None)
        config = flags.pop("config", config_variable)
        file = sources.read_file(cls.model_fields, config) if config is not None else {}
        values = defaults | file | variables | flags
        origins = (
            {name: f"{config}: {sources.file_key(name)}" for name in file}
            | {name: sources.environment_name(name) for name in variables}
            | {name: sources.flag_name(name) for name in flags}
        )
        purpose = values.pop("for", None)
        preset = None if purpose is None else PRESETS.get(str(purpose))
        if preset is not None:
            origins = dict.fromkeys(preset.values, f"--for {purpose}") | origins
            values = dict(preset.values) | values
        elif purpose is not None:
            near = did_you_mean(str(purpose), PRESETS)
            raise SettingsError(f"{origins['for']} {purpose!r}: expected {' or '.join(PRESETS)}.{near}")
        try:
            settings = cls.model_validate(values)
        except ValidationError as refusal:
            raise SettingsError(one_line(refusal, origins, _EXPECTED)) from refusal
        if preset is not None and (reason := preset.find_contradiction(settings, origins)):
            raise SettingsError(f"--for {purpose}: {reason}")
        if print_config:
            sys.stdout.write(format_config(GROUPS, settings, origins, str(purpose or "")))
            raise SystemExit(0)
        return settings

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = "; ".join(self._problems())
        if problems:
            raise ValueError(problems)
        return self

    def _problems(self) -> Iterator[str]:
        """Yields what is wrong with settings that are valid alone."""
        if self.default_deadline_s > self.max_deadline_s:
            yield (
                f"--default-deadline-s ({self.default_deadline_s:g}) is more than "
                f"--max-deadline-s ({self.max_deadline_s:g})"
            )
        if self.memory_limit != "auto" and 0 < self.memory_limit < _MIN_ENGINE_MEMORY:
            yield (
                f"--memory-limit ({self.memory_limit} bytes) is less than the {_MIN_ENGINE_MEMORY} bytes that an "
                "engine needs; 0 means no limit"
            )
        if self.max_engines != "auto" and self.max_engines <= self.engines:
            yield (
                f"--max-engines ({self.max_engines}) must be more than --engines ({self.engines}): a tenant with "
                "sessions has one more engine"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "--tls-cert and --tls-key go together: set both or none"
        if self.tls_client_ca is not None and self.tls_cert is None:
            yield "--tls-client-ca needs TLS: set --tls-cert and --tls-key"
        if self.takes_jwts and not (self.jwt_issuer and self.jwt_audience):
            yield (
                "--jwt-key and --jwt-jwks need --jwt-issuer and --jwt-audience: otherwise tokens of other issuers, or "
                "for other services, would be accepted"
            )
        if not self.takes_jwts and (self.jwt_issuer or self.jwt_audience):
            yield "--jwt-issuer and --jwt-audience have no effect without --jwt-key or --jwt-jwks"
        if self.takes_tokens and self.tls_cert is None and not self.is_local and not self.insecure_tokens:
            yield (
                f"tokens would be sent unencrypted to {self.host}: set --tls-cert and --tls-key, or --insecure-tokens "
                "if a proxy terminates TLS"
            )
        if self.http_port is not None and self.tls_client_ca is not None:
            yield (
                "--http-port has no client certificate to call the server with: run `gradrule gateway` with "
                "--client-cert and --client-key; all its callers then are the tenant of that certificate"
            )
        if self.http_port is None and self.http_allowed_hosts:
            yield "--http-allowed-hosts has no effect without --http-port"
        # Not a validator of the field, whose error would show the URL with its password.
        if self.registry:
            try:
                check_url(self.registry)
            except ValueError as problem:
                yield f"--registry: {problem}"

    @field_validator("disabled_fast_paths")
    @classmethod
    def _check_fast_paths(cls, text: str) -> str:
        disabled_paths(text)
        return text

    @property
    def takes_jwts(self) -> bool:
        """Whether JSON Web Tokens are credentials."""
        return self.jwt_key is not None or self.jwt_jwks is not None

    @property
    def takes_tokens(self) -> bool:
        """Whether each call needs a bearer token or a JSON Web Token."""
        return self.tokens is not None or self.takes_jwts

    @property
    def is_open(self) -> bool:
        """Whether callers need no credentials."""
        return not self.takes_tokens and self.tls_client_ca is None

    @property
    def is_local(self) -> bool:
        """Whether the server can be reached from its own machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def address(self, port: int) -> str:
        """Returns the address to listen on, with a port; IPv6 in brackets."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def server_limit(self, resource: str) -> int:
        """Returns the limit of a `TenantResource` over all tenants."""
        given = getattr(self, _RESOURCES[resource].max_setting)
        if given != "auto":
            return int(given)
        held = available_memory() * MEMORY_SHARES[resource]
        copies = HELD_PER_BYTE if resource == "bytes_in_flight" else 1
        return min(int(held / copies), _RESOURCES[resource].default)

    def unfinished_limits(self) -> tuple[int, int]:
        """Returns the most bytes of unfinished messages of a connection and of an address, of which one copy exists."""
        copies = HELD_PER_BYTE if getattr(self, _RESOURCES["bytes_in_flight"].max_setting) == "auto" else 1
        return self.tenant_limit("bytes_in_flight") * copies, self.server_limit("bytes_in_flight") * copies

    def tenant_limit(self, resource: str) -> int:
        """Returns the limit of a `TenantResource` for each tenant: its own setting, or a share of the server's."""
        own: int | None = getattr(self, _RESOURCES[resource].tenant_setting)
        if own is not None:
            return own
        limit = self.server_limit(resource)
        share = self.tenant_share_of(limit)
        # A tenant's messages may have the size that one may have, also in a small container.
        return max(share, min(limit, 2 * self.max_message_bytes)) if resource == "bytes_in_flight" else share

    def tenant_share_of(self, limit: int) -> int:
        """Returns each tenant's share of a limit of the server."""
        share = self.tenant_share
        if share == "auto":
            share = 1.0 if self.is_open else 0.25
        return max(1, int(limit * share))

    def graph_limits(self) -> dict[str, Any]:
        """Returns the limits on graphs by their names in `limits.Limits`."""
        return {name: int(getattr(self, f"max_{name}")) for name in GRAPH_LIMIT_FLAGS}


GROUPS: tuple[type[groups.SettingsGroup], ...] = Settings.__bases__
"""The groups of settings in the order of `--help`."""

_EXPECTED = {
    "otel_endpoint": "expected http://HOST:PORT or https://HOST:PORT",
    "device": "expected auto, cpu or gpu:N, gpu:0 for example",
    "max_engines": "expected auto or a number from 2",
    "memory_limit": "expected auto or a number of bytes, 8GiB for example",
    "max_bytes_in_flight": "expected auto or a number of bytes above 0, 2GiB for example",
    "max_shared_bytes": "expected auto or a number of bytes, 2GiB for example",
    "tenant_share": "expected auto or a number above 0 and at most 1, 0.25 for example",
}
"""What a setting expects, where pydantic's own reason does not help."""
