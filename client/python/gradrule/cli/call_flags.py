"""Defines the flags that `evaluate`, `explain`, `programs compile`, `compare` and `sweep` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from gradrule._messages.call_arguments import NoGradient, UnconnectedGradients
from gradrule.cli import parsing
from gradrule.cli.failures import USAGE, CommandError

if TYPE_CHECKING:
    from gradrule import Graph, Override, Preset
    from gradrule._builder.overrides import Overrides

PROGRAM_PREFIX = "programs/"
GRAPH_HELP = "file .pb, .pbtxt or .json, or a model of Keras or a SavedModel; - is standard input"


class ProgramArguments(TypedDict):
    """Types the keyword arguments that `client.evaluate`, `explain` and `compile` share."""

    fetches: list[str]
    ys: list[str]
    xs: list[str]
    grad_ys: dict[Any, Any] | None
    stop_gradients: list[str]
    unconnected_gradients: UnconnectedGradients
    overrides: list[Override | Preset] | None
    no_gradient: NoGradient
    rewrites: list[str]


def add_program_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that define a program: tensors, overrides, presets and rewrites."""
    group = add_tensor_flags(parser, fetch="tensor to return", stop_gradient="tensor to treat as a constant")
    group.add_argument(
        "--override",
        metavar="SELECTOR=RULE",
        type=parsing.override,
        action="append",
        default=[],
        help="assigns a rule to nodes: Sign=ste_sign, Sign=ste_sign:clip=2, @activation=lrp_pass, "
        "'node:layer_*/Sign=NAME', 'regex:conv[0-9]+=NAME', scope:block=NAME, near_xs:Conv2D=NAME, "
        "pattern:MatMul+BiasAdd=NAME, 'region:x,w>y=NAME', region:FUNCTION=NAME, 'Sign=expr:0.5 * dy'; conditions "
        f"joined by & must all hold ({', '.join(parsing.CONDITIONS)}); the first match wins; may be repeated",
    )
    group.add_argument(
        "--preset",
        metavar="NAME[:PARAM=VALUE,…]",
        type=parsing.preset,
        action="append",
        default=[],
        help="a named list of overrides; all other overrides have priority: epsilon_plus, epsilon_plus:eps=1e-4 "
        "(`gradrule rules presets` lists them); may be repeated",
    )
    add_gradient_flags(group)


def add_tensor_flags(parser: argparse.ArgumentParser, **more: str) -> Any:
    """Adds the flags for ys, xs, upstream gradients, and `more` tensors (flag: help text); returns their group."""
    group = parser.add_argument_group("program")
    texts = {"y": "tensor to differentiate", "x": "tensor to differentiate with respect to", **more}
    for word, text in texts.items():
        flag = f"--{word.replace('_', '-')}"
        group.add_argument(flag, metavar="TENSOR", action="append", default=[], help=f"{text}; may be repeated")
    group.add_argument(
        "--grad-y",
        metavar="Y=VALUE",
        type=parsing.grad_y,
        action="append",
        default=[],
        help="upstream gradient of a y: a .npy file, inline [1, 2], or tensor:NAME; may be repeated",
    )
    return group


def add_gradient_flags(group: Any) -> None:
    """Adds the flags for missing gradients, and `--rewrite`."""
    group.add_argument(
        "--unconnected", choices=("none", "zero"), help="gradient where y does not depend on x [default: none]"
    )
    group.add_argument(
        "--no-gradient",
        choices=("error", "default", "pass", "zero"),
        help="how to treat an op on the path that has no gradient [default: error]",
    )
    add_rewrite_flag(group)


def add_rewrite_flag(group: Any) -> None:
    """Adds the flag `--rewrite`."""
    group.add_argument(
        "--rewrite",
        metavar="NAME",
        action="append",
        default=[],
        help="fold_batch_norm folds batch norms into the linear ops before them; may be repeated",
    )


