"""Formats objects for terminals and notebooks: one short line, or an escaped HTML table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_REPR_CHARACTERS = 100
MAX_TABLE_ROWS = 50


def short_repr(text: str) -> str:
    """Cuts the text of a repr to 100 characters and one line; keeps its last character, the closing bracket."""
    text = " ".join(text.split())
    if len(text) <= MAX_REPR_CHARACTERS:
        return text
    return f"{text[: MAX_REPR_CHARACTERS - 2]}…{text[-1]}"


def names_text(names: Iterable[object]) -> str:
    """Returns the first names and the number of the others: `a, b, c, … (7)`."""
    found = [str(name) for name in names]
    shown = ", ".join(found[:3]) or "none"
    return shown if len(found) <= 3 else f"{shown}, … ({len(found)})"


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns an HTML table of at most 50 rows; escapes all text, and shows None as an empty cell."""
    found = list(rows)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in found[:MAX_TABLE_ROWS])
    more = len(found) - MAX_TABLE_ROWS
    foot = f"<tr><td colspan={len(columns)}>… {more} more rows</td></tr>" if more > 0 else ""
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}{foot}</table>"


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return escape(text)
