"""Reads the examples in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "docs/guide"
ADDRESS = "localhost:8470"
"""Address of the server in all examples."""

_BLOCK = re.compile(r"<!-- (?:quickstart|example|guide): (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)


def read_example(page: Path, name: str) -> str:
    """Returns the blocks of a page that are marked with a name, as one text."""
    found = [code for marker, code in _BLOCK.findall(page.read_text(encoding="utf-8")) if marker == name]
    assert found, f"{page.name} has no example {name}"
    return "\n".join(found)


def example_names(page: Path) -> set[str]:
    """Returns the names of all marked blocks of a page."""
    return {marker for marker, _ in _BLOCK.findall(page.read_text(encoding="utf-8"))}
