"""Implements `gradrule rules check`: compares a rule with finite differences and tests its behaviour."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from gradrule.cli import output
from gradrule.cli.connection import connect, finish
from gradrule.cli.failures import FOUND, USAGE, CommandError
from gradrule.cli.rules import inputs
from gradrule.cli.rules.drawing import further_inputs, info_of
from gradrule.viz import _figures as figures
from gradrule.viz._checking import Report, Slopes, check


def add(group: Any) -> None:
    """Adds the command `rules check` to the parser."""
    parser = group.add_parser(
        "check",
        help="compare a rule with finite differences and report its behaviour",
        description="Compares a rule with central finite differences, in float64 on the server, of the op or the "
        "formula that it claims to be the gradient of, and reports its results for element types, shapes, kinks, NaN "
        "and infinity. The exit code is 1 if a claim is wrong.",
    )
    inputs.add_rule(parser)
    inputs.add_feeds(parser, "value of a further input: x1=0.5")
    inputs.add_range(parser)
    parser.add_argument(
        "--of",
        metavar="OP_TYPE | expr:FORMULA",
        help="what the rule claims to be the gradient of: Softplus, 'expr:log1p(exp(x))' [default: the op of a rule "
        "that the registry calls a true gradient]",
    )
    parser.add_argument(
        "--output",
        metavar="FILE.png",
        type=output.picture,
        help="draw both into this file (.png, .svg, .pdf)",
    )
    finish(parser, run_check)


def run_check(options: argparse.Namespace) -> int:
    """Checks one rule."""
    if options.of is not None and options.op_type is not None:
        raise CommandError("--of names the op already; omit --op-type", USAGE)
    others = further_inputs(options)
    if options.output is not None:
        output.require_matplotlib()
    with connect(options) as client:
        rule = info_of(client, options.rule)
        report, lines = check(client, rule, options.of, options.op_type, others, dict(options.param), options.range)
    if options.output is not None:
        _draw(report, lines, options)
    if options.json:
        output.print_json(output.plain({**asdict(report), "holds": report.holds}))
    else:
        _show(report)
        if options.output is not None:
            print(f"wrote {options.output}")
    return 0 if report.holds else FOUND


def _draw(report: Report, lines: Slopes | None, options: argparse.Namespace) -> None:
    from gradrule.viz._lines import draw_check

    if lines is None:
        raise CommandError("--output has nothing to draw without a function to compare the rule with; give --of", USAGE)
    figure = figures.new_figure(7.5, 4.4)
    draw_check(figure.add_subplot(), report, lines)
    figure.savefig(options.output, dpi=figures.DPI)


def _show(report: Report) -> None:
    screen = output.console()
    screen.print(f"rule {report.rule}, x from {report.interval[0]:g} to {report.interval[1]:g}")
    if report.of is not None:
        _show_claims(screen, report)
    _table(
        screen,
        "kinks and jumps of the forward function, and the gradient there for dy = 1",
        ("x", "slope before", "slope after", "kind", "dx"),
        [[_g(k.x), _g(k.left), _g(k.right), "jump" if k.is_jump else "kink", _g(k.rule)] for k in report.kinks],
    )
    _table(
        screen,
        "types",
        ("x", "gives", "difference from float64", "finite", ""),
        [
            [
                t.dtype,
                t.gives,
                "" if t.difference is None else f"{t.difference:.1e}",
                _yes(t.is_finite),
                _holds(t.holds),
            ]
            for t in report.types
        ],
    )
    _table(
        screen, "shapes", ("x", "gives", ""), [[str(list(s.shape)), s.gives, _holds(s.holds)] for s in report.shapes]
    )
    _table(screen, "special values", ("x", "dy", "dx"), [[_g(s.x), _g(s.dy), _g(s.dx)] for s in report.specials])
    if report.samples is not None:
        claimed = {True: "claimed", False: "not claimed", None: "unknown"}[report.samples.claimed]
        found = "independent" if report.samples.found else "samples depend on each other"
        screen.print(f"per sample: {claimed}, {found}{'' if report.samples.holds else ': WRONG'}")
    for note in report.notes:
        screen.print(f"note: {note}")
    screen.print("all that is claimed holds" if report.holds else "a claim is WRONG")


def _show_claims(screen: output.Screen, report: Report) -> None:
    rows = [
        [
            claim.name, f"{claim.largest:.2e}", "" if claim.at is None else _g(claim.at),
            "" if claim.dy is None else _g(claim.dy), _g(claim.rule), _g(claim.expected),
            f"{claim.compared} points{f', {claim.skipped} skipped' if claim.skipped else ''}", _holds(claim.holds),
        ]
        for claim in report.claims
    ]  # fmt: skip
    columns = ("input", "largest difference", "worst at", "dy", "rule", "expected", "compared", "")
    _table(screen, f"against finite differences of {report.of}", columns, rows)


def _table(screen: output.Screen, title: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    output.table(screen, title, columns, rows)


def _g(value: float) -> str:
    return f"{value:.6g}"


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _holds(value: bool) -> str:
    return "holds" if value else "WRONG"
