"""Writes the HTML page: data, styles and script in one file that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Iterable
from html import escape

from gradrule._picture import svg
from gradrule._picture.view import View

_SCRIPTS = ("layout.js", "page.js", "start.js")

# `</script>` would end the element, and old JavaScript engines treat U+2028 and U+2029 as line ends.
_IN_SCRIPT = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def draw(view: View) -> str:
    """Returns the HTML text of the page."""
    script = "".join(map(_file, _SCRIPTS))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Second defence: even if text is parsed as markup, it cannot run scripts or load files.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width"><title>gradrule: graph</title>\n'
        f"<style>{svg.page_style_sheet(len(view.legend))}{_file('page.css')}</style></head><body>\n"
        f"<header><h1>gradrule: graph</h1>{_CONTROLS}</header>\n<main>\n"
        '<svg id="canvas" tabindex="0" role="application" aria-label="graph">'
        f'<defs>{svg.ARROWS}</defs><g id="space"></g></svg>\n'
        f'<aside id="legend"><details open><summary>legend</summary>{"".join(_legend(view))}</details></aside>\n'
        '<aside id="details" aria-live="polite" hidden></aside>\n</main>\n'
        f'<script type="application/json" id="graph">{_data(view)}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


_CONTROLS = (
    '<input id="search" type="search" placeholder="find a node, an op, a rule ( / )" aria-label="find">'
    '<button id="back" aria-label="previous">↑</button><button id="next" aria-label="next">↓</button>'
    '<span id="found" aria-live="polite"></span>'
    '<button id="fold">fold all</button><button id="first">initial view</button><button id="fit">whole graph</button>'
)


def _legend(view: View) -> Iterable[str]:
    for rule, sample, line in svg.legend(view):
        drawn = f'<svg aria-hidden="true">{sample}</svg>' if sample else ""
        inside = f"{drawn}<span>{escape(line)}</span>"
        yield f"<p>{inside}</p>" if rule is None else f'<button data-rule="{rule}">{inside}</button>'


def _data(view: View) -> str:
    """Returns the view as JSON that is safe in a script element. Equal detail lines are stored once."""
    texts: dict[str, int] = {}
    details = {
        box: [texts.setdefault(line, len(texts)) for line in detail.lines] for box, detail in view.details.items()
    }
    data = {
        **{column: getattr(view, column) for column in _COLUMNS},
        "badges": [[(badge.rule, badge.text, round(svg.badge_width(badge))) for badge in row] for row in view.badges],
        "legend": [{"mark": row.mark, "name": row.name} for row in view.legend],
        "details": details,
        "texts": list(texts),
        "pills": svg.PILLS,
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return "".join(_IN_SCRIPT.get(character, character) for character in text)


_COLUMNS = (
    *("parents", "depths", "children", "labels", "titles", "subtitles", "widths", "heights", "classes", "rule", "more"),
    *("rows", "row", "before", "edges", "opened"),
)


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
