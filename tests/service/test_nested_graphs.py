"""Randomly nested functions, loops and branches with overrides give the results of the flat computation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.service.answers import rules_by_node
from tests.service.graph_defs import load_graph
from tests.service.nested_cases import REGISTERED, REGISTERED_EXPRESSION, Case, case, reference
from tests.service.nested_graphs import graph_def

CHUNK = 10
QUICK = 30
"""How many cases run here; tests/generated runs the others."""


@pytest.fixture(scope="module", autouse=True)
def registered(client: Any) -> Iterator[None]:
    client.create_rule(REGISTERED, REGISTERED_EXPRESSION)
    yield
    client.delete_rule(REGISTERED)


def assert_equal(got: Any, wanted: Any, what: str) -> None:
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-10 * scale, err_msg=what, strict=True)


def compare(client: Any, item: Case) -> None:
    wanted = reference(item.number)
    r = client.evaluate(load_graph(graph_def(item.program, static=item.static)), **item.arguments())
    for name in item.fetches:
        assert_equal(r.outputs[item.tensor(name)], wanted.values[name], f"case {item.number}: output {name}")
    for x in item.xs:
        got, gradient = r.gradients[item.tensor(x)], wanted.gradients[x]
        if got is None:
            assert gradient is None, f"case {item.number}: {x} is unconnected"
        else:
            # A loop or a branch returns zeros where its executed part used nothing of x.
            gradient = np.zeros_like(wanted.values[x]) if gradient is None else gradient
            assert_equal(got, gradient, f"case {item.number}: gradient of {x}")
    assert wanted.asked <= set(rules_by_node(r)), f"case {item.number}"


def compare_chunk(client: Any, first: int) -> None:
    # Build the next case while the server compiles one.
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda number: compare(client, case(number)), range(first, first + CHUNK)):
            pass


@pytest.mark.parametrize("first", range(0, QUICK, CHUNK))
def test_nested_graphs_equal_the_reference(client: Any, first: int) -> None:
    compare_chunk(client, first)
