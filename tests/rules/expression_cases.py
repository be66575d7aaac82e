"""Lists one case for each expression rule of the catalogue; `code_cases` has those of code rules."""

from __future__ import annotations

from collections.abc import Mapping

from tests.rules import attribution_cases, flow_cases, straight_through_cases, surrogate_cases
from tests.rules.expression_case import Case

CASES: Mapping[str, Case] = {
    **straight_through_cases.CASES,
    **surrogate_cases.CASES,
    **attribution_cases.CASES,
    **flow_cases.FLOW,
    **flow_cases.STABLE,
}
