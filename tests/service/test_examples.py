"""Common examples from TensorFlow's documentation and forums, each with both clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.service.answers import assert_close, refused, rules_by_node, statuses

RuleMaker = Callable[..., str]


def graph_of_op(op_type: str, shape: list[int | None] | None = None, dtype: str = "float32") -> gr.Graph:
    """Makes x → y with one op of one input."""
    g = gr.Graph()
    g.op(op_type, g.placeholder("x", dtype, [None] if shape is None else shape), name="y")
    return g


def gradient_of(client: Any, g: gr.Graph, x: list[float], **words: Any) -> Any:
    """Returns the answer for y and its gradient at x."""
    return client.evaluate(g, feeds={"x": x}, fetches=["y"], ys=["y"], xs=["x"], **words)


def test_floor_takes_the_gradient_of_identity(either: Any) -> None:
    x = [0.5, -1.5, 2.0]
    plain = gradient_of(either, graph_of_op("Floor"), x)
    assert plain.gradients["x"] is None
    r = gradient_of(either, graph_of_op("Floor"), x, overrides={"Floor": "Identity"})
    assert_close(r.outputs["y"], np.float32([0, -2, 2]))
    assert_close(r.gradients["x"], np.float32([1, 1, 1]))
    assert rules_by_node(r) == {"y": "Identity"}


def test_identity_with_a_custom_gradient(either: Any, rule: RuleMaker) -> None:
    rule("CustomGrad", "5 * dy")
    r = gradient_of(either, graph_of_op("Identity"), [1.0, -2.0], overrides={"Identity": "CustomGrad"})
    assert_close(r.outputs["y"], np.float32([1, -2]))
    assert_close(r.gradients["x"], np.float32([5, 5]))


def test_builder_context_is_the_override_map_of_tensorflow(either: Any, rule: RuleMaker) -> None:
    rule("QuantizeGrad", "where(abs(x) <= 1, dy, 0)")
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    with g.gradient_override_map({"Sign": "QuantizeGrad"}):
        y = g.op("Sign", x, name="y")
    r = either.evaluate(g, feeds={"x": [-2.0, 0.5, 3.0]}, fetches=["y"], ys=[y], xs=[x])
    assert_close(r.outputs["y"], np.float32([-1, 1, 1]))
    assert_close(r.gradients[x], np.float32([0, 1, 0]))
    assert statuses(r) == {"y": "active"}


@pytest.mark.parametrize("at", [-1.0, -0.999, 0.0, 1.0])
def test_quantize_grad_passes_inside_its_range(either: Any, rule: RuleMaker, at: float) -> None:
    rule("QuantizeGrad", "where(abs(x) <= 1, dy, 0)")
    r = gradient_of(either, graph_of_op("Sign"), [at], overrides={"Sign": "QuantizeGrad"})
    assert_close(r.gradients["x"], np.float32([1]))


@pytest.mark.parametrize("at", [-3.0, -1.001, 1.001, np.inf])
def test_quantize_grad_is_zero_outside_its_range(either: Any, rule: RuleMaker, at: float) -> None:
    rule("QuantizeGrad", "where(abs(x) <= 1, dy, 0)")
    r = gradient_of(either, graph_of_op("Sign"), [at], overrides={"Sign": "QuantizeGrad"})
    assert_close(r.gradients["x"], np.float32([0]))


def test_gradient_multiplier_around_a_loss(either: Any, rule: RuleMaker) -> None:
    rule("Half", "0.5 * dy")
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    squares = g.op("Square", x)
    loss = g.op("Sum", squares, g.constant(np.int32([0])), name="loss")
    g.op("Identity", loss, name="scaled")
    r = either.evaluate(
        g, feeds={"x": [1.0, -3.0]}, fetches=["scaled"], ys=["scaled"], xs=["x"], overrides={"Identity": "Half"}
    )
    assert_close(r.outputs["scaled"], np.float32(10))
    assert_close(r.gradients["x"], np.float32([1, -3]))


def test_gradient_multiplier_between_two_dense_layers(either: Any, rule: RuleMaker) -> None:
    rule("Half", "0.5 * dy")
    rng = np.random.default_rng(0)
    x, w1, w2 = (rng.normal(size=size).astype(np.float32) for size in ((4, 3), (3, 5), (5, 2)))
    g = gr.Graph()
    h = g.op("MatMul", g.placeholder("x", "float32", [None, 3]), g.placeholder("w1", "float32", [3, 5]))
    middle = g.op("Identity", h, name="middle")
    y = g.op("MatMul", middle, g.placeholder("w2", "float32", [5, 2]))
    g.op("Sum", y, g.constant(np.int32([0, 1])), name="loss")
    r = either.evaluate(
        g,
        feeds={"x": x, "w1": w1, "w2": w2},
        fetches=["loss"],
        ys=["loss"],
        xs=["x", "w1", "w2"],
        overrides={"Identity": "Half"},
    )
    upstream = np.ones((4, 2), np.float32)
    assert_close(r.outputs["loss"], (x @ w1 @ w2).sum(), rtol=1e-4)
    assert_close(r.gradients["w2"], (x @ w1).T @ upstream, rtol=1e-4)
    below = 0.5 * upstream @ w2.T
    assert_close(r.gradients["w1"], x.T @ below, rtol=1e-4)
    assert_close(r.gradients["x"], below @ w1.T, rtol=1e-4)


@pytest.mark.parametrize("name", ["gradient_reversal", "builtin/gradient_reversal"])
def test_gradient_reversal_on_identity(either: Any, name: str) -> None:
    r = gradient_of(either, graph_of_op("Identity"), [2.0], overrides={"Identity": name})
    assert_close(r.outputs["y"], np.float32([2]))
    assert_close(r.gradients["x"], np.float32([-1]))


def stop_gradient_form() -> gr.Graph:
    """Makes y = t + stop_gradient(f - t) with f = x and t = -x: the value of f, the gradient of t."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    f, t = g.op("Identity", x, name="f"), g.op("Neg", x, name="t")
    g.op("AddV2", t, g.op("StopGradient", g.op("Sub", f, t)), name="y")
    return g


