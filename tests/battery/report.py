"""Shows figures: a few lines per row, a table of all, and one JSON object."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.battery.figures import Figures, Scale

_SHOWN_FINDINGS = 5


@dataclass(frozen=True)
class MeasuredRow:
    """Holds a row's figures and its duration."""

    figures: Figures
    seconds: float


@dataclass
class Report:
    """Describes one run."""

    scale: Scale
    rows: dict[str, MeasuredRow] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Returns whether every row met its target."""
        return all(row.figures.met for row in self.rows.values())

    def as_json(self) -> str:
        """Returns one line of JSON."""
        found = {
            "met": self.met,
            "scale": self.scale.share,
            "seconds": self.scale.seconds,
            "seed": self.scale.seed,
            "machine": machine(),
            "rows": {name: asdict(row.figures) | {"seconds": round(row.seconds, 1)} for name, row in self.rows.items()},
        }
        return json.dumps(_finite(found), allow_nan=False)

    def as_markdown(self) -> str:
        """Returns a page: how it was measured, and a table."""
        on = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine().items())
        how = f"{self.scale.seconds:g} s a row" if self.scale.seconds else f"{self.scale.share:g} of the long run"
        lines = [
            "# What the battery measured last",
            "",
            f"`make battery`, {how}, seed {self.scale.seed}; {on}.",
            "",
            "| row | target | cases | failures | met | s | figures |",
            "|---|---|---|---|---|---|---|",
        ]
        yes = "yes (sample)" if self.scale.is_sample else "yes"
        for name, row in self.rows.items():
            found = row.figures
            cells = [name, found.target, f"{found.cases:,}", f"{found.failures:,}", yes if found.met else "**no**"]
            lines.append(f"| {' | '.join([*cells, f'{row.seconds:.0f}', _brief(found.details)])} |")
        missed = [
            (name, row.figures.findings[:_SHOWN_FINDINGS]) for name, row in self.rows.items() if not row.figures.met
        ]
        for name, findings in missed:
            lines += ["", f"What {name} missed:", "", *(f"- {line}" for line in findings)]
        return "\n".join(lines) + "\n"


def machine() -> dict[str, Any]:
    """Describes the machine."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "grpc": metadata.version("grpcio"),
    }


def show_row(console: Console, name: str, row: MeasuredRow) -> None:
    """Prints the figures of a row."""
    figures = row.figures
    console.print(
        f"[bold]{name}[/bold]: {_verdict(figures)}, {figures.cases:,} cases, {figures.failures:,} failures, "
        f"{row.seconds:.0f} s; target: {escape(figures.target)}",
        highlight=False,
    )
    for line in figures.findings[:_SHOWN_FINDINGS]:
        console.print(f"  {line}", highlight=False, markup=False)


def show_table(console: Console, report: Report) -> None:
    """Prints all rows."""
    table = Table(title="battery", title_justify="left")
    for heading in ("row", "target", "cases", "failures", "met", "figures"):
        table.add_column(heading, justify="right" if heading in ("cases", "failures") else "left", overflow="fold")
    for name, row in report.rows.items():
        figures = row.figures
        cells = (escape(figures.target), f"{figures.cases:,}", f"{figures.failures:,}", _verdict(figures))
        table.add_row(name, *cells, escape(_brief(figures.details)))
    console.print(table)


def _verdict(figures: Figures) -> str:
    return "[green]met[/green]" if figures.met else "[red]missed[/red]"


def _brief(details: Mapping[str, Any]) -> str:
    """Formats the figures that are numbers."""
    kept = {name: value for name, value in details.items() if isinstance(value, int | float) and value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in kept.items())


def _finite(value: Any) -> Any:
    """Removes numbers that JSON does not support."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
