"""Selectors beyond names: regex, groups, position on the path, predicates, dependence, chains of ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused, rules_by_node, statuses
from tests.service.graph_defs import build_graph, placeholder

TEN = gr.Rule("10 * dy")
X = np.float32([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]])


def tower() -> gr.Graph:
    """Makes x → relu a → tanh b → relu c → y, and beside it x → relu side → y."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    a = g.op("Relu", x, name="block1/a")
    b = g.op("Tanh", a, name="block1/b")
    c = g.op("Relu", b, name="block2/c")
    side = g.op("Relu", x, name="side")
    g.op("AddV2", c, side, name="y")
    return g


def matched(client: Any, *overrides: Any, graph: gr.Graph | None = None, xs: Any = "x", ys: Any = "y") -> set[str]:
    return set(rules_by_node(client.evaluate(graph or tower(), {"x": X}, ys=[ys], xs=[xs], overrides=list(overrides))))


@pytest.mark.parametrize(
    ("conditions", "nodes"),
    [
        ({"node_regex": "block[0-9]+/[ac]"}, {"block1/a", "block2/c"}),
        ({"node": ["block1/a", "block2/*", "none"]}, {"block1/a", "block2/c"}),
        ({"node": ["**"], "op_type": "Tanh"}, {"block1/b"}),
        ({"node_regex": "block1/.*", "op_type": "Tanh"}, {"block1/b"}),
        ({"op_type": "@activation"}, {"block1/a", "block1/b", "block2/c", "side"}),
        ({"op_type": "@activation", "scope": "block1"}, {"block1/a", "block1/b"}),
        ({"op_type": "Relu", "position": "nearest_xs"}, {"block1/a", "side"}),
        ({"op_type": "Relu", "position": 0}, {"block1/a", "side"}),
        ({"op_type": "Relu", "position": 1}, {"block2/c"}),
        ({"op_type": "Relu", "position": "nearest_ys"}, {"block2/c", "side"}),
        ({"op_type": "Relu", "position": -2}, {"block1/a"}),
        ({"op_type": "@activation", "position": 2}, {"block2/c"}),
        ({"op_type": "@activation", "depends_on": ["block1/a"]}, {"block1/b", "block2/c"}),
        ({"op_type": "Relu", "depends_on": "x"}, {"block1/a", "block2/c", "side"}),
        ({"op_type": "Relu", "dtype": "float32"}, {"block1/a", "block2/c", "side"}),
        ({"op_type": "Relu", "rank": 2}, {"block1/a", "block2/c", "side"}),
        ({"pattern": ("Relu", "Tanh")}, {"block1/b"}),
        ({"pattern": ("@activation", "@activation", "Relu")}, {"block2/c"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_conditions_select_their_nodes(either: Any, conditions: dict[str, Any], nodes: set[str]) -> None:
    rule = "linearize" if "pattern" in conditions else TEN
    assert matched(either, gr.Override(rule, **conditions)) == nodes


@pytest.mark.parametrize(
    ("conditions", "reason", "says"),
    [
        ({"node_regex": "a("}, "INVALID_OVERRIDE", "missing )"),
        (
            {"node": ["b*"] + [f"{number}*" for number in range(1000)]},
            "INVALID_OVERRIDE",
            "1001 of its nodes are globs",
        ),
        ({"node": ["block1", "blok2"]}, "UNMATCHED_OVERRIDE", "named 'block1' or like 1 other names"),
        ({"node_regex": "block"}, "UNMATCHED_OVERRIDE", "as a whole"),
        ({"op_type": "@activations"}, "UNKNOWN_OP_TYPE", "'@activation'"),
        ({"op_type": "@convolution"}, "UNMATCHED_OVERRIDE", "Conv2D"),
        ({"op_type": "Relu", "position": 2}, "UNMATCHED_OVERRIDE", "position on the path"),
        ({"op_type": "Relu", "dtype": "float64"}, "UNMATCHED_OVERRIDE", "float64"),
        ({"op_type": "Relu", "rank": 4}, "INACTIVE_OVERRIDE", "rank"),
        ({"op_type": "Relu", "depends_on": "nope"}, "UNKNOWN_TENSOR", "nope"),
        ({"op_type": "Relu", "depends_on": "y"}, "UNMATCHED_OVERRIDE", "dependence on 'y'"),
        ({"pattern": ("Relu", "Relu")}, "UNMATCHED_OVERRIDE", "no chain Relu → Relu"),
        ({"pattern": ("Relu", "Thanh")}, "UNKNOWN_OP_TYPE", "Thanh"),
        ({"pattern": ("Relu", "Tanh"), "rank": 2}, "INVALID_OVERRIDE", "rank"),
        ({"pattern": ("Relu", "Tanh"), "op_type": "Tanh"}, "INVALID_OVERRIDE", "op_type"),
    ],
    ids=str,
)
def test_invalid_conditions_are_refused(client: Any, conditions: dict[str, Any], reason: str, says: str) -> None:
    with refused(reason) as refusal:
        matched(client, gr.Override(TEN, **conditions))
    refusal.says(says)


def test_attributes_match_with_their_defaults(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    one = g.op("LeakyRelu", x, name="one")
    g.op("LeakyRelu", one, alpha=0.5, name="y")
    assert matched(client, gr.Override(TEN, op_type="LeakyRelu", attrs={"alpha": 0.5}), graph=g) == {"y"}
    assert matched(client, gr.Override(TEN, op_type="LeakyRelu", attrs={"alpha": 0.2}), graph=g) == {"one"}


def test_node_of_another_rank_is_left_to_later_overrides(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [2, 3])
    flat = g.op("Relu", g.reshape(g.op("Relu", x, name="two"), [-1]), name="one")
    g.identity(flat, name="y")
    overrides = [gr.Override(gr.Rule("10 * dy"), op_type="Relu", rank=1), gr.Override("linearize", op_type="Relu")]
    r = client.evaluate(g, {"x": X}, ys=["y"], xs=["x"], overrides=overrides)
    assert rules_by_node(r) == {"one": "inline", "two": "linearize"}
    assert_close(r.gradients["x"], np.full((2, 3), 10, np.float32))
    unknown = gr.Graph()
    unknown.op("Relu", unknown.placeholder("x", "float32", None), name="y")
    with refused("RULE_NOT_APPLICABLE") as refusal:
        matched(client, gr.Override(TEN, op_type="Relu", rank=1), graph=unknown)
    refusal.says("'y'", "rank")


def test_dependence_and_position_reach_into_loops_and_calls(client: Any) -> None:
    @tf.function
    def inner(v: Any) -> Any:
        return tf.nn.relu(v, name="last")

    def build() -> None:
        x = placeholder("x", shape=(2, 3))
        first = tf.nn.relu(x, name="first")
        _, looped = tf.while_loop(
            lambda i, v: i < 2, lambda i, v: (i + 1, tf.nn.relu(v, name="middle")), [0, first], name="loop"
        )
        tf.identity(inner(looped), name="y")

    g = build_graph(build)
    by_position = [matched(client, gr.Override(TEN, op_type="Relu", position=n), graph=g) for n in (0, 1, 2, -1)]
    assert by_position[0] == {"first"}
    # TensorFlow numbers the nodes of a loop's body: middle_0.
    assert [name.rpartition("/")[2].split("_")[0] for (name,) in by_position[1:]] == ["middle", "last", "last"]
    behind = matched(client, gr.Override(TEN, op_type="Relu", depends_on="first"), graph=g)
    assert {name.rpartition("/")[2].split("_")[0] for name in behind} == {"middle", "last"}


def forked() -> gr.Graph:
    """Two conditionals whose branches have nodes of the same names: `one` and `two`, also in a function of both."""

    @tf.function
    def shared(v: Any) -> Any:
        return tf.tanh(tf.sin(v, name="one"), name="two")

    def branch(factor: float) -> Any:
        def compute(v: Any) -> Any:
            return shared(factor * tf.tanh(tf.sin(v, name="one"), name="two"))

        return compute

    def build() -> None:
        x, p, n = placeholder("x"), placeholder("p", tf.bool, ()), placeholder("n", tf.int32, ())
        chosen = tf.cond(p, lambda: branch(2.0)(x), lambda: branch(3.0)(x), name="fork")
        branches = [lambda factor=factor: branch(factor)(chosen) for factor in (1.0, 0.5, 0.25)]
        tf.identity(tf.switch_case(n, branches, name="case"), name="y")

    return build_graph(build)


@pytest.mark.parametrize("kind", ["node", "glob", "region", "depends_on"])
@pytest.mark.parametrize("chosen", ["fork[then]", "fork[else]", "case/indexed_case[2]"])
def test_one_branch_alone_gets_a_rule(client: Any, kind: str, chosen: str) -> None:
    """The right numbers come from the chain rule, in NumPy."""
    inner = f"{chosen}/PartitionedCall/two"
    ten = gr.Rule("10 * dy")
    override = {
        "node": lambda: gr.Override(ten, node=f"{chosen}/two"),
        "glob": lambda: gr.Override(ten, node=f"{chosen}/*", op_type="Tanh"),
        "region": lambda: gr.Override(ten, region=gr.Region([f"{chosen}/one"], [f"{chosen}/two"])),
        "depends_on": lambda: gr.Override(ten, node=inner, depends_on=f"{chosen}/two"),
    }[kind]()
    p = client.compile(forked(), ys="y", xs="x", overrides=override)
    (found,) = p.overrides
    assert found.qualified_name == (inner if kind == "depends_on" else f"{chosen}/two")
    for first, second in [(True, 0), (False, 2), (True, 2)]:
        value, slope = np.float64(0.3), 1.0
        for name, factor in [
            ("fork[then]", 2.0) if first else ("fork[else]", 3.0),
            (f"case/indexed_case[{second}]", (1.0, 0.5, 0.25)[second]),
        ]:
            for place, scale in (("two", factor), ("inner", 1.0)):
                wave, out = np.cos(value), np.tanh(np.sin(value))
                has_rule = name == chosen and (place == "inner") == (kind == "depends_on")
                value, slope = scale * out, slope * wave * (10.0 if has_rule else 1 - out * out) * scale
        gradient = p.evaluate({"x": [0.3], "p": first, "n": second}).gradients["x"]
        assert_close(gradient, np.float32([slope]), rtol=1e-5)


# Chains of ops.


def dense_layer(bias: str = "BiasAdd") -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    w = g.constant(np.float32([[1, -1], [2, 0.5], [-1, 1]]), name="w")
    h = g.op(bias, g.op("MatMul", x, w, name="mm"), g.constant(np.float32([0.5, -0.25]), name="b"), name="add")
    g.op("Relu", h, name="y")
    return g


def test_rule_of_a_chain_gets_all_its_inputs(either: Any) -> None:
    # x0 and x1 are the first op's inputs, x2 is the bias; y is the last op's output.
    rule = gr.Rule("(0 * x0 + sum(dy) + sum(y), ignore_dy(ones_like(x1)), sum_to(dy * x2, x2))")
    overrides = [gr.Override(rule, pattern=("MatMul", "BiasAdd", "Relu"))]
    r = either.evaluate(dense_layer(), {"x": X}, fetches=["y"], ys=["y"], xs=["x", "w", "b"], overrides=overrides)
    assert_close(r.gradients["x"], np.full((2, 3), 4 + r.outputs["y"].sum(), np.float32))
    assert_close(r.gradients["w"], np.ones((3, 2), np.float32))
    assert_close(r.gradients["b"], np.float32([1, -0.5]))
    (resolution,) = r.overrides
    assert (resolution.node, resolution.nodes) == ("y", ("mm", "add", "y"))
    assert resolution.op_type == "MatMul+BiasAdd+Relu"
    assert resolution.label == "MatMul+BiasAdd+Relu"
    assert r.default_gradient_nodes == []


def test_default_rule_of_a_chain_is_its_own_gradient(either: Any) -> None:
    plain = either.evaluate(dense_layer(), {"x": X}, ys=["y"], xs=["x", "w", "b"])
    rule = gr.Rule("(3 * default0, 3 * default1, 3 * default2)")
    overrides = [gr.Override(rule, pattern=("MatMul", "BiasAdd", "Relu"))]
    r = either.evaluate(dense_layer(), {"x": X}, ys=["y"], xs=["x", "w", "b"], overrides=overrides)
    for name in ("x", "w", "b"):
        assert_close(r.gradients[name], 3 * plain.gradients[name])


def test_bias_of_a_chain_does_not_depend_on_the_xs(client: Any) -> None:
    rule = gr.Rule("(ignore_dy(ones_like(x0)), None, None)")
    added = matched(client, gr.Override(rule, pattern=("@dense", "@bias")), graph=dense_layer("AddV2"))
    assert added == {"add"}
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    mixed = g.op("MatMul", x, g.constant(np.eye(3, dtype=np.float32)), name="mm")
    g.op("AddV2", mixed, x, name="y")
    with refused("UNMATCHED_OVERRIDE"):
        matched(client, gr.Override(rule, pattern=("@dense", "@bias")), graph=g)
    both = gr.Rule("(dy, dy)")
    assert matched(client, gr.Override(both, op_type="@sum"), graph=g) == {"y"}
    with refused("UNMATCHED_OVERRIDE"):
        matched(client, gr.Override(both, op_type="@sum"), graph=dense_layer("AddV2"))


@pytest.mark.parametrize("bias", ["BiasAdd", "AddV2", "Add"])
def test_sum_in_a_chain_is_no_bias_add(client: Any, bias: str) -> None:
    """A pattern that makes an exception for sums leaves layers with a bias to the other override."""
    overrides = [
        gr.Override("default", pattern=("@linear", "@sum"), optional=True),
        gr.Override(gr.Rule("(3 * default0, default1)"), op_type="MatMul", label="layers"),
    ]
    plain = client.evaluate(dense_layer(bias), {"x": X}, ys="y", xs="x").gradients["x"]
    r = client.evaluate(dense_layer(bias), {"x": X}, ys="y", xs="x", overrides=overrides)
    assert_close(r.gradients["x"], 3 * plain)
    assert {resolution.label for resolution in r.overrides} == {"layers"}


def test_residual_sum_in_a_chain_is_a_sum(client: Any) -> None:
    """Also where one operand is a layer with a bias: it depends on the xs."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    w = g.constant(np.eye(3, dtype=np.float32) * 2)
    biased = g.op("AddV2", g.op("MatMul", x, w, name="m1"), g.constant(np.ones(3, np.float32)), name="biased")
    g.op("AddV2", g.op("MatMul", biased, w, name="m2"), biased, name="y")
    overrides = [
        gr.Override("default", pattern=("@linear", "@sum"), label="residual"),
        gr.Override(gr.Rule("(3 * default0, default1)"), op_type="MatMul", label="layers"),
    ]
    r = client.evaluate(g, {"x": X}, ys="y", xs="x", overrides=overrides)
    assert {(one.node, one.label) for one in r.overrides if one.status == "active"} == {
        ("y", "residual"),
        ("m1", "layers"),
    }
    # Of y = 2 b + b with b = 2 x + 1, the layer in b is tripled.
    assert_close(r.gradients["x"], np.full_like(X, 3 * 2 * 3))


def test_chain_with_a_shared_intermediate_does_not_match(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    a = g.op("Relu", x, name="a")
    g.op("AddV2", g.op("Tanh", a, name="b"), a, name="y")
    with refused("UNMATCHED_OVERRIDE"):
        matched(client, gr.Override("linearize", pattern=("Relu", "Tanh")), graph=g)
    with refused("UNMATCHED_OVERRIDE"):
        matched(client, gr.Override("linearize", pattern=("Relu", "Tanh")), xs="block1/a")


def test_first_match_wins_between_chains_and_nodes(client: Any) -> None:
    chain, node = gr.Override("linearize", pattern=("Relu", "Tanh")), gr.Override(TEN, op_type="Tanh", optional=True)
    r = client.evaluate(tower(), {"x": X}, ys=["y"], xs=["x"], overrides=[chain, node])
    assert statuses(r) == {"block1/b": "active"}
    with refused("UNMATCHED_OVERRIDE") as refusal:
        client.evaluate(tower(), {"x": X}, ys=["y"], xs=["x"], overrides=[gr.Override(TEN, op_type="Tanh"), chain])
    refusal.says("'Relu+Tanh'", "'Tanh'")


@pytest.mark.parametrize("inside", [False, True], ids=["top", "loop"])
def test_step_function_gets_a_surrogate_gradient(either: Any, inside: bool) -> None:
    """The step is Greater and Cast with a broadcast threshold: dx goes to the potential, the sum of -dx to the
    threshold.
    """

    def spike(v: Any, threshold: Any) -> Any:
        return tf.cast(tf.greater(v, threshold), tf.float32)

    def build() -> None:
        x, threshold = placeholder("x", shape=(2, 3)), placeholder("t", shape=(3,))
        if inside:
            _, out = tf.while_loop(
                lambda i, v: i < 1, lambda i, v: (i + 1, v * spike(x, threshold)), [0, tf.ones((2, 3))]
            )
        else:
            out = spike(x, threshold)
        tf.identity(out, name="y")

    threshold = np.float32([0.5, 0.0, -0.5])
    dy = np.float32([[1, 2, 3], [4, 5, 6]])
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x", "t"], "grad_ys": {"y": dy}, "fetches": ["y"]}
    r = either.evaluate(
        build_graph(build),
        {"x": X, "t": threshold},
        overrides={"@step": ("fast_sigmoid", {"slope": 2.0})},
        **words,
    )
    assert_close(r.outputs["y"], (threshold < X).astype(np.float32))
    factor = dy / (1 + 2 * np.abs(X - threshold)) ** 2
    assert_close(r.gradients["x"], factor.astype(np.float32))
    assert_close(r.gradients["t"], -factor.sum(0).astype(np.float32))


def test_positions_count_along_the_path_of_the_gradient(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    cut = g.op("Relu", x, name="cut")
    g.op("Relu", g.op("AddV2", g.op("Tanh", cut, name="stopped"), x), name="y")
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x"], "stop_gradients": ["stopped"]}
    nearest = gr.Override("ste", op_type="Relu", position="nearest_xs")
    r = client.evaluate(g, {"x": X}, overrides=[nearest], **words)
    assert set(rules_by_node(r)) == {"y"}


def test_chain_behind_an_override_by_rank_is_reported(client: Any) -> None:
    by_rank = gr.Override(gr.Rule("(ignore_dy(ones_like(x0)), None)"), op_type="MatMul", rank=2, label="by rank")
    chain = gr.Override("lrp_epsilon", pattern=("MatMul", "BiasAdd"))
    with refused("INVALID_OVERRIDE") as refusal:
        matched(client, by_rank, chain, graph=dense_layer())
    refusal.says("'mm'", "'by rank'", "rank")


@pytest.mark.parametrize("pattern", [("Neg",) * 33, ("Neg", "")])
def test_patterns_of_invalid_length_are_refused(client: Any, pattern: tuple[str, ...]) -> None:
    with refused("INVALID_OVERRIDE"):
        matched(client, gr.Override(TEN, pattern=pattern))


def test_one_error_gives_one_finding(client: Any) -> None:
    override = gr.Override(TEN, op_type="Relu", depends_on="nope")
    (finding,) = client.explain(tower(), ys=["y"], xs=["x"], overrides=[override]).findings
    assert finding.reason == "UNKNOWN_TENSOR"
    step = gr.Graph()
    x = step.placeholder("x", "float32", [None, 3])
    step.cast(step.op("Greater", x, 0.0), "float32", name="y")
    with refused("RULE_NOT_APPLICABLE") as refusal:
        matched(client, gr.Override("lrp_epsilon", op_type="@step"), graph=step)
    refusal.says("Greater+Cast", "lrp_epsilon")
