"""gradrule's half of `make test-peers`: computes what the peers computed and compares.

python -m tests.peers.compare FOLDER reads what `tests.peers.reference` wrote, starts a server of its own, prints a
table and writes the rows as JSON. Exit code 1 where a difference exceeds its tolerance, where a rule is missing, or
where a known fault of a peer is none any more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import gradrule as gr
from tests.peers.cases import Array, Case, Reference
from tests.peers.runs import run

AGREES, DIFFERS, KNOWN_FAULT, MISSING = "agrees", "differs", "known fault of the peer", "missing rule"
FAULT_IS_GONE, REFUSED = "known fault is gone", "refused"
EXPLAINED, DIFFERENCE_IS_GONE = "explained", "explained difference is gone"
_PASSES = (AGREES, KNOWN_FAULT, EXPLAINED)
_HEADER = (
    "Written by `make test-peers`. max_rel_difference: the largest difference of an element relative to the peer's "
    "element, or to `floor` times the peer's largest element where that is more; it decides. A known fault is a place "
    "where the peer contradicts its own documentation, or the paper that it cites; there the two must differ. "
    "Explained: gradrule differs on purpose."
)
_STYLES = {AGREES: "green", KNOWN_FAULT: "yellow", EXPLAINED: "yellow"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where tests.peers.reference wrote")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.json"), help="file to write")
    parser.add_argument("-k", default="", metavar="TEXT", help="only cases whose rule, peer or name contains TEXT")
    parser.add_argument("--all", action="store_true", help="a line per case; otherwise cases that agree are summed up")
    arguments = parser.parse_args()
    reference = Reference.load(arguments.folder)
    cases = [case for case in reference.cases if arguments.k in f"{case.rule} {case.peer} {case.what}"]
    if not cases:
        parser.error(f"no case contains {arguments.k!r}")
    # Each case is a program of its own, and those of whole networks are large: none is kept for later calls.
    with gr.local(device="cpu", program_cache=1) as client:
        rows = [row_of(client, reference, case) for case in cases]
    show(rows, arguments.all)
    if not arguments.k:
        arguments.results.write_text(as_json(rows))
    counts = Counter(row["status"] for row in rows)
    passed = sum(counts[status] for status in _PASSES)
    print(f"{passed} passed, {len(rows) - passed} failed")
    return 0 if passed == len(rows) else 1


def row_of(client: gr.Client, reference: Reference, case: Case) -> dict[str, Any]:
    """A row of the results."""
    row: dict[str, Any] = {
        "rule": case.rule,
        "peer": case.peer,
        "peer_version": reference.versions[case.peer],
        "what": case.what,
        "params": dict(case.params),
        "dtype": case.dtype,
        "max_abs_difference": None,
        "max_rel_difference": None,
        "tolerance": case.tolerance,
        "floor": case.floor,
        "agrees": False,
        "status": MISSING,
        "note": case.known_fault or case.explained or (f"not compared: {case.skip}" if case.skip else ""),
    }
    if case.run["kind"] == "keras":
        kind = "layer" if case.run["is_layer"] else "network"
        row |= {kind: case.run["model"], "rewrites": list(case.run["rewrites"])}
    try:
        ours = run(client, reference, case)
    except gr.errors.GradruleError as error:
        row["status"] = MISSING if error.reason == "UNKNOWN_RULE" else REFUSED
        row["note"] = f"{error.reason}: {str(error).splitlines()[0]}"
        return row
    except (AttributeError, TypeError) as error:
        # A word of the contract that the client does not have yet.
        row["note"] = f"{type(error).__name__}: {error}"
        return row
    absolute, relative, where = difference(ours, reference.references(case), reference.skipped(case), case.floor)
    row["max_abs_difference"], row["max_rel_difference"] = short(absolute), short(relative)
    row["agrees"] = relative <= case.tolerance
    if case.known_fault:
        row["status"] = FAULT_IS_GONE if row["agrees"] else KNOWN_FAULT
        row["note"] += f" ({where})"
    elif case.explained:
        row["status"] = DIFFERENCE_IS_GONE if row["agrees"] else EXPLAINED
    else:
        row["status"] = AGREES if row["agrees"] else DIFFERS
        row["note"] = "; ".join(filter(None, [row["note"], "" if row["agrees"] else where]))
    return row


def difference(
    ours: dict[str, Array], theirs: dict[str, Array], skipped: Array | None, floor: float
) -> tuple[float, float, str]:
    """Largest absolute and relative difference, and where it lies. Infinite where only one of the two is finite."""
    worst = (0.0, 0.0, "")
    for name, reference in theirs.items():
        value = np.asarray(ours[name], np.float64)
        reference = reference.astype(np.float64)
        if value.shape != reference.shape:
            return float("inf"), float("inf"), f"d{name} has shape {value.shape}, the peer's {reference.shape}"
        kept = np.ones(value.shape, bool) if skipped is None else ~skipped
        finite = kept & np.isfinite(reference)
        largest = np.abs(reference[finite]).max(initial=0.0)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            same = (value == reference) | (np.isnan(value) & np.isnan(reference)) | ~kept
            gap = np.where(same, 0.0, np.abs(value - reference))
            relative = np.where(same, 0.0, gap / np.maximum(np.abs(reference), floor * largest))
        gap, relative = (np.where(np.isnan(part), np.inf, part) for part in (gap, relative))
        index = np.unravel_index(np.argmax(relative), relative.shape) if relative.size else ()
        if relative.size and relative[index] > worst[1]:
            place = f"[{', '.join(str(int(i)) for i in index)}]" if index else ""
            text = f"d{name}{place} is {value[index]:.6g} here, {reference[index]:.6g} there"
            worst = (float(gap.max()), float(relative[index]), text)
    return worst


def as_json(rows: Sequence[dict[str, Any]]) -> str:
    """One line per row, so that a change of a row is a change of a line."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{{"about": {json.dumps(_HEADER)},\n"rows": [\n{lines}\n]}}\n'


def short(value: float) -> float | str:
    """Two digits; JSON has no infinity."""
    return float(f"{value:.2g}") if np.isfinite(value) else "inf"


def show(rows: Sequence[dict[str, Any]], every: bool) -> None:
    """The table: a line per rule, peer and type, or per case; what does not pass always has a line of its own."""
    table = Table(title="gradrule and its peers", title_justify="left")
    for column in ("rule", "peer", "what", "dtype", "cases", "max abs", "max rel", "tolerance", "status"):
        table.add_column(
            column, overflow="fold", justify="right" if column in ("cases", "max abs", "max rel") else "left"
        )
    groups: dict[Any, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows):
        together = row["status"] in (AGREES, MISSING) and not every
        key = (row["status"], row["rule"], row["peer"], row["dtype"], row["tolerance"]) if together else number
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        row = group[0]
        what = row["what"] if len(group) == 1 else f"{row['what']}, …"
        text = row["status"] if row["status"] == AGREES else f"{row['status']}: {row['note']}"
        largest = [max((entry[name] for entry in group), key=_as_number) for name in _DIFFERENCES]
        table.add_row(
            row["rule"], row["peer"], what, row["dtype"], str(len(group)), *(_text(value) for value in largest),
            f"{row['tolerance']:g}", f"[{_STYLES.get(row['status'], 'bold red')}]{text}[/]",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    counts = Counter(row["status"] for row in rows)
    print(", ".join(f"{status}: {count}" for status, count in counts.most_common()))


_DIFFERENCES = ("max_abs_difference", "max_rel_difference")


def _as_number(value: float | str | None) -> float:
    return -1.0 if value is None else float(value)


def _text(value: float | str | None) -> str:
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
