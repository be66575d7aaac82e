"""Overrides: selectors, order, exemptions, labels, params, contexts, and how answers and `explain` report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused, rules_by_node, statuses
from tests.service.graph_defs import build_graph, build_graph_def, load_graph, placeholder

RuleMaker = Callable[..., str]


def tower(names: tuple[str, ...] = ("a/s1", "a/b/s2", "c/s3")) -> gr.Graph:
    """Makes x plus the sum of sign(x) at each name; with ste at k of them the gradient is 1 + k."""
    g = gr.Graph()
    total = g.placeholder("x", "float32", [None])
    x = total
    for name in names:
        total = total + g.op("Sign", x, name=name)
    g.identity(total, name="y")
    return g


def evaluate_tower(client: Any, g: gr.Graph, overrides: Any, **words: Any) -> Any:
    return client.evaluate(g, feeds={"x": [2.0]}, ys=["y"], xs=["x"], overrides=overrides, **words)


@pytest.mark.parametrize(
    ("selectors", "matched"),
    [
        ({"op_type": "Sign"}, {"a/s1", "a/b/s2", "c/s3"}),
        ({"node": "a/s1"}, {"a/s1"}),
        ({"node": "a/*"}, {"a/s1"}),
        ({"node": "a/**"}, {"a/s1", "a/b/s2"}),
        ({"node": "**/s2"}, {"a/b/s2"}),
        ({"node": "**/s?"}, {"a/s1", "a/b/s2", "c/s3"}),
        ({"scope": "a"}, {"a/s1", "a/b/s2"}),
        ({"scope": "a/b"}, {"a/b/s2"}),
        ({"scope": "a", "node": "*/s1"}, {"a/s1"}),
        ({"op_type": "Sign", "scope": "c"}, {"c/s3"}),
    ],
)
def test_selector_matches_its_nodes(client: Any, selectors: dict[str, str], matched: set[str]) -> None:
    r = evaluate_tower(client, tower(), [gr.Override("ste", **selectors)])
    assert rules_by_node(r) == dict.fromkeys(matched, "ste")
    assert_close(r.gradients["x"], np.float32([1 + len(matched)]))


@pytest.mark.parametrize(
    "selectors", [{"node": "a/b"}, {"scope": "s"}, {"scope": "a/s"}, {"op_type": "Neg"}, {"node": "s1"}]
)
def test_selector_that_matches_nothing_is_refused(client: Any, selectors: dict[str, str]) -> None:
    with refused("UNMATCHED_OVERRIDE"):
        evaluate_tower(client, tower(), [gr.Override("ste", **selectors)])


def test_star_does_not_cross_slashes(client: Any) -> None:
    r = evaluate_tower(client, tower(), [gr.Override(gr.Rule("each(default)"), node="*", optional=True)])
    assert "y" in statuses(r)
    assert not any("/" in node for node in statuses(r))


def test_first_matching_override_wins(client: Any) -> None:
    overrides = [
        gr.Override(gr.Rule("10 * dy"), node="a/s1"),
        gr.Override(gr.Rule("100 * dy"), scope="a"),
        gr.Override(gr.Rule("1000 * dy"), op_type="Sign"),
    ]
    assert_close(evaluate_tower(client, tower(), overrides).gradients["x"], np.float32([1 + 10 + 100 + 1000]))
    with refused("UNMATCHED_OVERRIDE"):
        evaluate_tower(client, tower(), overrides[::-1])


def test_default_exempts_nodes(either: Any) -> None:
    overrides = [gr.Override("default", scope="a/b"), gr.Override("ste", op_type="Sign")]
    r = evaluate_tower(either, tower(), overrides)
    assert_close(r.gradients["x"], np.float32([3]))
    assert rules_by_node(r) == {"a/s1": "ste", "a/b/s2": "default", "c/s3": "ste"}


def test_answer_reports_the_status_of_each_node(either: Any) -> None:
    g = tower()
    g.op("Sign", g.tensor("x"), name="aside")
    r = evaluate_tower(either, g, [gr.Override("ste", op_type="Sign", label="quantise")])
    assert statuses(r) == {"a/s1": "active", "a/b/s2": "active", "c/s3": "active", "aside": "off_path"}
    assert {(item.op_type, item.rule, item.label) for item in r.overrides} == {("Sign", "ste", "quantise")}
    assert "y" in r.default_gradient_nodes
    assert not set(r.default_gradient_nodes) & {"a/s1", "a/b/s2", "c/s3", "aside", "x"}


def test_optional_override_may_match_nothing(either: Any) -> None:
    r = evaluate_tower(either, tower(), [gr.Override("ste", op_type="Floor", optional=True)])
    assert r.overrides == []
    assert_close(r.gradients["x"], np.float32([1]))


def test_optional_does_not_excuse_a_misspelt_op_type(either: Any) -> None:
    with refused("UNKNOWN_OP_TYPE"):
        evaluate_tower(either, tower(), [gr.Override("ste", op_type="Flor", optional=True)])


def test_dict_of_overrides_accepts_params(either: Any) -> None:
    scaled = gr.Rule("alpha * dy", params={"alpha": 1.0})
    assert_close(evaluate_tower(either, tower(), {"Sign": scaled}).gradients["x"], np.float32([4]))
    assert_close(evaluate_tower(either, tower(), {"Sign": (scaled, {"alpha": 5.0})}).gradients["x"], np.float32([16]))


def test_params_of_a_call_do_not_recompile(either: Any, rule: RuleMaker) -> None:
    rule("Scaled", "alpha * dy", params={"alpha": 1.0})
    overrides = [
        gr.Override("Scaled", scope="a", label="front"),
        gr.Override("Scaled", op_type="Sign", label="back", params={"alpha": 3.0}),
    ]
    r = evaluate_tower(either, tower(), overrides)
    assert_close(r.gradients["x"], np.float32([1 + 2 + 3]))
    again = evaluate_tower(either, tower(), overrides, params={"front": {"alpha": 10.0}})
    assert_close(again.gradients["x"], np.float32([1 + 20 + 3]))
    assert again.digests.program == r.digests.program
    assert not again.timings.compile
    p = either.compile(tower(), ys=["y"], xs=["x"], overrides=overrides)
    for alpha in (0.0, -2.0, 0.5):
        one = p.evaluate({"x": [2.0]}, params={"back": {"alpha": alpha}})
        assert_close(one.gradients["x"], np.float32([1 + 2 + alpha]))
        assert not one.timings.compile
        assert one.digests == p.digests


def test_param_may_be_a_tensor(either: Any) -> None:
    scaled = gr.Rule("alpha * dy", params={"alpha": 1.0})
    r = either.evaluate(
        tower(("s",)),
        feeds={"x": [2.0, 3.0]},
        ys=["y"],
        xs=["x"],
        overrides={"Sign": (scaled, {"alpha": np.float32([10, 100])})},
    )
    assert_close(r.gradients["x"], np.float32([11, 101]))


def test_label_is_the_selector_by_default(either: Any) -> None:
    scaled = gr.Rule("alpha * dy", params={"alpha": 1.0})
    for override, label in ((gr.Override(scaled, op_type="Sign"), "Sign"), (gr.Override(scaled, node="c/*"), "c/*")):
        r = evaluate_tower(either, tower(), [override], params={label: {"alpha": 0.0}})
        assert_close(r.gradients["x"], np.float32([1]))


def test_contexts_of_the_builder_are_overrides(either: Any, rule: RuleMaker) -> None:
    rule("Ten", "10 * dy")
    rule("Hundred", "100 * dy")
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    with g.gradient_override_map({"Sign": "Ten", "Floor": "Ten"}):
        outer = g.op("Sign", x, name="outer")
        with g.gradient_override_map({"Sign": "Hundred"}):
            inner = g.op("Sign", x, name="inner")
            floor = g.op("Floor", x, name="floor")
    outside = g.op("Sign", x, name="outside")
    g.identity(outer + inner + floor + outside, name="y")
    r = either.evaluate(g, feeds={"x": [2.0]}, ys=["y"], xs=["x"])
    assert rules_by_node(r) == {"outer": "Ten", "inner": "Hundred", "floor": "Ten"}
    assert_close(r.gradients["x"], np.float32([120]))


def test_request_wins_over_contexts(either: Any, rule: RuleMaker) -> None:
    rule("Ten", "10 * dy")
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    with g.gradient_override_map({"Sign": "Ten"}):
        g.op("Sign", x, name="first")
        g.op("Sign", x, name="second")
    g.identity(g.tensor("first") + g.tensor("second"), name="y")
    r = either.evaluate(
        g, feeds={"x": [2.0]}, ys=["y"], xs=["x"], overrides=[gr.Override(gr.Rule("1000 * dy"), node="first")]
    )
    assert_close(r.gradients["x"], np.float32([1010]))


def test_contexts_accept_inline_rules_with_params(either: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    with g.gradient_override_map({"Sign": (gr.Rule("alpha * dy", params=["alpha"]), {"alpha": 7.0})}):
        g.op("Sign", x, name="y")
    r = either.evaluate(g, feeds={"x": [2.0]}, ys=["y"], xs=["x"])
    assert_close(r.gradients["x"], np.float32([7]))


@pytest.mark.parametrize("value", ["linearize", (gr.Rule("a * dy", params=["a"]), {"a": 7.0})], ids=["name", "params"])
def test_contexts_whose_nodes_no_gradient_reaches_are_refused(client: Any, value: Any) -> None:
    """As an override of the request; one node with a gradient is enough, and the request may take the nodes itself."""

    def build(**options: bool) -> gr.Graph:
        g = gr.Graph()
        x = g.placeholder("x", "float32", [None])
        with g.gradient_override_map({"Relu": value}, **options):
            g.op("Relu", g.op("Relu", x, name="first"), name="beside")
        g.op("Tanh", x, name="y")
        return g

    def ask(g: gr.Graph, ys: str = "y", overrides: Any = None) -> Any:
        return client.evaluate(g, {"x": [2.0]}, ys=ys, xs="x", overrides=overrides)

    with refused("INACTIVE_OVERRIDE") as refusal:
        ask(build())
    refusal.says("'first'", "'beside'", "optional")
    assert set(statuses(ask(build(optional=True))).values()) == {"off_path"}
    assert statuses(ask(build(), ys="first")) == {"first": "active", "beside": "off_path"}
    taken = ask(build(), overrides=gr.Override("default", op_type="Relu", optional=True))
    assert {one.rule for one in taken.overrides} == {"default"}
    assert client.evaluate(build(), {"x": [2.0]}, ["beside"]).outputs["beside"] == [2]


def test_params_for_two_contexts_of_one_op_type_are_refused(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    for scale in (5.0, 7.0):
        with g.gradient_override_map({"Sign": (gr.Rule("a * dy", params=["a"]), {"a": scale})}):
            x = g.op("Sign", x)
    g.identity(x, name="y")
    assert_close(client.evaluate(g, {"x": [2.0]}, ys="y", xs="x").gradients["x"], np.float32([35]))
    with refused("UNKNOWN_PARAM") as refusal:
        client.evaluate(g, {"x": [2.0]}, ys="y", xs="x", params={"Sign": {"a": 3.0}})
    refusal.says("'Sign'", "2 overrides")


def test_override_with_a_rule_by_graph(either: Any) -> None:
    rule_graph = gr.Graph()
    x, dy = rule_graph.placeholder("x", "float32", None), rule_graph.placeholder("dy", "float32", None)
    rule_graph.op("Mul", rule_graph.op("Tanh", x), dy, name="dx")
    made = either.create_rule("TanhTimes", graph=rule_graph)
    try:
        assert made.kind in ("user", "USER")
        r = evaluate_tower(either, tower(("s",)), {"Sign": "TanhTimes"})
        assert_close(r.gradients["x"], np.float32([1 + np.tanh(2)]))
        inline = evaluate_tower(either, tower(("s",)), {"Sign": gr.Rule(graph=rule_graph)})
        assert_close(inline.gradients["x"], np.float32([1 + np.tanh(2)]))
    finally:
        either.delete_rule("TanhTimes")


def test_explain_runs_nothing_and_reports_the_same_statuses(either: Any) -> None:
    overrides = [gr.Override("default", scope="a"), gr.Override("ste", op_type="Sign")]
    explained = either.explain(tower(), ys=["y"], xs=["x"], overrides=overrides)
    r = evaluate_tower(either, tower(), overrides)
    assert not explained.findings
    assert explained.overrides == r.overrides
    assert explained.default_gradient_nodes == r.default_gradient_nodes


def test_nested_names_are_selectable(client: Any) -> None:
    @tf.function
    def block(value: Any) -> Any:
        return tf.sign(value, name="binarise") + value

    def build() -> None:
        with tf.name_scope("layer1"):
            first = block(placeholder("x"))
        with tf.name_scope("layer2"):
            tf.identity(block(first), name="out")

    graph = build_graph(build)
    words: dict[str, Any] = {"feeds": {"layer1/x": [2.0]}, "ys": ["layer2/out"], "xs": ["layer1/x"]}
    everywhere = client.evaluate(graph, overrides=[gr.Override("ste", node="**/binarise")], **words)
    assert len(rules_by_node(everywhere)) == 2
    assert_close(everywhere.gradients["layer1/x"], np.float32([4]))
    (first,) = [node for node in rules_by_node(everywhere) if node.startswith("layer1")]
    one = client.evaluate(graph, overrides=[gr.Override("ste", op_type="Sign", scope="layer1")], **words)
    assert rules_by_node(one) == {first: "ste"}
    assert_close(one.gradients["layer1/x"], np.float32([2]))


def test_function_call_as_a_whole_takes_a_rule(client: Any) -> None:
    @tf.function
    def block(value: Any) -> Any:
        return tf.sign(value) + value

    graph_def = build_graph_def(lambda: tf.identity(block(placeholder("x")), name="y"))
    (call,) = [node.name for node in graph_def.node if node.op.endswith("PartitionedCall")]
    r = client.evaluate(
        load_graph(graph_def),
        feeds={"x": [2.0]},
        fetches=["y"],
        ys=["y"],
        xs=["x"],
        overrides=[gr.Override(gr.Rule("7 * dy"), node=call)],
    )
    assert rules_by_node(r) == {call: "inline"}
    assert_close(r.outputs["y"], np.float32([3]))
    assert_close(r.gradients["x"], np.float32([7]))


def test_explain_lists_all_problems(either: Any) -> None:
    overrides = [gr.Override("ste_sing", op_type="Sign"), gr.Override("ste", op_type="Sgin")]
    explained = either.explain(tower(), ys=["y"], xs=["x"], overrides=overrides)
    assert {finding.reason for finding in explained.findings} == {"UNKNOWN_RULE", "UNKNOWN_OP_TYPE"}
    assert not explained.overrides
    with refused("UNKNOWN_RULE"):
        either.explain(tower(), ys=["y"], xs=["x"], overrides=overrides[:1]).raise_for_findings()


def test_params_by_label_reach_the_rules_that_have_them(either: Any) -> None:
    overrides = [
        gr.Override(gr.Rule("alpha * dy", params={"alpha": 1.0}), scope="a", label="both"),
        gr.Override("ste", scope="c", label="both"),
    ]
    r = evaluate_tower(either, tower(), overrides, params={"both": {"alpha": 5.0}})
    assert_close(r.gradients["x"], np.float32([1 + 5 + 5 + 1]))
    with refused("UNKNOWN_PARAM") as refusal:
        evaluate_tower(either, tower(), overrides, params={"both": {"alfa": 5.0}})
    refusal.says("'alfa'", "'alpha'")


def test_params_of_an_unused_rule_are_not_required(either: Any) -> None:
    overrides = [gr.Override("gradient_scale", op_type="Floor", optional=True), gr.Override("ste", op_type="Sign")]
    assert_close(evaluate_tower(either, tower(), overrides).gradients["x"], np.float32([4]))


def test_rule_set_in_the_graph_is_labelled_by_op_type(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    with g.gradient_override_map({"Sign": "gradient_scale", "Tanh": "gradient_scale"}):
        g.identity(g.op("Sign", x) + g.op("Tanh", x), name="y")
    r = client.evaluate(
        gr.Graph.from_bytes(g.to_bytes()),
        feeds={"x": [2.0]},
        ys=["y"],
        xs=["x"],
        params={"Sign": {"factor": 3.0}, "Tanh": {"factor": 4.0}},
    )
    assert_close(r.gradients["x"], np.float32([7]))
    assert {item.label for item in r.overrides} == {"Sign", "Tanh"}


def test_default_exempts_a_loop_and_its_nodes(client: Any) -> None:
    def build() -> None:
        x = placeholder("x")
        _, out = tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v + tf.sign(v)), [0, x], name="loop")
        tf.identity(out + tf.sign(x), name="y")

    overrides = [gr.Override("default", node="loop"), gr.Override("ste", op_type="Sign")]
    r = evaluate_tower(client, build_graph(build), overrides)
    assert_close(r.gradients["x"], np.float32([2]))
    assert sorted(rules_by_node(r).values()) == ["default", "ste"]


def test_side_effects_of_a_function_happen_before_its_results_are_used(client: Any) -> None:
    """The assertion is reachable only through the function's control results, as in rewritten graphs."""

    @tf.function
    def checked(v: Any) -> Any:
        tf.debugging.Assert(tf.reduce_all(v > 0), ["NEGATIVE"], name="check")
        return v * 2.0

    graph_def = build_graph_def(lambda: tf.identity(checked(placeholder("x")), name="y"))
    for function in graph_def.library.function:
        for node in function.node_def:
            kept = [item for item in node.input if not item.startswith("^")]
            del node.input[:]
            node.input.extend(kept)
    g = load_graph(graph_def)
    assert_close(client.evaluate(g, {"x": [1.0]}, fetches=["y"]).outputs["y"], np.float32([2]))
    with refused("EXECUTION_FAILED") as refusal:
        client.evaluate(g, {"x": [-1.0]}, fetches=["y"])
    refusal.says("NEGATIVE")


