"""Implements `gradrule explain`: shows the rule of each node without running the graph."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradrule._results.call_results import Explanation
from gradrule.cli import output
from gradrule.cli.call_flags import (
    GRAPH_HELP,
    add_program_flags,
    add_value_flags,
    call_params,
    feeds,
    load_graph,
    program_arguments,
)
from gradrule.cli.connection import connect, finish
from gradrule.cli.failures import FOUND


def add(commands: Any) -> None:
    """Adds the command `explain` to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="show the rule of each node without running the graph",
        description="Checks a graph with its overrides and lists all errors. The exit code is 1 if there are any.",
    )
    parser.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
    add_program_flags(parser)
    add_value_flags(parser)
    group = parser.add_argument_group("pictures")
    for suffix, text in _PICTURES.items():
        group.add_argument(f"--{suffix}", metavar=f"FILE.{suffix}", type=Path, help=text)
    finish(parser, run)


_PICTURES = {
    "svg": "draw the graph into this file: folded by scope, nodes coloured by rule, the path from xs to ys",
    "html": "draw the same graph as a page in one file, with foldable scopes and search",
}


def run(options: argparse.Namespace) -> int:
    """Explains a graph and prints the result; returns the exit code.

    Also accepts and checks the feeds and params of `evaluate`; they do not change the result.
    """
    graph = load_graph(options.graph)
    with connect(options) as client:
        found = client.explain(graph, feeds=feeds(options), params=call_params(options), **program_arguments(options))
    pictures = [(options.svg, found.svg), (options.html, found.html)]
    wrote = [_write(path, draw()) for path, draw in pictures if path is not None]
    if options.json:
        output.print_json(_json(found))
    else:
        _show(found, {node.name: node.op_type for node in graph.find()})
        for path in wrote:
            print(f"wrote {path}")
    return FOUND if found.findings else 0


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _show(found: Explanation, op_types: dict[str, str]) -> None:
    screen = output.console()
    if found.findings:
        rows = [[item.reason, item.node, item.field, item.message] for item in found.findings]
        output.table(screen, "wrong", ("reason", "node", "field", "problem and remedy"), rows)
        return
    specs = [
        [role, spec.name, spec.dtype, output.shape_text(spec.shape), "optional" if spec.optional else ""]
        for role, group in (("feed", found.inputs), ("fetch", found.outputs), ("y", found.ys), ("x", found.xs))
        for spec in group.values()
    ]
    output.table(screen, "tensors", ("", "name", "type", "shape", ""), specs)
    # The graph's list of nodes lacks those inside functions (`call/inner`).
    own = [[node, op_types.get(node, ""), "its own", "", "active"] for node in found.default_gradient_nodes]
    rows = [*output.resolution_rows(found.overrides), *own]
    output.table(screen, "rules", output.RESOLUTION_COLUMNS, rows)
    if found.rewritten:
        screen.print(f"rewritten: {', '.join(found.rewritten)}")


def _json(found: Explanation) -> dict[str, object]:
    return {
        "overrides": [asdict(item) for item in found.overrides],
        "default_gradient_nodes": found.default_gradient_nodes,
        "rewritten": found.rewritten,
        "notes": found.notes,
        "findings": [asdict(item) for item in found.findings],
        **{
            role: [asdict(spec) for spec in group.values()]
            for role, group in (
                ("inputs", found.inputs),
                ("outputs", found.outputs),
                ("ys", found.ys),
                ("xs", found.xs),
            )
        },
    }
