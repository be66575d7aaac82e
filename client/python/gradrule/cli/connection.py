"""The flags that say which server is meant, and the client they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradrule import Client

TARGET_VARIABLE = "GRADRULE_TARGET"
TOKEN_VARIABLE = "GRADRULE_TOKEN"
DEFAULT_TARGET = "localhost:8470"
DEFAULT_TIMEOUT = 30.0


def default_target() -> str:
    """What `--target` is where it is not given."""
    return os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds `--target`, `--timeout` and `--token`."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=default_target(),
        help=f"server to ask [default: {DEFAULT_TARGET}] [{TARGET_VARIABLE}]",
    )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=DEFAULT_TIMEOUT,
        help=f"deadline of every call [default: {DEFAULT_TIMEOUT:g}]",
    )
    group.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"bearer token that is sent along [{TOKEN_VARIABLE}]",
    )


def finish(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """Adds `--json` and the server's flags to a command that shows something, and what runs it."""
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    add_connection(parser)
    parser.set_defaults(run=run)


def connect(options: argparse.Namespace) -> Client:
    """A client for the server that the flags name; a context manager."""
    import gradrule as gr

    return gr.connect(options.target, token=options.token, timeout=options.timeout)


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def forget_client_variables() -> None:
    """Takes the client's own variables out of the environment: a server refuses `GRADRULE_*` that it does not know."""
    for variable in (TARGET_VARIABLE, TOKEN_VARIABLE):
        os.environ.pop(variable, None)
