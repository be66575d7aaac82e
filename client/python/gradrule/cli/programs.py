"""Implements `gradrule programs`: compiles, lists, shows and deletes programs on the server."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradrule._builder.names import counted
from gradrule._builder.specs import TensorSpec
from gradrule.cli import output
from gradrule.cli.call_flags import GRAPH_HELP, add_program_flags, load_graph, program_arguments
from gradrule.cli.connection import connect, finish

if TYPE_CHECKING:
    from gradrule import Program


def add(commands: Any) -> None:
    """Adds the commands `programs …` to the parser."""
    group = commands.add_parser("programs", help="compile, list, show and delete programs").add_subparsers(
        dest="verb", metavar="VERB", required=True
    )

    parser = group.add_parser("compile", help="check and compile a graph, and store the program")
    parser.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
    parser.add_argument("--name", help="name of the program [default: made from the content]")
    add_program_flags(parser)
    finish(parser, run_compile)

    parser = group.add_parser("list", help="list programs by name")
    finish(parser, run_list)

    parser = group.add_parser("show", help="show feeds, fetches and rules of a program")
    parser.add_argument("name", metavar="NAME")
    finish(parser, run_show)

    parser = group.add_parser("delete", help="delete a program")
    parser.add_argument("name", metavar="NAME")
    finish(parser, run_delete)


def run_compile(options: argparse.Namespace) -> int:
    """Compiles and prints the program."""
    graph = load_graph(options.graph)
    with connect(options) as client:
        program = client.compile(
            graph, name=options.name, progress=output.shows_progress(), **program_arguments(options)
        )
        _show(program, options.json)
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Prints the programs."""
    with connect(options) as client:
        programs = client.list_programs()
    if options.json:
        output.print_json([_json(program) for program in programs])
        return 0
    screen = output.console()
    rows = [
        [
            program.name,
            _specs(program.inputs),
            _specs(program.outputs),
            f"{', '.join(program.ys)} by {', '.join(program.xs)}" if program.ys else "",
            _time(program),
        ]
        for program in programs
    ]
    columns = ("name", "feeds", "fetches", "gradient of", "compiled")
    output.table(screen, counted(len(programs), "program"), columns, rows)
    if not rows:
        screen.print("no programs")
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Prints one program."""
    with connect(options) as client:
        _show(client.program(options.name), options.json)
    return 0


def run_delete(options: argparse.Namespace) -> int:
    """Deletes a program."""
    with connect(options) as client:
        client.delete_program(options.name)
    if options.json:
        output.print_json({"deleted": options.name})
    else:
        print(f"deleted {options.name}")
    return 0


def _show(program: Program, as_json: bool) -> None:
    if as_json:
        output.print_json(_json(program))
        return
    screen = output.console()
    rows = [
        ["feeds", _specs(program.inputs)],
        ["fetches", _specs(program.outputs)],
        ["gradient of", _specs(program.ys)],
        ["by", _specs(program.xs)],
        ["device", program.device],
        ["compiled", _time(program)],
        ["digest", program.digests.program],
    ]
    output.table(screen, program.name, ("", ""), [row for row in rows if row[1]])
    output.table(screen, "overrides", output.RESOLUTION_COLUMNS, output.resolution_rows(program.overrides))
    if program.default_gradient_nodes:
        screen.print(f"own gradient: {', '.join(program.default_gradient_nodes)}")
    for note in program.notes:
        screen.print(f"note: {note}")
    if program.rewritten:
        screen.print(f"rewritten: {', '.join(program.rewritten)}")


def _specs(specs: Mapping[str, TensorSpec]) -> str:
    return ", ".join(f"{spec.name}: {spec.dtype}{output.shape_text(spec.shape)}" for spec in specs.values())


def _time(program: Program) -> str:
    moment = datetime.datetime.fromtimestamp(program.create_time, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _json(program: Program) -> dict[str, object]:
    return {
        "name": program.name,
        "inputs": [asdict(spec) for spec in program.inputs.values()],
        "outputs": [asdict(spec) for spec in program.outputs.values()],
        "ys": [asdict(spec) for spec in program.ys.values()],
        "xs": [asdict(spec) for spec in program.xs.values()],
        "overrides": [asdict(item) for item in program.overrides],
        "default_gradient_nodes": program.default_gradient_nodes,
        "rewritten": program.rewritten,
        "notes": program.notes,
        "device": program.device,
        "create_time": program.create_time,
        "digests": asdict(program.digests),
    }
