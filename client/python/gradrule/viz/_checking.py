"""Compares a rule with finite differences and tests its behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradrule._builder.rules import EXPRESSION, Rule
from gradrule._results.rule_infos import RuleInfo
from gradrule.common.tensor_codec import Array
from gradrule.errors import TypeMismatchError, UnsupportedError
from gradrule.viz import _behaviour as behaviour
from gradrule.viz import _slopes as slopes
from gradrule.viz._rule_text import number_text
from gradrule.viz._setups import (
    NoSetupError,
    RuleRunner,
    Setup,
    examples_used,
    params_with_examples,
    setup_of,
)

if TYPE_CHECKING:
    from gradrule import Client


@dataclass(frozen=True)
class Slopes:
    """Holds the lines of a check's picture: values for each x, for dy = 1.

    Attributes:
        x: Values of the input.
        rule: The rule's gradients.
        expected: Central finite differences of the forward function; NaN at kinks and jumps.
    """

    x: Array
    rule: Array
    expected: Array


class _NotElementwiseError(UnsupportedError):
    """Reports that an element of the gradient depends on several elements of the input."""


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


def check(
    client: Client,
    rule: RuleInfo | Rule,
    of: str | None = None,
    op_type: str | None = None,
    others: tuple[Any, ...] = (),
    params: dict[str, Any] | None = None,
    interval: tuple[float, float] | None = None,
) -> tuple[Report, Slopes | None]:
    """Checks one rule.

    Returns:
        The report, and the lines of its picture; None if the rule was compared with no function.

    Raises:
        NoSetupError: The rule is not a function of a tensor of numbers.
    """
    notes: list[str] = []
    is_formula = of is not None and of.startswith(EXPRESSION)
    setup = Setup(others=others) if is_formula else setup_of(rule, of or op_type, others)
    is_requested = of is not None
    if of is None and isinstance(rule, RuleInfo) and (rule.true_gradient or rule.kind == "op"):
        of = setup.op_type
        if of is None:
            notes.append("it is a true gradient of a region; name its formula (of=…, --of expr:…)")
    examples = examples_used(rule, params or {})
    if examples:
        notes.append(f"example values: {', '.join(f'{name}={number_text(value)}' for name, value in examples.items())}")
    low, high = interval or setup.interval
    runner = RuleRunner(client, rule, setup, params_with_examples(rule, params or {}), of)
    claims: list[slopes.InputClaim] = []
    kinks: list[slopes.Kink] = []
    lines: Slopes | None = None
    try:
        if not slopes.is_elementwise(runner, low, high):
            raise _NotElementwiseError(
                f"the rule{f' or {of}' if of else ''} uses several elements at once and cannot be compared "
                f"number by number; compare it with finite differences in a graph (client.compare, `gradrule compare`)"
            )
        if runner.has_forward:
            kinks = slopes.find_kinks(runner, low, high)
            if of is not None:
                claims = slopes.compare(runner, low, high, kinks)
                lines = Slopes(*slopes.sample(runner, low, high, kinks))
    except (NoSetupError, _NotElementwiseError, TypeMismatchError) as reason:
        # Some ops do not support float64.
        if is_requested or isinstance(reason, NoSetupError):
            raise
        notes.append(reason.message)
    report = Report(
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
    return report, lines
