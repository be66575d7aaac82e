"""Reads settings from the environment, a TOML file and presets, and describes refused values in one line."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from gradrule_server.errors import did_you_mean

if TYPE_CHECKING:
    from gradrule_server.settings.model import Settings

SOURCE_NAMES = ("for", "config")
"""Names that select a preset and a configuration file. They are flags and variables, but no fields of `Settings`."""

_PREFIX = "GRADRULE_"

# Variables of the client's commands: with them set, a server must still start.
_CLIENT_VARIABLES = frozenset(
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
    ignored = _CLIENT_VARIABLES.union(kubernetes_service_variables(environ))
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
        SettingsError: If the file cannot be read, or if a key is not a setting or has a value of a wrong type.
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
        accepted = [str] if name == "for" else list(accepted_types(fields[name].annotation))
        if not any(_is_accepted(value, one) for one in accepted):
            expected = " or ".join(dict.fromkeys(_TOML_TYPES.get(one, f'"{one}"') for one in accepted))
            raise SettingsError(f"{path}: {key} must be {expected}, not {_describe(value)}")
        values[name] = value
    return values


def accepted_types(annotation: object) -> Iterator[Any]:
    """Yields the types that a field accepts; for a `Literal`, its values."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from accepted_types(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from accepted_types(member)
    elif origin is Literal:
        yield from get_args(annotation)
    elif annotation is not types.NoneType:
        yield annotation


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


_TOML_TYPES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    ByteSize: 'an integer (bytes) or a string such as "64MiB"',
    str: "a string",
    Path: "a string",
}


def _is_accepted(value: object, accepted: Any) -> bool:
    """Returns whether a value of a TOML file has a type that a field accepts."""
    if isinstance(accepted, str):
        return value == accepted
    # In Python, but not in TOML, a boolean is an integer.
    if isinstance(value, bool) or accepted is bool:
        return isinstance(value, bool) and accepted is bool
    if accepted in (int, float):
        return isinstance(value, int | accepted)
    if accepted is ByteSize:
        return isinstance(value, int | str)
    return isinstance(value, str)


def _describe(value: object) -> str:
    """Returns a value of a TOML file in words, for error messages."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the string {value!r}"
    if isinstance(value, int | float):
        return f"the number {value!r}"
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "a table"
    return "a date or time"


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
            "session_idle_s": 60.0,
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
