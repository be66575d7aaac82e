"""Makes errors that show the expression with a caret under the wrong column."""

from __future__ import annotations

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

# Longer expressions are truncated around the column, so that the error stays small.
_MAX_SHOWN = 96
_MAX_NAME_SHOWN = 64


def with_caret(text: str, offset: int, message: str) -> str:
    """Returns the message, followed by a line with `text` and a line with a caret under the character at `offset`."""
    offset = max(0, min(offset, len(text)))
    first = max(0, offset - _MAX_SHOWN // 2)
    # Replace line breaks and other unprintable characters, which would shift the caret.
    shown = "".join(character if character.isprintable() else " " for character in text[first : first + _MAX_SHOWN])
    before, after = ("…" if first else ""), ("…" if first + _MAX_SHOWN < len(text) else "")
    caret = " " * (len(before) + offset - first) + "^"
    return f"{message} (column {offset + 1})\n    {before}{shown}{after}\n    {caret}"


def invalid_expression(text: str, offset: int, message: str) -> GradruleError:
    """Returns INVALID_EXPRESSION for a character of `text`."""
    return error(errors_pb2.ERROR_REASON_INVALID_EXPRESSION, with_caret(text, offset, message), field="expression")


def not_applicable(text: str, offset: int, message: str) -> GradruleError:
    """Returns RULE_NOT_APPLICABLE: the part at a character of `text` does not fit the op's element types."""
    return error(errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE, with_caret(text, offset, message), field="expression")


def quoted(name: str) -> str:
    """Returns a name from a caller in quotes, truncated if it is long."""
    return repr(name) if len(name) <= _MAX_NAME_SHOWN else f"{name[:_MAX_NAME_SHOWN]!r}…"
