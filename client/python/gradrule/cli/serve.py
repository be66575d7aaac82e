"""`gradrule serve`: hands its words to the server, whose settings are the only list of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from gradrule.cli.connection import forget_client_variables
from gradrule.cli.failures import missing_extra

_SERVER_PARTS = {"gradrule_server", "grpc_health", "grpc_reflection", "pydantic", "sqlalchemy"}


def run(arguments: Sequence[str]) -> int:
    """Serves until told to stop; gives the server's exit code."""
    forget_client_variables()
    if importlib.util.find_spec("tensorflow") is None and not {"-h", "--help"} & set(arguments):
        # The server itself does without; its engines would die one after the other.
        raise missing_extra("the server is not complete (tensorflow is missing)", "server")
    try:
        from gradrule_server.__main__ import main as server_main

        return server_main(["serve", *arguments])
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] not in _SERVER_PARTS:
            raise
        raise missing_extra(f"the server is not complete ({cause.name} is missing)", "server") from None
    except SystemExit as end:
        # `--help` ends so.
        return end.code if isinstance(end.code, int) else 0