def add_map_flags(group: Any) -> None:
    """Adds the flags `--map` and `--preset`, which name override maps."""
    group.add_argument(
        "--map",
        metavar="NAME=OVERRIDE,…",
        type=parsing.override_map,
        action="append",
        default=[],
        help="an override map: 'guided=Relu=guided_relu', 'both=Sign=ste_sign:clip=2,preset:epsilon_plus', with the "
        "selectors of `gradrule evaluate --override`; a repeated name extends the map; may be repeated",
    )
    group.add_argument(
        "--preset",
        metavar="NAME=PRESET",
        type=parsing.preset_map,
        action="append",
        default=[],
        help="an override map that is a preset: lrp=epsilon_plus:eps=1e-4; may be repeated",
    )


def override_maps(options: argparse.Namespace) -> dict[str, Overrides | None]:
    """Returns the override maps that `--map` and `--preset` give, by name."""
    found: dict[str, list[Override | Preset]] = {}
    for label, chosen in [*options.map, *options.preset]:
        found.setdefault(label, []).extend(chosen)
    return dict(found)


def add_feed_flag(group: Any) -> None:
    """Adds the flag `--feed`."""
    group.add_argument(
        "--feed",
        metavar="NAME=VALUE",
        type=parsing.feed,
        action="append",
        default=[],
        help="x=FILE.npy, x=FILE.npz:KEY, 'x=[1, 2.5]', or FILE.npz for all its arrays; x=- and - are standard input: "
        "NumPy's formats, or JSON; may be repeated",
    )


def add_value_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the values of one call: feeds and params."""
    group = parser.add_argument_group("values")
    add_feed_flag(group)
    group.add_argument(
        "--param",
        metavar="LABEL.PARAM=VALUE",
        type=parsing.call_param,
        action="append",
        default=[],
        help="value of a rule's param, by the override's op type, glob or scope; may be repeated",
    )


def program_arguments(options: argparse.Namespace) -> ProgramArguments:
    """Returns the keyword arguments of `client.evaluate` that the flags give."""
    return {
        "fetches": options.fetch,
        "ys": options.y,
        "xs": options.x,
        "grad_ys": dict(options.grad_y) or None,
        "stop_gradients": options.stop_gradient,
        "unconnected_gradients": options.unconnected or "none",
        "overrides": [*options.override, *options.preset] or None,
        "no_gradient": options.no_gradient or "error",
        "rewrites": options.rewrite,
    }


def feeds(options: argparse.Namespace) -> dict[Any, Any]:
    """Returns all feeds by name. Raises `CommandError` for a name that is fed twice."""
    found: dict[str, Any] = {}
    for one in options.feed:
        for name, value in one.items():
            if name in found:
                raise CommandError(f"{name!r} is fed twice", USAGE)
            found[name] = value
    return found


def call_params(options: argparse.Namespace) -> dict[str, dict[str, Any]] | None:
    """Returns params by label, then by name; None without any."""
    found: dict[str, dict[str, Any]] = {}
    for label, name, value in options.param:
        found.setdefault(label, {})[name] = value
    return found or None


def load_graph(path: str) -> Graph:
    """Loads the graph in a file or, for `-`, in standard input; a missing file is a usage error."""
    import gradrule as gr
    from gradrule._tracing.loading import read_graph

    if path == parsing.STDIN:
        try:
            return read_graph(parsing.read_stdin("the graph"), "", "standard input")
        except argparse.ArgumentTypeError as cause:
            raise CommandError(str(cause), USAGE) from None
    if not Path(path).exists():
        raise CommandError(f"there is no file {path!r}", USAGE)
    return gr.load(path)


def refuse_program_flags(options: argparse.Namespace) -> None:
    """Raises `CommandError` for flags that a compiled program does not accept because it fixes them."""
    given = [
        flag
        for flag, value in (
            ("--fetch", options.fetch),
            ("--y", options.y),
            ("--x", options.x),
            ("--stop-gradient", options.stop_gradient),
            ("--override", options.override),
            ("--preset", options.preset),
            ("--unconnected", options.unconnected),
            ("--no-gradient", options.no_gradient),
            ("--rewrite", options.rewrite),
        )
        if value
    ]
    if given:
        raise CommandError(f"{options.graph} is compiled with its own {', '.join(given)}; leave these flags out", USAGE)
