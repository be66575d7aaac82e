"""Policies for ops on the path without a gradient and without an override."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.service.answers import assert_close, refused

X = np.float32([0.5, -1.5])


def graph(op_type: str) -> gr.Graph:
    """Makes y = 3 · op(2 · x) + x."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    inner = g.op(op_type, g.op("Mul", x, g.constant(np.float32(2)), name="twice"), name="inner")
    g.op("AddV2", g.op("Mul", inner, g.constant(np.float32(3)), name="thrice"), x, name="y")
    return g


# TensorFlow registers this op as not differentiable.
REGISTERED = "RandomShuffle"


@pytest.mark.parametrize(("policy", "wanted"), [("default", 1), ("zero", 1), ("pass", 7)])
def test_policy_decides_the_gradient(either: Any, policy: str, wanted: float) -> None:
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x", "twice"], "no_gradient": policy}
    r = either.evaluate(graph(REGISTERED), {"x": X}, **words)
    assert_close(r.gradients["x"], np.full(2, wanted, np.float32))
    (told,) = r.overrides
    assert (told.node, told.op_type, told.rule, told.label) == ("inner", REGISTERED, policy, "no_gradient")
    assert "inner" not in r.default_gradient_nodes
    kinds = {"default": "unconnected", "zero": "dense", "pass": "dense"}
    assert r.gradient_kinds["twice"] == kinds[policy]
    explained = either.explain(graph(REGISTERED), ys=["y"], xs=["x"], no_gradient=policy)
    assert [item.label for item in explained.overrides] == ["no_gradient"]


def test_default_policy_refuses(either: Any) -> None:
    for words in ({}, {"no_gradient": "error"}):
        with refused("NO_GRADIENT") as refusal:
            either.evaluate(graph(REGISTERED), {"x": X}, ys=["y"], xs=["x"], **words)
        refusal.says("'inner'", REGISTERED)


def test_override_has_priority_over_the_policy(client: Any) -> None:
    r = client.evaluate(
        graph(REGISTERED), {"x": X}, ys=["y"], xs=["x"], no_gradient="zero", overrides={REGISTERED: "ste"}
    )
    assert_close(r.gradients["x"], np.full(2, 7, np.float32))
    assert [item.label for item in r.overrides] == [REGISTERED]


def test_unknown_op_as_a_policy_is_refused(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float64", [None])
    g.op("NextAfter", x, g.constant(np.float64([9.0, 9.0])), name="y")
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x"]}
    assert_close(client.evaluate(g, {"x": [1.0, 2.0]}, no_gradient="pass", **words).gradients["x"], np.ones(2))
    g = gr.Graph()
    x = g.placeholder("x", "float32", [2, 3])
    g.op("Bincount", g.cast(x, "int32"), g.constant(np.int32(4)), x, name="y")
    with refused("NO_GRADIENT"):
        client.evaluate(g, {"x": np.ones((2, 3), np.float32)}, no_gradient="default", **words)
    with refused("RULE_OUTPUT") as refusal:
        client.evaluate(g, {"x": np.ones((2, 3), np.float32)}, no_gradient="pass", **words)
    refusal.says("'pass'", "'y'")


def test_policy_is_part_of_the_program(client: Any) -> None:
    digests = {
        client.evaluate(graph(REGISTERED), {"x": X}, ys=["y"], xs=["x"], no_gradient=policy).digests.program
        for policy in ("default", "zero", "pass")
    }
    assert len(digests) == 3


def test_unknown_policy_is_refused(either: Any) -> None:
    with refused("INVALID_DERIVATIVE") as refusal:
        either.evaluate(graph(REGISTERED), {"x": X}, ys=["y"], xs=["x"], no_gradient="cut")
    refusal.says("'cut'", "pass")
