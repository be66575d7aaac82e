"""`make scaling`: compile time and memory for graphs of 1,000, 10,000 and 100,000 nodes, part by part.

Every part is measured in a process of its own, in processor time. Beside gradrule's parts stands TensorFlow on the same
graph without gradrule: what grows faster than the graph there cannot grow slower here. Prints a table and, as its last
line, one JSON object; writes docs/reference/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs/reference/scaling.md"
SIZES = (1_000, 10_000, 100_000)
KINDS = {"mlp": "layers in a row", "functions": "calls of one function"}
BAR = 1.15

Measured = Mapping[str, float]
Found = dict[tuple[str, int], dict[str, Measured]]
"""(kind, nodes) → part → seconds of processor time, seconds by the clock (wall) and MiB."""

PARTS = {
    "front end: check and expand": ["front: check and expand"],
    "engine: build forward and gradient": ["engine: build"],
    "compile (both)": ["front: check and expand", "engine: build"],
    "engine: build another map on the graph": ["engine: build of another map"],
    "engine: first run": ["engine: first run"],
    "all up to the first result": ["front: check and expand", "engine: build", "engine: first run"],
    "engine: second run": ["engine: second run"],
    "TensorFlow alone: import and tf.gradients": ["tensorflow: import and tf.gradients"],
    "TensorFlow alone: first run": ["tensorflow: first run"],
    "TensorFlow alone: up to the first result": ["tensorflow: import and tf.gradients", "tensorflow: first run"],
    "TensorFlow alone: second run": ["tensorflow: second run"],
}


@dataclass(frozen=True)
class Row:
    """One line: a part on graphs of one kind, by number of nodes; None where it was not measured."""

    kind: str
    part: str
    seconds: list[float | None]
    wall: list[float | None]
    mib: list[float | None]
    sizes: Sequence[int]

    @property
    def exponent(self) -> float | None:
        """Of growth in processor time, by least squares over the logarithms."""
        return exponent(self.sizes, self.seconds)

    @property
    def memory_exponent(self) -> float | None:
        """Of growth in memory."""
        return exponent(self.sizes, self.mib)

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "part": self.part,
            "nodes": list(self.sizes),
            "seconds": [None if value is None else round(value, 4) for value in self.seconds],
            "wall": [None if value is None else round(value, 4) for value in self.wall],
            "mib": [None if value is None else round(value, 1) for value in self.mib],
            "exponent": None if self.exponent is None else round(self.exponent, 3),
            "memory_exponent": None if self.memory_exponent is None else round(self.memory_exponent, 3),
        }


def exponent(sizes: Sequence[int], values: Sequence[float | None]) -> float | None:
    """The slope of log(value) over log(size); None with fewer than two values above zero."""
    points = [
        (math.log(size), math.log(value))
        for size, value in zip(sizes, values, strict=True)
        if value is not None and value > 0
    ]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def measure(sizes: Sequence[int], kinds: Sequence[str], limit_s: float) -> Found:
    """Runs every stage; one that takes longer than `limit_s` is left out."""
    found: Found = {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    with tempfile.TemporaryDirectory() as folder:
        for nodes in sizes:
            for kind in kinds:
                parts = found.setdefault((kind, nodes), {})
                for stage in ("front", "engine", "tensorflow"):
                    command = [sys.executable, "-m", "tests.benchmarks.scaling_work", stage, kind, str(nodes), folder]
                    try:
                        done = subprocess.run(
                            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=limit_s, check=True
                        )
                    except subprocess.TimeoutExpired:
                        print(f"{stage}, {kind}, {nodes:,} nodes: not done after {limit_s:g} s", file=sys.stderr)
                        continue
                    for part, value in json.loads(done.stdout.splitlines()[-1]).items():
                        parts[f"{stage}: {part}"] = value
    return found


def rows_of(found: Found, sizes: Sequence[int], kinds: Sequence[str]) -> list[Row]:
    """The table's rows: parts, and sums of parts where all of them were measured."""

    def total(kind: str, nodes: int, parts: Sequence[str], what: str) -> float | None:
        values = [found[kind, nodes].get(part) for part in parts]
        return None if None in values else sum(value[what] for value in values if value is not None)

    return [
        Row(
            kind,
            part,
            [total(kind, nodes, parts, "seconds") for nodes in sizes],
            [total(kind, nodes, parts, "wall") for nodes in sizes],
            [total(kind, nodes, parts, "mib") for nodes in sizes],
            sizes,
        )
        for kind in kinds
        for part, parts in PARTS.items()
    ]