def test_stop_gradient_form_has_the_gradient_of_t(either: Any) -> None:
    g = stop_gradient_form()
    f_alone = either.evaluate(g, feeds={"x": [3.0]}, ys=["f"], xs=["x"])
    assert_close(f_alone.gradients["x"], np.float32([1]))
    r = gradient_of(either, g, [3.0])
    assert_close(r.outputs["y"], np.float32([3]))
    assert_close(r.gradients["x"], np.float32([-1]))


def where_graph() -> gr.Graph:
    g = gr.Graph()
    c, a, b = (
        g.placeholder("c", "bool", [None]),
        g.placeholder("a", "float32", [None]),
        g.placeholder("b", "float32", [None]),
    )
    g.op("SelectV2", c, g.op("Square", a), g.op("Sin", b), name="y")
    return g


WHERE_FEEDS = {"c": [True, False, True], "a": [1.0, 2.0, 3.0], "b": [0.5, 1.0, 1.5]}


def test_where_sends_gradients_to_both_branches(either: Any) -> None:
    r = either.evaluate(where_graph(), feeds=WHERE_FEEDS, fetches=["y"], ys=["y"], xs=["a", "b"])
    assert_close(r.outputs["y"], np.float32([1, np.sin(1), 9]))
    assert_close(r.gradients["a"], np.float32([2, 0, 6]))
    assert_close(r.gradients["b"], np.float32([0, np.cos(1), 0]))


def test_where_with_a_rule_of_its_own(either: Any, rule: RuleMaker) -> None:
    rule("BothBranches", "(None, where(x, dy, 0.5 * dy), where(x, 0.25 * dy, dy))")
    r = either.evaluate(
        where_graph(), feeds=WHERE_FEEDS, ys=["y"], xs=["a", "b"], overrides={"SelectV2": "BothBranches"}
    )
    assert_close(r.gradients["a"], np.float32([2, 0.5 * 4, 6]))
    assert_close(r.gradients["b"], np.float32([0.25 * np.cos(0.5), np.cos(1), 0.25 * np.cos(1.5)]))


@pytest.mark.parametrize(
    ("op_type", "expression", "wanted"),
    [
        ("Square", "3 * x * dy", lambda x: 3 * x),
        ("Sin", "2 * cos(x) * dy", lambda x: 2 * np.cos(x)),
        ("Relu", "where(x > 0, dy, 0.1 * dy)", lambda x: np.where(x > 0, 1, 0.1)),
        ("Relu", "where(y > 0, maximum(dy, 0), 0)", lambda x: np.where(x > 0, 1, 0)),
    ],
)
def test_common_ops_take_custom_gradients(
    either: Any, rule: RuleMaker, op_type: str, expression: str, wanted: Callable[[Any], Any]
) -> None:
    rule("Mine", expression)
    x = np.float32([-1.5, -0.25, 0.5, 2.0])
    r = gradient_of(either, graph_of_op(op_type), x.tolist(), overrides={op_type: "Mine"})
    assert_close(r.gradients["x"], wanted(x).astype(np.float32))


