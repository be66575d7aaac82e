"""Runs the commands of `gradrule`, and reports failures as one message and an exit code.

Exit codes: 0 success, 1 failure or rejection by the server, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gradrule import __version__
from gradrule.cli import compare, evaluate, explain, programs, serve, status
from gradrule.cli.demo import command as demo
from gradrule.cli.output import FAILED, INTERRUPTED, CommandError, describe, report
from gradrule.cli.rules import checking, drawing, registry
from gradrule.errors import GradruleError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _with_intervals(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in serve.COMMANDS:
        # The server parses its own flags, which its settings define.
        return _guarded(f"gradrule {arguments[0]}", lambda: serve.run(arguments[0], arguments[1:]))
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 0
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except GradruleError as refusal:
        report("gradrule", describe(refusal))
        return FAILED
    return _guarded(f"gradrule {options.command}", lambda: int(options.run(options)))


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. Each command sets `run`, a function from options to an exit code."""
    parser = argparse.ArgumentParser(
        prog="gradrule",
        description="Computes gradients with your own rules on a server.",
        epilog="`gradrule COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"gradrule {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in serve.COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    status.add_health(commands)
    status.add_status(commands)
    _add_rules(commands)
    for command in (programs, evaluate, explain, compare, demo):
        command.add(commands)
    return parser


def _add_rules(commands: Any) -> None:
    """Adds the commands `rules …`."""
    verbs = commands.add_parser(
        "rules", help="list, show, create, delete, try, draw and check rules; list presets"
    ).add_subparsers(dest="verb", metavar="VERB", required=True)
    for group in (registry, drawing, checking):
        group.add(verbs)


def _with_intervals(arguments: Sequence[str]) -> list[str]:
    """Joins `--range -3:3` to `--range=-3:3`, because argparse parses `-3:3` as a flag."""
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] == "--range":
            joined[-1] = f"--range={word}"
        else:
            joined.append(word)
    return joined


def _guarded(command: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except CommandError as failure:
        report(command, str(failure))
        return failure.code
    except GradruleError as refusal:
        report(command, describe(refusal))
    except BrokenPipeError:
        # The reader closed the pipe (`| head`), so the flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as failure:
        report(command, str(failure))
    except KeyboardInterrupt:
        return INTERRUPTED
    return FAILED
