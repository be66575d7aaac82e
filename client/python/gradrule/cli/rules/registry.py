"""Implements `gradrule rules list`, `show`, `presets`, `create`, `delete` and `sample`."""

from __future__ import annotations

import argparse
from typing import Any

from gradrule._builder.names import counted, did_you_mean
from gradrule._results.rule_infos import RuleInfo
from gradrule.cli import output, parsing
from gradrule.cli.call_flags import load_graph
from gradrule.cli.connection import connect, finish
from gradrule.cli.failures import REFUSED, USAGE, CommandError
from gradrule.cli.rules import inputs, rule_json
from gradrule.viz import _rule_text as rule_text

_KINDS = ("user", "builtin", "op")


def add(group: Any) -> None:
    """Adds the commands that read and change the registry of rules to the parser."""
    parser = group.add_parser(
        "list",
        help="list rules by kind and name",
        description="Lists rules; the gradients of TensorFlow's ops only with --kind op, --search or --json.",
    )
    parser.add_argument("--kind", choices=_KINDS, help="only rules of this kind")
    parser.add_argument(
        "--search", metavar="TEXT", help="only rules with these words in their name, formula, description or ops"
    )
    parser.add_argument(
        "--family", help="only rules of this family: straight_through, surrogate, attribution, flow, stable"
    )
    finish(parser, run_list)

    parser = group.add_parser("show", help="show one rule in detail")
    parser.add_argument("name", metavar="NAME")
    finish(parser, run_show)

    parser = group.add_parser("presets", help="list presets, which are named lists of overrides for --preset")
    parser.add_argument("name", metavar="NAME", nargs="?", help="show only this preset")
    finish(parser, run_presets)

    parser = group.add_parser(
        "create",
        help="register a rule",
        description="Registers a rule. Fails if the name belongs to a rule with other content, without --replace.",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "expression",
        metavar="EXPRESSION",
        nargs="?",
        type=_expression,
        help="formula over x, y, dy, default and params: '0.5 * dy'; - is standard input",
    )
    parser.add_argument(
        "--graph", metavar="FILE", help="instead of a formula: a graph with nodes dx, dx1, …; - is standard input"
    )
    parser.add_argument(
        "--param",
        metavar="NAME[=DEFAULT]",
        type=parsing.rule_param,
        action="append",
        default=[],
        help="a param that the formula uses, with its default; may be repeated",
    )
    parser.add_argument(
        "--gradient",
        metavar="EXPRESSION",
        help="formula for the gradient of the rule, for second derivatives: its x, x1, … are the op's inputs and "
        "outputs and dy, its y are the rule's gradients",
    )
    parser.add_argument("--description", default="", help="what the rule is for")
    parser.add_argument(
        "--replace", action="store_true", help="replace your rule of this name; programs compiled with it keep it"
    )
    finish(parser, run_create)

    parser = group.add_parser("delete", help="delete a user's rule; programs compiled with it keep it")
    parser.add_argument("name", metavar="NAME")
    finish(parser, run_delete)

    parser = group.add_parser("sample", help="run a rule on numbers, without a graph")
    inputs.add_rule(parser)
    inputs.add_feeds(parser, "value of x, x1, y, dy, … as a .npy file or inline: 'x=[-2, 0.5, 3]'", "--value")
    finish(parser, run_sample)


def run_list(options: argparse.Namespace) -> int:
    """Prints the rules."""
    with connect(options) as client:
        rules = list(client.list_rules(kind=options.kind))
    if options.family is not None:
        rules = [rule for rule in rules if rule.family == options.family]
    if options.search is not None:
        rules = [rule for rule in rules if _has_words(rule, options.search)]
    if options.json:
        output.print_json([rule_json.rule_json(rule) for rule in rules])
        return 0
    screen = output.console()
    is_short = options.kind is options.family is options.search is None
    shown = [rule for rule in rules if rule.kind != "op"] if is_short else rules
    rows = [
        [
            rule.name,
            rule.family or rule.kind,
            rule.description,
            rule_text.formula_text(rule),
            rule_text.params_text(rule.param_infos),
        ]
        for rule in shown
    ]
    columns = ("name", "family", "description", "formula", "params")
    output.table(screen, counted(len(shown), "rule"), columns, rows, one_line=True)
    if screen.is_terminal and rows:
        screen.print("`gradrule rules show NAME` shows a rule in full")
    if len(shown) < len(rules):
        screen.print(f"and {counted(len(rules) - len(shown), 'gradient')} of TensorFlow's ops: --kind op")
    if not rows:
        wanted = {"of kind": options.kind, "of family": options.family, "with": options.search}
        screen.print(" ".join(["no rules", *(f"{word} {value}" for word, value in wanted.items() if value)]))
    return 0


