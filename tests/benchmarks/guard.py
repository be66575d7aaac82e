"""`make bench-quick`: two minutes, fails where a ratio is worse than the recorded one by more than `SLACK`.

Ratios are of processor time, which other work on the machine changes least. recorded.json holds them; `--record` writes
it from a run, which should be made on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Run by path: the repository's root is where `tests.benchmarks` is found.
    sys.path.insert(0, str(ROOT))

from tests.benchmarks.context import DEFAULT, MIB, Bench, Contender, Sample, Start, measured  # noqa: E402

RECORDED = Path(__file__).with_name("recorded.json")
SLACK = 1.15
"""How many times the recorded ratio a ratio may be: one that gets worse by a fifth is noticed."""
_STARTS = 3
"""How often the servers are started anew: processes of one program differ by more than rounds of one process."""
_COUNTS = replace(DEFAULT, rounds=8, budget_s=15.0)

Ratios = dict[str, float]


def ratios() -> Ratios:
    """Measures the ratios, each the median over several starts of all servers."""
    found = [_ratios() for _ in range(_STARTS)]
    return {name: statistics.median(item[name] for item in found) for name in found[0]}


def _ratios() -> Ratios:
    """Measures the ratios of one start: each the median over rounds of gradrule's processor time by its peer's."""
    found: Ratios = {}
    with Bench(_COUNTS) as bench, bench.contenders() as start:
        kinds = ("stream", "wire", "client", "echo aio")
        tiny = _cpu_us({kind: start(kind, "tiny") for kind in kinds}, calls=100)
        for kind in kinds[:-1]:
            found[f"tiny, {kind}, against an echo"] = _median_ratio(tiny[kind], tiny["echo aio"])
        large = _cpu_us(_large(start), calls=2)
        for kind in ("wire", "client"):
            found[f"16 MiB, {kind}, against an echo"] = _median_ratio(large[kind], large["echo aio"])
        inline = _cpu_us({kind: start(kind, "aside:2000") for kind in ("wire inline", "wire")}, calls=20)
        found["second inline Evaluate, against by name"] = _median_ratio(inline["wire inline"], inline["wire"])
    return found


def _large(start: Start) -> dict[str, Contender]:
    return {kind: start(kind, f"large:{16 * MIB // 4}") for kind in ("wire", "client", "echo aio")}


def _cpu_us(contenders: Mapping[str, Contender], calls: int) -> dict[str, list[float]]:
    """Returns each contender's processor time of a call, by round."""
    found: Mapping[str, Sequence[Sample]] = measured(contenders, _COUNTS, calls=calls)
    return {name: [sample.cpu_us for sample in samples] for name, samples in found.items()}


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def worse(found: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """Returns a line for each ratio that is worse than recorded by more than the slack, or that is not recorded."""
    lines = []
    for name, ratio in found.items():
        if name not in recorded:
            lines.append(f"{name}: {ratio:.2f}, and none is recorded; `make bench-quick ARGS=--record` records it")
        elif ratio > recorded[name] * SLACK:
            lines.append(f"{name}: {ratio:.2f}; recorded {recorded[name]:.2f}, at most {recorded[name] * SLACK:.2f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, compares, and records where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write recorded.json instead of comparing with it")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    started = time.monotonic()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found = ratios()
    for name, ratio in found.items():
        known = recorded.get(name)
        print(f"{ratio:6.2f}  {'recorded: none' if known is None else f'recorded: {known:.2f}'}  {name}")
    print(f"{time.monotonic() - started:.0f} seconds")
    if options.record:
        RECORDED.write_text(json.dumps({name: round(ratio, 2) for name, ratio in found.items()}, indent=2) + "\n")
        return 0
    lines = worse(found, recorded)
    for line in lines:
        print(f"worse than recorded: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
