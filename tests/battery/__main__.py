"""`python -m tests.battery`: runs rows of the battery against its own servers on loopback.

Each row's figures are shown beside its target; a table follows at the end, one JSON object as the last line and in
`battery.json`, and the same as a page in `battery.md`. Exit code 1: a target was missed. `--scale 1`, the default,
takes hours.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.battery import report
from tests.battery.figures import Scale
from tests.battery.report import Report
from tests.battery.rows import MODULES, measure

_OUT = Path("out")


def main(arguments: Sequence[str]) -> int:
    """Runs the rows that the arguments select; returns the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    scale = Scale(options.scale, options.seed, options.out / "battery", options.seconds)
    scale.folder.mkdir(parents=True, exist_ok=True)
    if options.replay:
        return _replay(options.replay, scale, console)
    found = Report(scale)
    for name in options.rows:
        console.print(f"[bold]{name}[/bold]: runs", highlight=False)
        found.rows[name] = measure(name, scale)
        report.show_row(console, name, found.rows[name])
    report.show_table(console, found)
    line = found.as_json()
    (options.out / "battery.json").write_text(line + "\n")
    (options.out / "battery.md").write_text(found.as_markdown())
    print(line)
    return 0 if found.met else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.battery", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument(
        "--rows",
        type=_rows,
        default=tuple(MODULES),
        metavar="ROW,…",
        help=f"some of {', '.join(MODULES)} [default: all]",
    )
    parser.add_argument("--scale", type=_positive, default=1.0, help="share of the long run's numbers [default: 1]")
    parser.add_argument(
        "--seconds", type=_positive, help="of each row: what fits into them, instead of a share of the long run"
    )
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn at random [default: 1]")
    parser.add_argument("--out", type=Path, default=_OUT, help=f"folder of what is left behind [default: {_OUT}]")
    parser.add_argument(
        "--replay", type=Path, nargs="+", metavar="FILE", help="send saved inputs of the fuzzer again, and nothing else"
    )
    return parser


def _rows(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in MODULES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}: expected some of {', '.join(MODULES)}")
    return names


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _replay(paths: Sequence[Path], scale: Scale, console: Console) -> int:
    """Sends saved cases one by one to one server; returns 1 if one is still a fault."""
    # Imports TensorFlow.
    from tests.battery import fuzz
    from tests.battery.serving import served

    faults = 0
    with served(scale, "replay", **fuzz.settings()) as server:
        for path in paths:
            outcome = asyncio.run(fuzz.replay(server, path))
            faults += len(outcome.faults)
            told = [*outcome.faults, *outcome.reasons] or ["answered"]
            console.print(f"{path.name}: {'; '.join(told)} ({outcome.seconds:.2f} s)", highlight=False, markup=False)
            if server.process.poll() is not None:
                console.print(f"the front end ended with {server.process.returncode}")
                return 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