def _expression(text: str) -> str:
    return parsing.read_stdin_text("the formula") if text == parsing.STDIN else text


def _has_words(rule: RuleInfo, words: str) -> bool:
    text = " ".join([rule.name, *rule.aliases, rule_text.formula_text(rule), rule.description, *rule.op_types]).lower()
    return all(word in text for word in words.lower().split())


def run_show(options: argparse.Namespace) -> int:
    """Prints one rule."""
    with connect(options) as client:
        print_rule(client.get_rule(options.name), options.json)
    return 0


def print_rule(rule: RuleInfo, as_json: bool) -> None:
    """Prints a rule."""
    if as_json:
        output.print_json(rule_json.rule_json(rule))
        return
    rows = [
        ["kind", rule.kind],
        ["family", rule.family],
        ["formula", rule_text.formula_text(rule)],
        ["its gradient", rule_text.gradient_text(rule)],
        ["description", rule.description],
        ["for ops", ", ".join(rule.op_types)],
        ["true gradient", "yes" if rule.true_gradient else ""],
        ["source", rule.reference],
        ["also named", ", ".join(rule.aliases)],
        ["per sample", "" if rule.per_sample is None else "yes" if rule.per_sample else "no"],
        ["hides", f"the builtin of this name, which is builtin/{rule.name}" if rule.hides_builtin else ""],
        ["digest", rule.digest],
    ]
    screen = output.console()
    output.table(screen, f"rule {rule.name}", ("", ""), [row for row in rows if row[1]])
    output.table(screen, "params", rule_text.PARAM_COLUMNS, rule_text.param_rows(rule.param_infos))


def run_presets(options: argparse.Namespace) -> int:
    """Prints the presets, or one with its overrides."""

    with connect(options) as client:
        presets = client.list_presets()
    if options.name is not None:
        names = [preset.name for preset in presets]
        presets = [preset for preset in presets if preset.name == options.name]
        if not presets:
            raise CommandError(f"there is no preset {options.name!r}.{did_you_mean(options.name, names)}", REFUSED)
    if options.json:
        output.print_json([rule_json.preset_json(preset) for preset in presets])
        return 0
    screen = output.console()
    if options.name is None:
        rows = [
            [preset.name, rule_text.params_text(preset.params), "\n".join(preset.overrides), preset.description]
            for preset in presets
        ]
        output.table(screen, counted(len(presets), "preset"), ("name", "params", "overrides", "description"), rows)
        return 0
    (preset,) = presets
    about = [
        ["description", preset.description],
        ["source", preset.reference],
        ["overrides", "\n".join(preset.overrides)],
    ]
    output.table(screen, f"preset {preset.name}", ("", ""), about)
    output.table(screen, "params", rule_text.PARAM_COLUMNS, rule_text.param_rows(preset.params))
    return 0


def run_create(options: argparse.Namespace) -> int:
    """Registers a rule and prints it."""
    import gradrule as gr

    if (options.expression is None) == (options.graph is None):
        raise CommandError("a rule is either a formula or a graph: give EXPRESSION or --graph FILE", USAGE)
    graph = None if options.graph is None else load_graph(options.graph)
    with connect(options) as client:
        rule = client.create_rule(
            options.name,
            options.expression,
            graph=graph,
            params=dict(options.param) or None,
            gradient=None if options.gradient is None else gr.Rule(options.gradient, params=dict(options.param)),
            description=options.description,
            replace=options.replace,
        )
    print_rule(rule, options.json)
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
