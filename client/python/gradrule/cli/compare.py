"""Implements `gradrule compare`: evaluates one graph under several override maps and shows where they differ."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradrule.cli import output
from gradrule.cli.call_flags import (
    GRAPH_HELP,
    add_feed_flag,
    add_map_flags,
    add_rewrite_flag,
    add_tensor_flags,
    feeds,
    load_graph,
    override_maps,
)
from gradrule.cli.connection import connect, finish
from gradrule.cli.failures import USAGE, CommandError
from gradrule.viz import _figures as figures

if TYPE_CHECKING:
    from gradrule import Comparison


def add(commands: Any) -> None:
    """Adds the command `compare` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="compare the gradients of one graph under several override maps",
        description="Evaluates a graph with its own gradient and with each of the override maps, takes finite "
        "differences, and shows the norm of the upstream gradient of each tensor on the path from ys to xs.",
    )
    parser.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
    group = add_tensor_flags(parser)
    add_feed_flag(group)
    add_map_flags(group)
    add_rewrite_flag(group)
    group.add_argument(
        "--no-finite-differences", action="store_true", help="skip the finite differences, which take many evaluations"
    )
    parser.add_argument(
        "--output", metavar="FILE.png", type=output.picture, help="draw the norms into this file (.png, .svg, .pdf)"
    )
    finish(parser, run)


def run(options: argparse.Namespace) -> int:
    """Runs the comparison and prints it; returns the exit code."""
    maps = override_maps(options)
    if not maps:
        raise CommandError("nothing to compare: give --map NAME=OVERRIDE,… or --preset NAME=PRESET", USAGE)
    if options.output is not None:
        output.require_matplotlib()
    graph = load_graph(options.graph)
    with connect(options) as client:
        found = client.compare(
            graph,
            feeds(options),
            ys=options.y,
            xs=options.x,
            overrides=maps,
            grad_ys=dict(options.grad_y) or None,
            finite_differences=not options.no_finite_differences,
            rewrites=options.rewrite,
            progress=output.shows_progress(),
        )
    if options.output is not None:
        _draw(found, options)
    if options.json:
        output.print_json(output.plain(_json(found)))
    else:
        _show(found)
        if options.output is not None:
            print(f"wrote {options.output}")
    return 0


def _show(found: Comparison) -> None:
    screen = output.console()
    for is_x, title in ((False, "norms of upstream gradients, from the ys to the xs"), (True, "gradients of the xs")):
        tensors = dict.fromkeys((row.tensor, row.op_type) for row in found.rows if row.is_x == is_x)
        cells = {(row.tensor, row.label): _cell(row.norm, row.difference) for row in found.rows if row.is_x == is_x}
        labels = [label for label in found.labels if any(key[1] == label for key in cells)]
        rows = [[*tensor, *(cells.get((tensor[0], label), "") for label in labels)] for tensor in tensors]
        output.table(screen, title, ("tensor", "op type", *labels), rows)
    rows = [
        [row.tensor, row.label, output.percent_text(row.from_finite_differences)]
        for row in found.rows
        if row.from_finite_differences is not None
    ]
    output.table(screen, "distance from finite differences", ("x", "label", "relative"), rows)
    if found.finite_differences is not None:
        screen.print(f"finite differences: {found.finite_differences.how}")
    if found.reference is not None:
        screen.print(f"in brackets: distance from {found.reference}, relative to its norm")
    for label, first in found.first_differences.items():
        if first is None:
            screen.print(f"{label}: same gradients as {found.reference}")
            continue
        rules = ", ".join(f"{item.rule} at {item.node}" for item in first.rules)
        screen.print(
            f"{label}: differs from {found.reference} first at {first.tensor} ({output.percent_text(first.difference)})"
            f"{f', because of {rules}' if rules else ''}"
        )
    for note in found.notes:
        screen.print(f"note: {note}")


def _cell(norm: float | None, difference: float | None) -> str:
    if norm is None:
        return "none"
    text = f"{norm:.4g}"
    return text if difference is None or difference < _EQUAL else f"{text} ({output.percent_text(difference)})"


_EQUAL = 1e-6


def _draw(found: Comparison, options: argparse.Namespace) -> None:
    from gradrule.viz._lines import comparison_size, draw_comparison

    figure = figures.new_figure(*comparison_size(found))
    draw_comparison(figure.add_subplot(), found)
    figure.savefig(options.output, dpi=figures.DPI)


def _json(found: Comparison) -> dict[str, object]:
    measured = found.finite_differences
    return {
        "labels": list(found.labels),
        "reference": found.reference,
        "rows": found.table(),
        "gradients": {
            label: {x: output.array_json(value, "unconnected") for x, value in by_x.items()}
            for label, by_x in found.gradients.items()
        },
        "first_differences": {
            label: None if item is None else asdict(item) for label, item in found.first_differences.items()
        },
        "overrides": {label: _dicts(items) for label, items in found.overrides.items()},
        "finite_differences": None if measured is None else {"how": measured.how, "norms": measured.norms},
        "notes": list(found.notes),
    }


def _dicts(items: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(item) for item in items]
