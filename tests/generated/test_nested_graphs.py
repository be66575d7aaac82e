"""Compares more randomly nested graphs than tests/service does, and checks that they are diverse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.service.nested_cases import CASES, case, reference
from tests.service.nested_programs import Branch, Call, Loop, Map, Scan, places, statements
from tests.service.test_nested_graphs import CHUNK, QUICK, compare_chunk, registered

__all__ = ["registered"]


@pytest.mark.parametrize("first", range(QUICK, CASES, CHUNK))
def test_nested_graphs_equal_the_reference(client: Any, first: int) -> None:
    compare_chunk(client, first)


def test_cases_are_diverse() -> None:
    """Tests the test: kinds of control flow, depth, and rules called inside each kind."""
    seen: Counter[str] = Counter()
    for number in range(CASES):
        item, asked = case(number), reference(number).asked
        found = places(item.program)
        depth = max(len(place.kinds) for place in found)
        made = list(statements(item.program))
        seen.update(
            {
                "depth 2": depth >= 2,
                "depth 3": depth >= 3,
                "while": any(isinstance(one, Loop) for one in made),
                "data-dependent trips": any(isinstance(one, Loop) and isinstance(one.trips, str) for one in made),
                "TensorArray": any(isinstance(one, Loop) and one.collect for one in made),
                "map_fn": any(isinstance(one, Map) for one in made),
                "scan": any(isinstance(one, Scan) for one in made),
                "If": any(isinstance(one, Branch) and one.by == "sum" for one in made),
                "Case": any(isinstance(one, Branch) and one.by != "sum" for one in made),
                "function in function": any(place.kinds.count("function") >= 2 for place in found),
                "loop in loop": any(place.kinds.count("loop") >= 2 for place in found),
                "branch in branch": any(place.kinds.count("branch") >= 2 for place in found),
                "shared function": any(
                    count > 1 for count in Counter(one.function for one in made if isinstance(one, Call)).values()
                ),
                "x inside": any(x in {one.name for one in item.program.top.statements} for x in item.xs),
                "several xs": len(item.xs) > 1,
                "several ys": len(item.ys) > 1,
                "grad_ys": bool(item.grad_ys),
                "stop_gradients": bool(item.stopped),
                "asked": bool(asked),
                "params": any(rule.params for rule in (one.rule for one in item.overrides)),
            }
        )
        kinds = {place.name: place.kinds for place in found}
        seen.update({f"asked in a {kind}" for name in asked for kind in kinds[name]})
        seen.update({"asked at depth 2" for name in asked if len(kinds[name]) >= 2})
        seen.update({f"rule: {one.rule.kind}" for one in item.overrides if any(map(one.fits, found))})
    shares = {what: count / CASES for what, count in seen.items()}
    least = {
        "depth 2": 0.8,
        "depth 3": 0.5,
        "while": 0.5,
        "data-dependent trips": 0.3,
        "TensorArray": 0.1,
        "map_fn": 0.3,
        "scan": 0.3,
        "If": 0.4,
        "Case": 0.25,
        "function in function": 0.05,
        "loop in loop": 0.2,
        "branch in branch": 0.1,
        "shared function": 0.1,
        "x inside": 0.2,
        "several xs": 0.5,
        "several ys": 0.1,
        "grad_ys": 0.3,
        "stop_gradients": 0.1,
        "asked": 0.6,
        "params": 0.25,
        "asked in a loop": 0.2,
        "asked in a branch": 0.1,
        "asked in a function": 0.15,
        "asked at depth 2": 0.2,
        "rule: inline": 0.5,
        "rule: name": 0.2,
        "rule: graph": 0.05,
        "rule: default": 0.1,
    }
    assert {what: shares[what] for what, share in least.items() if shares[what] < share} == {}


def test_rules_change_gradients() -> None:
    """A server that ignores rules would pass if they changed nothing."""
    changed = [
        any(
            got is not None and (plain is None or not np.allclose(got, plain, rtol=1e-6, atol=0))
            for got, plain in zip(
                ruled.gradients.values(), reference(number, overridden=False).gradients.values(), strict=True
            )
        )
        for number in range(60)
        if (ruled := reference(number)).asked
    ]
    assert np.mean(changed) > 0.6
