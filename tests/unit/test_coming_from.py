"""docs/guide/coming-from.md names what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradrule as gr
from gradrule import viz
from gradrule_server.rules.catalogue import BUILTINS, surrogate
from gradrule_server.rules.catalogue.presets import PRESETS

PAGE = Path(__file__).resolve().parents[2] / "docs/guide/coming-from.md"
PEERS = [
    "Tesseract",
    "UM-Bridge",
    "Triton Inference Server",
    "captum",
    "zennit",
    "snntorch and spikingjelly",
    "NNsight",
    "TensorBoard and Netron",
]


def cells() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| (.*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [row for row in rows if not row[0].startswith("in ")]


def test_each_peer_has_a_table() -> None:
    assert re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == PEERS
    assert len(cells()) >= 40


@pytest.mark.parametrize(("theirs", "ours"), cells(), ids=lambda text: text[:30])
def test_each_row_leads_somewhere_or_says_what_is_missing(theirs: str, ours: str) -> None:
    assert "](" in ours or "Missing" in ours, theirs


def test_names_exist() -> None:
    code = " ".join(re.findall(r"`([^`]+)`", " ".join(ours for _, ours in cells())))
    names = {
        "client": set(re.findall(r"client\.(\w+)", code)),
        "program": set(re.findall(r"\b(?:p|program)\.(\w+)", code)),
        "viz": set(re.findall(r"viz\.(\w+)", code)),
    }
    assert all(len(found) >= 2 for found in names.values())
    for owner, found in zip((gr.Client, gr.Program, viz), names.values(), strict=True):
        assert not [name for name in found if not hasattr(owner, name) and name not in ("inputs", "outputs")]


def test_rules_and_presets_exist() -> None:
    text = " ".join(ours for _, ours in cells())
    rules = set(re.findall(r"`(lrp_[a-z]\w*|deeplift_\w+)`", text)) | set(
        re.findall(r'(?:surrogate\(|: )"(\w+)"', text)
    )
    assert len(rules) >= 6
    assert not [name for name in rules if name not in BUILTINS]
    assert set(re.findall(r'Preset\("(\w+)"', text)) <= {preset.name for preset in PRESETS}
    assert f"{len(surrogate.RULES)} rules" in text
    composites = next(theirs for theirs, ours in cells() if theirs.startswith("composites"))
    own = {preset.name.replace("_", "") for preset in PRESETS}
    assert {name.lower() for name in re.findall(r"`(\w+)`", composites)} <= own