def test_a_rule_for_a_call_may_use_default(client: Any) -> None:
    @tf.function
    def block(value: Any) -> Any:
        return tf.tanh(value, name="inner") * value

    graph = build_graph(lambda: tf.identity(block(placeholder("x")), name="y"))
    words: dict[str, Any] = {"feeds": {"x": [0.5]}, "ys": ["y"], "xs": ["x"]}
    own = np.tanh(0.5) + 0.5 / np.cosh(0.5) ** 2
    twice = gr.Override(gr.Rule("each(default * 2)"), op_type="PartitionedCall", optional=True)
    stateful = gr.Override(gr.Rule("each(default * 2)"), op_type="StatefulPartitionedCall", optional=True)
    assert_close(client.evaluate(graph, overrides=[twice, stateful], **words).gradients["x"], np.float32([2 * own]))
    everything = client.evaluate(graph, overrides=[gr.Override(gr.Rule("each(default * 2)"), node="**")], **words)
    # The call and the Identity; what is in the call belongs to it.
    assert_close(everything.gradients["x"], np.float32([4 * own]))
    # An earlier override holds inside, where the call's rule uses its own gradients.
    inner = gr.Override(gr.Rule("5 * dy"), node="**/inner")
    both = client.evaluate(graph, overrides=[inner, twice, stateful], **words)
    assert_close(both.gradients["x"], np.float32([2 * (np.tanh(0.5) + 0.5 * 5)]))
    assert sorted(rules_by_node(both).values()) == ["inline", "inline"]


