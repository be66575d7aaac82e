"""Defines the style sheets of pictures. Each rule has a letter and a colour, each status a kind of border."""

from __future__ import annotations

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
    "ground": "#ffffff",
    "ink": "#1c2430",
    "soft": "#5d6878",
    "line": "#b4bcc8",
    "card": "#ffffff",
    "scope": "#eef1f5",
    "open": "#5d68780d",
    "path": "#1c2430",
    "edge": "#a3adba",
    "wrong": "#c62f2f",
}
_DARK = {
    "ground": "#14181e",
    "ink": "#e4e8ee",
    "soft": "#9aa4b2",
    "line": "#4a5463",
    "card": "#1c222b",
    "scope": "#28303c",
    "open": "#9aa4b20f",
    "path": "#e4e8ee",
    "edge": "#5b6676",
    "wrong": "#ff7b72",
}

_RULES = """
text { font: 11px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: {ink}; }
.legend text { font-size: 12px; }
.ground { fill: {ground}; }
.body { fill: {card}; stroke: {line}; }
.leaf > .first, .leaf > .second { fill: {soft}; }
.leaf.path > .first, .leaf.rule > .first, .scope > .first { fill: {ink}; }
.second { font-size: 10px; fill: {soft}; }
.leaf.rule > .second { fill: {ink}; }
.scope > .body, .scope > .behind { fill: {scope}; stroke: {line}; }
.open > .body { fill: {open}; }
.name { paint-order: stroke; stroke: {ground}; stroke-width: 3; stroke-linejoin: round; }
.path > .body { stroke: {path}; stroke-width: 2; }
.open.path > .body { stroke-width: 1.2; }
.off_path > .body { stroke-dasharray: 6 3; }
.not_differentiable > .body { stroke-dasharray: 1.5 3; stroke-linecap: round; stroke-width: 2; }
.x > .body, .y > .body { stroke-width: 3; }
.open.x > .body, .open.y > .body { stroke-width: 1.2; }
.wrong > .body { stroke: {wrong}; stroke-width: 3; }
circle.pill { fill: {path}; }
circle.wrong { fill: {wrong}; }
text.pill { fill: {ground}; font-size: 10px; font-weight: bold; }
text.mark { font-size: 10px; font-weight: bold; }
.edge { fill: none; stroke: {edge}; stroke-width: 1; }
.edge.path { stroke: {path}; stroke-width: 2.6; }
.tip.plain { fill: {edge}; }
.tip.thick { fill: {path}; }
"""


def of_svg(rules: int) -> str:
    """Returns the light style sheet of the SVG file, without CSS variables, which some programs do not support."""
    sheet = _RULES + _of_rules(rules)
    for name, value in _theme(_LIGHT, rules).items():
        sheet = sheet.replace(f"{{{name}}}", value)
    return sheet


def of_page(rules: int) -> str:
    """Returns the style sheet of the page's drawing, with light and dark colours."""
    sheet = _RULES + _of_rules(rules)
    light, dark = _theme(_LIGHT, rules), _theme(_DARK, rules)
    for name in light:
        sheet = sheet.replace(f"{{{name}}}", f"var(--{name})")
    light_text, dark_text = (" ".join(f"--{name}: {value};" for name, value in each.items()) for each in (light, dark))
    return (
        f":root {{ color-scheme: light dark; {light_text} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark_text} }} }}\n{sheet}"
    )


def _theme(colours: dict[str, str], rules: int) -> dict[str, str]:
    """Returns colours by name, including two background colours per rule: strong if it is active, else faint."""
    theme = dict(colours)
    for number in range(rules):
        colour, _ = PALETTE[number % len(PALETTE)]
        theme[f"strong{number}"] = _mixed(colour, colours["card"], 0.32)
        theme[f"faint{number}"] = _mixed(colour, colours["card"], 0.1)
    return theme


def _mixed(one: str, other: str, share: float) -> str:
    pairs = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def _of_rules(count: int) -> str:
    """Returns the CSS of the rules' classes `r0`, `r1`, …; the colours repeat after seven rules, the marks do not."""
    lines = []
    for number in range(count):
        colour, ink = PALETTE[number % len(PALETTE)]
        lines.append(f".r{number} rect.mark {{ fill: {colour}; }} .r{number} text.mark {{ fill: {ink}; }}")
        lines.append(f".r{number}.leaf > .body {{ fill: {{strong{number}}}; }}")
        for status in ("off_path", "not_differentiable"):
            lines.append(f".r{number}.{status} > .body {{ fill: {{faint{number}}}; }}")
    return "\n".join([*lines, ""])
