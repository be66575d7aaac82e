"""Reports failures of commands: one message on stderr and an exit code."""

from __future__ import annotations

import sys

from gradrule.errors import GradruleError, UnknownRuleError

FAILED = 1
USAGE = 2
INTERRUPTED = 130


class CommandError(Exception):
    """Ends a command. The message gives the cause and the remedy; `code` is the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def missing_extra(what: str, extra: str) -> CommandError:
    """Returns the error for a missing optional dependency; `what` describes it."""
    return CommandError(f"{what}; install it with: pip install 'gradrule[{extra}]'")


def report(command: str, message: str) -> None:
    """Writes the message to stderr."""
    print(f"{command}: {message}", file=sys.stderr)


def describe(failure: GradruleError) -> str:
    """Formats an error: reason, message, all findings with their fields, and the time of a retry."""
    lines = [str(failure)]
    fields = [f"{detail.field}" for detail in failure.details if detail.field]
    if fields:
        lines.append(f"  at: {', '.join(dict.fromkeys(fields))}")
    if isinstance(failure, UnknownRuleError) and any(field.endswith(".rule") for field in fields):
        lines.append("  to use a formula instead of a rule's name, write expr:FORMULA")
    if failure.retry_delay is not None:
        lines.append(f"  retry after {failure.retry_delay:g} s")
    return "\n".join(lines)
