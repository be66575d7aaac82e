"""The reference page agrees with the registry of rules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "tools/generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_current(generator: Any) -> None:
    written = generator.TARGET.read_text(encoding="utf-8")
    assert written == generator.reference(generator.peer_results()), "run `make docs`"


def test_every_rule_has_its_entry(generator: Any) -> None:
    page = generator.reference(None)
    # A preset may have the name of a rule.
    catalogue = page.partition("## Presets")[0]
    for rule in generator.rules():
        (row,) = [line for line in catalogue.splitlines() if line.startswith(f"| **{rule.name}**")]
        shown = [*rule.aliases, *rule.op_types, rule.reference, *(info.name for info in rule.param_infos)]
        assert all(word.replace("|", "\\|") in row for word in shown), rule.name
        assert row.replace("\\|", "").count("|") == 7, rule.name
    for preset in generator.presets():
        assert f"| **{preset.name}** |" in page


def test_page_without_peer_results_has_no_comparison(generator: Any) -> None:
    assert "other libraries" not in generator.reference(None)


def test_disagreement_is_listed_with_its_reason(generator: Any) -> None:
    row = {
        "rule": "ste", "peer": "lib", "peer_version": "1", "what": "all x", "params": {}, "dtype": "float64",
        "max_abs_difference": 1e-9, "max_rel_difference": 2e-9, "tolerance": 1e-6, "agrees": True, "status": "agrees",
        "note": "",
    }  # fmt: skip
    other = row | {
        "what": "x = 0",
        "agrees": False,
        "status": "known fault",
        "note": "a | b",
        "max_rel_difference": "inf",
    }
    page = generator.reference({"rows": [row, other]})
    assert "| ste | lib 1 | 1 of 2 | 2e-09 |  |" in page
    assert "| ste | lib | x = 0 | known fault | a \\| b |" in page
