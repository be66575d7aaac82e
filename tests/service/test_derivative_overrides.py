"""Overrides in derivatives of every kind, and the orders of differentiation in which they apply."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused
from tests.service.derivative_cases import FEEDS, RTOL, VW, VX, LocalDerivatives, W, X, graph_for_function
from tests.service.graph_defs import build_graph, placeholder

VALUES = np.float32([-1.6, -0.5, 0.25, 0.8, 2.0])
SIGN, CLIP = np.sign(VALUES), (np.abs(VALUES) <= 1).astype(np.float32)
V = np.float32([1.0, -2.0, 0.5, 3.0, 1.5])


def sign_graph() -> gr.Graph:
    """Makes y = sign(x)² · x."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.multiply(g.square(g.op_output("Sign", x, name="s")), x, name="y")
    return g


def abs_graph() -> gr.Graph:
    """Makes y = |x| · x; its only Sign is the one that the gradient of Abs adds."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.multiply(g.op_output("Abs", x), x, name="y")
    return g


def override(rule: str, order: str, **selectors: Any) -> list[gr.Override]:
    return [gr.Override(gr.Rule(rule), order=order, label="o", **selectors)]


def test_forward_mode_uses_the_transpose_of_the_rule(either: Any) -> None:
    wanted = (2 * SIGN * CLIP * VALUES + SIGN**2) * V
    found = either.jvp(sign_graph(), {"x": VALUES}, {"x": V}, ys=["y"], xs=["x"], overrides={"Sign": "ste_sign"})
    assert_close(found["y"], wanted)


def test_jacobian_uses_the_rule(either: Any) -> None:
    found = either.jacobian(sign_graph(), {"x": VALUES}, ys=["y"], xs=["x"], overrides={"Sign": "ste_sign"})
    assert_close(found["y"]["x"], np.diag(2 * SIGN * CLIP * VALUES + SIGN**2).astype(np.float32))


def test_params_of_a_call_reach_the_rule(either: Any) -> None:
    program = either.compile(
        sign_graph(), ys=["y"], xs=["x"], overrides=[gr.Override(gr.Rule("k * dy", params={"k": 1.0}), op_type="Sign")]
    )
    for k in (1.0, 3.0):
        slope = 2 * SIGN * k * VALUES + SIGN**2
        params = {"Sign": {"k": k}}
        assert_close(program.jvp({"x": VALUES}, {"x": V}, params=params)["y"], slope * V)
        assert_close(program.jacobian({"x": VALUES}, params=params)["y"]["x"], np.diag(slope).astype(np.float32))
        assert_close(program.hvp({"x": VALUES}, {"x": V}, params=params)["x"], 2 * k * SIGN * V)
    program.delete()


@pytest.mark.parametrize(
    ("order", "wanted"),
    [("first", 2 * SIGN * CLIP * V), ("all", (4 * SIGN * CLIP + 2 * VALUES * CLIP) * V)],
)
def test_order_decides_whether_a_rule_applies_in_the_second_derivative(client: Any, order: str, wanted: Any) -> None:
    overrides = [gr.Override("ste_sign", op_type="Sign", order=order)]
    found = client.hvp(sign_graph(), {"x": VALUES}, {"x": V}, ys=["y"], xs=["x"], overrides=overrides)
    assert_close(found["x"], wanted)


def test_override_applies_to_nodes_that_gradients_add(client: Any) -> None:
    asked: dict[str, Any] = {
        "graph": abs_graph(),
        "feeds": {"x": VALUES},
        "vectors": {"x": V},
        "ys": ["y"],
        "xs": ["x"],
    }
    assert_close(client.hvp(**asked)["x"], 2 * SIGN * V)
    found = client.hvp(**asked, overrides=override("3 * dy", "all", op_type="Sign"))
    assert_close(found["x"], (2 * SIGN + 3 * VALUES) * V)


def test_only_a_plain_op_type_selects_nodes_that_gradients_add(client: Any) -> None:
    asked: dict[str, Any] = {
        "graph": abs_graph(),
        "feeds": {"x": VALUES},
        "vectors": {"x": V},
        "ys": ["y"],
        "xs": ["x"],
    }
    named = [gr.Override(gr.Rule("3 * dy"), op_type="Sign", node="**", order="all", optional=True)]
    assert_close(client.hvp(**asked, overrides=named)["x"], 2 * SIGN * V)
    # The first override of the op type decides; `default` is the op's own gradient.
    later = gr.Override(gr.Rule("3 * dy"), op_type="Sign", order="all", optional=True)
    carved = [gr.Override("default", op_type="Sign", order="all"), later]
    assert_close(client.hvp(**asked, overrides=carved)["x"], 2 * SIGN * V)
    assert_close(client.hvp(**asked, overrides=[later])["x"], (2 * SIGN + 3 * VALUES) * V)
    # 7 · |x|' is 7 in the first differentiation, sign(x) in the second: y' = 7x + |x|.
    steep = override("7 * dy", "first", op_type="Abs")
    assert_close(client.hvp(**asked, overrides=steep)["x"], (7 + SIGN) * V)
    with refused("INACTIVE_OVERRIDE") as refusal:
        client.hvp(**asked, overrides=[*steep, gr.Override("default", op_type="Sign", order="all")])
    refusal.says("'Sign'", "one that gradients create")


def test_override_without_a_node_in_any_order_is_refused(client: Any) -> None:
    g = gr.Graph()
    g.square(g.placeholder("x", "float32", [None]), name="y")
    with refused("INACTIVE_OVERRIDE") as refusal:
        client.hvp(g, {"x": VALUES}, {"x": V}, ys=["y"], xs=["x"], overrides=override("dy", "all", op_type="Sign"))
    refusal.says("'o'", "no effect")
    for order, ask in (("first", client.hvp), ("all", client.jvp)):
        with refused("UNMATCHED_OVERRIDE"):
            ask(g, {"x": VALUES}, {"x": V}, ys=["y"], xs=["x"], overrides=override("dy", order, op_type="Sign"))


@tf.custom_gradient
def _sign(x: Any) -> Any:
    return tf.sign(x), lambda dy: 3.0 * dy


@tf.custom_gradient
def _abs(x: Any) -> Any:
    return tf.abs(x), lambda dy: dy * _sign(x)


def looped(absolute: Any) -> Any:
    """Runs a loop and a branch in it; both contain an absolute value."""

    def function(x: Any, w: Any) -> Any:
        def body(i: Any, value: Any) -> tuple[Any, Any]:
            grown = tf.cond(tf.equal(i % 2, 0), lambda: absolute(tf.matmul(value, w)) * x, lambda: absolute(value) + x)
            return i + 1, grown * 0.5

        return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]

    return function


def test_override_applies_to_nodes_that_gradients_add_in_loops_and_branches(client: Any) -> None:
    overrides = override("3 * dy", "all", op_type="Sign")
    found = client.hvp(
        graph_for_function(looped(tf.abs)), FEEDS, {"x": VX, "w": VW}, ys=["y"], xs=["x", "w"], overrides=overrides
    )
    by_x, by_w = LocalDerivatives(looped(_abs)).hvp(VX, VW)
    assert_close(found["x"], by_x, rtol=RTOL)
    assert_close(found["w"], by_w, rtol=RTOL)
    plain, _ = LocalDerivatives(looped(tf.abs)).hvp(VX, VW)
    assert not np.allclose(found["x"], plain, rtol=1e-2)


@tf.custom_gradient
def _guided_relu(x: Any) -> Any:
    y = tf.nn.relu(x)
    return y, lambda dy: tf.where((x > 0) & (dy > 0), dy, tf.zeros_like(dy))


def rectified(relu: Any) -> Any:
    """Runs a loop with a Relu."""

    def function(x: Any, w: Any) -> Any:
        def body(i: Any, value: Any) -> tuple[Any, Any]:
            return i + 1, relu(tf.matmul(value, w) + x)

        return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]

    return function


def test_rule_in_a_loop_applies_in_second_derivatives(client: Any) -> None:
    graph, overrides = graph_for_function(rectified(tf.nn.relu)), {"Relu": "guided_relu"}
    by_x, by_w = LocalDerivatives(rectified(_guided_relu)).jacobian()
    found = client.jacobian(graph, FEEDS, ys=["y"], xs=["x", "w"], overrides=overrides)["y"]
    assert_close(found["x"], by_x, rtol=RTOL)
    assert_close(found["w"], by_w, rtol=RTOL)
    grad_ys = np.stack([VX, -VX])
    stacked = client.evaluate(
        graph, FEEDS, ys=["y"], xs=["x"], grad_ys={"y": grad_ys}, overrides=overrides, stacked_grad_ys=True
    )
    wanted = [LocalDerivatives(rectified(_guided_relu)).gradients(grad_y)[0] for grad_y in grad_ys]
    assert_close(stacked.gradients["x"], np.stack(wanted), rtol=RTOL)
    assert {item.status for item in stacked.overrides} == {"active"}


def test_linear_rule_in_a_loop_in_forward_mode(client: Any) -> None:
    @tf.custom_gradient
    def leaky(x: Any) -> Any:
        return tf.nn.relu(x), lambda dy: tf.where(x > 0, dy, 0.3 * dy)

    overrides = override("where(x > 0, dy, 0.3 * dy)", "first", op_type="Relu")
    graph = graph_for_function(rectified(tf.nn.relu))
    found = client.jvp(graph, FEEDS, {"x": VX, "w": VW}, ys=["y"], xs=["x", "w"], overrides=overrides)["y"]
    by_x, by_w = LocalDerivatives(rectified(leaky)).jacobian()
    assert_close(found, np.tensordot(by_x, VX, 2) + np.tensordot(by_w, VW, 2), rtol=RTOL)


def region_graph() -> gr.Graph:
    """Makes y = x³ · x; the cube is three ops."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    h = g.identity(x, name="h")
    cube = g.multiply(g.square(h), h, name="k")
    g.multiply(cube, x, name="y")
    return g


