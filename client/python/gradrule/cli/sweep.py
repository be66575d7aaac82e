"""Implements `gradrule sweep`: evaluates one graph under many override maps, or under many values of params."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule._comparison.numeric_gradients import relative
from gradrule._results.call_results import Result, Sparse
from gradrule.cli import output, parsing
from gradrule.cli.call_flags import (
    GRAPH_HELP,
    add_feed_flag,
    add_gradient_flags,
    add_map_flags,
    add_tensor_flags,
    feeds,
    load_graph,
    override_maps,
)
from gradrule.cli.connection import connect, finish
from gradrule.cli.failures import REFUSED, UNREACHABLE, USAGE, CommandError, describe
from gradrule.common.tensor_codec import Array
from gradrule.errors import UnavailableError

if TYPE_CHECKING:
    from gradrule import SweepResult

COLUMNS = ("x", "norm", "difference", "compile ms", "run ms")


def add(commands: Any) -> None:
    """Adds the command `sweep` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "sweep",
        help="evaluate one graph under many override maps, or many values of params",
        description="Sends a graph and its feeds once, evaluates them with each override map, or with each value of a "
        "param, and shows the norm of each gradient and its distance from that of the first map.",
    )
    parser.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
    group = add_tensor_flags(parser, fetch="tensor to return", stop_gradient="tensor to treat as a constant")
    add_feed_flag(group)
    add_map_flags(group)
    group.add_argument(
        "--param",
        metavar="LABEL.PARAM=[VALUE,…]",
        type=parsing.call_params,
        action="append",
        default=[],
        help="values of a rule's param, with one override map, which is compiled once: Sign.clip=[0.5, 1, 2]; of "
        "several params, all combinations; may be repeated",
    )
    add_gradient_flags(group)
    parser.add_argument(
        "--out",
        metavar="FILE.npz",
        type=output.npz,
        help="write the arrays MAP/outputs/NAME and MAP/gradients/NAME; bfloat16 becomes float32, sparse becomes dense",
    )
    finish(parser, run)


def run(options: argparse.Namespace) -> int:
    """Runs the sweep and prints its results; returns the exit code. Raises `CommandError` if a map failed."""
    cases = _cases(options)
    graph = load_graph(options.graph)
    results: list[SweepResult] = []
    interrupt: KeyboardInterrupt | None = None
    with connect(options) as client:
        swept = client.sweep(
            graph,
            feeds(options),
            fetches=options.fetch,
            ys=options.y,
            xs=options.x,
            grad_ys=dict(options.grad_y) or None,
            stop_gradients=options.stop_gradient,
            unconnected_gradients=options.unconnected or "none",
            no_gradient=options.no_gradient or "error",
            rewrites=options.rewrite,
            progress=output.shows_progress(),
            **cases,
        )
        try:
            for done in swept:
                results.append(done)
                if isinstance(done.error, UnavailableError):
                    break
        except KeyboardInterrupt as stop:
            # What is done is shown and written.
            interrupt = stop
    if options.out is not None:
        arrays = {
            f"{done.label}/{name}": array
            for done in results
            if done.error is None
            for name, array in output.result_arrays(done.result).items()
        }
        output.write_npz(options.out, arrays)
    distances = _distances(results)
    if options.json:
        output.print_json({"results": [_json(done, distances) for done in results]})
    else:
        _show(results, distances, "params" if options.param else "map")
    if interrupt is not None:
        raise interrupt
    _raise_failures(results)
    return 0


