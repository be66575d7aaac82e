"""Reads settings from the environment, a TOML file and presets, and describes refused values in one line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from gradrule_server.errors import did_you_mean

if TYPE_CHECKING:
    from gradrule_server.settings.model import Settings

SOURCE_NAMES = ("for", "config")
"""Names that select a preset and a configuration file. They are flags and variables, but no fields of `Settings`."""

_PREFIX = "GRADRULE_"

CLIENT_VARIABLES = frozenset(
    {
        "GRADRULE_TARGET",
        "GRADRULE_TOKEN",
        "GRADRULE_TLS",
        "GRADRULE_TLS_CA",
        "GRADRULE_CLIENT_CERT",
        "GRADRULE_CLIENT_KEY",
        "GRADRULE_INSECURE_TOKEN",
    }
)
"""Variables of the client's commands: with them set, a server must still start."""

# Kubernetes sets these variables in a container for each Service; Services may be named gradrule or gradrule-….
_SERVICE_NAMES = re.compile(
    r"GRADRULE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_SERVICE_PORT = re.compile(r"GRADRULE_(\w+_)?PORT")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


class SettingsError(Exception):
    """A setting that is unknown or has a wrong value. The message is one line: which setting, and what is right."""


def flag_name(name: str) -> str:
    """Returns the flag of a setting: `data_dir` → `--data-dir`."""
    return "--" + file_key(name)


def environment_name(name: str) -> str:
    """Returns the environment variable of a setting: `data_dir` → `GRADRULE_DATA_DIR`."""
    return _PREFIX + name.upper()


def file_key(name: str) -> str:
    """Returns the key of a setting in a configuration file: `data_dir` → `data-dir`."""
    return name.replace("_", "-")


def kubernetes_service_variables(environ: Mapping[str, str]) -> list[str]:
    """Returns the variables that Kubernetes sets for Services. They only look like settings and are ignored."""
    return sorted(
        variable
        for variable, value in environ.items()
        if _SERVICE_NAMES.fullmatch(variable) or (_SERVICE_PORT.fullmatch(variable) and _SERVICE_ADDRESS.match(value))
    )


def read_environment(fields: Mapping[str, FieldInfo], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of `GRADRULE_*` variables by setting.

    Raises:
        SettingsError: If a variable is not a setting.
    """
    names = {environment_name(name): name for name in (*SOURCE_NAMES, *fields)}
    ignored = CLIENT_VARIABLES.union(kubernetes_service_variables(environ))
    values = {}
    for variable, value in sorted(environ.items()):
        if variable.startswith(_PREFIX) and variable not in ignored:
            if variable not in names:
                upper = variable.upper()
                near = f" Did you mean {upper!r}?" if upper in names else did_you_mean(variable, names)
                raise SettingsError(
                    f"The environment variable {variable} is not a setting.{near} --help lists all settings."
                )
            values[names[variable]] = value
    return values


def read_file(fields: Mapping[str, FieldInfo], path: str) -> dict[str, Any]:
    """Returns the values in a TOML file by setting.

    Raises:
        SettingsError: If the file cannot be read, or if a key is not a setting.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        raise SettingsError(f"--config {path}: the file cannot be read: {failure.strerror or failure}") from None
    except ValueError as failure:
        raise SettingsError(f"{path} is not valid TOML: {failure}") from None
    names = {file_key(name): name for name in ("for", *fields)}
    values = {}
    for key, value in content.items():
        if key not in names:
            if isinstance(value, dict):
                raise SettingsError(f"{path}: [{key}] is a table; write all settings at the top level, without tables")
            raise SettingsError(f"{path}: {key} is not a setting.{did_you_mean(key, names)} --help lists all settings.")
        name = names[key]
        # pydantic would read a boolean as a number.
        if isinstance(value, bool) and (name == "for" or fields[name].annotation is not bool):
            raise SettingsError(f"{path}: {key} is no switch, so it cannot be {str(value).lower()}")
        values[name] = value
    return values


def one_line(refusal: ValidationError, origins: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Returns why settings are refused.

    Args:
        refusal: The error of pydantic.
        origins: The flag, variable or key that each setting came from.
        expected: What a setting expects, for settings whose reason in `refusal` does not help.
    """
    parts: dict[str, str] = {}
    for found in refusal.errors():
        reason = found["msg"].removeprefix("Value error, ")
        name = str(found["loc"][0]) if found["loc"] else ""
        reason = expected.get(name, reason)
        # pydantic reports a union once for each member; keep one line for each setting.
        parts[name] = f"{origins.get(name, flag_name(name))} {found['input']!r}: {reason}" if name else reason
    return "; ".join(parts.values())


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for one purpose. Flags, variables and the configuration file override `values`.

    Attributes:
        description: What it is for, for the help text.
        values: The settings that it changes.
        find_contradiction: Returns why settings contradict the purpose, or "". Gets the settings and their origins.
    """

    description: str
    values: Mapping[str, Any]
    find_contradiction: Callable[[Settings, Mapping[str, str]], str]


def _contradicts_development(settings: Settings, origins: Mapping[str, str]) -> str:
    if not settings.is_local:
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


PRESETS: dict[str, Preset] = {
    "development": Preset(
        "one person on this machine: no credentials, generous limits",
        {
            "default_deadline_s": 600.0,
            "max_deadline_s": 86_400.0,
            "drain_s": 2.0,
            "quarantine_s": 0.0,
            "handle_ttl_s": 3600.0,
            "session_idle_s": 0.0,
            "max_message_bytes": "1GiB",
            "max_nodes": 1_000_000,
            "max_inlined_nodes": 5_000_000,
            "max_inlined_bytes": "256MiB",
            "max_selections": 100_000_000,
            "log_format": "text",
        },
        _contradicts_development,
    ),
    "strangers": Preset(
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
            "session_idle_s": 60.0,
            "max_unauthenticated_connections": 32,
            "unauthenticated_idle_s": 20.0,
            "max_nodes": 50_000,
            "max_inlined_nodes": 250_000,
            "max_graph_bytes": "256MiB",
        },
        _contradicts_strangers,
    ),
}
"""The presets by the word after `--for`."""
