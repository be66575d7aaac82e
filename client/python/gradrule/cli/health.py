"""Implements `gradrule health`: checks whether a server has a ready engine."""

from __future__ import annotations

import argparse
from typing import Any

from gradrule.cli.connection import DEFAULT_TARGET, TARGET_VARIABLE, add_tls, credentials, default_target, seconds
from gradrule.cli.failures import FAILED, CommandError

_SERVING = 1
_STATUS_NAMES = {0: "UNKNOWN", _SERVING: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_TIMEOUT = 5.0


def add(commands: Any) -> None:
    """Adds the command `health` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "health", help="check whether a server is ready (exit code 0) or not (1)"
    )
    parser.add_argument(
        "target",
        metavar="HOST:PORT",
        nargs="?",
        default=default_target(),
        help=f"address of the server [default: {DEFAULT_TARGET}] [{TARGET_VARIABLE}]",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, default=_TIMEOUT, help=f"deadline [default: {_TIMEOUT:g}]"
    )
    add_tls(parser.add_argument_group("server"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the status of `gradrule.v1.GradientService` from `grpc.health.v1`; needs only grpc."""
    import grpc

    from gradrule._rpc import channels

    address, secured = channels.address(options.target), credentials(options)
    with grpc.insecure_channel(address) if secured is None else grpc.secure_channel(address, secured) as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(channels.HEALTH_METHOD)
        try:
            answer = check(channels.HEALTH_REQUEST, timeout=options.timeout)
        except grpc.RpcError as cause:
            raise CommandError(f"{options.target}: {cause.code().name}: {cause.details()}") from None
    # The answer is one enum in field 1; proto3 omits a zero.
    number = answer[1] if len(answer) > 1 else 0
    print(_STATUS_NAMES.get(number, str(number)))
    return 0 if number == _SERVING else FAILED
