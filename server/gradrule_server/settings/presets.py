"""Defines the presets of `gradrule serve --for NAME`: defaults for a purpose, and what contradicts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradrule_server.errors import did_you_mean
from gradrule_server.settings.sources import SettingsError, flag_name

if TYPE_CHECKING:
    from gradrule_server.settings.model import Settings


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for one purpose. Flags, variables and the configuration file override `values`.

    Attributes:
        name: The word after `--for`.
        description: What it is for, for the help text.
        values: The settings that it changes.
        find_contradiction: Returns why settings contradict the purpose, or "". Gets the settings and their origins.
    """

    name: str
    description: str
    values: Mapping[str, Any]
    find_contradiction: Callable[[Settings, Mapping[str, str]], str]

    def check(self, settings: Settings, origins: Mapping[str, str]) -> None:
        """Checks that no setting contradicts the purpose.

        Raises:
            SettingsError: If one does.
        """
        reason = self.find_contradiction(settings, origins)
        if reason:
            raise SettingsError(f"--for {self.name}: {reason}")


def find_preset(name: object, origin: str) -> Preset | None:
    """Returns the preset with a name, or None if no preset is selected.

    Raises:
        SettingsError: If there is no such preset.
    """
    if name is None:
        return None
    if name not in PRESETS:
        raise SettingsError(f"{origin} {name!r}: expected {' or '.join(PRESETS)}.{did_you_mean(str(name), PRESETS)}")
    return PRESETS[str(name)]


def _contradicts_development(settings: Settings, origins: Mapping[str, str]) -> str:
    from gradrule_server.settings.model import is_loopback

    if not is_loopback(settings.host):
        return (
            "the server asks for no credentials, so it must listen on this machine only, but "
            f"{_origin('host', origins)} is {settings.host}. Remove it, or use --for strangers"
        )
    for name in ("tokens", "jwt_key", "jwt_jwks", "tls_client_ca"):
        if getattr(settings, name) is not None:
            return f"this preset uses no credentials, but {_origin(name, origins)} is set. Remove one of the two"
    return ""


def _contradicts_strangers(settings: Settings, origins: Mapping[str, str]) -> str:
    if settings.is_open:
        return (
            "callers need credentials. Set --tokens FILE (`gradrule token new --tenant NAME --file FILE` creates it), "
            "--jwt-key or --jwt-jwks, or --tls-client-ca"
        )
    for name, needed in (("sandbox", "on"), ("trust", "sandbox")):
        value = getattr(settings, name)
        if value != needed:
            return f"{flag_name(name)} must be {needed}, but {_origin(name, origins)} is {value}"
    if settings.memory_limit == 0:
        return f"{_origin('memory_limit', origins)} must not be 0: engines need a memory limit"
    return ""


def _origin(name: str, origins: Mapping[str, str]) -> str:
    return origins.get(name, flag_name(name))


_PRESETS = (
    Preset(
        "development",
        "one person on this machine: no credentials, generous limits",
        {
            "default_deadline_s": 600.0,
            "max_deadline_s": 86_400.0,
            "drain_s": 2.0,
            "quarantine_s": 0.0,
            "handle_ttl_s": 3600.0,
            "max_message_bytes": "1GiB",
            "max_nodes": 1_000_000,
            "max_inlined_nodes": 5_000_000,
            "max_inlined_bytes": "256MiB",
            "max_selections": 100_000_000,
            "log_format": "text",
        },
        _contradicts_development,
    ),
    Preset(
        "strangers",
        "callers whom the operator does not know: credentials required, sandbox on, strict limits",
        {
            "sandbox": "on",
            "trust": "sandbox",
            "reflection": False,
            "tenant_share": 0.1,
            "default_deadline_s": 10.0,
            "max_deadline_s": 60.0,
            "stall_s": 20.0,
            "quarantine_s": 600.0,
            "handle_ttl_s": 30.0,
            "max_unauthenticated_connections": 32,
            "unauthenticated_idle_s": 20.0,
            "max_nodes": 50_000,
            "max_inlined_nodes": 250_000,
            "max_graph_bytes": "256MiB",
        },
        _contradicts_strangers,
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}
"""The presets by name."""
