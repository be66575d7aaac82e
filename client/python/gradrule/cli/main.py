"""Runs the commands of `gradrule`, and reports failures as one message and an exit code.

Exit codes: 0 success, 1 failure or rejection by the server, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gradrule import __version__
from gradrule._builder.names import did_you_mean
from gradrule.cli import compare, evaluate, explain, gateway, programs, serve, status
from gradrule.cli.demo import command as demo
from gradrule.cli.output import FAILED, INTERRUPTED, USAGE, CommandError, describe, report
from gradrule.cli.rules import checking, drawing, registry
from gradrule.errors import GradruleError, GradruleWarning

_WRONG_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_OTHER_NAMES_OF_TARGET = frozenset({"--server", "--host", "--port", "--address", "--url"})
_WRONG_FLAG = re.compile(r"unrecognized arguments: (--[\w-]+)")


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
    parser = _Parser(
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
    for command in (programs, evaluate, explain, compare, gateway, demo):
        command.add(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in two lines, with a suggestion, instead of the whole usage."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; unknown ones are errors of the command, which knows its flags."""
        words = sys.argv[1:] if args is None else list(args)
        options, unknown = self.parse_known_args(words, namespace)
        if unknown:
            _command_of(self, words).error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def error(self, message: str) -> NoReturn:
        hint = self._hint(message)
        self.exit(USAGE, f"{self.prog}: {message}{hint and f'.{hint}'}\n{self.prog} --help shows the usage\n")

    def _hint(self, message: str) -> str:
        wrong = _WRONG_CHOICE.search(message)
        if wrong is not None:
            return did_you_mean(wrong[1], re.findall(r"'([^']*)'", wrong[2]))
        wrong = _WRONG_FLAG.match(message)
        if wrong is None:
            return ""
        flags = self._option_string_actions
        if wrong[1] in _OTHER_NAMES_OF_TARGET and "--target" in flags:
            return " The address of the server is --target HOST:PORT"
        return did_you_mean(wrong[1], flags)


def _command_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of the command that words choose."""
    for word in words:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
                break
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


def _show_warning(command: str, message: Warning | str, *_: Any) -> None:
    """Prints a warning without the line of code that caused it, which is gradrule's own."""
    report(command, f"note: {message}")


def _guarded(command: str, run: Callable[[], int]) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", GradruleWarning)
            warnings.showwarning = functools.partial(_show_warning, command)
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
