"""`make bench-quick`: under two minutes, fails where a ratio is worse than the recorded one by more than its slack.

Ratios are of processor time, which other work on the machine changes least. recorded.json holds them; `--record` writes
it from a run, which keeps the better of the old and the new ratio unless `--replace` is given too.
"""

from __future__ import annotations

import argparse
import json
import os
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
SLACK = 1.25
"""How many times the recorded ratio a ratio may be, unless recorded.json says other."""
_COUNTS = replace(DEFAULT, rounds=5, budget_s=15.0)


def ratios() -> dict[str, float]:
    """Measures the ratios, each the least processor time of gradrule by the least of its peer."""
    found: dict[str, float] = {}
    with Bench(_COUNTS) as bench, bench.contenders() as start:
        kinds = ("stream", "wire", "client", "echo aio")
        tiny = _cheapest({kind: start(kind, "tiny") for kind in kinds}, calls=100)
        for kind in kinds[:-1]:
            found[f"tiny, {kind}, against an echo"] = tiny[kind] / tiny["echo aio"]
        large = _cheapest(_large(start), calls=2)
        for kind in ("wire", "client"):
            found[f"16 MiB, {kind}, against an echo"] = large[kind] / large["echo aio"]
        inline = _cheapest({kind: start(kind, "aside:2000") for kind in ("wire inline", "wire")}, calls=20)
        found["second inline Evaluate, against by name"] = inline["wire inline"] / inline["wire"]
    return found


def _large(start: Start) -> dict[str, Contender]:
    return {kind: start(kind, f"large:{16 * MIB // 4}") for kind in ("wire", "client", "echo aio")}


def _cheapest(contenders: Mapping[str, Contender], calls: int) -> dict[str, float]:
    found: Mapping[str, Sequence[Sample]] = measured(contenders, _COUNTS, calls=calls)
    return {name: min(sample.cpu_us for sample in samples) for name, samples in found.items()}


def worse(found: Mapping[str, float], recorded: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a line for each ratio that is worse than recorded by more than its slack, or that is not recorded."""
    lines = []
    for name, ratio in found.items():
        if name not in recorded:
            lines.append(f"{name}: {ratio:.2f}, and none is recorded; `make bench-quick ARGS=--record` records it")
            continue
        most = recorded[name]["ratio"] * recorded[name].get("slack", SLACK)
        if ratio > most:
            lines.append(f"{name}: {ratio:.2f}; recorded {recorded[name]['ratio']:.2f}, at most {most:.2f}")
    return lines


def record(
    found: Mapping[str, float], recorded: Mapping[str, Mapping[str, float]], *, is_new: bool
) -> dict[str, dict[str, float]]:
    """Returns what recorded.json is to hold. is_new: the ratios as found, even where the recorded ones are better."""
    kept: dict[str, dict[str, float]] = {}
    for name, ratio in found.items():
        before = dict(recorded.get(name, {}))
        best = ratio if is_new else min(ratio, before.get("ratio", ratio))
        kept[name] = before | {"ratio": round(best, 2)}
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, compares, and records where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write recorded.json instead of comparing with it")
    parser.add_argument("--replace", action="store_true", help="with --record: also where the recorded ratio is better")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    started = time.monotonic()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found = ratios()
    for name, ratio in found.items():
        known = recorded.get(name, {}).get("ratio")
        print(f"{ratio:6.2f}  {'recorded: none' if known is None else f'recorded: {known:.2f}'}  {name}")
    print(f"{time.monotonic() - started:.0f} seconds")
    if options.record:
        RECORDED.write_text(json.dumps(record(found, recorded, is_new=options.replace), indent=2) + "\n")
        return 0
    lines = worse(found, recorded)
    for line in lines:
        print(f"worse than recorded: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
