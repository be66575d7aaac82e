"""`gradrule rules create`, `delete` and `sample`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradrule.cli import output, values
from gradrule.cli.connection import connect, finish
from gradrule.cli.rules import inputs
from gradrule.cli.rules.listing import show


def add(group: Any) -> None:
    """Adds the commands."""
    parser = group.add_parser(
        "create",
        help="register a rule",
        description="Registers a rule. Equal content again changes nothing; other content under a taken name fails.",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "expression", metavar="EXPRESSION", nargs="?", help="formula over x, y, dy, default and params: '0.5 * dy'"
    )
    parser.add_argument(
        "--graph", metavar="FILE", type=Path, help="in place of a formula a graph with nodes dx, dx1, …"
    )
    parser.add_argument(
        "--param",
        metavar="NAME[=DEFAULT]",
        type=values.rule_param,
        action="append",
        default=[],
        help="a param that the formula uses, with its default; may be repeated",
    )
    parser.add_argument(
        "--gradient",
        metavar="EXPRESSION",
        help="formula for the rule's own gradient, for second derivatives: its x, x1, … are the op's inputs, outputs "
        "and dy, its y the rule's gradients",
    )
    parser.add_argument("--description", default="", help="for people")
    finish(parser, run_create)

    parser = group.add_parser("delete", help="forget a user's rule; programs that use it keep it")
    parser.add_argument("name", metavar="NAME")
    finish(parser, run_delete)

    parser = group.add_parser("sample", help="run a rule on numbers, without a graph")
    inputs.add_rule(parser)
    inputs.add_feeds(parser, "value of x, x1, y, dy, … as a .npy file or inline: 'x=[-2, 0.5, 3]'", "--value")
    finish(parser, run_sample)


def run_create(options: argparse.Namespace) -> int:
    """Registers a rule and prints it; the client checks that it is either an expression or a graph."""
    import gradrule as gr

    graph = None if options.graph is None else gr.load(options.graph)
    with connect(options) as client:
        rule = client.create_rule(
            options.name,
            options.expression,
            graph=graph,
            params=dict(options.param) or None,
            gradient=None if options.gradient is None else gr.Rule(options.gradient, params=dict(options.param)),
            description=options.description,
        )
    show(rule, options.json)
    return 0


def run_delete(options: argparse.Namespace) -> int:
    """Deletes a rule."""
    with connect(options) as client:
        client.delete_rule(options.name)
    if options.json:
        output.print_json({"deleted": options.name})
    else:
        print(f"deleted {options.name}")
    return 0


def run_sample(options: argparse.Namespace) -> int:
    """Prints the gradients that a rule computes from the values."""
    given, params = inputs.feeds(options), dict(options.param)
    with connect(options) as client:
        sampled = client.sample_rule(options.rule, **given, params=params or None, op_type=options.op_type)
    if options.json:
        output.print_json(
            {
                "gradients": {
                    name: output.array_json(value, "unconnected") for name, value in sampled.gradients.items()
                },
                "outputs": {name: output.array_json(value) for name, value in sampled.outputs.items()},
            }
        )
        return 0
    screen = output.console()
    outputs = [output.array_row(name, value) for name, value in sampled.outputs.items()]
    output.table(screen, "outputs", output.ARRAY_COLUMNS, outputs)
    gradients = [output.array_row(name, value, "unconnected") for name, value in sampled.gradients.items()]
    output.table(screen, "gradients", output.ARRAY_COLUMNS, gradients)
    return 0
