"""docs/reference/gradients.md lists every differentiable op, and a sample of its cases is tried again."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from tests.policy import gradients
from tests.policy.gradient_cases import UNTRIED, Case, cases

# Programs share the time to build and to trace; all cases together take minutes.
_SHARE = 12
# These are what gradrule computes or refuses itself.
_ALWAYS = {
    "Cumprod",
    "DepthwiseConv2dNative",
    "DynamicStitch",
    "MatrixDiagV2",
    "MulNoNan",
    "PadV2",
    "SquaredDifference",
    "Xlogy",
}


@pytest.fixture(scope="module")
def listed() -> list[Case]:
    return cases()


def test_every_differentiable_op_has_cases_or_a_reason(listed: list[Case]) -> None:
    tried = {case.op for case in listed}
    assert tried | set(UNTRIED) == gradients.differentiable_ops(), "add cases, then run `make gradients`"
    assert not tried & set(UNTRIED)


def test_page_lists_the_cases(listed: list[Case]) -> None:
    recorded = dict(gradients.read_page())
    assert sorted(map(str, listed)) == sorted(recorded), "run `make gradients`"
    assert not [name for name, outcome in recorded.items() if outcome.startswith(gradients.WRONG)]


def test_sample_has_the_outcomes_of_the_page(listed: list[Case]) -> None:
    recorded = dict(gradients.read_page())
    sample = [case for number, case in enumerate(listed) if number % _SHARE == 0 or case.op in _ALWAYS]
    found = {str(case): outcome for case, outcome in gradients.outcomes(sample)}
    assert found == {name: recorded[name] for name in found}


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch, listed: list[Case]) -> None:
    """Without the replaced gradients, TensorFlow's are wrong where it says that they are."""
    from gradrule_server.engine import op_gradients
    from gradrule_server.engine.gradient_templates import TEMPLATES

    monkeypatch.setattr(op_gradients, "_REPLACED", {})
    # Those of other tests have the right gradients, and later tests must not get the wrong ones.
    monkeypatch.setattr(TEMPLATES, "_templates", OrderedDict())
    TEMPLATES.clear()
    some = [case for case in listed if case.op in ("PadV2", "Xlogy", "DynamicStitch")]
    wrong = {case.op for case, outcome in gradients.outcomes(some) if outcome.startswith(gradients.WRONG)}
    assert wrong == {"PadV2", "Xlogy", "DynamicStitch"}