def log1pexp_graph() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.op("Log", g.op("AddV2", g.op("Exp", x), g.constant(np.float32(1))), name="y")
    return g


def test_log1pexp_is_stable_with_its_rule(either: Any) -> None:
    plain = gradient_of(either, log1pexp_graph(), [0.0, 100.0])
    assert_close(plain.gradients["x"][0], 0.5)
    assert np.isnan(plain.gradients["x"][1])
    # Log passes the upstream gradient on, and Exp, whose x is the formula's x, returns the whole gradient.
    r = gradient_of(either, log1pexp_graph(), [0.0, 100.0], overrides={"Log": "ste", "Exp": "log1pexp"})
    assert_close(r.gradients["x"], np.float32([0.5, 1.0]))


def test_log1pexp_rule_on_softplus(either: Any) -> None:
    r = gradient_of(either, graph_of_op("Softplus"), [-100.0, 0.0, 100.0], overrides={"Softplus": "log1pexp"})
    assert_close(r.gradients["x"], np.float32([0, 0.5, 1]))


def product_graph() -> gr.Graph:
    g = gr.Graph()
    g.op("Mul", g.placeholder("x", "float32", []), g.placeholder("y", "float32", []), name="z")
    return g


@pytest.mark.parametrize("expression", [None, "(dy * x1, dy * x0)", "each(default)"])
def test_rule_with_two_inputs(either: Any, rule: RuleMaker, expression: str | None) -> None:
    overrides = None if expression is None else {"Mul": rule("Product", expression)}
    r = either.evaluate(
        product_graph(), feeds={"x": 2.0, "y": 3.0}, fetches=["z"], ys=["z"], xs=["x", "y"], overrides=overrides
    )
    assert_close(r.outputs["z"], np.float32(6))
    assert_close(r.gradients["x"], np.float32(3))
    assert_close(r.gradients["y"], np.float32(2))


def shuffle_graph(*, stopped: bool) -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [4])
    shuffled = g.op("RandomShuffle", x, name="shuffled")
    g.op("Mul", x, g.op("StopGradient", shuffled) if stopped else shuffled, name="y")
    return g


def test_op_without_gradient_may_be_behind_stop_gradient(either: Any) -> None:
    r = either.evaluate(
        shuffle_graph(stopped=True), feeds={"x": [1.0, 2.0, 3.0, 4.0]}, fetches=["shuffled"], ys=["y"], xs=["x"]
    )
    assert sorted(r.outputs["shuffled"].tolist()) == [1, 2, 3, 4]
    assert_close(r.gradients["x"], r.outputs["shuffled"])


def test_op_without_gradient_is_refused(either: Any) -> None:
    with refused("NO_GRADIENT") as refusal:
        either.evaluate(shuffle_graph(stopped=False), feeds={"x": [1.0, 2.0, 3.0, 4.0]}, ys=["y"], xs=["x"])
    refusal.says("shuffled", "RandomShuffle", "stop_gradients")


def test_op_without_gradient_may_be_behind_stop_gradients_of_the_call(either: Any) -> None:
    r = either.evaluate(
        shuffle_graph(stopped=False),
        feeds={"x": [1.0, 2.0, 3.0, 4.0]},
        fetches=["shuffled"],
        ys=["y"],
        xs=["x"],
        stop_gradients=["shuffled"],
    )
    assert_close(r.gradients["x"], r.outputs["shuffled"])


def test_op_without_gradient_takes_a_rule(either: Any) -> None:
    r = either.evaluate(
        shuffle_graph(stopped=False),
        feeds={"x": [1.0, 2.0, 3.0, 4.0]},
        fetches=["shuffled"],
        ys=["y"],
        xs=["x"],
        overrides={"RandomShuffle": "ste"},
    )
    assert_close(r.gradients["x"], r.outputs["shuffled"] + np.float32([1, 2, 3, 4]))


@pytest.mark.parametrize("expression", ["0", "0.0", "-1", "2 * 3"])
def test_rule_that_is_a_number_is_refused(either: Any, expression: str) -> None:
    with refused("INVALID_RULE") as refusal:
        either.create_rule("JustANumber", expression)
    refusal.says("zeros_like")
    with refused("INVALID_RULE"):
        gradient_of(either, graph_of_op("Sign"), [1.0], overrides={"Sign": gr.Rule(expression)})


def test_explicit_zero_rule_is_accepted(either: Any, rule: RuleMaker) -> None:
    r = gradient_of(either, graph_of_op("Sign"), [1.0, 2.0], overrides={"Sign": rule("Zero", "zeros_like(x)")})
    assert_close(r.gradients["x"], np.float32([0, 0]))
