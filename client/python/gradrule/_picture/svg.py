"""Writes the SVG file and its style sheet."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gradrule._picture.placing import (
    HEAD,
    LEAF_HEIGHT,
    MARK_WIDTH,
    MAX_BOXES,
    Positions,
    Rect,
    Route,
    Rows,
    arrange,
    badge_width,
    initially_open,
    place,
    routes,
    without_constants,
)
from gradrule._picture.reading import ROOT
from gradrule._picture.text import width
from gradrule._picture.view import Badge, View

# The palette of Okabe and Ito, which is safe for colour blindness; with a readable text colour for each.
PALETTE = (
    ("#e69f00", "#000"),
    ("#56b4e9", "#000"),
    ("#009e73", "#000"),
    ("#cc79a7", "#000"),
    ("#0072b2", "#fff"),
    ("#d55e00", "#000"),
    ("#f0e442", "#000"),
)

PILLS = {"x": "x", "y": "y", "wrong": "!"}

SAMPLES = (
    ("leaf path", "on the path from xs to ys"),
    ("leaf", "not on the path"),
    ("leaf off_path", "an override that is off the path"),
    ("leaf not_differentiable", "an override of an op that is not differentiable"),
)
PATH = "the path from xs to ys"

_LIGHT = {
    "background": "#ffffff",
    "text": "#1c2430",
    "muted": "#5d6878",
    "line": "#b4bcc8",
    "box": "#ffffff",
    "scope": "#eef1f5",
    "open": "#5d68780d",
    "path": "#1c2430",
    "edge": "#a3adba",
    "wrong": "#c62f2f",
}
_RULES = """
text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: {text}; }
.background { fill: {background}; }
.body { fill: {box}; stroke: {line}; }
.leaf > .first, .leaf > .second { fill: {muted}; }
.leaf.path > .first, .leaf.rule > .first, .scope > .first { fill: {text}; }
.first, .name { font-size: 13px; }
.second { fill: {muted}; }
.leaf.rule > .second { fill: {text}; }
.scope > .body, .scope > .behind { fill: {scope}; stroke: {line}; }
.open > .body { fill: {open}; }
.name { paint-order: stroke; stroke: {background}; stroke-width: 3; stroke-linejoin: round; }
.path > .body { stroke: {path}; stroke-width: 2; }
.open.path > .body { stroke-width: 1.2; }
.off_path > .body { stroke-dasharray: 6 3; }
.not_differentiable > .body { stroke-dasharray: 1.5 3; stroke-linecap: round; stroke-width: 2; }
.x > .body, .y > .body { stroke-width: 3; }
.open.x > .body, .open.y > .body { stroke-width: 1.2; }
.wrong > .body { stroke: {wrong}; stroke-width: 3; }
circle.pill { fill: {path}; }
circle.wrong { fill: {wrong}; }
text.pill { fill: {background}; font-size: 12px; font-weight: bold; }
text.mark { font-weight: bold; }
.tensor { fill: {muted}; paint-order: stroke; stroke: {background}; stroke-width: 4; stroke-linejoin: round; }
.edge { fill: none; stroke: {edge}; stroke-width: 1; }
.edge.path { stroke: {path}; stroke-width: 2.6; }
.tip.plain { fill: {edge}; }
.tip.thick { fill: {path}; }
"""
_MARGIN = 16.0
_LINE_HEIGHT = 20.0
_SWATCH = 22.0


def svg_style_sheet(rules: int) -> str:
    """Returns the light style sheet of the SVG file, without CSS variables, which some programs do not support."""
    sheet = _RULES + _rule_styles(rules)
    for name, value in _theme(rules).items():
        sheet = sheet.replace(f"{{{name}}}", value)
    return sheet


def _theme(rules: int) -> dict[str, str]:
    """Returns colours by name, including two background colours per rule: strong if it is active, else faint."""
    theme = dict(_LIGHT)
    for number in range(rules):
        colour, _ = PALETTE[number % len(PALETTE)]
        theme[f"strong{number}"] = _mix_colours(colour, _LIGHT["box"], 0.32)
        theme[f"faint{number}"] = _mix_colours(colour, _LIGHT["box"], 0.1)
    return theme


def _mix_colours(one: str, other: str, share: float) -> str:
    pairs = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def _rule_styles(count: int) -> str:
    """Returns the CSS of the rules' classes `r0`, `r1`, …; the colours repeat after seven rules, the marks do not."""
    lines = []
    for number in range(count):
        colour, text_colour = PALETTE[number % len(PALETTE)]
        lines.append(f".r{number} rect.mark {{ fill: {colour}; }} .r{number} text.mark {{ fill: {text_colour}; }}")
        lines.append(f".r{number}.leaf > .body {{ fill: {{strong{number}}}; }}")
        for status in ("off_path", "not_differentiable"):
            lines.append(f".r{number}.{status} > .body {{ fill: {{faint{number}}}; }}")
    return "\n".join([*lines, ""])


