"""How settings are read: flags and `GRADRULE_*`, by the fields of a model; and what is said of what is refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from gradrule_server.errors import did_you_mean

_PREFIX = "GRADRULE_"

# Variables of the command line's other half: whoever has set them for clients must be able to start a server too.
_OF_CLIENTS = frozenset(
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


# What Kubernetes tells a container of the Services beside it, those named gradrule or gradrule-… included.
_SERVICE_NAMES = re.compile(
    r"GRADRULE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_SERVICE_PORT = re.compile(r"GRADRULE_(\w+_)?PORT")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


class SettingsError(Exception):
    """A setting that is unknown or has a value it cannot take; one line that says which and what would be right."""


def flag_name(name: str) -> str:
    """`data_dir` → `--data-dir`."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """`data_dir` → `GRADRULE_DATA_DIR`."""
    return _PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parse_flags(
    fields: Mapping[str, FieldInfo], argv: Sequence[str], fallbacks: Mapping[str, object]
) -> dict[str, Any]:
    """What flags say, by the setting's name. fallbacks: defaults that fields do not tell. `SettingsError`."""
    parser = _Parser(
        prog="gradrule serve",
        description="Starts a server. A flag wins over its environment variable, which wins over the default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, info in fields.items():
        default = fallbacks.get(name, info.default)
        shown = "" if default in (None, "") else f" [default: {_shown(default)}]"
        text = f"{info.description}{shown} [{environment_name(name)}]".replace("%", "%%")
        if info.annotation is bool:
            parser.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag_name(name), dest=name, metavar=_metavar(info), help=text)
    values, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise SettingsError(f"{flag!r} belongs to no flag. --help lists all.")
        near = did_you_mean(flag, map(flag_name, fields))
        raise SettingsError(f"There is no flag {flag!r}.{near} --help lists all.")
    return vars(values)


def service_links(environ: Mapping[str, str]) -> list[str]:
    """Variables that Kubernetes sets for Services, and that only look like settings: they are ignored."""
    return sorted(
        variable
        for variable, value in environ.items()
        if _SERVICE_NAMES.fullmatch(variable) or (_SERVICE_PORT.fullmatch(variable) and _SERVICE_ADDRESS.match(value))
    )


def read_environment(fields: Mapping[str, FieldInfo], environ: Mapping[str, str]) -> dict[str, str]:
    """What the environment says, by the setting's name. `SettingsError`."""
    names = {environment_name(name): name for name in fields}
    ignored = _OF_CLIENTS.union(service_links(environ))
    values = {}
    for variable, value in sorted(environ.items()):
        if variable.startswith(_PREFIX) and variable not in ignored:
            if variable not in names:
                raise SettingsError(
                    f"The environment variable {variable} is no setting.{did_you_mean(variable, names)}"
                    " --help lists all."
                )
            values[names[variable]] = value
    return values


def one_line(refusal: ValidationError, sources: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Why settings are refused. sources: flag or variable by which each came; expected: in the place of its reason."""
    parts: dict[str, str] = {}
    for found in refusal.errors():
        reason = found["msg"].removeprefix("Value error, ")
        name = str(found["loc"][0]) if found["loc"] else ""
        reason = expected.get(name, reason)
        # Of a setting that may be one thing or another, all that it is not are told as one.
        parts[name] = f"{sources.get(name, name)} {found['input']!r}: {reason}" if name else reason
    return "; ".join(parts.values())


def _metavar(info: FieldInfo) -> str:
    by_type: dict[object, str] = {
        int: "N",
        int | None: "N",
        float: "X",
        ByteSize: "BYTES",
        ByteSize | None: "BYTES",
        Path: "DIR",
        Path | None: "FILE",
    }
    return by_type.get(info.annotation, "TEXT")


def _shown(default: object) -> str:
    if isinstance(default, ByteSize):
        return f"{default // 1024**2}MiB"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)
