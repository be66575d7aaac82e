"""Implements `gradrule completion`: prints a script that completes commands, flags and files in a shell."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

from gradrule.cli.examples import leaves
from gradrule.cli.failures import missing_extra

SHELLS = ("bash", "zsh", "fish")


def add(commands: Any, build_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds the command `completion` to the parser. `build_parser`: returns the parser of all commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a script that completes commands and flags in bash, zsh or fish",
        description="Prints a script for a shell, which completes commands, flags and names of files.",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=lambda options: run(options.shell, build_parser()))


def run(shell: str, parser: argparse.ArgumentParser) -> int:
    """Prints the script."""
    if importlib.util.find_spec("shtab") is None:
        raise missing_extra("completion is not installed (shtab is missing)", "cli")
    import shtab

    for _, below in leaves(parser):
        for action in below._actions:
            if _is_file(action):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))
    return 0


def _is_file(action: argparse.Action) -> bool:
    words = action.metavar if isinstance(action.metavar, str) else ""
    return any(word in words for word in ("GRAPH", "FILE", "DIR"))