def test_rules_of_calls_pass_gradients_on_through_one_another(client: Any) -> None:
    """The results of both calls come from their second argument alone, so only the rules lead to x."""

    @tf.function
    def block(ignored: Any, value: Any) -> Any:
        return tf.sin(value)

    def build() -> None:
        squared, w = tf.square(placeholder("x")), placeholder("w")
        tf.tanh(block(block(squared, w), w), name="y")

    graph_def = build_graph_def(build)
    first, second = [node.name for node in graph_def.node if node.op.endswith("PartitionedCall")]
    overrides = [gr.Override(gr.Rule("each(3 * dy)"), node=name) for name in (first, second, "y")]
    r = client.evaluate(load_graph(graph_def), {"x": [2.0], "w": [0.5]}, ys="y", xs="x", overrides=overrides)
    assert statuses(r) == {first: "active", second: "active", "y": "active"}
    assert_close(r.gradients["x"], np.float32([3**3 * 4]))


def test_what_only_another_output_leads_to_is_off_the_path(either: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    first, second = g.op("IdentityN", [x, x], name="u")
    g.identity(first)
    g.op("Tanh", second, name="y")
    words: dict[str, Any] = {"feeds": {"x": [0.5]}, "ys": ["y"], "xs": ["u:0"]}
    rule = gr.Override(gr.Rule("5 * dy"), op_type="Tanh", optional=True)
    r = either.evaluate(g, overrides=[rule], **words)
    assert r.gradients["u:0"] is None
    assert [item.status for item in r.overrides] == ["off_path"]
    with refused("INACTIVE_OVERRIDE"):
        either.evaluate(g, overrides={"Tanh": gr.Rule("5 * dy")}, **words)


def test_params_by_a_label_that_nobody_gave_are_refused_where_it_is_ambiguous(either: Any) -> None:
    scaled = gr.Rule("alpha * dy", params={"alpha": 1.0})
    overrides = [gr.Override(scaled, op_type="Sign", scope="a"), gr.Override(scaled, op_type="Sign")]
    with refused("UNKNOWN_PARAM") as refusal:
        evaluate_tower(either, tower(), overrides, params={"Sign": {"alpha": 5.0}})
    refusal.says("'Sign'", "'alpha'", "label")
