"""`python -m gradrule_server serve …`, and what `gradrule serve …` calls."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serves. Exit codes: 0 after a drain, 1 where the server cannot start, 2 for wrong settings."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] != "serve":
        print("usage: python -m gradrule_server serve [--help]", file=sys.stderr)
        return 2

    from gradrule_server.settings import Settings, SettingsError

    try:
        settings = Settings.load(arguments[1:], os.environ)
    except SettingsError as wrong:
        print(f"gradrule serve: {wrong}", file=sys.stderr)
        return 2

    from gradrule_server.app import serve
    from gradrule_server.link.engine import EngineRefused
    from gradrule_server.operations import logs
    from gradrule_server.operations.tracing import TracingRefused
    from gradrule_server.registry.store import StoreError

    logs.configure(settings.log_level, settings.log_format)
    try:
        asyncio.run(serve(settings))
    except (EngineRefused, StoreError, TracingRefused, OSError) as refusal:
        print(f"gradrule serve: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
