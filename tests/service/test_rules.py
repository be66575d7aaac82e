"""The registry of rules through the clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import rule_pb2
from tests.service import raw
from tests.service.answers import assert_close, refused

RuleMaker = Callable[..., str]

FIRST_BUILTINS = {
    "ste",
    "ste_sign",
    "gradient_reversal",
    "gradient_scale",
    "gradient_clip",
    "guided_relu",
    "deconvnet",
    "gradient_zero",
    "log1pexp",
    "fast_sigmoid",
}


def test_rule_is_created_used_and_deleted(either: Any) -> None:
    made = either.create_rule("Short", "alpha * dy", params={"alpha": 2.0}, description="Scales.")
    try:
        got = either.get_rule("Short")
        assert (got.name, got.digest, got.params) == (made.name, made.digest, {"alpha": 2.0})
        assert (got.name, got.expression, got.description) == ("Short", "alpha * dy", "Scales.")
        assert len(got.digest) == 64
        assert "Short" in {rule.name for rule in either.list_rules(kind="user")}
    finally:
        either.delete_rule("Short")
    with refused("UNKNOWN_RULE"):
        either.get_rule("Short")


def test_equal_content_is_the_same_rule(either: Any, rule: RuleMaker) -> None:
    rule("Same", "2 * dy", description="first")
    assert either.create_rule("Same", "2 * dy").digest == either.get_rule("Same").digest


def test_rule_is_replaced_but_programs_keep_the_old_one(either: Any) -> None:
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x"], "overrides": {"Sign": "Replaced"}}
    either.create_rule("Replaced", "2 * dy")
    try:
        program = either.compile(g, **words)
        assert either.create_rule("Replaced", "3 * dy", replace=True).expression == "3 * dy"
        assert either.evaluate(g, feeds={"x": [1.0]}, **words).gradients["x"].tolist() == [3.0]
        assert program.evaluate({"x": [1.0]}).gradients["x"].tolist() == [2.0]
        with refused("RULE_EXISTS") as refusal:
            either.create_rule("ste_sign", "3 * dy", replace=True)
        assert "choose another name" in refusal.message
    finally:
        either.delete_rule("Replaced")


def test_rules_of_all_kinds_are_listed(either: Any) -> None:
    names = {kind: {rule.name for rule in either.list_rules(kind=kind)} for kind in ("op", "builtin")}
    assert {"Identity", "Relu", "MatMul", "Sign"} <= names["op"]
    assert len(names["op"]) > 300
    assert {name.removeprefix("builtin/") for name in names["builtin"]} >= FIRST_BUILTINS


def test_op_rules_are_tensorflow_gradients(client: Any) -> None:
    from tensorflow.python.framework import ops

    registered = {name for name in ops.gradient_registry.list() if not name.startswith(("Gradrule", "CustomGradient"))}
    assert {rule.name for rule in client.list_rules(kind="op")} <= registered


def test_pages_contain_every_rule_once(channel: Any, client: Any) -> None:
    seen: list[str] = []
    token = ""
    while True:
        request = rule_pb2.ListRulesRequest(page_size=70, page_token=token)
        page = rule_pb2.ListRulesResponse.FromString(
            raw.send(channel, "RuleService/ListRules", request.SerializeToString())
        )
        assert len(page.rules) <= 70
        seen += [rule.name for rule in page.rules]
        token = page.next_page_token
        if not token:
            break
    assert len(seen) == len(set(seen)) == len(list(client.list_rules()))


@pytest.mark.parametrize("name", sorted(FIRST_BUILTINS))
def test_first_builtin_rules_have_two_names(client: Any, name: str) -> None:
    assert client.get_rule(name).digest == client.get_rule(f"builtin/{name}").digest


def test_rule_with_a_reserved_name_is_refused(either: Any) -> None:
    with refused("INVALID_RULE") as refusal:
        either.create_rule("default", "2 * dy")
    refusal.says("default")


@pytest.mark.parametrize("name", ["", "with space", "a/b", "builtin/mine", "-x", "x" * 300])
def test_invalid_names_are_refused(either: Any, name: str) -> None:
    with pytest.raises(gr.errors.GradruleError) as caught:
        either.create_rule(name, "2 * dy")
    assert caught.value.reason in {"INVALID_RULE", "MALFORMED_REQUEST", "RULE_EXISTS"}


def test_expression_is_sampled(either: Any, rule: RuleMaker) -> None:
    rule("Window", "where(abs(x) <= width, dy, 0)", params={"width": 1.0})
    x, dy = np.float32([-2, 0.5, 1.5]), np.float32([1, 2, 3])
    assert_close(sampled(either.sample_rule("Window", x=x, dy=dy)), np.float32([0, 2, 0]))
    wide = either.sample_rule("Window", x=x, dy=dy, params={"width": 1.75})
    assert_close(sampled(wide), np.float32([0, 2, 3]))


def test_op_rule_is_sampled(either: Any) -> None:
    x = np.float32([-1, 0.5])
    assert_close(sampled(either.sample_rule("Tanh", x=x)), 1 - np.tanh(x) ** 2)


def test_sampled_gradient_has_the_shape_of_x(either: Any) -> None:
    assert_close(sampled(either.sample_rule(gr.Rule("sum(dy) + 0 * sum(x)"), x=np.ones((2, 3)))), np.full((2, 3), 6.0))
    with refused("RULE_OUTPUT") as refusal:
        either.sample_rule("ste", x=np.float32([1, 2, 3]), dy=np.float32([1]))
    refusal.says("[1]", "[3]")


def test_rule_is_sampled_by_name(either: Any) -> None:
    with refused("MISSING_PARAM") as refusal:
        either.sample_rule("gradient_scale", x=np.float32([1]))
    refusal.says("'gradient_scale'", "'factor'")


def test_sample_without_its_inputs_is_refused(either: Any) -> None:
    with refused("MISSING_FEED") as refusal:
        either.sample_rule("guided_relu", dy=np.float32([1]))
    refusal.says("x")


def sampled(answer: gr.SampleResult) -> Any:
    """Returns the gradient of the only input."""
    (gradient,) = answer.gradients.values()
    return gradient


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_graph_for_float32_fits_16_bit_ops(client: Any, dtype: str) -> None:
    """The rule sees float32, and its gradient is rounded once: 200 squared overflows float16."""
    rule = gr.Graph()
    x, dy = rule.placeholder("x", "float32"), rule.placeholder("dy", "float32")
    rule.op("Mul", dy, rule.op("Div", rule.op("Square", x), rule.constant(30.0)), name="dx")
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", dtype, [3]), name="y")
    given = np.array([0.1, 1.5, 1000]).astype(getattr(ml_dtypes, dtype, dtype))
    r = client.evaluate(g, {"x": given}, ys="y", xs="x", overrides={"Sign": gr.Rule(graph=rule)})
    wanted = (given.astype(np.float32) ** 2 / np.float32(30)).astype(given.dtype)
    np.testing.assert_array_equal(r.gradients["x"], wanted)
