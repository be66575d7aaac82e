"""Formats objects for terminals and notebooks: one short line, or escaped HTML with tables.

The HTML takes text colour and background from the notebook, so it is readable on light and dark pages, and without the
styles, which some viewers remove.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_REPR_CHARACTERS = 100
MAX_TABLE_ROWS = 50
_MAX_CELL_CHARACTERS = 300
_DIGEST_CHARACTERS = 12

_STYLE = (
    ".gradrule{font:13px/1.4 system-ui,sans-serif;overflow-x:auto}"
    ".gradrule table{border-collapse:collapse;margin:2px 0 10px;font-size:12px}"
    ".gradrule caption{caption-side:top;text-align:left;font-weight:600;padding:2px 0;color:inherit;white-space:nowrap}"
    ".gradrule tr{background:transparent!important}"
    ".gradrule th,.gradrule td{text-align:left!important;vertical-align:middle;padding:2px 14px 2px 0;border:0;"
    "border-bottom:1px solid rgba(128,128,128,.3);color:inherit;max-width:44em;overflow-wrap:anywhere}"
    ".gradrule th{font-weight:400;opacity:.7}.gradrule td{font-family:ui-monospace,Consolas,monospace}"
    ".gradrule p{margin:2px 0 8px}.gradrule svg{display:block;fill:currentColor}"
    ".gradrule .soft{opacity:.7}.gradrule .bad{font-weight:600;border-left:3px solid #d55e00;padding-left:6px}"
    ".gradrule img{background:#fff;max-width:100%}"
)


class Html(str):
    """HTML that is inserted without escaping."""

    __slots__ = ()


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


def short_digest(digest: str) -> str:
    """Returns the first characters of a digest; empty for none."""
    return f"{digest[:_DIGEST_CHARACTERS]}…" if digest else ""


def html_block(*parts: str) -> Html:
    """Returns HTML of a result: its parts, which are HTML, with the styles that they need."""
    return Html(f'<div class="gradrule"><style>{_STYLE}</style>{"".join(parts)}</div>')


def html_line(*texts: str, kind: str = "soft") -> Html:
    """Returns a paragraph with the texts that are not empty, separated by dots. kind: CSS class."""
    shown = " · ".join(escape(text) for text in texts if text)
    return Html(f'<p class="{kind}">{shown}</p>' if shown else "")


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Returns an HTML table of at most 50 rows, empty without rows. Escapes all text but `Html`; None is empty."""
    found = list(rows)
    if not found:
        return Html("")
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    head = f"<tr>{head}</tr>" if any(columns) else ""
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in found[:MAX_TABLE_ROWS])
    more = len(found) - MAX_TABLE_ROWS
    foot = f"<tr><td colspan={len(columns)}>… {more} more rows</td></tr>" if more > 0 else ""
    return Html(f"<table><caption>{escape(caption)}</caption>{head}{body}{foot}</table>")


def _cell(value: object) -> str:
    if isinstance(value, Html):
        return value
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return escape(text if len(text) <= _MAX_CELL_CHARACTERS else f"{text[: _MAX_CELL_CHARACTERS - 1]}…")
