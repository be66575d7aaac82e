"""Runs the server's commands: `serve`, `token` and `registry`; `gradrule serve` and the others call it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 failed, 2 wrong settings or usage, 3 the server failed while running."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments[:1]:
        case ["serve"]:
            return _serve(arguments[1:])
        case ["token"]:
            from gradrule_server.commands import token

            return token.run(arguments[1:])
        case ["registry"]:
            from gradrule_server.commands import registry

            return registry.run(arguments[1:])
    print("usage: python -m gradrule_server serve|token|registry [--help]", file=sys.stderr)
    return 2


def _serve(arguments: Sequence[str]) -> int:
    """Runs the server and returns its exit code: 0 after a drain."""
    # gRPC's C core writes to stderr, including text from clients, which could imitate lines of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # By default gRPC starts threads in a forked process before it becomes another program, and may wait there for ever;
    # uvloop waits for the process meanwhile.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    import uvloop

    from gradrule_server.settings import Settings, SettingsError, kubernetes_service_variables

    try:
        settings = Settings.load(arguments, os.environ)
    except SettingsError as wrong:
        print(f"gradrule serve: {wrong}", file=sys.stderr)
        return 2

    from gradrule_server.app import EXIT_FAILED, serve
    from gradrule_server.errors import CannotStartError, GradruleError
    from gradrule_server.front.server import AcceptLoopEnded
    from gradrule_server.operations import logs

    logs.configure(settings.log_level, settings.log_format)
    ignored = kubernetes_service_variables(os.environ)
    if ignored:
        logging.getLogger(__name__).warning(
            "ignored variables that Kubernetes sets for Services: %s; enableServiceLinks: false prevents them",
            ", ".join(ignored),
        )
    try:
        # uvloop needs 20 % less processor time for a small call than asyncio's own loop.
        with logs.standard_error_as_lines(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    # GradruleError: the registry's database went away while the server read it.
    except (CannotStartError, GradruleError, OSError) as refusal:
        print(f"gradrule serve: {refusal}", file=sys.stderr)
        return 1
    except AcceptLoopEnded:
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
