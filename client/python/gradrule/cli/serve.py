"""`gradrule serve`, `gradrule token`, `gradrule registry`: hand their words to the server, which alone lists them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from gradrule.cli.failures import missing_extra

COMMANDS = {
    "serve": "start a server; `gradrule serve --help` lists its settings",
    "token": "make, show and take back bearer tokens of a server",
    "registry": "copy, bring back and check what a server keeps",
}
"""What each is for."""

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
    """Runs a command of the server's; its exit code."""
    if command == "serve" and importlib.util.find_spec("tensorflow") is None and not {"-h", "--help"} & set(arguments):
        # The server itself does without; its engines would die one after the other.
        raise missing_extra("the server is not complete (tensorflow is missing)", "server")
    try:
        from gradrule_server.__main__ import main as server_main

        return server_main([command, *arguments])
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] not in _SERVER_PARTS:
            raise
        raise missing_extra(f"the server is not complete ({cause.name} is missing)", "server") from None
    except SystemExit as end:
        # `--help` ends so.
        return end.code if isinstance(end.code, int) else 0
