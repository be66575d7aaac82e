"""Runs the commands of `gradrule`, and reports failures as one message and an exit code, see `EXIT_CODES`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from gradrule import __version__
from gradrule._builder.names import did_you_mean
from gradrule.cli import compare, completion, evaluate, examples, explain, gateway, programs, serve, status, sweep
from gradrule.cli.demo import command as demo
from gradrule.cli.failures import EXIT_CODES, FAILED, INTERRUPTED, USAGE, CommandError, Reporter, describe
from gradrule.cli.rules import checking, drawing, registry
from gradrule.errors import GradruleError, GradruleWarning

_NOT_STARTED = 1
_WRONG_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_OTHER_NAMES_OF_TARGET = frozenset({"--server", "--host", "--port", "--address", "--url"})
_WRONG_FLAG = re.compile(r"unrecognized arguments: (--[\w-]+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _with_intervals(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in serve.COMMANDS:
        # The server parses its own flags, which its settings define.
        reporter = Reporter(f"gradrule {arguments[0]}", as_json=False)
        return _server_code(_guarded(reporter, lambda: serve.run(arguments[0], arguments[1:])))
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 0
    as_json = "--json" in arguments
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except _UsageError as wrong:
        return Reporter(wrong.command, as_json=as_json).error(wrong)
    except GradruleError as refusal:
        return Reporter("gradrule", as_json=as_json).error(CommandError(describe(refusal), USAGE))
    command = " ".join(["gradrule", options.command, *([options.verb] if "verb" in options else [])])
    code = _guarded(Reporter(command, as_json=as_json), lambda: int(options.run(options)))
    return _server_code(code) if options.command == "gateway" else code


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. Each command sets `run`, a function from options to an exit code."""
    codes = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = _Parser(
        prog="gradrule",
        description="Computes gradients with your own rules on a server.",
        epilog=f"exit codes:\n{codes}\n\n`gradrule COMMAND --help` shows the options of a command, with examples.",
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"gradrule {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in serve.COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    status.add_health(commands)
    status.add_status(commands)
    _add_rules(commands)
    for command in (programs, evaluate, explain, compare, sweep, gateway, demo):
        command.add(commands)
    completion.add(commands, build_parser)
    examples.add(parser)
    return parser


class _Formatter(argparse.HelpFormatter):
    """Keeps the lines of examples and exit codes."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)


class _UsageError(CommandError):
    """Ends a command because of wrong usage. `command`: the words before its arguments."""

    def __init__(self, command: str, message: str) -> None:
        super().__init__(message, USAGE)
        self.command = command


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
        raise _UsageError(self.prog, f"{message}{hint and f'.{hint}'}\n{self.prog} --help shows the usage")

    def _hint(self, message: str) -> str:
        wrong = _WRONG_CHOICE.search(message)
        if wrong is not None:
            return did_you_mean(wrong[1], re.findall(r"'([^']*)'", wrong[2]))
        if message.endswith(("required: VERB", "required: COMMAND")):
            return f" It is one of {', '.join(next(_groups(self)).choices)}"
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
        for group in _groups(parser):
            parser = group.choices.get(word, parser)
    return parser


def _groups(parser: argparse.ArgumentParser) -> Iterator[argparse._SubParsersAction[Any]]:
    """Yields the groups of commands of a parser; it has one or none."""
    yield from (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


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


def _server_code(code: int) -> int:
    """Returns the exit code of commands that run a server, which supervisors know: 1 if it could not start."""
    return _NOT_STARTED if code == FAILED else code


def _guarded(reporter: Reporter, run: Callable[[], int]) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", GradruleWarning)
            # Without the line of code that caused it, which is gradrule's own.
            warnings.showwarning = lambda message, *_: reporter.note(str(message))
            return run()
    except (CommandError, GradruleError) as failure:
        return reporter.error(failure)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`), so the flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as failure:
        return reporter.error(CommandError(str(failure)))
    except KeyboardInterrupt:
        return INTERRUPTED
