"""Random graphs and overrides against the interpreter, and whether the cases and the interpreter are worth it.

tests/service runs the first cases, this file the others. `case(number)` is the same everywhere; a failure shows
the smallest request that still fails.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.generated.cases import case
from tests.generated.comparing import Answer, compare_cases, differences, expected, registered
from tests.generated.expanded import Call, Node, expand
from tests.generated.requests import Override, Request
from tests.generated.resolution import Unclear
from tests.generated.rules import RULES, Rule
from tests.generated.shrinking import shrink
from tests.service.test_generated_overrides import CASES as QUICK

__all__ = ["registered"]

CASES = 10_000
CHUNK = 100
STUDIED = 1_000
"""How many cases the tests of the cases look at."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(QUICK, CASES, CHUNK))
def test_overrides(client: Any, first: int) -> None:
    compare_cases(client, range(first, min(first + CHUNK, CASES)))


def test_the_cases_are_hard() -> None:
    seen: Counter[str] = Counter()
    for number in range(STUDIED):
        request = case(number)
        try:
            wanted = expected(request)
        except Unclear:
            seen["unclear"] += 1
            continue
        graph = expand(request.graph)
        depth = max(len(item.around) for item in graph.items)
        results = Counter(item.name for item in graph.items)
        seen.update(
            {
                request.kind,
                "depth 2" if depth >= 2 else "depth below 2",
                *(wanted.refusals or {"answer"}),
                *({"active"} if wanted.active else set()),
                *(["several ys"] if len(request.ys) > 1 else []),
                *(["several xs"] if len(request.xs) > 1 else []),
                *(["stopped"] if request.stopped else []),
                *(["params of the call"] if request.params else []),
                *(["names shared by branches"] if max(results.values()) > 1 else []),
            }
        )
        seen.update({f"has {item.op}" for item in graph.items})
        seen.update({"several results" for item in graph.items if isinstance(item, Call) and len(item.results) > 1})
        for unit in wanted.active:
            override = request.overrides[unit.override] if unit.override >= 0 else Override(RULES[0])
            given = [name for name in _CONDITIONS if getattr(override, name) not in (None, ())]
            seen.update(
                {
                    *(f"active by {name}" for name in given),
                    *(["active carve-out"] if override.rule.is_default else []),
                    *(["active for all orders"] if override.every_order else []),
                    *(["active step"] if unit.is_step else []),
                    *(["active group"] if (override.op_type or "").startswith("@") else []),
                    *(["active carried rule"] if unit.override < 0 else []),
                    *(["active call"] if isinstance(unit.item, Call) else []),
                    *(["active loop or branch"] if isinstance(unit.item, Node) and unit.item.bodies else []),
                    *(f"active in a {holder.op}" for holder in unit.shown.around),
                }
            )
    shares = {what: seen[what] / STUDIED for what in _LEAST}
    assert {what: shares[what] for what, share in _LEAST.items() if shares[what] < share} == {}
    assert seen["unclear"] < 0.01 * STUDIED


_CONDITIONS = ("op_type", "node", "node_regex", "scope", "position", "pattern", "dtype", "depends_on", "region")
_LEAST = {
    "vjp": 0.4,
    "hvp": 0.15,
    "stacked": 0.05,
    "jacobian": 0.05,
    "batched": 0.05,
    "depth 2": 0.2,
    "answer": 0.6,
    "UNMATCHED_OVERRIDE": 0.02,
    "INACTIVE_OVERRIDE": 0.02,
    "INVALID_OVERRIDE": 0.01,
    "RULE_ARITY": 0.005,
    "several ys": 0.1,
    "several xs": 0.2,
    "stopped": 0.05,
    "params of the call": 0.02,
    "names shared by branches": 0.05,
    "several results": 0.1,
    "has StatelessWhile": 0.1,
    "has StatelessIf": 0.1,
    "has StatelessCase": 0.05,
    "active": 0.4,
    "active carve-out": 0.08,
    "active for all orders": 0.02,
    "active step": 0.02,
    "active group": 0.02,
    "active carried rule": 0.02,
    "active call": 0.03,
    "active loop or branch": 0.02,
    "active in a PartitionedCall": 0.05,
    "active in a StatelessIf": 0.02,
    "active in a StatelessCase": 0.01,
    "active in a StatelessWhile": 0.02,
    **{f"active by {name}": 0.01 for name in _CONDITIONS if name not in ("dtype", "node_regex")},
    "active by dtype": 0.003,
    "active by node_regex": 0.003,
}


