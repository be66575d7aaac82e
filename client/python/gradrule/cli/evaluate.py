"""Implements `gradrule evaluate`: computes outputs and gradients of a graph or of a compiled program."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from gradrule._results.call_results import Result
from gradrule.cli import output
from gradrule.cli.call_flags import (
    GRAPH_HELP,
    PROGRAM_PREFIX,
    add_program_flags,
    add_value_flags,
    call_params,
    feeds,
    load_graph,
    program_arguments,
    refuse_program_flags,
)
from gradrule.cli.connection import connect, finish


def add(commands: Any) -> None:
    """Adds the command `evaluate` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "evaluate",
        help="compute outputs and gradients of a graph",
        description="Sends a graph, overrides and feeds, and shows outputs, gradients, and which node got which rule.",
    )
    parser.add_argument("graph", metavar="GRAPH", help=f"{GRAPH_HELP}; or {PROGRAM_PREFIX}ID")
    add_program_flags(parser)
    add_value_flags(parser)
    parser.add_argument(
        "--out",
        metavar="FILE.npz",
        type=output.npz,
        help="write the arrays outputs/NAME and gradients/NAME; bfloat16 becomes float32, sparse becomes dense",
    )
    finish(parser, run)


def run(options: argparse.Namespace) -> int:
    """Evaluates the graph or program, and prints or writes the result; returns the exit code."""
    result = _evaluate(options)
    if options.out is not None:
        output.write_npz(options.out, output.result_arrays(result))
    if options.json:
        output.print_json(_json(result))
    else:
        _show(result)
    return 0


def _evaluate(options: argparse.Namespace) -> Result:
    if not options.graph.startswith(PROGRAM_PREFIX):
        graph = load_graph(options.graph)
        with connect(options) as client:
            return client.evaluate(
                graph, feeds=feeds(options), params=call_params(options), **program_arguments(options)
            )
    refuse_program_flags(options)
    with connect(options) as client:
        program = client.program(options.graph)
        grad_ys = dict(options.grad_y) or None
        return program.evaluate(feeds(options), params=call_params(options), grad_ys=grad_ys)


def _show(result: Result) -> None:
    screen = output.console()
    outputs = [output.array_row(name, value) for name, value in result.outputs.items()]
    output.table(screen, "outputs", output.ARRAY_COLUMNS, outputs)
    gradients = [output.array_row(name, value, result.gradient_kinds[name]) for name, value in result.gradients.items()]
    output.table(screen, "gradients", output.ARRAY_COLUMNS, gradients)
    output.table(screen, "overrides", output.RESOLUTION_COLUMNS, output.resolution_rows(result.overrides))
    if result.default_gradient_nodes:
        screen.print(f"own gradient: {', '.join(result.default_gradient_nodes)}")
    if result.rewritten:
        screen.print(f"rewritten: {', '.join(result.rewritten)}")
    times = result.timings
    screen.print(
        f"{result.device}: queue {times.queue * 1e3:.3g} ms, compile {times.compile * 1e3:.3g} ms, "
        f"run {times.run * 1e3:.3g} ms"
    )


def _json(result: Result) -> dict[str, object]:
    return {
        "outputs": {name: output.array_json(value) for name, value in result.outputs.items()},
        "gradients": {
            name: output.array_json(value, result.gradient_kinds[name]) for name, value in result.gradients.items()
        },
        "overrides": [asdict(item) for item in result.overrides],
        "default_gradient_nodes": result.default_gradient_nodes,
        "rewritten": result.rewritten,
        "notes": result.notes,
        "device": result.device,
        "timings": asdict(result.timings),
        "digests": asdict(result.digests),
    }
