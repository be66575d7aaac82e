"""Writes one self-contained HTML page with every builtin rule: curve, formula, params, paper and an example."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from gradrule import _progress
from gradrule._progress import Progress
from gradrule._results.rule_infos import ParamInfo, PresetInfo, RuleInfo
from gradrule.errors import GradruleError
from gradrule.viz import _rule_text as rule_text
from gradrule.viz._curve_svg import curve_svg
from gradrule.viz._curves import Curve, curve

if TYPE_CHECKING:
    from gradrule import Client

FAMILIES = {
    "straight_through": "Straight-through: quantisation and rounding",
    "surrogate": "Surrogate gradients: spiking networks",
    "attribution": "Attribution: which inputs a result depends on",
    "flow": "Flow: domain adaptation, optimisation, hygiene",
    "stable": "Numerically stable gradients",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6878; --line: #d5dae2; --paper: #fff; --card: #f7f8fa;
  --gradient: #0072b2; --opposite: #d55e00; --forward: #8a94a2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa4b2; --line: #353d49; --paper: #14181e;
  --card: #1c222b; --gradient: #56b4e9; --opposite: #ff9a4d; --forward: #66707e; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 1400px; padding: 0 20px 60px; }
code, pre { font: 13px/1.4 ui-monospace, Consolas, monospace; }
nav { position: sticky; top: 0; background: var(--paper); padding: 10px 0; border-bottom: 1px solid var(--line);
  display: flex; gap: 14px; flex-wrap: wrap; z-index: 1; }
nav a { color: var(--gradient); text-decoration: none; }
nav input { margin-left: auto; padding: 4px 8px; min-width: 220px; }
.rules { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); gap: 16px; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  min-width: 0; }
article h3 { margin: 0 0 4px; font: 600 16px ui-monospace, monospace; }
article h3 small { font-weight: 400; color: var(--soft); }
.formula, pre { display: block; white-space: pre-wrap; overflow-wrap: anywhere; padding: 6px 8px; margin: 6px 0;
  background: var(--paper); border: 1px solid var(--line); border-radius: 4px; }
.copied { position: relative; } .copied pre { padding-right: 60px; }
.copied button { position: absolute; right: 6px; top: 5px; font: 12px system-ui, sans-serif; color: var(--soft);
  background: var(--card); border: 1px solid var(--line); border-radius: 4px; cursor: pointer; }
.none { color: var(--soft); border: 1px dashed var(--line); border-radius: 4px; padding: 14px; margin: 6px 0; }
.note, .source { color: var(--soft); font-size: 13px; margin: 4px 0; }
table { border-collapse: collapse; font-size: 13px; margin: 6px 0; }
td, th { text-align: left; padding: 2px 12px 2px 0; vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
svg { width: 100%; max-width: 420px; display: block; }
svg text { font: 10px sans-serif; fill: var(--soft); }
svg .frame { fill: none; stroke: var(--line); } svg .zero { stroke: var(--line); }
polyline { fill: none; stroke-linejoin: round; } polyline.forward { stroke: var(--forward); stroke-width: 1.4; }
polyline.gradient { stroke: var(--gradient); stroke-width: 2.2; }
polyline.opposite { stroke: var(--opposite); stroke-width: 1.4; stroke-dasharray: 5 4; }
.forward-key { color: var(--forward); } .gradient-key { color: var(--gradient); }
.opposite-key { color: var(--opposite); }
"""

_SCRIPT = """
const box = document.querySelector("input");
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\\s+/);
  for (const card of document.querySelectorAll("article")) {
    const text = card.textContent.toLowerCase();
    card.hidden = !words.every((word) => text.includes(word));
  }
});
document.addEventListener("click", async (event) => {
  if (!event.target.matches(".copied button")) return;
  const text = event.target.previousElementSibling;
  try {
    await navigator.clipboard.writeText(text.textContent);
    event.target.textContent = "copied";
  } catch {
    // Without the right to write the clipboard, select the text, so that Ctrl-C copies it.
    getSelection().selectAllChildren(text);
    event.target.textContent = "selected";
  }
  setTimeout(() => { event.target.textContent = "copy"; }, 1500);
});
"""


