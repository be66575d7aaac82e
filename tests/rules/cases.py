"""One case per rule of the catalogue that is data, in its order. Rules that are code have theirs in `code_cases`."""

from __future__ import annotations

from collections.abc import Mapping

from tests.rules import attribution_cases, flow_cases, straight_through_cases, surrogate_cases
from tests.rules.case import Case

CASES: Mapping[str, Case] = {
    **straight_through_cases.CASES,
    **surrogate_cases.CASES,
    **attribution_cases.CASES,
    **flow_cases.FLOW,
    **flow_cases.STABLE,
}
