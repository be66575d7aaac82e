"""Implements `gradrule rules check`: compares a rule with finite differences and tests its behaviour."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gradrule._builder.rules import Rule
from gradrule._results.rule_infos import RuleInfo
from gradrule.cli import output
from gradrule.cli.connection import connect, finish
from gradrule.cli.output import FAILED, USAGE, CommandError
from gradrule.cli.parsing import EXPRESSION
from gradrule.cli.rules import behaviour, inputs, slopes
from gradrule.cli.rules.drawing import further_inputs, info_of
from gradrule.cli.rules.rule_text import number_text
from gradrule.cli.rules.setups import NoSetupError, RuleRunner, Setup, examples_used, params_with_examples, setup_of
from gradrule.errors import TypeMismatchError

if TYPE_CHECKING:
    from gradrule import Client


@dataclass(frozen=True)
class Report:
    """Holds the results of a check.

    Attributes:
        rule: Name or formula of the rule.
        of: Op type or `expr:FORMULA` that the rule was compared with; None if it was compared with none.
        interval: Range of x.
        claims: Comparison for each input.
        kinks: Kinks and jumps of the forward function.
        types: Results by element type of x.
        shapes: Results by shape of x.
        specials: Gradients at special values.
        samples: Test of `per_sample`; None if the rule refuses batches.
        notes: Example values that were used, and parts that were skipped, with the reason.
    """

    rule: str
    of: str | None
    interval: tuple[float, float]
    claims: tuple[slopes.InputClaim, ...]
    kinks: tuple[slopes.Kink, ...]
    types: tuple[behaviour.TypeBehaviour, ...]
    shapes: tuple[behaviour.ShapeBehaviour, ...]
    specials: tuple[behaviour.SpecialValue, ...]
    samples: behaviour.SampleBehaviour | None
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Returns whether the rule passed every comparison."""
        claims = [claim.holds for claim in self.claims]
        found = [*(item.holds for item in self.types), *(item.holds for item in self.shapes)]
        return all([*claims, *found, self.samples is None or self.samples.holds])


def add(group: Any) -> None:
    """Adds the command `rules check` to the parser."""
    parser = group.add_parser(
        "check",
        help="compare a rule with finite differences and report its behaviour",
        description="Compares a rule with central finite differences, in float64 on the server, of the op or the "
        "formula that it claims to be the gradient of, and reports its results for element types, shapes, kinks, NaN "
        "and infinity. The exit code is 1 if a claim is wrong.",
    )
    inputs.add_rule(parser)
    inputs.add_feeds(parser, "value of a further input: x1=0.5")
    inputs.add_range(parser)
    parser.add_argument(
        "--of",
        metavar="OP_TYPE | expr:FORMULA",
        help="what the rule claims to be the gradient of: Softplus, 'expr:log1p(exp(x))' [default: the op of a rule "
        "that the registry calls a true gradient]",
    )
    finish(parser, run_check)


def run_check(options: argparse.Namespace) -> int:
    """Checks one rule."""
    if options.of is not None and options.op_type is not None:
        raise CommandError("--of names the op already; omit --op-type", USAGE)
    others = further_inputs(options)
    with connect(options) as client:
        rule = info_of(client, options.rule)
        report = check(client, rule, options.of, options.op_type, others, dict(options.param), options.range)
    if options.json:
        output.print_json(output.plain({**asdict(report), "holds": report.holds}))
    else:
        _show(report)
    return 0 if report.holds else FAILED


