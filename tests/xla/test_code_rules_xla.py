"""Code rules compiled by XLA give the results of NumPy written from their formulas."""

from __future__ import annotations

import pytest

from tests.rules.code_cases import CASES, Case
from tests.rules.code_sites import check, evaluate, given
from tests.rules.test_code_rules import FEW


@pytest.mark.parametrize("case", [case for case in CASES if case.only_xla or (case in FEW and case.has_xla)], ids=str)
def test_rule_compiled_by_xla_equals_its_formula(case: Case) -> None:
    operands, dys = given(case, "float32")
    check(case, evaluate(case, operands, dys, jit=True), operands, dys)
