"""Defines the flags that select a server, and connects to it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

    from gradrule import Client

TARGET_VARIABLE = "GRADRULE_TARGET"
TOKEN_VARIABLE = "GRADRULE_TOKEN"
INSECURE_TOKEN_VARIABLE = "GRADRULE_INSECURE_TOKEN"
TLS_VARIABLE = "GRADRULE_TLS"
TLS_CA_VARIABLE = "GRADRULE_TLS_CA"
CLIENT_CERT_VARIABLE = "GRADRULE_CLIENT_CERT"
CLIENT_KEY_VARIABLE = "GRADRULE_CLIENT_KEY"
DEFAULT_TARGET = "localhost:8470"
DEFAULT_TIMEOUT = 30.0


def default_target() -> str:
    """Returns the default of `--target`."""
    return os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET


def add_connection(parser: argparse.ArgumentParser, timeout: str) -> None:
    """Adds `--target`, `--timeout`, `--token` and the TLS flags. `timeout`: describes the default deadline."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=default_target(),
        help=f"address of the server [default: {DEFAULT_TARGET}] [{TARGET_VARIABLE}]",
    )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        help=f"deadline of every call [default: {timeout}]",
    )
    group.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE) or None,
        help=f"bearer token; other users of this machine can see flags, but not the variable [{TOKEN_VARIABLE}]",
    )
    group.add_argument(
        "--insecure-token",
        action="store_true",
        default=is_set(INSECURE_TOKEN_VARIABLE),
        help=f"allow sending the token unencrypted to another machine [{INSECURE_TOKEN_VARIABLE}=1]",
    )
    add_tls(group)


def add_tls(group: argparse._ActionsContainer) -> None:
    """Adds the TLS flags."""
    group.add_argument(
        "--tls",
        action="store_true",
        default=is_set(TLS_VARIABLE),
        help=f"connect by TLS, trusting the system's certificate authorities [{TLS_VARIABLE}=1]",
    )
    for flag, variable, help_text in (
        ("--tls-ca", TLS_CA_VARIABLE, "connect by TLS, trusting the authorities in this file"),
        ("--client-cert", CLIENT_CERT_VARIABLE, "the client's certificate, if the server requires one"),
        ("--client-key", CLIENT_KEY_VARIABLE, "private key of the client's certificate"),
    ):
        group.add_argument(
            flag, metavar="FILE", default=os.environ.get(variable) or None, help=f"{help_text} [{variable}]"
        )


def finish(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    timeout: str = f"{DEFAULT_TIMEOUT:g}, and more for compiling",
) -> None:
    """Adds `--json` and the server's flags to a command, and sets the function that runs it."""
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON instead of tables, and errors on stderr as JSON too"
    )
    add_connection(parser, timeout)
    parser.set_defaults(run=run)


def connect(options: argparse.Namespace) -> Client:
    """Opens a client for the server that the flags select; a context manager."""
    import gradrule as gr

    # A deadline that the caller gives is that of the whole call.
    limits = {} if options.timeout is None else {"timeout": options.timeout, "compile_timeout": 0.0}
    return gr.connect(
        options.target,
        credentials=credentials(options),
        token=options.token,
        insecure_token=options.insecure_token,
        **limits,
    )


def connect_to_one_server(options: argparse.Namespace) -> Client:
    """Opens a client like `connect`, but all its calls go to one server of the target, until that goes away."""
    from gradrule._rpc import channels
    from gradrule._rpc.sync_client.client import open_client

    return open_client(
        channels.ONE_SERVER_OPTIONS,
        options.target,
        credentials(options),
        token=options.token,
        timeout=DEFAULT_TIMEOUT if options.timeout is None else options.timeout,
        compile_timeout=0.0,
        insecure_token=options.insecure_token,
    )


def credentials(options: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """Returns the gRPC credentials that the flags give; None for an unencrypted connection."""
    from gradrule._rpc import channels

    if not (options.tls or options.tls_ca or options.client_cert or options.client_key):
        return None
    return channels.tls(options.tls_ca, certificate=options.client_cert, key=options.client_key)


def seconds(text: str) -> float:
    """Parses a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def is_set(variable: str) -> bool:
    """Returns whether an environment variable is set to a word that means yes."""
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on")