@dataclass(frozen=True, repr=False)
class Gallery:
    """Holds a page with every builtin rule. It needs no other file and no network; notebooks display it.

    Attributes:
        html: The page.
        rules: Number of rules.
        curves: Number of rules with a curve.
        presets: Number of presets.
    """

    html: str
    rules: int
    curves: int
    presets: int

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the page.

        Args:
            folder: Folder for the file; created if it does not exist.

        Returns:
            Path of the written `index.html`.
        """
        path = Path(folder) / "index.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html, encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"<Gallery of {self.rules} rules, {self.curves} with a curve, {self.presets} presets>"

    def _repr_html_(self) -> str:
        # A page of its own: neither its styles nor its script reach the notebook.
        style = "width:100%;height:600px;border:1px solid rgba(128,128,128,.4)"
        return (
            f'<iframe title="the rules of gradrule" sandbox="allow-scripts" style="{style}" '
            f'srcdoc="{escape(self.html)}"></iframe>'
        )


def page(client: Client, *, progress: Progress = None) -> Gallery:
    """Makes the page from the server's rules and samples."""
    rules = sorted(client.list_rules("builtin"), key=lambda rule: (_family_order(rule.family), rule.name))
    presets = client.list_presets()
    curves = 0
    sections = []
    with _progress.start(progress, "drawing rules", len(rules), "rules") as task:
        for family, members in itertools.groupby(rules, key=lambda rule: rule.family):
            cards = []
            for rule in members:
                drawn = _curve_or_reason(client, rule)
                curves += isinstance(drawn, Curve)
                cards.append(_card(rule, drawn))
                task.advance()
            sections.append(_section(family, FAMILIES.get(family, family), cards))
    sections.append(_section("presets", "Presets: named lists of overrides", [_preset_card(item) for item in presets]))
    links = "".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in _section_names(rules))
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>gradrule: rules</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n'
        f"<h1>The rules of gradrule</h1>\n<p>{len(rules)} rules, {len(presets)} presets. Curves: "
        '<span class="forward-key">the op</span>, <span class="gradient-key">its gradient for dy = 1</span>, and '
        '<span class="opposite-key">for dy = -1</span>, unless it is just the negative.</p>\n'
        f'<nav>{links}<input type="search" placeholder="find a rule, an op, a paper"></nav>\n'
        f"{''.join(sections)}<script>{_SCRIPT}</script></body></html>\n"
    )
    return Gallery(html, len(rules), curves, len(presets))


def _section_names(rules: Sequence[RuleInfo]) -> list[str]:
    return [*dict.fromkeys(rule.family for rule in rules), "presets"]


def _family_order(family: str) -> tuple[int, str]:
    known = list(FAMILIES)
    return (known.index(family) if family in known else len(known), family)


def _curve_or_reason(client: Client, rule: RuleInfo) -> Curve | str:
    try:
        return curve(client, rule)
    except GradruleError as refusal:
        return refusal.message


def _section(anchor: str, title: str, cards: Sequence[str]) -> str:
    return f'<h2 id="{escape(anchor)}">{escape(title)}</h2>\n<div class="rules">\n{"".join(cards)}</div>\n'


def _card(rule: RuleInfo, drawn: Curve | str) -> str:
    aliases = f" <small>also {escape(', '.join(rule.aliases))}</small>" if rule.aliases else ""
    parts = [f'<article id="{escape(rule.name)}"><h3>{escape(rule.name)}{aliases}</h3>']
    parts.append(f"<div>{_markup(rule.description)}</div>")
    if isinstance(drawn, Curve):
        parts.append(curve_svg(drawn))
        parts += [f'<p class="note">{escape(note)}</p>' for note in drawn.notes]
    else:
        parts.append(f'<div class="none">no curve: {escape(drawn)}</div>')
    parts.append(f'<code class="formula">{escape(rule_text.formula_text(rule))}</code>')
    parts.append(_params(rule.param_infos))
    facts = [("for", ", ".join(rule.op_types) or "any op or region"), ("source", rule.reference)]
    facts.append(("true gradient", "yes" if rule.true_gradient else ""))
    facts.append(("per sample", {True: "yes", False: "no", None: ""}[rule.per_sample]))
    parts += [f'<p class="source">{name}: {escape(value)}</p>' for name, value in facts if value]
    return "".join([*parts, _example(rule_text.rule_example(rule)), "</article>\n"])


def _preset_card(preset: PresetInfo) -> str:
    return "".join(
        [
            f'<article id="preset-{escape(preset.name)}"><h3>{escape(preset.name)}</h3>',
            f"<div>{_markup(preset.description)}</div>",
            f"<pre>{escape(chr(10).join(preset.overrides))}</pre>",
            _params(preset.params),
            f'<p class="source">source: {escape(preset.reference)}</p>',
            _example(rule_text.preset_example(preset)),
            "</article>\n",
        ]
    )


def _params(infos: Sequence[ParamInfo]) -> str:
    if not infos:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in rule_text.PARAM_COLUMNS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_markup(cell)}</td>' for cell in row)}</tr>" for row in rule_text.param_rows(infos)
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _example(example: rule_text.Example) -> str:
    texts = (example.python, example.shell)
    return "".join(f'<div class="copied"><pre>{escape(text)}</pre><button>copy</button></div>' for text in texts)


def _markup(description: str) -> str:
    """Converts text between backticks to HTML code."""
    pieces = escape(description).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
