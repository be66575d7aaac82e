"""Settings of `gradrule serve`: flag > environment `GRADRULE_*` > default; unknown ones are refused.

The model's fields are the only list: flags, environment names and help are made from it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from gradrule_server.errors import did_you_mean

ENVIRONMENT_PREFIX = "GRADRULE_"

# Variables of the command line's other half: whoever has set them for clients must be able to start a server too.
_OF_CLIENTS = frozenset({"GRADRULE_TARGET", "GRADRULE_TOKEN"})
_MEBIBYTE = 1024 * 1024


class SettingsError(Exception):
    """A setting that is unknown or has a value it cannot take; one line that says which and what would be right."""


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """`gradrule` under `$XDG_DATA_HOME` (ignored where relative, as its specification asks) or `~/.local/share`."""
    xdg = Path(environ.get("XDG_DATA_HOME", ""))
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return (xdg if xdg.is_absolute() else home / ".local" / "share") / "gradrule"


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
    engine_threads: PositiveInt = Field(8, description="Requests that an engine runs at a time.")
    program_cache: PositiveInt = Field(256, description="Programs that an engine keeps loaded.")
    program_cache_bytes: ByteSize = Field(
        ByteSize(2048 * _MEBIBYTE),
        gt=0,
        description="Roughly the bytes of the programs that an engine keeps loaded; the front end keeps as many.",
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
    memory_limit: ByteSize = Field(ByteSize(0), ge=0, description="Bytes that an engine may take; 0: any.")
    drain_s: float = Field(20.0, ge=0, description="Seconds that running requests get after SIGTERM.")
    max_nodes: PositiveInt = Field(200_000, description="Nodes of a graph, its functions included.")
    max_inlined_nodes: PositiveInt = Field(1_000_000, description="Nodes of a graph after its calls are inlined.")
    trust: Literal["sandbox", "full"] = Field(
        "sandbox", description="sandbox: only ops that were reviewed run; full: every caller may run all ops."
    )
    max_node_outputs: PositiveInt = Field(1024, description="Outputs that a number in an attribute may ask for.")
    max_constant_bytes: ByteSize = Field(
        ByteSize(256 * _MEBIBYTE), gt=0, description="Bytes of a constant in a graph, as its shape says."
    )
    max_unpacking: PositiveInt = Field(
        10, description="Memory that a message may take once it is read: 64 MiB and so many times its size."
    )
    max_call_depth: PositiveInt = Field(32, description="Depth of calls, loops and branches within each other.")
    max_rules: PositiveInt = Field(10_000, description="USER rules that the registry keeps.")
    max_programs: PositiveInt = Field(10_000, description="Programs that the registry keeps.")
    max_blob_bytes: ByteSize = Field(
        ByteSize(8192 * _MEBIBYTE), gt=0, description="Bytes of blobs (uploaded graphs and weights) that are kept."
    )
    max_graph_bytes: ByteSize = Field(
        ByteSize(1024 * _MEBIBYTE), gt=0, lt=2**31, description="Bytes of a graph that was uploaded as a blob."
    )
    reflection: bool = Field(True, description="Whether the server tells its services by gRPC reflection.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")

    @model_validator(mode="after")
    def _deadlines_in_order(self) -> Self:
        if self.default_deadline_s > self.max_deadline_s:
            raise ValueError(
                f"default_deadline_s ({self.default_deadline_s:g}) is more than "
                f"max_deadline_s ({self.max_deadline_s:g})"
            )
        return self

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Settings from flags (without the program's name) and the environment.

        `--help` prints all of them and raises `SystemExit(0)`. Raises `SettingsError`.
        """
        fallback_data_dir = default_data_dir(environ)
        flags = _parse_flags(argv, fallback_data_dir)
        variables = _read_environment(environ)
        sources = {name: environment_name(name) for name in variables} | {name: flag_name(name) for name in flags}
        try:
            return cls.model_validate({"data_dir": fallback_data_dir} | variables | flags)
        except ValidationError as refusal:
            raise SettingsError(_one_line(refusal, sources)) from refusal


def flag_name(name: str) -> str:
    """`data_dir` → `--data-dir`."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """`data_dir` → `GRADRULE_DATA_DIR`."""
    return ENVIRONMENT_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parse_flags(argv: Sequence[str], data_dir: Path) -> dict[str, Any]:
    parser = _Parser(
        prog="gradrule serve",
        description="Starts a server. A flag wins over its environment variable, which wins over the default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, info in Settings.model_fields.items():
        default = data_dir if name == "data_dir" else info.default
        text = f"{info.description} [default: {_shown(default)}] [{environment_name(name)}]".replace("%", "%%")
        if info.annotation is bool:
            parser.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag_name(name), dest=name, metavar=_metavar(info), help=text)
    values, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise SettingsError(f"{flag!r} belongs to no flag. --help lists all.")
        near = did_you_mean(flag, [flag_name(name) for name in Settings.model_fields])
        raise SettingsError(f"There is no flag {flag!r}.{near} --help lists all.")
    return vars(values)


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    names = {environment_name(name): name for name in Settings.model_fields}
    values = {}
    for variable, value in sorted(environ.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in _OF_CLIENTS:
            if variable not in names:
                raise SettingsError(
                    f"The environment variable {variable} is no setting.{did_you_mean(variable, names)}"
                    " --help lists all."
                )
            values[names[variable]] = value
    return values


def _one_line(refusal: ValidationError, sources: Mapping[str, str]) -> str:
    parts = []
    for found in refusal.errors():
        reason = found["msg"].removeprefix("Value error, ")
        name = str(found["loc"][0]) if found["loc"] else ""
        if name == "device":
            reason = "expected auto, cpu or gpu:N, gpu:0 for example"
        parts.append(f"{sources.get(name, name)} {found['input']!r}: {reason}" if name else reason)
    return "; ".join(parts)


def _metavar(info: FieldInfo) -> str:
    by_type: dict[object, str] = {int: "N", float: "X", ByteSize: "BYTES", Path: "DIR"}
    return by_type.get(info.annotation, "TEXT")


def _shown(default: object) -> str:
    if isinstance(default, ByteSize):
        return f"{default // _MEBIBYTE}MiB"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)
