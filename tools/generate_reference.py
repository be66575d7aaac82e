"""Writes docs/reference/rules.md from the registry of rules and presets and the comparison with other libraries.

python tools/generate_reference.py            # writes docs/reference/rules.md
python tools/generate_reference.py --check    # exit code 1 if the committed file differs
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gradrule._results import rule_infos
from gradrule.v1 import rule_pb2
from gradrule.viz import _rule_text as rule_text
from gradrule.viz._gallery import FAMILIES
from gradrule_server.registry.rule_entries import preset_message, rule_message
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store
from gradrule_server.rules.catalogue.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/reference/rules.md"
PEERS = ROOT / "tests/peers/results.json"

_HEAD = """\
# Rules that ship with gradrule

This page is generated from the server's catalogue by `make docs`. `gradrule rules gallery DIR` draws every rule, and
`gradrule rules show NAME` describes one.

Notation of the formulas:

- `x` is the op's input, `y` its output, `dy` the upstream gradient, `default` the op's own gradient. The functions are
  those of the [expression language](expression-language.md).
- `vjp(v)` is the op's own gradient of its input for the upstream gradient `v`; `vjp(v; W)` is the same with weights
  `W`. `op(x; W)` is the op with input `x` and weights `W`.
- `pos(v)` and `neg(v)` are the positive and the negative part. `st(v)` is `v + eps` for `v >= 0`, otherwise `v - eps`.

A param without a value is required. **True**: the rule is the true gradient of its ops, except at single points; all
other rules differ from it on purpose. **S** (per sample): the gradient of an example does not depend on other examples.
"""


def rules() -> list[rule_infos.RuleInfo]:
    """Returns all builtin rules, as clients get them."""
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
    """Returns all presets, as clients get them."""
    return [rule_infos.preset_info(preset_message(preset)) for preset in PRESETS]


def reference(peers: dict[str, Any] | None) -> str:
    """Returns the text of docs/reference/rules.md."""
    order = list(FAMILIES)
    ordered = sorted(rules(), key=lambda rule: (order.index(rule.family), rule.name))
    parts = [_HEAD]
    for family, members in itertools.groupby(ordered, key=lambda rule: rule.family):
        parts.append(f"\n## {FAMILIES[family]}\n\n")
        parts.append(_table(("rule", "dx", "params", "for", "source", ""), map(_rule_row, members)))
        parts.append(_notes(rule for rule in ordered if rule.family == family))
    parts.append("\n## Presets\n\n")
    parts.append(
        "A preset is a named list of overrides: `gr.Preset(NAME, …)` in a list of overrides, `--preset NAME` in the "
        "shell. Other overrides take precedence over those of a preset.\n\n"
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
    """Returns the comparison by rule and library, then each setting that does not agree, with the reason."""
    all_rows: list[dict[str, Any]] = results["rows"]
    rows = [row for row in all_rows if "network" not in row and "layer" not in row]
    parts = ["\n## Compared with other libraries\n\n"]
    parts.append(
        "`make test-peers` compares the rules with other libraries. A setting is a rule with values of its params, "
        "applied to tensors or a network. The columns float64 and float32 show the largest relative difference of an "
        "element in settings that agree.\n\n"
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
        parts.append("\n### Settings that do not agree\n\n")
        lines = [[*entry, note] for entry, note in differing.items()]
        parts.append(_table(("rule", "library", "setting", "", "why"), lines))
    networks, layers = ([row for row in all_rows if kind in row] for kind in ("network", "layer"))
    return "".join([*parts, _networks(networks), _layers(layers)])


def _networks(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the largest difference per network, then each preset that differs from zennit's composite."""
    if not rows:
        return ""
    text = (
        "\n### Whole networks\n\n"
        "Presets on Keras models, against zennit's composites on PyTorch models that one mapping of layers made of "
        "them, in float64, with random weights. The outputs of both agree to 1e-9. Each number is the largest "
        "difference of an element as a share of the largest element, among the settings that agree. Folded: "
        'with `rewrites=("fold_batch_norm",)`, against zennit\'s `SequentialMergeBatchNorm`, which merges eps too '
        "here. captum: guided backpropagation, deconvolution and DeepLift on the networks with ReLU, LRP with its "
        "EpsilonRule on VGG16 and on ResNet50 with merged batch norms; on the others, captum's LRP refuses modules "
        "(ReLU6, Sigmoid, SiLU, GELU, LayerNorm) or has no rule for batch norms. Max pools keep their gradients in "
        "DeepLift. ConvNeXtTiny has DepthwiseConv2D for grouped convolutions, of which TensorFlow has no float64 "
        "gradients on CPUs.\n\n"
    )
    kinds = ("own", "plain", "folded", "captum")
    columns = ("network", "settings that agree", "true gradient", "presets", "presets, folded", "captum")
    return text + _differences(rows, columns, kinds, lambda row: str(row["network"]))


def _layers(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the largest difference per layer, then each preset that differs from zennit's composite."""
    if not rows:
        return ""
    text = (
        "\n### Single layers\n\n"
        "The same for Keras layers that have a twin in PyTorch, each after a dense layer or a convolution, and linear "
        "layers alone too, where they get the rules of first layers. float64, but float32 for poolings of volumes and "
        "bilinear resizing, which TensorFlow does not compute in float64. Kernels, padding, strides, ranks and biases "
        "of a layer are settings of one row.\n\n"
    )
    columns = ("layer", "settings that agree", "true gradient", "presets", "presets, folded")
    return text + _differences(
        rows, columns, ("own", "plain", "folded"), lambda row: re.split(r",| \(| on | after | up ", row["layer"])[0]
    )


def _differences(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    kinds: Sequence[str],
    name_of: Callable[[dict[str, Any]], str],
) -> str:
    table = []
    for name, members in itertools.groupby(sorted(rows, key=name_of), key=name_of):
        settings = list(members)
        agreeing = [row for row in settings if row["agrees"]]
        largest = [_largest([row["max_rel_difference"] for row in agreeing if kind == _kind(row)]) for kind in kinds]
        share = f"{len(agreeing)} of {len(settings)}" if len(agreeing) < len(settings) else f"all {len(settings)}"
        table.append([name, share, *largest])
    parts = [_table(columns, table)]
    differing = [
        [row["what"], row["rule"], _difference(row["max_rel_difference"]), row["note"]]
        for row in rows
        if not row["agrees"]
    ]
    if differing:
        parts.append("\nSettings that differ:\n\n")
        parts.append(_table((columns[0], "preset", "difference", "why"), differing))
    return "".join(parts)


def _difference(value: float | str | None) -> str:
    return "" if value is None else f"{float(value):.0e}"


def _kind(row: dict[str, Any]) -> str:
    """Returns which column of the table of networks a row counts for."""
    if row["peer"] == "captum":
        return "captum"
    if not row["rule"].startswith("preset "):
        return "own"
    return "folded" if row["rewrites"] else "plain"


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
    """Returns Markdown code; two backticks enclose text that contains backticks."""
    return f"`` {value} ``" if "`" in value else f"`{value}`"


def peer_results() -> dict[str, Any] | None:
    """Returns the results that `make test-peers` wrote; None if it has not been run."""
    if not PEERS.exists():
        return None
    found: dict[str, Any] = json.loads(PEERS.read_text(encoding="utf-8"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/reference/rules.md from the registry.")
    parser.add_argument("--check", action="store_true", help="only compare with the committed file")
    options = parser.parse_args()
    page = reference(peer_results())
    if options.check:
        return int(not TARGET.exists() or TARGET.read_text(encoding="utf-8") != page)
    TARGET.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
