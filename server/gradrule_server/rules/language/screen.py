"""From text to Python's syntax tree, whatever the text is: too long, too deep and unreadable text is a typed error."""

from __future__ import annotations

import ast
import threading
from dataclasses import dataclass

from gradrule_server.errors import GradruleError
from gradrule_server.rules.language.errors import invalid_expression

# Python 3.11 counts how deep it is in a tree once per process, for all threads: one that stops for garbage makes others
# refuse what they could read, or fail.
_PARSING = threading.Lock()

MAX_LENGTH = 4096
MAX_DEPTH = 64

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
    "~": "write `not` for ~",
    "&": "write `and` for &",
    "|": "write `or` for |",
    "^": "write ** for a power",
    "!": "write `not` for !",
    "?": "write `a if c else b` or where(c, a, b)",
}


@dataclass(frozen=True, slots=True)
class Source:
    """An expression as text with its syntax tree, and the way back from the tree's positions to characters."""

    text: str
    body: ast.expr
    # Python counts positions in bytes and starts where the text does after leading blanks.
    _parsed: bytes
    _shift: int

    def start(self, node: ast.expr | ast.keyword) -> int:
        """Offset of the node's first character."""
        return self._shift + len(self._parsed[: node.col_offset].decode())

    def end(self, node: ast.expr) -> int:
        """Offset behind the node's last character."""
        return self._shift + len(self._parsed[: node.end_col_offset].decode())


def read(expression: str) -> Source:
    """The syntax tree of `expression`; INVALID_EXPRESSION where there is none."""
    if len(expression) > MAX_LENGTH:
        raise invalid_expression(
            expression,
            MAX_LENGTH,
            f"an expression has at most {MAX_LENGTH:,} characters, this one has {len(expression):,}",
        )
    # A line break means nothing: with blanks in its place, offsets stay and everything is one line.
    text = "".join(" " if character in "\n\r\t\f\v" else character for character in expression)
    stripped = text.strip(" ")
    if not stripped:
        raise invalid_expression(text, 0, f"the expression is empty: {ALLOWED}")
    _screen_characters(text)
    shift = len(text) - len(text.lstrip(" "))
    try:
        with _PARSING:
            body = ast.parse(stripped, mode="eval").body
        return Source(text, body, stripped.encode(), shift)
    except SyntaxError as cause:
        # At the end of the text Python gives no position.
        offset = cause.offset - 1 if cause.offset else len(stripped)
        raise _syntax_error(text, shift + offset, cause.msg) from None
    except (RecursionError, MemoryError):
        raise invalid_expression(text, shift, f"the expression is nested more than {MAX_DEPTH} deep") from None
    except ValueError as cause:
        raise invalid_expression(text, shift, f"the expression cannot be read: {cause}") from None


def _screen_characters(text: str) -> None:
    """Refuses what the language has no use for, before Python reads it; a quoted word may hold none of it either."""
    depth = 0
    for offset, character in enumerate(text):
        if character == "!" and text[offset + 1 : offset + 2] == "=":
            continue
        if character in _HINTS:
            raise invalid_expression(text, offset, _HINTS[character])
        if "\ud800" <= character <= "\udfff":
            raise invalid_expression(text, offset, "half a surrogate pair is no character")
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
