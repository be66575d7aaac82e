"""Generated graphs with random overrides, dtypes and shapes give the same results as local TensorFlow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradrule as gr
from tests.samples import size
from tests.service import reference
from tests.service.answers import dense, statuses
from tests.service.generated import COMPLEX, FLOATS, Case, Nested, Rule, cases, nested_cases, values
from tests.service.graph_defs import all_nodes, build_graph_def, load_graph, placeholder

GRAPHS = size(80, 220)
QUICK = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
SEEN: Counter[str] = Counter()


def as_override(rule: Rule, **selectors: Any) -> gr.Override:
    """Returns the override; optional, because a generated node need not lie on the path."""
    return gr.Override(rule.expression if rule.op_rule else gr.Rule(rule.expression), optional=True, **selectors)


def assert_equal(got: Any, wanted: Any, dtype: str) -> None:
    """Compares dtype, shape and values within the dtype's rounding error; NaN and infinity must agree."""
    got = dense(got)
    assert got.dtype == np.asarray(wanted).dtype
    assert got.shape == np.shape(wanted)
    tolerance = (FLOATS | COMPLEX)[dtype]
    a, b = reference.numpy_of(got), reference.numpy_of(wanted)
    # Compare errors with the tensor's largest value: cancelled sums have no relative accuracy.
    finite = np.abs(b[np.isfinite(b)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


def compare(client: Any, case: Case) -> None:
    """Runs one case on the server and in local TensorFlow."""
    wanted = reference.evaluate(
        case.graph_def, case.feeds, ["y"], ["y"], case.xs, rules={node: rule.python for node, rule in case.overrides}
    )
    r = client.evaluate(
        load_graph(case.graph_def),
        feeds=case.feeds,
        fetches=["y"],
        ys=["y"],
        xs=case.xs,
        overrides=[as_override(rule, node=node) for node, rule in case.overrides] or None,
    )
    assert_equal(r.outputs["y"], wanted.outputs["y"], case.dtype)
    for x in case.xs:
        assert (r.gradients[x] is None) == (wanted.gradients[x] is None)
        if wanted.gradients[x] is not None:
            assert_equal(r.gradients[x], wanted.gradients[x], case.dtype)
    assert {node for node, status in statuses(r).items() if status == "active"} == wanted.asked
    SEEN["graphs"] += 1
    SEEN["rules asked"] += len(wanted.asked)
    SEEN[case.dtype] += 1


@settings(max_examples=GRAPHS, derandomize=True, deadline=None, database=None, suppress_health_check=QUICK)
@given(case=cases())
def test_generated_graphs_equal_tensorflow(client: Any, case: Case) -> None:
    compare(client, case)


def test_generator_reaches_every_dtype_and_calls_rules() -> None:
    """Tests the test."""
    if not SEEN:
        pytest.skip("test_generated_graphs_equal_tensorflow did not run")
    assert SEEN["graphs"] >= 0.9 * GRAPHS
    assert SEEN["rules asked"] >= 0.7 * GRAPHS
    assert all(SEEN[dtype] >= 0.1 * GRAPHS for dtype in FLOATS)


@settings(max_examples=size(20, 50), derandomize=True, deadline=None, database=None, suppress_health_check=QUICK)
@given(case=nested_cases())
def test_generated_nested_graphs_equal_tensorflow(client: Any, case: Nested) -> None:
    rules = {node.name: case.rule.python for node in all_nodes(case.flat_def) if node.op == case.op_type}
    wanted = reference.evaluate(case.flat_def, {"x": case.feed}, ["y"], ["y"], ["x"], rules=rules)
    r = client.evaluate(
        load_graph(case.graph_def),
        feeds={"x": case.feed},
        fetches=["y"],
        ys=["y"],
        xs=["x"],
        overrides=[as_override(case.rule, op_type=case.op_type)],
    )
    assert_equal(r.outputs["y"], wanted.outputs["y"], case.dtype)
    assert_equal(r.gradients["x"], wanted.gradients["x"], case.dtype)
    assert ("active" in statuses(r).values()) == bool(wanted.asked)


@settings(max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=QUICK)
@given(data=st.data(), dtype=st.sampled_from(sorted(COMPLEX)))
def test_generated_complex_graphs_equal_tensorflow(client: Any, data: st.DataObject, dtype: str) -> None:
    import tensorflow as tf

    ops = {"Square": tf.square, "Neg": tf.negative, "Identity": tf.identity, "Sin": tf.sin, "Conj": tf.math.conj}
    chain = data.draw(st.lists(st.sampled_from(sorted(ops)), min_size=1, max_size=4))
    overridden = data.draw(st.sampled_from(chain))
    x = data.draw(st.composite(values)([3], dtype))

    def build() -> None:
        value = placeholder("x", dtype)
        for op_type in chain:
            value = ops[op_type](value)
        tf.identity(value, name="y")

    graph_def = build_graph_def(build)
    upstream = np.array([1 + 1j, 2, -0.5j], dtype)
    rules = {node.name: doubled for node in graph_def.node if node.op == overridden}
    wanted = reference.evaluate(graph_def, {"x": x}, ["y"], ["y"], ["x"], rules=rules, grad_ys=[upstream])
    r = client.evaluate(
        load_graph(graph_def),
        feeds={"x": x},
        fetches=["y"],
        ys=["y"],
        xs=["x"],
        grad_ys=[upstream],
        overrides={overridden: gr.Rule("2 * dy")},
    )
    assert_equal(r.outputs["y"], wanted.outputs["y"], dtype)
    assert_equal(r.gradients["x"], wanted.gradients["x"], dtype)


def doubled(op: Any, dy: Any) -> Any:
    return dy * 2
