"""Reads the tables of docs/reference/expression-language.md as test cases."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.rules.running import SALT, Array, number_of, value_for

DOCUMENT = Path(__file__).parents[3] / "docs/reference/expression-language.md"

_SPEC = re.compile(r"(\w+) (\w+)\[([\d,]*)\]")
_REFUSAL = re.compile(r"\*\*(\w+)\*\*(?: column (\d+))?(?:: ?(.*))?")


@dataclass
class Refusal:
    """What an error must be: reason, column (None: not told), words of its message."""

    reason: str
    column: int | None
    words: str


@dataclass
class Row:
    """A row with an expression and what it gives: a NumPy formula, or a refusal."""

    id: str
    section: str
    expression: str
    gives: str | Refusal
    inputs: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)

    def specs(self, dtype: str | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of every variable that the op has; `dtype` in place of all of them."""
        given = dict(self.inputs) or {"x0": ("float64", (2, 3))}
        if not any(name.startswith("y") for name in given):
            given["y0"] = given["x0"]
        for name in [name for name in given if name[0] in "xy"]:
            given[("default" if name[0] == "x" else "dy") + name[1:]] = given[name]
        return {name: (dtype or kind, shape) for name, (kind, shape) in given.items()}

    def types(self, family: str, dtype: str | None = None) -> tuple[int, ...]:
        """Element types of x0, x1, … or y0, y1, …"""
        specs = self.specs(dtype)
        names = sorted(name for name in specs if name.startswith(family))
        return tuple(number_of(specs[name][0]) for name in names)

    def values(self, dtype: str | None = None) -> dict[str, Array]:
        """A value for every variable and param."""
        values = {name: value_for(name, kind, shape) for name, (kind, shape) in self.specs(dtype).items()}
        values["salt"] = np.array(SALT)
        values |= {f"param/{name}": np.array(value, np.float64) for name, value in self.params.items()}
        return values


def rows(columns: str) -> list[tuple[str, list[str]]]:
    """Section and cells of every row of the tables whose header is `columns`."""
    found: list[tuple[str, list[str]]] = []
    section, within = "", False
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        if not line.startswith("|"):
            within = False
            continue
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if within and not line.startswith("|---"):
            found.append((section, cells))
        within = within or ", ".join(cells) == columns
    return found


def code(cell: str) -> str:
    """What stands between backticks."""
    assert cell.startswith("`"), cell
    assert cell.endswith("`"), cell
    return cell[1:-1]


def refusal(cell: str) -> Refusal | None:
    """The refusal that a cell says, if it says one."""
    match = _REFUSAL.fullmatch(cell)
    return match and Refusal(match[1], int(match[2]) if match[2] else None, match[3] or "")


def expression_rows() -> list[Row]:
    """Rows with inputs and a result."""
    found = []
    for section, (name, expression, inputs, gives) in rows("id, expression, inputs, gives"):
        row = Row(name, section, code(expression), refusal(gives) or code(gives))
        for part in filter(None, inputs.split("; ")):
            spec = _SPEC.fullmatch(part)
            if spec is None:
                param, _, value = part.partition("=")
                row.params[param] = [float(entry) for entry in value.strip("[]").split(",")]
                row.params[param] = row.params[param] if value.startswith("[") else row.params[param][0]
            else:
                variable = spec[1] if spec[1][-1].isdigit() else spec[1] + "0"
                row.inputs[variable] = (spec[2], tuple(int(size) for size in spec[3].split(",") if size))
        found.append(row)
    return found