def check(
    client: Client,
    rule: RuleInfo | Rule,
    of: str | None = None,
    op_type: str | None = None,
    others: tuple[Any, ...] = (),
    params: dict[str, Any] | None = None,
    interval: tuple[float, float] | None = None,
) -> Report:
    """Checks one rule. Raises `NoSetupError` if it is not a function of a tensor of numbers."""
    notes: list[str] = []
    is_formula = of is not None and of.startswith(EXPRESSION)
    setup = Setup(others=others) if is_formula else setup_of(rule, of or op_type, others)
    is_requested = of is not None
    if of is None and isinstance(rule, RuleInfo) and (rule.true_gradient or rule.kind == "op"):
        of = setup.op_type
        if of is None:
            notes.append("it is a true gradient of a region; name its formula with --of expr:…")
    examples = examples_used(rule, params or {})
    if examples:
        notes.append(f"example values: {', '.join(f'{name}={number_text(value)}' for name, value in examples.items())}")
    low, high = interval or setup.interval
    runner = RuleRunner(client, rule, setup, params_with_examples(rule, params or {}), of)
    claims: list[slopes.InputClaim] = []
    kinks: list[slopes.Kink] = []
    try:
        if not slopes.is_elementwise(runner, low, high):
            raise CommandError(
                f"the rule{f' or {of}' if of else ''} uses several elements at once and cannot be compared "
                f"number by number; compare it with finite differences in a graph (`gradrule compare`)"
            )
        if runner.has_forward:
            kinks = slopes.find_kinks(runner, low, high)
            claims = slopes.compare(runner, low, high, kinks) if of is not None else []
    except (CommandError, TypeMismatchError) as reason:
        # Some ops do not support float64.
        if is_requested or isinstance(reason, NoSetupError):
            raise
        notes.append(str(reason))
    return Report(
        rule=rule.name if isinstance(rule, RuleInfo) else rule.expression or "",
        of=of if claims else None,
        interval=(low, high),
        claims=tuple(claims),
        kinks=tuple(kinks),
        types=tuple(behaviour.check_types(runner, low, high)),
        shapes=tuple(behaviour.check_shapes(runner, low, high)),
        specials=tuple(behaviour.sample_special_values(runner, low, high)),
        samples=behaviour.check_samples(runner, low, high),
        notes=tuple(notes),
    )


def _show(report: Report) -> None:
    screen = output.console()
    screen.print(f"rule {report.rule}, x from {report.interval[0]:g} to {report.interval[1]:g}")
    if report.of is not None:
        _show_claims(screen, report)
    _table(
        screen,
        "kinks and jumps of the forward function, and the gradient there for dy = 1",
        ("x", "slope before", "slope after", "kind", "dx"),
        [[_g(k.x), _g(k.left), _g(k.right), "jump" if k.is_jump else "kink", _g(k.rule)] for k in report.kinks],
    )
    _table(
        screen,
        "types",
        ("x", "gives", "difference from float64", "finite", ""),
        [
            [
                t.dtype,
                t.gives,
                "" if t.difference is None else f"{t.difference:.1e}",
                _yes(t.is_finite),
                _holds(t.holds),
            ]
            for t in report.types
        ],
    )
    _table(
        screen, "shapes", ("x", "gives", ""), [[str(list(s.shape)), s.gives, _holds(s.holds)] for s in report.shapes]
    )
    _table(screen, "special values", ("x", "dy", "dx"), [[_g(s.x), _g(s.dy), _g(s.dx)] for s in report.specials])
    if report.samples is not None:
        claimed = {True: "claimed", False: "not claimed", None: "unknown"}[report.samples.claimed]
        found = "independent" if report.samples.found else "samples depend on each other"
        screen.print(f"per sample: {claimed}, {found}{'' if report.samples.holds else ': WRONG'}")
    for note in report.notes:
        screen.print(f"note: {note}")
    screen.print("all that is claimed holds" if report.holds else "a claim is WRONG")


def _show_claims(screen: output.Screen, report: Report) -> None:
    rows = [
        [
            claim.name, f"{claim.largest:.2e}", "" if claim.at is None else _g(claim.at),
            "" if claim.dy is None else _g(claim.dy), _g(claim.rule), _g(claim.expected),
            f"{claim.compared} points{f', {claim.skipped} skipped' if claim.skipped else ''}", _holds(claim.holds),
        ]
        for claim in report.claims
    ]  # fmt: skip
    columns = ("input", "largest difference", "worst at", "dy", "rule", "expected", "compared", "")
    _table(screen, f"against finite differences of {report.of}", columns, rows)


def _table(screen: output.Screen, title: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    output.table(screen, title, columns, rows)


def _g(value: float) -> str:
    return f"{value:.6g}"


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _holds(value: bool) -> str:
    return "holds" if value else "WRONG"