def cells(row: Row) -> list[str]:
    """A row as text."""

    def shown(value: float | None, places: int) -> str:
        return "–" if value is None else f"{value:,.{places}f}"

    return [
        row.part,
        *(shown(value, 3) for value in row.seconds),
        shown(row.exponent, 2),
        *(shown(value, 0) for value in row.mib),
        shown(row.memory_exponent, 2),
    ]


def header(sizes: Sequence[int]) -> list[str]:
    names = [f"{size:,}" for size in sizes]
    return ["part", *(f"s, {name}" for name in names), "exponent", *(f"MiB, {name}" for name in names), "exponent "]


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def document(rows: Sequence[Row], sizes: Sequence[int], load: float) -> str:
    """docs/reference/scaling.md."""
    lines = [
        "# Compile time and memory by size of graph",
        "",
        f"Written by `make scaling` on {machine()}; load average {load:.1f}.",
        "",
        "Seconds are processor time of all threads, because other work on the machine changes it least. MiB are the",
        "growth of the peak memory of the process; each part runs in a process of its own. Exponents are the slopes of",
        f"least-squares lines through the logarithms; the limit for compile time is {BAR:g}. TensorFlow alone is the",
        "same graph with `import_graph_def`, `tf.gradients` and `tf.function`, without overrides. In the first run,",
        "TensorFlow's optimizer processes the graph; the second run is what each later call costs.",
        "",
    ]
    for kind in dict.fromkeys(row.kind for row in rows):
        lines += [f"## {KINDS[kind][0].upper()}{KINDS[kind][1:]}", "", f"| {' | '.join(header(sizes))} |"]
        lines += ["|---|" + "---:|" * (len(header(sizes)) - 1)]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows if row.kind == kind] + [""]
    lines += [*verdicts(rows), ""]
    return "\n".join(lines)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """One sentence per kind on the bar, and where the time goes if it is missed."""
    found = []
    for kind in dict.fromkeys(row.kind for row in rows):
        by_part = {row.part: row for row in rows if row.kind == kind}
        compiled = by_part["compile (both)"].exponent
        if compiled is None:
            continue
        met = compiled <= BAR
        steepest = max(
            ("front end: check and expand", "engine: build forward and gradient"),
            key=lambda part: by_part[part].exponent or 0.0,
        )
        alone = by_part["TensorFlow alone: import and tf.gradients"].exponent
        cause = "" if met else f"; the steepest part is “{steepest}” ({by_part[steepest].exponent:.2f})"
        beside = "" if alone is None else f"; TensorFlow alone: {alone:.2f}"
        found.append(
            f"- {KINDS[kind]}: compile time grows with exponent {compiled:.2f}, the limit of {BAR:g} is "
            f"{'met' if met else 'missed'}{cause}{beside}."
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="without the 100,000 nodes; docs/reference/scaling.md is left alone"
    )
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one stage [default: 900]")
    options = parser.parse_args(arguments)
    from gradrule.cli import output

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sizes = SIZES[:-1] if options.quick else SIZES
    started = time.perf_counter()
    rows = rows_of(measure(sizes, list(KINDS), options.limit), sizes, list(KINDS))
    load = os.getloadavg()[2]
    for kind, what in KINDS.items():
        output.table(output.console(), what, header(sizes), [cells(row) for row in rows if row.kind == kind])
    if not options.quick:
        DOC.write_text(document(rows, sizes, load))
    summary = {
        "rows": [row.as_json() for row in rows],
        "bar": BAR,
        "machine": machine(),
        "load": round(load, 1),
        "seconds": round(time.perf_counter() - started, 1),
    }
    output.print_json(summary)
    return 0


if __name__ == "__main__":
    # Run by path: the repository's root is where `tests.benchmarks` is found.
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
