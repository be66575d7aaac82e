"""Implements `gradrule serve`, `token` and `registry`: passes their arguments to the server's own parser."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from gradrule.cli.failures import missing_extra

COMMANDS = {
    "serve": "start a server; `gradrule serve --help` lists its settings",
    "token": "create, show and revoke bearer tokens of a server",
    "registry": "back up, restore and check the registry of a server",
}
"""Help texts by command."""

_SERVER_PARTS = {
    "cryptography",
    "gradrule_server",
    "grpc_health",
    "grpc_reflection",
    "jwt",
    "prometheus_client",
    "pydantic",
    "sqlalchemy",
}


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a command of the server; returns its exit code."""
    if command == "serve" and importlib.util.find_spec("tensorflow") is None and not {"-h", "--help"} & set(arguments):
        # Check here: the front end does not need TensorFlow, but its engines would fail one after the other.
        raise missing_extra("the server is not complete (tensorflow is missing)", "server")
    try:
        from gradrule_server.__main__ import main as server_main

        return server_main([command, *arguments])
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] not in _SERVER_PARTS:
            raise
        raise missing_extra(f"the server is not complete ({cause.name} is missing)", "server") from None
    except SystemExit as end:
        # argparse raises SystemExit for `--help`.
        return end.code if isinstance(end.code, int) else 0