def draw(view: View) -> str:
    """Returns the SVG text, with open scopes up to a number of boxes that fits on a page."""
    if len(view.details) > MAX_BOXES:
        view = without_constants(view)
    arranged = arrange(view)
    positions = place(arranged, set(initially_open(view)))
    rows = list(legend(view))
    top = _MARGIN + _LINE_HEIGHT * len(rows) + _MARGIN
    graph = positions.rects[ROOT]
    wide = max(graph.w + 2 * _MARGIN, max(width(line, 12.0) for _, _, line in rows) + 3 * _MARGIN + _SWATCH)
    high = top + graph.h + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" '
        f'height="{high:.0f}" role="img">',
        f"<title>{_heading(view)}</title>",
        f"<style>{svg_style_sheet(len(view.legend))}</style>",
        f"<defs>{ARROWS}</defs>",
        f'<rect class="background" width="{wide:.0f}" height="{high:.0f}"/>',
    ]
    for number, (_, sample, line) in enumerate(rows):
        y = _MARGIN + _LINE_HEIGHT * number
        parts.append(f'<g class="legend" transform="translate({_MARGIN:g} {y:g})">{sample}')
        parts.append(f'<text x="{_SWATCH + 8 if sample else 0:g}" y="13">{escape(line)}</text></g>')
    parts.append(f'<g transform="translate({_MARGIN:g} {top:g})">')
    parts += _graph(arranged, positions)
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _graph(arranged: Rows, positions: Positions) -> Iterable[str]:
    view = arranged.view
    drawn = routes(arranged, positions)
    boxes = [box for box in positions.rects if box != ROOT]
    for box in boxes:
        if box in positions.bands:
            yield _open_scope(view, box, positions.rects[box])
    for route in drawn:
        yield _edge(route, positions)
    for route in drawn:
        yield from _tensor(route)
    for box in boxes:
        if box in positions.bands:
            yield _name(view, box, positions.rects[box])
        else:
            yield _box(view, box, positions.rects[box])


def _heading(view: View) -> str:
    return escape(f"gradrule: {'; '.join(line for _, line in view.heading)}")


def legend(view: View) -> Iterable[tuple[int | None, str, str]]:
    """Yields the legend's rows: index of a rule or None, SVG of a sample of at most 26 by 18 pixels, and a text."""
    for pill, line in view.heading:
        yield None, _pill(pill, 12, 9) if pill else "", line
    for number, row in enumerate(view.legend):
        yield number, _mark(number, row.mark, 2, 1), f"{row.name}: {row.counts}" if row.counts else row.name
    for classes, line in SAMPLES:
        drawn = f'<rect class="body" x="1" y="3" width="{_SWATCH:g}" height="12" rx="3"/>'
        yield None, f'<g class="{classes}">{drawn}</g>', line
    yield None, f'<path class="edge path" d="M1,9 H{_SWATCH + 1:g}"/>', PATH


def _arrow(name: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="tip {name}" d="M0,0.5 L8,4 L0,7.5 z"/></marker>'
    )


ARROWS = _arrow("plain") + _arrow("thick")


def _open_scope(view: View, box: int, at: Rect) -> str:
    return (
        f'<g class="open {view.classes[box]}"><title>{escape(_details(view, box))}</title>'
        f'<rect class="body" x="{at.x:.1f}" y="{at.y:.1f}" width="{at.w:.1f}" height="{at.h:.1f}" rx="8"/></g>'
    )


def _name(view: View, box: int, at: Rect) -> str:
    return f'<text class="name" x="{at.x + 10:.1f}" y="{at.y + HEAD - 10:.1f}">{escape(view.labels[box])}</text>'


