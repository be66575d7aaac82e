"""`gradrule rules`: the registry of rules."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradrule._results import RuleInfo
from gradrule.cli import output, values
from gradrule.cli.connection import add_connection, connect

_KINDS = ("user", "builtin", "op")


def add(commands: Any) -> None:
    """Adds the commands."""
    group = commands.add_parser("rules", help="list, show, create, delete and try rules").add_subparsers(
        dest="verb", metavar="VERB", required=True
    )

    parser = group.add_parser("list", help="rules by kind and name")
    parser.add_argument("--kind", choices=_KINDS, help="only rules of this kind")
    _finish(parser, run_list)

    parser = group.add_parser("show", help="all about one rule")
    parser.add_argument("name", metavar="NAME")
    _finish(parser, run_show)

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
    parser.add_argument("--description", default="", help="for people")
    _finish(parser, run_create)

    parser = group.add_parser("delete", help="forget a user's rule; programs that use it keep it")
    parser.add_argument("name", metavar="NAME")
    _finish(parser, run_delete)

    parser = group.add_parser("sample", help="run a rule on numbers, without a graph")
    parser.add_argument("name", metavar="NAME", help="a rule's name, or expr:FORMULA")
    parser.add_argument(
        "--value",
        metavar="VARIABLE=VALUE",
        type=values.variable,
        action="append",
        default=[],
        help="value of x, x1, y, dy, … as a .npy file or inline: 'x=[-2, 0.5, 3]'; may be repeated",
    )
    parser.add_argument(
        "--param",
        metavar="NAME=VALUE",
        type=values.rule_param,
        action="append",
        default=[],
        help="value of one of the rule's params; may be repeated",
    )
    parser.add_argument("--op-type", metavar="TYPE", help="op whose outputs and own gradient the rule sees")
    _finish(parser, run_sample)


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    add_connection(parser)
    parser.set_defaults(run=run)


def run_list(options: argparse.Namespace) -> int:
    """Prints the rules."""
    with connect(options) as client:
        rules = list(client.list_rules(kind=options.kind))
    if options.json:
        output.print_json([_rule_json(rule) for rule in rules])
        return 0
    screen = output.console()
    rows = [[rule.name, rule.kind, _params(rule), _content(rule), rule.description] for rule in rules]
    output.table(screen, f"rules ({len(rules)})", ("name", "kind", "params", "formula", "description"), rows)
    if not rows:
        screen.print("no rules" if options.kind is None else f"no rules of kind {options.kind}")
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Prints one rule."""
    with connect(options) as client:
        rule = client.get_rule(options.name)
    _show(rule, options.json)
    return 0


def run_create(options: argparse.Namespace) -> int:
    """Registers a rule and prints it. Whether it is a formula or a graph, and only one of them, the client checks."""
    import gradrule as gr

    graph = None if options.graph is None else gr.load(options.graph)
    with connect(options) as client:
        rule = client.create_rule(
            options.name,
            options.expression,
            graph=graph,
            params=dict(options.param) or None,
            description=options.description,
        )
    _show(rule, options.json)
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
    """Prints what a rule makes of the values."""
    given: dict[str, Any] = {}
    for value in options.value:
        given.update(value)
    params = dict(options.param)
    with connect(options) as client:
        sampled = client.sample_rule(
            values.rule_of(options.name), **given, params=params or None, op_type=options.op_type
        )
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


def _show(rule: RuleInfo, as_json: bool) -> None:
    if as_json:
        output.print_json(_rule_json(rule))
        return
    rows = [
        ["kind", rule.kind],
        ["formula", _content(rule)],
        ["params", _params(rule)],
        ["description", rule.description],
        ["meant for", ", ".join(rule.op_types)],
        ["from", rule.reference],
        ["also named", ", ".join(rule.aliases)],
        ["per sample", "" if rule.per_sample is None else "yes" if rule.per_sample else "no"],
        ["digest", rule.digest],
    ]
    output.table(output.console(), f"rule {rule.name}", ("", ""), [row for row in rows if row[1]])


def _params(rule: RuleInfo) -> str:
    return ", ".join(name if value is None else f"{name}={_number(value)}" for name, value in rule.params.items())


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _content(rule: RuleInfo) -> str:
    if rule.expression is not None:
        return rule.expression
    if rule.graph is not None:
        return f"a graph of {len(rule.graph)} bytes"
    return "TensorFlow's own" if rule.kind == "op" else ""


def _rule_json(rule: RuleInfo) -> dict[str, object]:
    found = asdict(rule)
    found["graph_bytes"] = None if rule.graph is None else len(rule.graph)
    del found["graph"]
    found["params"] = {
        name: value if value is None or isinstance(value, float) else output.array_json(value)
        for name, value in rule.params.items()
    }
    return found
