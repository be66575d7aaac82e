"""Invalid rules, overrides and derivatives get typed errors, and the next request works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import graph_pb2, override_pb2, rule_pb2
from tests.service import raw
from tests.service.answers import keeps_engine, provokes, refused, refused_raw
from tests.service.graph_defs import SIGN_FEEDS, sign_graph

# Rules.


@provokes("INVALID_EXPRESSION")
@keeps_engine
@pytest.mark.parametrize(
    ("expression", "column", "word"),
    [
        ("dy * ", 5, ""),
        ("dy * foo(x)", 6, "foo"),
        ("dy +* x", 5, ""),
        ("where(x, dy)", 1, "where"),
        ("dy.shape", 1, ""),
    ],
)
def test_invalid_expression_is_refused(either: Any, expression: str, column: int, word: str) -> None:
    with refused("INVALID_EXPRESSION") as refusal:
        either.create_rule("Bad", expression)
    refusal.says(f"column {column}", word)
    with refused("UNKNOWN_RULE"):
        either.get_rule("Bad")


@provokes("INVALID_RULE")
@keeps_engine
@pytest.mark.parametrize(
    ("expression", "params"),
    [("3", None), ("1 - y ** 2", None), ("dy * x", {"x": 1.0}), ("dy * lambda_", {"lambda": 1.0})],
)
def test_invalid_rule_is_refused(client: Any, expression: str, params: Any) -> None:
    with refused("INVALID_RULE"):
        client.create_rule("Bad", expression, params=params)


def test_gradient_that_drops_dy_is_refused(client: Any) -> None:
    for rule in ("1 - y ** 2", gr.Rule("1 - y ** 2")):
        with refused("INVALID_RULE") as refusal:
            client.sample_rule(rule, op_type="Tanh", x=[0.5])
        refusal.says("multiply by dy", "ignore_dy")
    ignored = client.sample_rule("ignore_dy(1 - y ** 2)", op_type="Tanh", x=[0.5], dy=[7.0]).gradients["dx"]
    np.testing.assert_allclose(ignored, 1 - np.tanh([0.5]) ** 2, rtol=1e-6)


def test_graph_that_drops_dy_is_refused(client: Any) -> None:
    def slope(**attrs: Any) -> gr.Graph:
        g = gr.Graph()
        g.op("Square", g.placeholder("x", "float32"), name="dx", **attrs)
        return g

    with refused("INVALID_RULE") as refusal:
        client.create_rule("Slope", graph=slope())
    refusal.says("'dx'", "multiply by dy", "_ignore_dy=True")
    said = gr.Rule(graph=slope(_ignore_dy=True))
    found = client.sample_rule(said, x=np.float32([1, 2]), op_type="Identity").gradients["dx"]
    np.testing.assert_array_equal(found, [1, 4])


def test_name_that_is_a_variable_is_shown_as_a_formula(client: Any) -> None:
    with refused("UNKNOWN_RULE") as refusal:
        client.sample_rule("dy", x=[1.0])
    refusal.says("Rule('dy')")


@provokes("UNKNOWN_RULE")
@keeps_engine
@pytest.mark.parametrize("action", ["get_rule", "delete_rule"])
def test_unknown_rule_is_refused(either: Any, action: str) -> None:
    with refused("UNKNOWN_RULE") as refusal:
        getattr(either, action)("gradient_reversl")
    refusal.says("gradient_reversal")


@provokes("RULE_EXISTS")
@keeps_engine
def test_rule_of_an_existing_name_is_refused(either: Any, rule: Callable[..., str]) -> None:
    rule("Once", "2 * dy")
    with refused("RULE_EXISTS"):
        either.create_rule("Once", "3 * dy")
    assert either.get_rule("Once").expression == "2 * dy"


@provokes("RULE_READ_ONLY")
@keeps_engine
@pytest.mark.parametrize("name", ["Relu", "ste", "builtin/ste"])
def test_builtin_rule_cannot_be_deleted(either: Any, name: str) -> None:
    with refused("RULE_READ_ONLY"):
        either.delete_rule(name)


@provokes("UNKNOWN_PARAM")
@keeps_engine
def test_unknown_param_is_refused(either: Any) -> None:
    words: dict[str, Any] = {"feeds": SIGN_FEEDS, "ys": ["y"], "xs": ["x"]}
    scaled = gr.Rule("alpha * dy", params={"alpha": 1.0})
    with refused("UNKNOWN_PARAM") as refusal:
        either.evaluate(sign_graph(), overrides={"Sign": (scaled, {"alhpa": 2.0})}, **words)
    refusal.says("alhpa", "alpha")
    with refused("UNKNOWN_PARAM") as refusal:
        either.evaluate(sign_graph(), overrides={"Sign": scaled}, params={"Sing": {"alpha": 2.0}}, **words)
    refusal.says("Sing", "Sign")


@provokes("MISSING_PARAM")
@keeps_engine
def test_missing_param_is_refused(either: Any) -> None:
    scaled = gr.Rule("alpha * dy", params=["alpha"])
    with refused("MISSING_PARAM") as refusal:
        either.evaluate(sign_graph(), feeds=SIGN_FEEDS, ys=["y"], xs=["x"], overrides={"Sign": scaled})
    refusal.says("alpha")


@provokes("INVALID_PARAM")
@keeps_engine
def test_param_without_a_value_is_refused(channel: grpc.Channel) -> None:
    definition = rule_pb2.RuleDefinition(expression="alpha * dy", params=[rule_pb2.RuleParam(name="alpha")])
    override = override_pb2.GradientOverride(
        selector=override_pb2.Selector(op_type="Sign"), definition=definition, params={"alpha": rule_pb2.ParamValue()}
    )
    with refused_raw("INVALID_PARAM") as refusal:
        raw.evaluate(channel, raw.request(raw.sign_graph(), overrides=[override], vjp=raw.vjp()))
    refusal.says("alpha")


# Overrides and derivatives.


@provokes("INVALID_OVERRIDE")
@keeps_engine
def test_overrides_without_ys_are_refused(either: Any) -> None:
    with refused("INVALID_OVERRIDE") as refusal:
        either.evaluate(sign_graph(), feeds=SIGN_FEEDS, fetches=["y"], overrides={"Sign": "ste"})
    refusal.says("ys")


@keeps_engine
def test_override_without_a_selector_is_refused(channel: grpc.Channel) -> None:
    with refused_raw("INVALID_OVERRIDE"):
        raw.evaluate(
            channel, raw.request(raw.sign_graph(), overrides=[override_pb2.GradientOverride(rule="ste")], vjp=raw.vjp())
        )


@provokes("UNMATCHED_OVERRIDE")
@keeps_engine
def test_override_that_matches_no_node_is_refused(either: Any) -> None:
    for override in (gr.Override("ste", op_type="Floor"), gr.Override("ste", node="z"), gr.Override("ste", scope="s")):
        with refused("UNMATCHED_OVERRIDE"):
            either.evaluate(sign_graph(), feeds=SIGN_FEEDS, ys=["y"], xs=["x"], overrides=[override])


@provokes("INACTIVE_OVERRIDE")
@keeps_engine
def test_override_of_a_node_off_the_path_is_refused(either: Any) -> None:
    g = sign_graph()
    g.op("Floor", g.tensor("x"), name="aside")
    with refused("INACTIVE_OVERRIDE") as refusal:
        either.evaluate(g, feeds=SIGN_FEEDS, ys=["y"], xs=["x"], overrides={"Floor": "ste"})
    refusal.says("aside")


@provokes("RULE_ARITY")
@keeps_engine
@pytest.mark.parametrize("expression", ["(dy, dy)", "dy * x1"])
def test_wrong_number_of_gradients_is_refused(either: Any, expression: str) -> None:
    with refused("RULE_ARITY") as refusal:
        either.evaluate(sign_graph(), feeds=SIGN_FEEDS, ys=["y"], xs=["x"], overrides={"Sign": gr.Rule(expression)})
    refusal.says("y", "Sign")


@provokes("RULE_OUTPUT")
@keeps_engine
def test_wrong_shape_found_at_run_time_is_refused(either: Any) -> None:
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", None), name="y")
    squeezed = gr.Rule("sum(dy, axis=0)")
    for shape in ((2, 3), (3, 3)):
        with refused("RULE_OUTPUT") as refusal:
            either.evaluate(
                g, feeds={"x": np.ones(shape, np.float32)}, ys=["y"], xs=["x"], overrides={"Sign": squeezed}
            )
        refusal.says("rule 'inline'", "node 'y'", f"(1, {shape[1]})", str(shape))


@provokes("RULE_NOT_APPLICABLE")
@keeps_engine
def test_rule_of_another_op_is_refused(either: Any) -> None:
    with refused("RULE_NOT_APPLICABLE"):
        either.evaluate(sign_graph(), feeds=SIGN_FEEDS, ys=["y"], xs=["x"], overrides={"Sign": "Conv2D"})


@provokes("FOREIGN_GRADIENT")
@keeps_engine
def test_unknown_registered_gradient_is_refused(channel: grpc.Channel) -> None:
    foreign = raw.node("y", "Sign", "x", _gradient_op_type=graph_pb2.AttrValue(s=b"CustomGradient-3"))
    with refused_raw("FOREIGN_GRADIENT") as refusal:
        raw.evaluate(channel, raw.request(raw.graph(raw.placeholder(), foreign), vjp=raw.vjp()))
    refusal.says("CustomGradient-3", "y")


@provokes("NO_GRADIENT")
@keeps_engine
def test_op_without_gradient_is_refused(either: Any) -> None:
    g = gr.Graph()
    g.op("RandomShuffle", g.placeholder("x", "float32", [None]), name="y")
    with refused("NO_GRADIENT") as refusal:
        either.evaluate(g, feeds=SIGN_FEEDS, ys=["y"], xs=["x"])
    refusal.says("y", "RandomShuffle")


@provokes("INVALID_DERIVATIVE")
@keeps_engine
def test_invalid_derivative_is_refused(either: Any) -> None:
    complex_sign = gr.Graph()
    complex_sign.op("Sign", complex_sign.placeholder("x", "complex64", [None]), name="y")
    with refused("INVALID_DERIVATIVE") as refusal:
        either.evaluate(complex_sign, feeds=SIGN_FEEDS, ys=["y"], xs=["x"])
    refusal.says("y", "complex64")
    for words in (
        {"ys": ["y"]},
        {"xs": ["x"], "fetches": ["y"]},
        {"ys": ["y"], "xs": ["x"], "grad_ys": {"x": [1.0, 1.0]}},
    ):
        with refused("INVALID_DERIVATIVE"):
            either.evaluate(sign_graph(), feeds=SIGN_FEEDS, **words)
