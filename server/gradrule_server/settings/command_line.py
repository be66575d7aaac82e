"""Parses the flags of `gradrule serve`, prints its help in groups, and formats settings as a configuration file."""

from __future__ import annotations

import argparse
import functools
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gradrule_server.errors import did_you_mean
from gradrule_server.registry.database_url import describe_url
from gradrule_server.settings.groups import SettingsGroup
from gradrule_server.settings.sources import (
    PRESETS,
    SettingsError,
    environment_name,
    file_key,
    flag_name,
)

_COMMON = ("host", "port", "data_dir", "device", "tls_cert", "tls_key", "tokens", "log_level")
"""The settings that `--help` shows first, after `--for` and `--config`."""

_METAVARS = {
    "host": "ADDRESS",
    "metrics_host": "ADDRESS",
    "device": "auto|cpu|gpu:N",
    "admin_tenants": "NAMES",
    "audit_log": "FILE|-",
    "otel_endpoint": "URL",
    "registry": "URL",
    "disabled_fast_paths": "NAMES|all",
}
"""Placeholders of values whose type does not describe them."""

_WITHOUT_SECRETS: Mapping[str, Callable[[Any], Any]] = {"registry": lambda url: url and describe_url(url)}
"""Functions that remove passwords from values before they are printed."""

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parse_flags(
    groups: Sequence[type[SettingsGroup]], argv: Sequence[str], defaults: Mapping[str, object]
) -> dict[str, Any]:
    """Returns the values of flags by setting, with `for`, `config` and `print_config`.

    Args:
        groups: The groups of settings.
        argv: The arguments after `gradrule serve`.
        defaults: Defaults that depend on the environment, for the help text.

    Raises:
        SettingsError: If a flag is unknown or lacks its value.
    """
    parser = _Parser(
        prog="gradrule serve",
        usage="gradrule serve [--for PRESET] [--config FILE] [FLAG ...]",
        description="Starts a server. A flag takes precedence over its environment variable, which takes precedence "
        "over the configuration file, the preset and the default, in this order. Sizes may have a unit: 64MiB.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=28),
    )
    fields = {name: info for group in groups for name, info in group.model_fields.items()}
    common = parser.add_argument_group("Common flags")
    purposes = "; ".join(f"{name}: {preset.description}" for name, preset in PRESETS.items())
    common.add_argument(
        "--for",
        metavar="{" + ",".join(PRESETS) + "}",
        help=f"Preset of settings for a purpose. {purposes}. [env: GRADRULE_FOR]",
    )
    common.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with settings, named like the flags without the dashes in front (max-rules = 100). "
        "[env: GRADRULE_CONFIG]",
    )
    for name in _COMMON:
        _add_flag(common, name, fields[name], defaults)
    for group in groups:
        section = parser.add_argument_group(group.title, group.note or None)
        for name, info in group.model_fields.items():
            if name not in _COMMON:
                _add_flag(section, name, info, defaults)
    other = parser.add_argument_group("Other")
    other.add_argument(
        "--print-config",
        action="store_true",
        help="Print all settings as a configuration file, each with its origin, and exit.",
    )
    other.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    values, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise SettingsError(f"{flag!r} belongs to no flag. --help lists all flags.")
        near = did_you_mean(flag, (*map(flag_name, fields), "--for", "--config", "--print-config"))
        raise SettingsError(f"There is no flag {flag!r}.{near} --help lists all flags.")
    return vars(values)


def format_config(
    groups: Sequence[type[SettingsGroup]], settings: BaseModel, origins: Mapping[str, str], preset: str
) -> str:
    """Returns settings as the text of a configuration file, with the origin of each value as a comment.

    Args:
        groups: The groups of settings.
        settings: The settings.
        origins: Where values came from, by setting; missing: the default.
        preset: Name of the preset; empty: none.
    """
    lines = [f"for = {json.dumps(preset)}", ""] if preset else []
    for group in groups:
        lines.append(f"# {group.title}")
        for name in group.model_fields:
            value = _WITHOUT_SECRETS.get(name, lambda given: given)(getattr(settings, name))
            if value is None:
                lines.append(f"# {file_key(name)} is not set")
            else:
                lines.append(f"{file_key(name)} = {_toml_value(value)}  # {origins.get(name, 'default')}")
        lines.append("")
    return "\n".join(lines)


def _accepted_types(annotation: object) -> Iterator[Any]:
    """Yields the types that a field accepts; for a `Literal`, its values."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _accepted_types(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _accepted_types(member)
    elif origin is Literal:
        yield from get_args(annotation)
    elif annotation is not types.NoneType:
        yield annotation


def _add_flag(section: argparse._ArgumentGroup, name: str, info: FieldInfo, defaults: Mapping[str, object]) -> None:
    default = defaults.get(name, info.default)
    shown = "" if default in (None, "", PydanticUndefined) else f" [default: {_shown(default)}]"
    text = f"{info.description}{shown} [env: {environment_name(name)}]".replace("%", "%%")
    if info.annotation is bool:
        section.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
    else:
        section.add_argument(flag_name(name), dest=name, metavar=_metavar(name, info), help=text)


def _metavar(name: str, info: FieldInfo) -> str:
    """Returns the placeholder of a flag's value: its choices, its unit, or its type."""
    if name in _METAVARS:
        return _METAVARS[name]
    accepted = list(_accepted_types(info.annotation))
    choices = [one for one in accepted if isinstance(one, str)]
    kinds = [one for one in accepted if not isinstance(one, str)]
    if not kinds:
        return "{" + ",".join(choices) + "}"
    if name.endswith("port"):
        kind = "PORT"
    elif name.endswith("_s"):
        kind = "SECONDS"
    elif name.endswith("_ms"):
        kind = "MILLISECONDS"
    else:
        kind = {int: "N", float: "NUMBER", ByteSize: "SIZE", Path: "DIR" if name.endswith("_dir") else "FILE"}.get(
            kinds[0], "TEXT"
        )
    return "|".join([*choices, kind])


def _shown(value: object) -> str:
    if isinstance(value, ByteSize):
        return _size(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size(value: int) -> str:
    """Returns a size in the largest unit that divides it: `8KiB`."""
    for unit, factor in _UNITS:
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def _toml_value(value: object) -> str:
    if isinstance(value, ByteSize):
        size = _size(value)
        return size if size.isdecimal() else f'"{size}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML string, as long as characters are not escaped as surrogates.
    return json.dumps(str(value), ensure_ascii=False)
