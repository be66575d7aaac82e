"""Implements `gradrule rules plot` and `gallery`, which draw rules."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradrule._builder.rules import Rule
from gradrule._results.rule_infos import RuleInfo
from gradrule.cli import output
from gradrule.cli.connection import connect, finish
from gradrule.cli.failures import USAGE, CommandError
from gradrule.cli.rules import inputs
from gradrule.viz import _figures as figures

if TYPE_CHECKING:
    from gradrule import Client
    from gradrule.viz._curves import Curve


def add(group: Any) -> None:
    """Adds the commands `rules plot` and `rules gallery` to the parser."""
    parser = group.add_parser(
        "plot",
        help="draw a rule: the op and the gradient",
        description="Draws the op and the rule's gradient over x, or over dy for rules that depend on dy only. A "
        "dashed line shows the gradient for -dy, unless it is just the negative.",
    )
    inputs.add_rule(parser)
    inputs.add_feeds(parser, "value of a further input: x1=0.5")
    inputs.add_range(parser)
    parser.add_argument("--dy", type=float, default=1.0, help="upstream gradient [default: 1]")
    parser.add_argument("--over", choices=("x", "dy"), help="the horizontal axis [default: what the rule depends on]")
    parser.add_argument(
        "--output", metavar="FILE.png", type=output.picture, help="draw into this file (.png, .svg, .pdf)"
    )
    parser.add_argument("--terminal", action="store_true", help="draw in the terminal too [default without --output]")
    finish(parser, run_plot)

    parser = group.add_parser(
        "gallery",
        help="one HTML page with every builtin rule",
        description="Writes DIR/index.html, a page that needs no other file: every builtin rule by family with its "
        "curve, formula, params, source and an example, and the presets.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    finish(parser, run_gallery)


def run_plot(options: argparse.Namespace) -> int:
    """Draws one rule."""
    from gradrule.cli.rules import curve_drawing
    from gradrule.viz._curves import curve

    others = further_inputs(options)
    if options.output is not None:
        output.require_matplotlib()
    with connect(options) as client:
        drawn = curve(
            client,
            info_of(client, options.rule),
            op_type=options.op_type,
            others=others,
            params=dict(options.param),
            interval=options.range,
            dy=options.dy,
            over=options.over,
        )
    if options.output is not None:
        from gradrule.viz._lines import draw_curve

        figure = figures.new_figure(7, 4.2)
        draw_curve(figure.add_subplot(), drawn)
        figure.savefig(options.output, dpi=figures.DPI)
    if options.json:
        output.print_json(_json(drawn))
        return 0
    screen = output.console()
    if options.terminal or options.output is None:
        curve_drawing.print_curve(screen, drawn)
    if options.output is not None:
        screen.print(f"wrote {options.output}")
    return 0


def further_inputs(options: argparse.Namespace) -> tuple[Any, ...]:
    """Returns the values of x1, x2, … in order."""
    feeds = inputs.feeds(options)
    expected = [f"x{index}" for index in range(1, len(feeds) + 1)]
    if sorted(feeds) != expected:
        raise CommandError(
            f"--feed gives further inputs, x1, x2, … without gaps, not {', '.join(sorted(feeds))}", USAGE
        )
    return tuple(feeds[name] for name in expected)


def info_of(client: Client, rule: str | Rule) -> RuleInfo | Rule:
    """Fetches a registered rule by name."""
    return client.get_rule(rule) if isinstance(rule, str) else rule


def run_gallery(options: argparse.Namespace) -> int:
    """Writes the page."""
    from gradrule.viz._gallery import page as gallery_page

    options.folder.mkdir(parents=True, exist_ok=True)
    with connect(options) as client:
        page = gallery_page(client, progress=output.shows_progress())
    path = page.save(options.folder)
    if options.json:
        output.print_json({"file": str(path), "rules": page.rules, "curves": page.curves, "presets": page.presets})
    else:
        print(f"wrote {path}: {page.rules} rules, {page.curves} with a curve, {page.presets} presets")
    return 0


def _json(curve: Curve) -> dict[str, object]:
    return {
        "title": curve.title,
        "axis": curve.axis,
        "x": output.array_json(curve.x)["values"],
        "lines": [
            {"label": line.label, "role": line.role, "values": output.array_json(line.values)["values"]}
            for line in curve.lines
        ],
        "notes": list(curve.notes),
    }
