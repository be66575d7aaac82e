"""`gradrule rules list`, `show` and `presets`."""

from __future__ import annotations

import argparse
from typing import Any

from gradrule._results.rule_infos import RuleInfo
from gradrule.cli import output
from gradrule.cli.connection import connect, finish
from gradrule.cli.rules import text

_KINDS = ("user", "builtin", "op")


def add(group: Any) -> None:
    """Adds the commands."""
    parser = group.add_parser("list", help="rules by kind and name")
    parser.add_argument("--kind", choices=_KINDS, help="only rules of this kind")
    parser.add_argument(
        "--family", help="only rules of this family: straight_through, surrogate, attribution, flow, stable"
    )
    finish(parser, run_list)

    parser = group.add_parser("show", help="all about one rule")
    parser.add_argument("name", metavar="NAME")
    finish(parser, run_show)

    parser = group.add_parser("presets", help="presets: named lists of overrides, for --preset")
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this one")
    finish(parser, run_presets)


def run_list(options: argparse.Namespace) -> int:
    """Prints the rules."""
    with connect(options) as client:
        rules = list(client.list_rules(kind=options.kind))
    if options.family is not None:
        rules = [rule for rule in rules if rule.family == options.family]
    if options.json:
        output.print_json([text.rule_json(rule) for rule in rules])
        return 0
    screen = output.console()
    rows = [
        [rule.name, rule.family or rule.kind, text.params(rule.param_infos), text.formula(rule), rule.description]
        for rule in rules
    ]
    output.table(screen, f"rules ({len(rules)})", ("name", "family", "params", "formula", "description"), rows)
    if not rows:
        wanted = [f"of kind {options.kind}" if options.kind else "", f"of family {options.family}"]
        screen.print(" ".join(["no rules", *filter(None, wanted[: 2 if options.family else 1])]))
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Prints one rule."""
    with connect(options) as client:
        show(client.get_rule(options.name), options.json)
    return 0


def show(rule: RuleInfo, as_json: bool) -> None:
    """Prints a rule."""
    if as_json:
        output.print_json(text.rule_json(rule))
        return
    rows = [
        ["kind", rule.kind],
        ["family", rule.family],
        ["formula", text.formula(rule)],
        ["its gradient", text.gradient(rule)],
        ["description", rule.description],
        ["meant for", ", ".join(rule.op_types)],
        ["true gradient", "yes" if rule.true_gradient else ""],
        ["from", rule.reference],
        ["also named", ", ".join(rule.aliases)],
        ["per sample", "" if rule.per_sample is None else "yes" if rule.per_sample else "no"],
        ["hides", f"the builtin of this name, which is builtin/{rule.name}" if rule.hides_builtin else ""],
        ["digest", rule.digest],
    ]
    screen = output.console()
    output.table(screen, f"rule {rule.name}", ("", ""), [row for row in rows if row[1]])
    output.table(screen, "params", text.PARAM_COLUMNS, text.param_rows(rule.param_infos))


def run_presets(options: argparse.Namespace) -> int:
    """Prints the presets, or one with its overrides."""
    from gradrule._builder.names import near
    from gradrule.cli.failures import CommandError

    with connect(options) as client:
        presets = client.list_presets()
    if options.name is not None:
        names = [preset.name for preset in presets]
        presets = [preset for preset in presets if preset.name == options.name]
        if not presets:
            raise CommandError(f"there is no preset {options.name!r}.{near(options.name, names)}")
    if options.json:
        output.print_json([text.preset_json(preset) for preset in presets])
        return 0
    screen = output.console()
    if options.name is None:
        rows = [
            [preset.name, text.params(preset.params), "\n".join(preset.overrides), preset.description]
            for preset in presets
        ]
        output.table(screen, f"presets ({len(presets)})", ("name", "params", "overrides", "description"), rows)
        return 0
    (preset,) = presets
    about = [
        ["description", preset.description],
        ["from", preset.reference],
        ["overrides", "\n".join(preset.overrides)],
    ]
    output.table(screen, f"preset {preset.name}", ("", ""), about)
    output.table(screen, "params", text.PARAM_COLUMNS, text.param_rows(preset.params))
    return 0
