"""Writes docs/reference/rules.md from the registry of rules and presets and the comparison with other libraries.

python tools/generate_reference.py            # writes docs/reference/rules.md
python tools/generate_reference.py --check    # exit code 1 where the committed file differs
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradrule._results import rule_infos
from gradrule.cli.rules import rule_text
from gradrule.cli.rules.gallery import FAMILIES
from gradrule.v1 import rule_pb2
from gradrule_server.registry.rule_entries import preset_message, rule_message
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store
from gradrule_server.rules.catalogue.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/reference/rules.md"
PEERS = ROOT / "tests/peers/results.json"

_HEAD = """\
# The rules

Written by `make docs` from the registry; `gradrule rules gallery DIR` makes a page of it with curves, and
`gradrule rules show NAME` tells one rule.

In formulas `x` is the op's input, `y` its output, `dy` the upstream gradient and `default` the op's own gradient; the
[language](expression-language.md) is defined elsewhere. `vjp(v)` is the op's own gradient of its input for the upstream
gradient `v`, `vjp(v; W)` the same with other weights, and `op(x; W)` the op; `pos` and `neg` are the positive and the
negative part, `st(v)` is `v + eps` or `v - eps`, away from 0. A param without a value must be given. **True** marks
rules that are the true gradient of their ops, up to single points; all others mean to be something else. **S**: samples
are independent of each other.
"""


def rules() -> list[rule_infos.RuleInfo]:
    """All builtin rules, as clients see them."""
    found: list[rule_infos.RuleInfo] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        try:
            registry, token = RuleRegistry(store, ()), ""
            while True:
                page, token = registry.list(rule_pb2.RULE_KIND_BUILTIN, 1000, token)
                found += [rule_infos.rule_info(rule_message(entry)) for entry in page]
                if not token:
                    return found
        finally:
            store.close()


def presets() -> list[rule_infos.PresetInfo]:
    """All presets, as clients see them."""
    return [rule_infos.preset_info(preset_message(preset)) for preset in PRESETS]


def reference(peers: dict[str, Any] | None) -> str:
    """The page."""
    order = list(FAMILIES)
    ordered = sorted(rules(), key=lambda rule: (order.index(rule.family), rule.name))
    parts = [_HEAD]
    for family, members in itertools.groupby(ordered, key=lambda rule: rule.family):
        parts.append(f"\n## {FAMILIES[family]}\n\n")
        parts.append(_table(("rule", "dx", "params", "for", "source", ""), map(_rule_row, members)))
        parts.append(_notes(rule for rule in ordered if rule.family == family))
    parts.append("\n## Presets: named lists of overrides\n\n")
    parts.append(
        "`gr.Preset(NAME, …)` in a list of overrides, `--preset NAME` in the shell. Overrides before them win.\n\n"
    )
    parts.append(_table(("preset", "overrides", "params", "what it is", "source"), map(_preset_row, presets())))
    if peers is not None:
        parts.append(_peers(peers))
    return "".join(parts)


def _rule_row(rule: rule_infos.RuleInfo) -> list[str]:
    names = f"**{rule.name}**" + "".join(f"<br>{alias}" for alias in rule.aliases)
    marks = " ".join(filter(None, ["**True**" if rule.true_gradient else "", "**S**" if rule.per_sample else ""]))
    ops = ", ".join(rule.op_types) or "any op, regions"
    return [names, _code(rule_text.formula_text(rule)), _params(rule.param_infos), ops, rule.reference, marks]


def _notes(members: Iterable[rule_infos.RuleInfo]) -> str:
    lines = [f"- **{rule.name}**: {rule.description} {_code(rule_text.rule_example(rule).flag)}\n" for rule in members]
    return "".join(["\n", *lines])


def _preset_row(preset: rule_infos.PresetInfo) -> list[str]:
    overrides = "<br>".join(_code(line) for line in preset.overrides)
    return [f"**{preset.name}**", overrides, _params(preset.params), preset.description, preset.reference]


def _params(infos: Sequence[rule_infos.ParamInfo]) -> str:
    cells = []
    for info in infos:
        value = "" if info.default is None else f" = {rule_text.number_text(info.default)}"
        range_ = f" ({info.range})" if info.range else ""
        cells.append(f"`{info.name}{value}`{range_}")
    return "<br>".join(cells)


def _peers(results: dict[str, Any]) -> str:
    """Rules by library: how many settings agree and how far they are apart; then each that does not, and why."""
    rows: list[dict[str, Any]] = results["rows"]
    parts = ["\n## Compared with other libraries\n\n"]
    parts.append(
        "By `make test-peers`, in an environment of its own. A setting is a rule with params, on tensors or a network. "
        "The difference is the largest of an element that agrees, relative to the library's.\n\n"
    )
    key = lambda row: (row["rule"], row["peer"], row["peer_version"])  # noqa: E731
    table = []
    for (rule, peer, version), members in itertools.groupby(sorted(rows, key=key), key=key):
        settings = list(members)
        agreeing = [row for row in settings if row["agrees"]]
        wide = [row["max_rel_difference"] for row in agreeing if row["dtype"] == "float64"]
        narrow = [row["max_rel_difference"] for row in agreeing if row["dtype"] != "float64"]
        share = f"{len(agreeing)} of {len(settings)}" if len(agreeing) < len(settings) else f"all {len(settings)}"
        table.append([rule, f"{peer} {version}", share, _largest(wide), _largest(narrow)])
    parts.append(_table(("rule", "library", "settings that agree", "float64", "float32"), table))
    differing: dict[tuple[str, ...], str] = {}
    for row in rows:
        if not row["agrees"]:
            differing.setdefault((row["rule"], row["peer"], row["what"], row["status"]), row["note"])
    if differing:
        parts.append("\n### Where they do not agree\n\n")
        lines = [[*entry, note] for entry, note in differing.items()]
        parts.append(_table(("rule", "library", "setting", "", "why"), lines))
    return "".join(parts)


def _largest(values: list[float]) -> str:
    finite = [float(value) for value in values if math.isfinite(float(value))]
    return f"{max(finite):.0e}" if finite else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |\n", f"|{'---|' * len(columns)}\n"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |\n" for row in rows]
    return "".join(lines)


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")


def _code(value: str) -> str:
    """As code; text with backticks of its own is fenced by two."""
    return f"`` {value} ``" if "`" in value else f"`{value}`"


def peer_results() -> dict[str, Any] | None:
    """What `make test-peers` left; None where it has not been run."""
    if not PEERS.exists():
        return None
    found: dict[str, Any] = json.loads(PEERS.read_text(encoding="utf-8"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/reference/rules.md from the registry.")
    parser.add_argument("--check", action="store_true", help="only compare with the file that is there")
    options = parser.parse_args()
    page = reference(peer_results())
    if options.check:
        return int(not TARGET.exists() or TARGET.read_text(encoding="utf-8") != page)
    TARGET.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
