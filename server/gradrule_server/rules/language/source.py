"""Parses text to Python's syntax tree, and makes errors that show the text with a caret under the wrong column."""

from __future__ import annotations

import ast
import threading
import unicodedata
from dataclasses import dataclass

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

# Python 3.11 counts the depth of a syntax tree once per process, for all threads. Without the lock, a thread that is
# interrupted by garbage collection makes the parser of other threads fail.
_PARSER_LOCK = threading.Lock()

MAX_LENGTH = 4096
MAX_DEPTH = 64

# Longer expressions are truncated around the column, so that the error stays small.
_MAX_SHOWN = 96
_MAX_NAME_SHOWN = 64

ALLOWED = (
    "allowed are numbers, names, calls such as where(c, a, b), + - * / // % **, comparisons, and/or/not, "
    "`a if c else b`, and a tuple of these with one entry per input"
)

_HINTS = {
    "#": "there are no comments in an expression",
    "\\": "there is no backslash in the language",
    "\0": "there is a NUL character in the expression",
    "[": "there is no indexing and there are no lists in the language",
    "{": "there are no braces in the language",
    ";": "an expression is one formula, without ;",
    "@": "there is no matrix product in the language",
    "^": "write ** for a power",
    "!": "write `not` for !",
    "?": "write `a if c else b` or where(c, a, b)",
    **{
        typed: f"write {meant} for {typed}"
        for typed, meant in zip("×·÷−≤≥≠²π", ("*", "*", "/", "-", "<=", ">=", "!=", "** 2", "pi"), strict=True)
    },
}


@dataclass(frozen=True, slots=True)
class Source:
    """An expression with its syntax tree; converts positions in the tree to offsets in the text.

    Positions in the tree are byte offsets in `_parsed`, the text without its `_shift` leading blanks.
    """

    text: str
    body: ast.expr
    _parsed: bytes
    _shift: int

    def start(self, node: ast.expr | ast.keyword) -> int:
        """Returns the offset of the node's first character."""
        return self._shift + len(self._parsed[: node.col_offset].decode())

    def end(self, node: ast.expr) -> int:
        """Returns the offset after the node's last character."""
        return self._shift + len(self._parsed[: node.end_col_offset].decode())


def read(expression: str, *, stored: bool = False) -> Source:
    """Parses an expression. Raises INVALID_EXPRESSION. `stored`: it was accepted before, maybe by an older version."""
    if len(expression) > MAX_LENGTH:
        raise invalid_expression(
            expression,
            MAX_LENGTH,
            f"an expression has at most {MAX_LENGTH:,} characters, this one has {len(expression):,}",
        )
    # Line breaks have no meaning. Replacing them by blanks keeps offsets and gives Python a single line.
    text = "".join(" " if character in "\n\r\t\f\v" else character for character in expression)
    stripped = text.strip(" ")
    if not stripped:
        raise invalid_expression(text, 0, f"the expression is empty: {ALLOWED}")
    _check_characters(text, ascii_only=not stored)
    shift = len(text) - len(text.lstrip(" "))
    try:
        with _PARSER_LOCK:
            body = ast.parse(stripped, mode="eval").body
        return Source(text, body, stripped.encode(), shift)
    except SyntaxError as cause:
        # Python gives no position for an error at the end of the text.
        offset = cause.offset - 1 if cause.offset else len(stripped)
        raise _syntax_error(text, shift + offset, cause.msg) from None
    except (RecursionError, MemoryError):
        raise invalid_expression(text, shift, f"the expression is nested more than {MAX_DEPTH} deep") from None
    except ValueError as cause:
        raise invalid_expression(text, shift, f"the expression cannot be read: {cause}") from None


def _check_characters(text: str, *, ascii_only: bool) -> None:
    """Refuses characters that the language does not use, also in strings, and deep nesting, before Python parses it."""
    depth = 0
    for offset, character in enumerate(text):
        if character == "!" and text[offset + 1 : offset + 2] == "=":
            continue
        if character in _HINTS:
            raise invalid_expression(text, offset, _HINTS[character])
        if "\ud800" <= character <= "\udfff":
            raise invalid_expression(text, offset, "half of a surrogate pair is not a character")
        if ascii_only and not character.isascii():
            # Python would take letters such as a full-width x for the plain ones.
            plain = unicodedata.normalize("NFKC", character)
            instead = f": write {plain}" if plain.isascii() and plain.strip() else ""
            raise invalid_expression(text, offset, f"{character!r} is no ASCII character{instead}")
        depth += (character == "(") - (character == ")")
        if depth > MAX_DEPTH:
            raise invalid_expression(text, offset, f"parentheses are nested more than {MAX_DEPTH} deep")


def _syntax_error(text: str, offset: int, message: str) -> GradruleError:
    rest = text[offset:].lstrip()
    if rest.startswith("=") and not rest.startswith("=="):
        return invalid_expression(
            text, offset, "there is no assignment in the language; compare with ==, and write only the formula"
        )
    return invalid_expression(text, offset, f"{message}: {ALLOWED}")


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
