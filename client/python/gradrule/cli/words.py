"""The flags that say what to differentiate, shared by `evaluate`, `explain` and `programs compile`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TypedDict

from gradrule.cli import values
from gradrule.cli.failures import USAGE, CommandError

if TYPE_CHECKING:
    from gradrule import Graph, Override

PROGRAM_PREFIX = "programs/"


class Words(TypedDict):
    """Keyword arguments that `client.evaluate`, `explain` and `compile` share."""

    fetches: list[str]
    ys: list[str]
    xs: list[str]
    grad_ys: dict[Any, Any] | None
    stop_gradients: list[str]
    unconnected_gradients: str
    overrides: list[Override] | None


def add_words(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that make a program of a graph."""
    group = parser.add_argument_group("program")
    for flag, text in (
        ("--fetch", "tensor to put out"),
        ("--y", "tensor to differentiate"),
        ("--x", "tensor to differentiate with respect to"),
        ("--stop-gradient", "tensor that counts as a constant"),
    ):
        group.add_argument(flag, metavar="TENSOR", action="append", default=[], help=f"{text}; may be repeated")
    group.add_argument(
        "--grad-y",
        metavar="Y=VALUE",
        type=values.grad_y,
        action="append",
        default=[],
        help="upstream gradient of a y: a .npy file, inline [1, 2], or tensor:NAME; may be repeated",
    )
    group.add_argument(
        "--override",
        metavar="SELECTOR=RULE",
        type=values.override,
        action="append",
        default=[],
        help="which nodes get which rule: Sign=ste_sign, 'node:layer_*/Sign=NAME', 'scope:block=NAME', "
        "'Sign=expr:0.5 * dy'; the first match wins; may be repeated",
    )
    group.add_argument(
        "--unconnected", choices=("none", "zero"), help="gradient where y does not depend on x [default: none]"
    )


def add_call(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that each run has of its own."""
    group = parser.add_argument_group("values")
    group.add_argument(
        "--feed",
        metavar="NAME=VALUE",
        type=values.feed,
        action="append",
        default=[],
        help="x=FILE.npy, x=FILE.npz:KEY, 'x=[1, 2.5]', or FILE.npz for all in it; may be repeated",
    )
    group.add_argument(
        "--param",
        metavar="LABEL.PARAM=VALUE",
        type=values.call_param,
        action="append",
        default=[],
        help="value of a rule's param, by the override's op type, glob or scope; may be repeated",
    )


def words(options: argparse.Namespace) -> Words:
    """The words of `client.evaluate` that the flags stand for."""
    return {
        "fetches": options.fetch,
        "ys": options.y,
        "xs": options.x,
        "grad_ys": dict(options.grad_y) or None,
        "stop_gradients": options.stop_gradient,
        "unconnected_gradients": options.unconnected or "none",
        "overrides": options.override or None,
    }


def feeds(options: argparse.Namespace) -> dict[Any, Any]:
    """All feeds. One that is given twice is a usage error."""
    found: dict[str, Any] = {}
    for one in options.feed:
        for name, value in one.items():
            if name in found:
                raise CommandError(f"{name!r} is fed twice", USAGE)
            found[name] = value
    return found


def call_params(options: argparse.Namespace) -> dict[str, dict[str, Any]] | None:
    """Params by label, then by name."""
    found: dict[str, dict[str, Any]] = {}
    for label, name, value in options.param:
        found.setdefault(label, {})[name] = value
    return found or None


def load_graph(path: str) -> Graph:
    """The graph in a file."""
    import gradrule as gr

    return gr.load(path)


def refuse_words(options: argparse.Namespace) -> None:
    """A compiled program has its words already: giving them again is a usage error."""
    given = [
        flag
        for flag, value in (
            ("--fetch", options.fetch),
            ("--y", options.y),
            ("--x", options.x),
            ("--stop-gradient", options.stop_gradient),
            ("--override", options.override),
            ("--unconnected", options.unconnected),
        )
        if value
    ]
    if given:
        raise CommandError(f"{options.graph} is compiled and fixes {', '.join(given)} already; leave it out", USAGE)
