"""Adds the flags of the commands that run a rule: `sample`, `plot`, `check`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from gradrule.cli import parsing
from gradrule.cli.failures import USAGE, CommandError


def add_rule(parser: argparse.ArgumentParser) -> None:
    """Adds the rule argument and the flags for its params and op."""
    parser.add_argument(
        "rule", metavar="NAME", type=parsing.parse_rule, help="a rule's name, or expr:FORMULA; - is standard input"
    )
    parser.add_argument(
        "--param",
        metavar="NAME=VALUE",
        type=parsing.sample_param,
        action="append",
        default=[],
        help="value of one of the rule's params; may be repeated",
    )
    parser.add_argument("--op-type", metavar="TYPE", help="op whose outputs and gradient the rule can use")


def add_feeds(parser: argparse.ArgumentParser, text: str, *more_flags: str) -> None:
    """Adds `--feed` for the rule's variables."""
    parser.add_argument(
        "--feed",
        *more_flags,
        dest="feed",
        metavar="VARIABLE=VALUE",
        type=parsing.variable,
        action="append",
        default=[],
        help=f"{text}; may be repeated",
    )


def add_range(parser: argparse.ArgumentParser) -> None:
    """Adds `--range`."""
    parser.add_argument(
        "--range", metavar="FROM:TO", type=interval, help="range of x [default: a range that suits the op, or -3:3]"
    )


def feeds(options: argparse.Namespace) -> dict[str, Any]:
    """Returns values by variable; a variable that is given twice is a usage error."""
    given: dict[str, Any] = {}
    for feed in options.feed:
        if twice := given.keys() & feed.keys():
            raise CommandError(f"{min(twice)!r} is fed twice", USAGE)
        given.update(feed)
    return given


def interval(text: str) -> tuple[float, float]:
    """Parses `-3:3`."""
    first, colon, last = text.partition(":")
    try:
        low, high = float(first), float(last)
    except ValueError:
        low, high = 0.0, 0.0
    if not (colon and low < high and math.isfinite(low) and math.isfinite(high)):
        raise argparse.ArgumentTypeError(f"expected FROM:TO with FROM less than TO, such as -3:3, got {text!r}")
    return low, high