def _answered(request: Request) -> Answer | None:
    """What a server would answer that is right; None where it would refuse."""
    wanted = expected(request)
    return None if wanted.refusals or wanted.may_refuse else Answer(None, wanted.numbers)


def _mutants(request: Request) -> list[Request]:
    """Requests that a server with a plain fault would have answered."""
    later = list(reversed(request.overrides))
    return [
        replace(request, overrides=later),
        replace(request, overrides=[replace(one, every_order=not one.every_order) for one in request.overrides]),
        replace(request, overrides=[one for one in request.overrides if not one.region]),
        replace(request, overrides=[one for one in request.overrides if not one.rule.is_default]),
        replace(request, stopped=()),
        replace(request, overrides=[replace(one, position=None) for one in request.overrides if one.op_type]),
    ]


def test_planted_faults_are_seen() -> None:
    """The numbers of a request with a fault differ from those of the request, for each kind of fault."""
    seen: Counter[int] = Counter()
    for number in range(STUDIED):
        request = replace(case(number), params={})
        try:
            if _answered(request) is None:
                continue
            for fault, mutant in enumerate(_mutants(request)):
                answer = _answered(mutant)
                if answer is not None:
                    found = differences(request, expected(request), answer)
                    seen[fault] += any(text.startswith(f"{request.kind} of") for text in found)
        except Unclear:
            continue
    assert all(seen[fault] >= 5 for fault in range(6)), seen


def test_shrinking_keeps_the_fault() -> None:
    """The fault: every Tanh counts as the identity. What is left is an override of a Tanh, and a graph of few nodes."""
    faulty = Rule("planted", lambda site: [site.dys[0]])

    def fails(request: Request) -> bool:
        try:
            planted = [replace(one, rule=faulty) if one.op_type == "Tanh" else one for one in request.overrides]
            right, wrong = expected(request), expected(replace(request, overrides=planted))
        except (Unclear, ValueError, KeyError, IndexError, TypeError):
            return False
        if right.refusals or wrong.refusals:
            return False
        return any(
            value is not None and other is not None and not np.allclose(value, other)
            for value, other in zip(right.numbers.values(), wrong.numbers.values(), strict=True)
        )

    number = next(number for number in range(STUDIED) if len(case(number).overrides) > 1 and fails(case(number)))
    small = shrink(case(number), fails)
    assert [override.op_type for override in small.overrides] == ["Tanh"]
    assert len(small.graph.node) < len(case(number).graph.node)


def test_positions_count_through_a_step_with_a_rule(client: Any) -> None:
    """Spiking code: the first layer lies before a step, through which gradients pass only by the override."""
    g = gr.Graph()
    x = g.placeholder("x", "float64", [2, 2])
    first = g.op("MatMul", x, g.constant(np.eye(2)), name="first")
    fired = g.op("Cast", g.op("Greater", first, g.constant(np.zeros((2, 2)))), DstT="float64")
    g.op("MatMul", fired, g.constant(np.eye(2)), name="y")
    overrides = [
        gr.Override(gr.Rule("dy"), op_type="@step"),
        gr.Override(gr.Rule("each(default * 3)"), op_type="MatMul", position="nearest_xs", label="first layer"),
    ]
    r = client.evaluate(g, {"x": np.ones((2, 2))}, ys="y", xs="x", overrides=overrides)
    assert [one.node for one in r.overrides if one.label == "first layer"] == ["first"]
