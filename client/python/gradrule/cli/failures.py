"""Reports the failures of commands: one message on stderr, as text or as JSON, and an exit code."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict

from gradrule.errors import GradruleError, InvalidParamError, UnknownRuleError

FOUND = 1
USAGE = 2
REFUSED = 3
UNREACHABLE = 4
FAILED = 5
INTERRUPTED = 130
EXIT_CODES = {
    0: "done",
    FOUND: "a check found something: explain, rules check, health",
    USAGE: "wrong usage: a flag, a value, or a file that is not there",
    REFUSED: "the request was refused; the reason says why",
    UNREACHABLE: "no server answered: it is not there, or the deadline passed",
    FAILED: "something failed on this machine: a package is missing, or a file cannot be written",
    INTERRUPTED: "interrupted by Ctrl-C",
}
"""Meanings of exit codes; `serve`, `token`, `registry` and `gateway` have those of the server."""
# What messages advise users of the Python client, and the flags that do the same.
_FLAGS = (
    (re.compile(r"params=\{'(\w+)': ([^}]+)\}"), r"--param \1=\2"),
    (re.compile(r"credentials=gradrule\.tls\('([^']+)'\)"), r"--tls-ca \1"),
    (re.compile(r"connect with credentials=gradrule\.tls\(…?\)"), "give --tls, or --tls-ca FILE"),
    (re.compile(r"connect without credentials"), "leave out the flags for TLS"),
    (re.compile(r"insecure_token=True"), "--insecure-token"),
    (re.compile(r"stop_gradients=\['([^']+)'\]"), r"--stop-gradient \1"),
    (re.compile(r"no_gradient='default', 'pass' or 'zero'"), "--no-gradient default, pass or zero"),
    (re.compile(r"replace=True"), "--replace"),
    (re.compile(r"connect to the address of another$"), "name the address of another: --target HOST:PORT"),
)
_NO_ANSWER = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
_REASONS = {USAGE: "USAGE", REFUSED: "REFUSED", UNREACHABLE: "UNAVAILABLE"}


class CommandError(Exception):
    """Ends a command. The message gives the cause and the remedy; `code` is the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class Reporter:
    """Writes the errors and notes of a command to stderr: as text, or with `--json` as one line of JSON each."""

    def __init__(self, command: str, *, as_json: bool) -> None:
        self._command, self._as_json = command, as_json

    def note(self, message: str) -> None:
        """Writes a note."""
        self._write(f"note: {message}", {"note": message})

    def error(self, failure: CommandError | GradruleError) -> int:
        """Writes an error; returns the exit code."""
        if isinstance(failure, CommandError):
            reason = _REASONS.get(failure.code, "FAILED")
            told: dict[str, object] = {"reason": reason, "message": str(failure), "exit_code": failure.code}
            self._write(str(failure), {"error": told})
            return failure.code
        code = UNREACHABLE if failure.reason in _NO_ANSWER else REFUSED
        if isinstance(failure, InvalidParamError) and not failure.request_id:
            # The client refused a flag or a file; servers add the id of the request.
            code = USAGE
        told = {
            "reason": failure.reason,
            "message": in_flags(failure.message),
            "details": [asdict(detail) | {"message": in_flags(detail.message)} for detail in failure.details],
            "retry_delay": failure.retry_delay,
            "request_id": failure.request_id,
            "exit_code": code,
        }
        self._write(describe(failure), {"error": told})
        return code

    def _write(self, text: str, fields: dict[str, object]) -> None:
        line = json.dumps(fields, ensure_ascii=False) if self._as_json else f"{self._command}: {text}"
        print(line, file=sys.stderr)


def missing_extra(what: str, extra: str) -> CommandError:
    """Returns the error for a missing optional dependency; `what` describes it."""
    return CommandError(f"{what}; install it with: pip install 'gradrule[{extra}]'")


def describe(failure: GradruleError) -> str:
    """Formats an error: reason, message, all findings with their fields, and the time of a retry."""
    lines = [in_flags(line) for line in str(failure).splitlines()]
    fields = [f"{detail.field}" for detail in failure.details if detail.field]
    if fields:
        lines.append(f"  at: {', '.join(dict.fromkeys(fields))}")
    if isinstance(failure, UnknownRuleError) and any(field.endswith(".rule") for field in fields):
        lines.append("  to use a formula instead of a rule's name, write expr:FORMULA")
    if failure.reason == "MISSING_FEED":
        lines.append("  to give a value, write --feed NAME=VALUE")
    if failure.retry_delay is not None:
        lines.append(f"  retry after {failure.retry_delay:g} s")
    return "\n".join(lines)


def in_flags(message: str) -> str:
    """Returns a message with flags of the command line instead of arguments of the Python client."""
    for argument, flag in _FLAGS:
        message = argument.sub(flag, message)
    return message