def _box(view: View, box: int, at: Rect) -> str:
    words = view.classes[box].split()
    rule = view.rule[box]
    parts = [f'<g class="{view.classes[box]}{f" r{rule}" if rule >= 0 else ""}" ']
    parts.append(f'transform="translate({at.x:.1f} {at.y:.1f})"><title>{escape(_details(view, box))}</title>')
    if "scope" in words:
        parts.append(f'<rect class="behind" x="4" y="4" width="{at.w:g}" height="{at.h:g}" rx="4"/>')
    parts.append(f'<rect class="body" width="{at.w:g}" height="{at.h:g}" rx="4"/>')
    if rule >= 0:
        parts.append(_mark(rule, view.legend[rule].mark, 6, 14))
    left = 10 + MARK_WIDTH * (rule >= 0)
    parts.append(f'<text class="first" x="{left}" y="18">{escape(view.labels[box])}</text>')
    parts.append(f'<text class="second" x="{left}" y="35">{escape(view.subtitles[box])}</text>')
    right = at.w - 12
    for word in PILLS:
        if word in words:
            parts.append(_pill(word, right, 13))
            right -= 18
    parts += _badges(view, box)
    return "".join([*parts, "</g>"])


def _pill(word: str, x: float, y: float) -> str:
    return (
        f'<circle class="pill {word}" cx="{x:g}" cy="{y:g}" r="8"/>'
        f'<text class="pill" x="{x:g}" y="{y + 4:g}" text-anchor="middle">{PILLS[word]}</text>'
    )


def _badges(view: View, box: int) -> Iterable[str]:
    x = 10.0
    for badge in view.badges[box]:
        yield _badge(badge, x)
        x += badge_width(badge) + 4
    if view.more[box]:
        yield f'<text class="second" x="{x:g}" y="{LEAF_HEIGHT + 12}">…</text>'


def _badge(badge: Badge, x: float) -> str:
    w, y = badge_width(badge), LEAF_HEIGHT - 2
    return (
        f'<g class="r{badge.rule}"><rect class="mark" x="{x:g}" y="{y}" width="{w:g}" height="17" rx="8"/>'
        f'<text class="mark" x="{x + w / 2:g}" y="{y + 13}" text-anchor="middle">{escape(badge.text)}</text></g>'
    )


def _mark(rule: int, mark: str, x: float, y: float) -> str:
    return (
        f'<g class="r{rule}"><rect class="mark" x="{x:g}" y="{y:g}" width="17" height="17" rx="3"/>'
        f'<text class="mark" x="{x + 8.5:g}" y="{y + 13:g}" text-anchor="middle">{escape(mark)}</text></g>'
    )


def _details(view: View, box: int) -> str:
    detail = view.details.get(box)
    if detail is not None:
        return "\n".join([detail.name, *detail.lines])
    counts = ", ".join(f"{view.legend[badge.rule].name} {badge.text}" for badge in view.badges[box])
    return "\n".join([view.titles[box], view.subtitles[box], *([counts] if counts else [])])


def _edge(route: Route, positions: Positions) -> str:
    name = "thick" if route.on_path else "plain"
    classes = "edge path" if route.on_path else "edge"
    way = edge_path(route, positions.rects[route.source], positions.rects[route.target])
    return f'<path class="{classes}" d="{way}" marker-end="url(#{name})"/>'


def _tensor(route: Route) -> Iterable[str]:
    """Yields the shape of a tensor below the box, or the scope, that its edge leaves."""
    if route.tensor.endswith("]") and route.label is not None:
        x, y = route.label
        yield f'<text class="tensor" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(route.tensor)}</text>'


def edge_path(route: Route, source: Rect, target: Rect) -> str:
    """Returns the SVG path of an edge: straight along boxes, curved between rows, upwards around the right side."""
    if not route.points:
        x, y, to, end = source.x + source.w, source.y + source.h / 2, target.x + target.w, target.y + target.h / 2
        out = max(x, to) + 40
        return f"M{x:.1f},{y:.1f} C{out:.1f},{y:.1f} {out:.1f},{end:.1f} {to:.1f},{end:.1f}"
    x, y = route.points[0]
    parts = [f"M{x:.1f},{y:.1f}"]
    for to, end in route.points[1:]:
        if to == x:
            parts.append(f"V{end:.1f}")
        else:
            half = (y + end) / 2
            parts.append(f"C{x:.1f},{half:.1f} {to:.1f},{half:.1f} {to:.1f},{end:.1f}")
        x, y = to, end
    return " ".join(parts)