@pytest.mark.parametrize(
    ("order", "wanted"),
    [("first", (10 * VALUES + 3 * VALUES**2) * V), ("all", (10 * VALUES + 5 * VALUES) * V)],
)
def test_region_in_second_derivatives(client: Any, order: str, wanted: Any) -> None:
    overrides = override("5 * dy * x", order, region=gr.Region(["h"], ["k"]))
    asked = (region_graph(), {"x": VALUES})
    first = 5 * VALUES**2 + VALUES**3
    assert_close(client.jvp(*asked, {"x": V}, ys=["y"], xs=["x"], overrides=overrides)["y"], first * V)
    found = client.jacobian(*asked, ys=["y"], xs=["x"], overrides=overrides)["y"]["x"]
    assert_close(found, np.diag(first).astype(np.float32))
    assert_close(client.hvp(*asked, {"x": V}, ys=["y"], xs=["x"], overrides=overrides)["x"], wanted)


@pytest.mark.parametrize("order", ["first", "all"])
def test_rule_of_a_region_that_uses_its_output(client: Any, order: str) -> None:
    overrides = override("dy * y", order, region=gr.Region(["h"], ["k"]))
    found = client.hvp(region_graph(), {"x": VALUES}, {"x": V}, ys=["y"], xs=["x"], overrides=overrides)["x"]
    # The first gradient is x · k + k with k = x³; differentiated again, k has its own slope or that of the rule.
    slope = VALUES**3 if order == "all" else 3 * VALUES**2
    assert_close(found, (VALUES**3 + VALUES * slope + slope) * V)


