"""`make bench`: gradrule against bare echoes, TensorFlow and other services, all in one run on this machine.

Prints a table and, as its last line, one JSON object, which out/bench.json keeps too. Ratios count, not times:
contenders take turns in every round, and a ratio is the median over rounds of gradrule's value divided by the peer's in
the same round. Bars are shown, not enforced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Run by path: the repository's root is where `tests.benchmarks` is found.
    sys.path.insert(0, str(ROOT))

from tests.benchmarks import (  # noqa: E402
    copies,
    instructions,
    profiling,
    rows_maps,
    rows_peers,
    rows_programs,
    rows_scale,
    rows_server,
    rows_sessions,
    rows_tiny,
    rule_cost,
)
from tests.benchmarks.context import DEFAULT, Bench, Counts  # noqa: E402
from tests.benchmarks.measure import Failed, Line, Row, Skipped, Table  # noqa: E402

OUT = ROOT / "out" / "bench.json"

GROUPS: dict[str, Callable[[Bench], Sequence[Line]]] = {
    "tiny": rows_tiny.tiny,
    "rate": rows_tiny.rate,
    "large": rows_tiny.large,
    "huge": rows_tiny.huge,
    "shared-memory": rows_tiny.shared_memory,
    "peers": rows_peers.peers,
    "batching": rows_programs.batching,
    "compute": rows_programs.compute,
    "inline": rows_programs.inline,
    "compile": rows_programs.compiling,
    "sessions": rows_sessions.sessions,
    "memory": rows_programs.memory,
    "scale": rows_scale.scale,
    "maps/resnet50": rows_maps.network("resnet50", is_frozen=False),
    "maps/resnet50-frozen": rows_maps.network("resnet50", is_frozen=True),
    "maps/transformer": rows_maps.network("transformer", is_frozen=False),
    "maps/transformer-frozen": rows_maps.network("transformer", is_frozen=True),
    "maps/many-maps": rows_maps.many_maps,
    "maps/many-programs": rows_maps.many_programs,
    "start": rows_server.start,
    "supervision": rows_server.supervision,
    "fairness": rows_server.fairness,
    "rules": rule_cost.rule_cost,
    "profile": profiling.tiny,
    "profile-large": profiling.large,
    "copies": copies.copies,
    "instructions": instructions.instructions,
}
ON_REQUEST = ("instructions", *(name for name in GROUPS if name.startswith("maps/")))
"""Groups that run only where they are named: they take many minutes."""

QUICK = replace(
    DEFAULT,
    rounds=3,
    tiny_calls=60,
    rate_calls=400,
    large_calls=2,
    examples=300,
    map_rounds=1,
    maps=20,
    map_programs=60,
    budget_s=5.0,
)


def measure(groups: Sequence[str], counts: Counts, device: str = "cpu", *, is_full: bool = False) -> list[Line]:
    """Starts what the groups need, measures their rows, and ends what it started."""
    lines: list[Line] = []
    with Bench(counts, device, is_full=is_full) as bench:
        for group in groups:
            print(f"bench: {group}", file=sys.stderr)
            try:
                lines += GROUPS[group](bench)
            except Exception as failure:  # One group that fails must not cost the figures of the others.
                traceback.print_exc()
                lines.append(Failed(group, f"all rows of {group}", "", f"{type(failure).__name__}: {failure}"))
    return lines


def show(lines: Sequence[Line]) -> None:
    """Prints the table."""
    from gradrule.cli import output

    cells, notes = [], []
    for line in lines:
        if isinstance(line, Table):
            output.table(output.console(), line.title, line.columns, line.cells)
            continue
        if isinstance(line, Skipped):
            cells.append(
                [line.work, "", line.peer, "", "", "", "", "failed" if isinstance(line, Failed) else "skipped"]
            )
            notes.append(f"{line.work}: {line.reason}")
            continue
        cells.append(_cells(line))
        if line.note:
            notes.append(f"{line.work}: {line.note}")
    columns = ("work", "gradrule", "peer", "peer's", "ratio (rounds)", "CPU ratio", "bar", "")
    output.table(output.console(), "bench", columns, cells)
    for note in dict.fromkeys(notes):
        print(f"- {note}")


def _cells(row: Row) -> list[str]:
    bar = ""
    if row.most is not None:
        bar = f"≤ {row.most:g} {row.unit}"
    elif row.bar is not None:
        bar = f"{'≥' if row.more_is_better else '≤'} {row.bar:g}"
    spread = f"{row.ratio:.2f} ({min(row.ratios):.2f}-{max(row.ratios):.2f})"
    ours, theirs = (f"{_shown(item.median)} {row.unit}" for item in (row.ours, row.theirs))
    cpu = "" if row.cpu_ratio is None else f"{row.cpu_ratio.median:.2f}"
    return [row.work, ours, row.peer, theirs, spread, cpu, bar, {True: "met", False: "missed", None: ""}[row.met]]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def summary(lines: Sequence[Line], seconds: float) -> dict[str, Any]:
    """Returns what the last line holds."""
    measured = [line for line in lines if isinstance(line, Row)]
    return {
        "rows": [line.as_json() for line in lines],
        "bars_met": sum(row.met is True for row in measured),
        "bars_missed": sum(row.met is False for row in measured),
        "skipped": sum(isinstance(line, Skipped) and not isinstance(line, Failed) for line in lines),
        "failed": sum(isinstance(line, Failed) for line in lines),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(seconds, 1),
    }


def chosen(text: str) -> list[str]:
    """Returns the groups of a comma-separated list, in the order of the table; all for an empty one.

    The part of a name before a slash chooses all groups that begin with it.
    """
    named = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted({name for name in named if name not in GROUPS and not _parts(name)})
    if unknown:
        raise argparse.ArgumentTypeError(f"there are no rows {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    wanted = {part for name in named for part in (name, *_parts(name))}
    return [name for name in GROUPS if (name in wanted if wanted else name not in ON_REQUEST)]


def _parts(name: str) -> list[str]:
    return [group for group in GROUPS if group.startswith(f"{name}/")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=chosen, default="", help=f"rows to measure, by group: {', '.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and calls: rougher figures, sooner")
    parser.add_argument("--full", action="store_true", help="the design's own sizes in rows that have a smaller form")
    parser.add_argument("--device", default="cpu", help="cpu or gpu:N, as for `gradrule serve` [default: cpu]")
    parser.add_argument("--out", type=Path, default=OUT, help="file that keeps the JSON [default: out/bench.json]")
    options = parser.parse_args(arguments)
    from gradrule.cli import output

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    started = time.perf_counter()
    lines = measure(options.rows, QUICK if options.quick else DEFAULT, options.device, is_full=options.full)
    show(lines)
    found = summary(lines, time.perf_counter() - started)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    output.print_json(found)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