def _cases(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `client.sweep` that say what varies. Raises `CommandError`."""
    maps = override_maps(options)
    if not options.param:
        if not maps:
            raise CommandError("nothing to evaluate: give --map NAME=OVERRIDE,… or --preset NAME=PRESET", USAGE)
        return {"maps": maps}
    if len(maps) != 1:
        raise CommandError(f"--param takes one override map, as --map or --preset, not {len(maps)}", USAGE)
    params: dict[str, dict[str, dict[str, Any]]] = {}
    for values in itertools.product(*(values for _, _, values in options.param)):
        chosen: dict[str, dict[str, Any]] = {}
        for (label, name, _), value in zip(options.param, values, strict=True):
            chosen.setdefault(label, {})[name] = value
        words = [f"{label}.{name}={value}" for label, by_name in chosen.items() for name, value in by_name.items()]
        params[", ".join(words)] = chosen
    return {"overrides": next(iter(maps.values())), "params": params}


Distances = dict[tuple[str, str], tuple[float, float | None]]
"""By label and x: the norm of the gradient, and its distance from that of the first map, relative to its norm."""


def _distances(results: Sequence[SweepResult]) -> Distances:
    found: Distances = {}
    first: dict[str, Array] = {}
    for done in results:
        if done.error is not None:
            continue
        for x, gradient in done.result.gradients.items():
            value = _dense(gradient)
            if value is not None:
                standard = first.setdefault(x, value)
                distance = None
                if standard is not value:
                    distance = relative(value, standard) if value.shape == standard.shape else float("inf")
                found[done.label, x] = float(np.linalg.norm(value.ravel())), distance
    return found


def _dense(gradient: Array | Sparse | None) -> Array | None:
    if gradient is None:
        return None
    dense = gradient.to_dense() if isinstance(gradient, Sparse) else gradient
    return dense.astype(np.complex128 if dense.dtype.kind == "c" else np.float64)


def _show(results: Sequence[SweepResult], distances: Distances, varied: str) -> None:
    screen = output.console()
    done = [item for item in results if item.error is None]
    if done:
        outputs = [output.array_row(name, value) for name, value in done[0].result.outputs.items()]
        output.table(screen, "outputs", output.ARRAY_COLUMNS, outputs)
    rows = [row for item in results for row in _rows(item, distances)]
    output.table(screen, "gradients", (varied, *COLUMNS), rows)
    if len(done) > 1 and distances:
        screen.print(f"difference: distance from {done[0].label}, relative to its norm")


def _rows(done: SweepResult, distances: Distances) -> list[list[str]]:
    if done.error is not None:
        return [[done.label, "", "failed", "", "", ""]]
    result: Result = done.result
    times = [_ms_text(result.timings.compile), _ms_text(result.timings.run)]
    rows = []
    for x in result.gradients or [""]:
        norm, distance = distances.get((done.label, x), (None, None))
        missing = result.gradient_kinds[x].replace("_", " ") if x else ""
        rows.append([done.label, x, missing if norm is None else f"{norm:.6g}", output.percent_text(distance), *times])
    return rows


def _ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:.{3 if seconds < 1 else 6}g}"


def _json(done: SweepResult, distances: Distances) -> dict[str, Any]:
    if done.error is not None:
        return {"label": done.label, "error": {"reason": done.error.reason, "message": done.error.message}}
    result: Result = done.result
    gradients = {}
    for x, value in result.gradients.items():
        norm, distance = distances.get((done.label, x), (None, None))
        gradients[x] = output.array_json(value, result.gradient_kinds[x]) | {
            "norm": output.plain(norm),
            "difference": output.plain(distance),
        }
    return {
        "label": done.label,
        "outputs": {name: output.array_json(value) for name, value in result.outputs.items()},
        "gradients": gradients,
        "overrides": [asdict(item) for item in result.overrides],
        "timings": asdict(result.timings),
    }


def _raise_failures(results: Sequence[SweepResult]) -> None:
    failed = [(done.label, done.error) for done in results if done.error is not None]
    if not failed:
        return
    texts = [f"{label}: {describe(error)}" for label, error in failed]
    code = UNREACHABLE if isinstance(failed[-1][1], UnavailableError) else REFUSED
    raise CommandError("\n".join([f"{len(failed)} of {len(results)} failed", *texts]), code)
