"""Writes the HTML page: data, styles and script in one file that loads nothing from the network.

`graph_page.js` and `graph_page.css` are built from `client/console/src/graphs/`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from html import escape

from gradrule._picture.svg import PALETTE, PATH, PILLS, SAMPLES
from gradrule._picture.view import View

# `</script>` would end the element, and old JavaScript engines treat U+2028 and U+2029 as line ends.
_IN_SCRIPT = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def draw(view: View) -> str:
    """Returns the HTML text of the page."""
    script = _file("graph_page.js")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Second defence: even if text is parsed as markup, it cannot run scripts or load files.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>gradrule: graph</title>\n'
        f"<style>{_file('graph_page.css')}</style></head><body>\n"
        f'<script type="application/json" id="graph">{_in_script(data(view))}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


def embed(page: str, height: int) -> str:
    """Returns an element that shows the page inside another page, such as a notebook, apart from its scripts.

    Args:
        page: The HTML text of a page.
        height: Height of the element in pixels.
    """
    return (
        f'<iframe title="gradrule: graph" sandbox="allow-scripts" srcdoc="{escape(page)}" width="100%" '
        f'height="{height}" style="border: 1px solid #8884; border-radius: 6px"></iframe>'
    )


def data(view: View) -> dict[str, object]:
    """Returns the view as JSON values: `GraphData` of `graph_data.ts`. Equal texts are stored once."""
    texts: dict[str, int] = {}
    details = {
        str(box): [texts.setdefault(line, len(texts)) for line in detail.lines] for box, detail in view.details.items()
    }
    edges = [
        [edge.source, edge.target, int(edge.on_path), texts.setdefault(edge.tensor, len(texts)) if edge.tensor else -1]
        for edge in view.edges
    ]
    return {
        **{column: getattr(view, column) for column in _COLUMNS},
        "badges": [[[badge.rule, badge.text] for badge in row] for row in view.badges],
        "legend": [{"mark": row.mark, "name": row.name, "counts": row.counts} for row in view.legend],
        "samples": [*SAMPLES, ("edge path", PATH)],
        "palette": PALETTE,
        "pills": PILLS,
        "edges": edges,
        "details": details,
        "texts": list(texts),
    }


_COLUMNS = "parents", "children", "labels", "titles", "subtitles", "classes", "rule", "more", "interest", "heading"


def _in_script(values: object) -> str:
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
    return "".join(_IN_SCRIPT.get(character, character) for character in text)


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