def test_rule_that_runs_the_graph_at_a_baseline(client: Any) -> None:
    """DeepLIFT's multiplier is the secant to the baseline, here 0."""
    graph = graph_for_function(lambda x, w: tf.matmul(tf.nn.sigmoid(tf.matmul(x, w)), w))
    found = client.jacobian(graph, FEEDS, ys=["y"], xs=["x"], overrides={"Sigmoid": "deeplift_rescale"})["y"]["x"]
    hidden = X @ W
    secant = (1 / (1 + np.exp(-hidden)) - 0.5) / hidden
    wanted = np.einsum("bi,ij,ki,bc->bjck", secant, W, W, np.eye(2))
    assert_close(found, wanted.astype(np.float32), rtol=RTOL)


def test_op_without_a_second_derivative_is_refused(client: Any) -> None:
    def build() -> None:
        tf.nn.lrn(placeholder("x", shape=(None, None, None, None)), name="y")

    image = np.ones((1, 2, 2, 3), np.float32)
    with refused("NO_GRADIENT") as refusal:
        client.hvp(build_graph(build), {"x": image}, {"x": image}, ys=["y"], xs=["x"])
    refusal.says("LRNGrad")


def test_invalid_order_is_refused(client: Any) -> None:
    with refused("INVALID_OVERRIDE") as refusal:
        gr.Override("ste_sign", op_type="Sign", order="second")
    refusal.says("'first'", "'all'", "'second'")
