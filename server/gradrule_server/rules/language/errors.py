"""Errors of the language: they show the expression and point at the column."""

from __future__ import annotations

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

# Longer expressions are cut around the column, so that the error stays small.
_SHOWN = 96
_SHOWN_NAME = 64


def pointed(text: str, offset: int, message: str) -> str:
    """The message, then `text` on a line of its own, then a caret under the character at `offset`."""
    offset = max(0, min(offset, len(text)))
    first = max(0, offset - _SHOWN // 2)
    # A line break or another odd character would push the caret aside.
    shown = "".join(character if character.isprintable() else " " for character in text[first : first + _SHOWN])
    before, after = ("…" if first else ""), ("…" if first + _SHOWN < len(text) else "")
    caret = " " * (len(before) + offset - first) + "^"
    return f"{message} (column {offset + 1})\n    {before}{shown}{after}\n    {caret}"


def invalid_expression(text: str, offset: int, message: str) -> GradruleError:
    """INVALID_EXPRESSION at a character of `text`."""
    return error(errors_pb2.ERROR_REASON_INVALID_EXPRESSION, pointed(text, offset, message), field="expression")


def not_applicable(text: str, offset: int, message: str) -> GradruleError:
    """RULE_NOT_APPLICABLE: what stands at a character of `text` does not fit the op's element types."""
    return error(errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE, pointed(text, offset, message), field="expression")


def quoted(name: str) -> str:
    """A name of the caller's in quotes, cut where it is long."""
    return repr(name) if len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]!r}…"
