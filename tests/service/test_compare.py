"""`client.compare`: one graph under several override maps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule._comparison import numeric_gradients
from tests.service.answers import assert_close, refused
from tests.service.graph_defs import build_graph, placeholder

RNG = np.random.default_rng(0)
FEEDS = {
    "x": RNG.normal(size=(3, 5)).astype(np.float32),
    "w": RNG.normal(size=(5, 4)).astype(np.float32),
    "b": RNG.normal(size=4).astype(np.float32),
}


def network() -> gr.Graph:
    """Makes x · w + b → relu r → tanh t → m = t - 0.3 → relu r2 → loss."""
    g = gr.Graph()
    x, w, b = (
        g.placeholder("x", "float32", [None, 5]),
        g.placeholder("w", "float32", [5, 4]),
        g.placeholder("b", "float32", [4]),
    )
    h = g.op("Relu", g.op("BiasAdd", g.matmul(x, w, name="mm"), b, name="ba"), name="r")
    h = g.op("Relu", g.op("Sub", g.op("Tanh", h, name="t"), 0.3, name="m"), name="r2")
    g.reduce_sum(h + 0.25 * x[:, :4], axis=[0, 1], name="loss")
    return g


def compared(client: Any, overrides: Any, **more: Any) -> Any:
    return client.compare(network(), FEEDS, ys=["loss"], xs=["x", "w", "b"], overrides=overrides, **more)


def test_own_gradient_and_finite_differences_agree(either: Any) -> None:
    found = compared(either, {"same": {"Tanh": gr.Rule("dy * (1 - y * y)")}})
    assert found.labels == ("default", "same", "finite_differences")
    assert found.reference == "default"
    assert found.first_differences == {"same": None}
    assert "float64" in found.finite_differences.how and found.notes == ()
    for row in found.rows:
        if row.is_x and row.label != "finite_differences":
            assert row.from_finite_differences < 1e-5
    for name in ("x", "w", "b"):
        own = either.evaluate(network(), FEEDS, ys=["loss"], xs=[name]).gradients[name]
        assert_close(found.gradients["default"][name].astype(np.float32), own)
        assert_close(found.finite_differences.gradients[name].astype(np.float32), own, rtol=1e-4)


def test_norms_are_those_of_the_upstream_gradients(client: Any) -> None:
    found = compared(client, {"half": {"Tanh": gr.Rule("0.5 * default")}}, finite_differences=False)
    tensors = ["r2", "m", "t", "r", "ba", "mm"]
    for label, overrides in (("default", None), ("half", {"Tanh": gr.Rule("0.5 * default")})):
        r = client.evaluate(network(), FEEDS, ys=["loss"], xs=tensors, overrides=overrides)
        norms = found.norms(label)
        for name in tensors:
            assert norms[name] == pytest.approx(float(np.linalg.norm(r.gradients[name])), rel=1e-5)
    order = list(found.norms("default"))
    assert [name for name in order if name in tensors] == tensors
    assert order[-3:] == ["x", "w", "b"]


def test_first_differences_between_maps_are_reported(either: Any) -> None:
    found = compared(
        either,
        {
            "early": {"Relu": "linearize"},
            "late": [gr.Override(gr.Rule("2 * dy"), node="r")],
            "never": [gr.Override("default", op_type="Relu")],
        },
        finite_differences=False,
    )
    early, late = found.first_differences["early"], found.first_differences["late"]
    assert (early.tensor, [item.node for item in early.rules]) == ("m", ["r2"])
    assert (late.tensor, [item.node for item in late.rules]) == ("ba", ["r"])
    assert found.first_differences["never"] is None
    assert found.finite_differences is None
    assert [item.node for item in found.overrides["late"]] == ["r"]


def test_tensors_inside_a_chain_or_a_region_are_left_out(client: Any) -> None:
    rule = gr.Rule("(2 * default0, default1, default2)")
    region = gr.Override(gr.Rule("3 * default"), region=gr.Region(["ba"], ["t"]))
    found = compared(
        client,
        {"chain": [gr.Override(rule, pattern=("MatMul", "BiasAdd"))], "region": [region]},
        finite_differences=False,
    )
    assert found.notes == ()
    assert found.norms("chain")["mm"] is None and found.norms("region")["r"] is None
    assert found.first_differences["chain"].tensor == "x"
    assert found.first_differences["region"].tensor == "ba"
    own = found.gradients["default"]
    # The rule doubles the part of x that passes the layer; the skip connection adds its part once. The gradient of w
    # comes through the region alone.
    arriving = client.evaluate(network(), FEEDS, ys=["loss"], xs=["mm"]).gradients["mm"]
    assert_close(found.gradients["chain"]["x"], own["x"] + arriving.astype(np.float64) @ FEEDS["w"].T, rtol=1e-4)
    assert_close(found.gradients["region"]["w"], 3 * own["w"], rtol=1e-4)


def test_positions_and_presets_select_the_same_nodes_as_evaluate(client: Any) -> None:
    """Comparing asks for more tensors than `evaluate`; positions counted from the xs must not change."""
    maps = {
        "first": [gr.Override(gr.Rule("2 * dy"), op_type="Relu", position="nearest_xs")],
        "second": [gr.Override(gr.Rule("2 * dy"), op_type="Relu", position=1)],
        "lrp": gr.Preset("epsilon_plus_flat"),
    }
    found = compared(client, maps, finite_differences=False)
    assert found.notes == ()
    for label, overrides in maps.items():
        r = client.evaluate(network(), FEEDS, ys=["loss"], xs=["x"], overrides=overrides)
        assert_close(found.gradients[label]["x"].astype(np.float32), r.gradients["x"])


def test_first_map_is_the_reference_where_an_op_has_no_gradient(either: Any) -> None:
    g = gr.Graph()
    g.op("RandomShuffle", g.op("Square", g.placeholder("x", "float32", [None]), name="s"), name="y")
    maps = {"one": {"RandomShuffle": "ste"}, "two": {"RandomShuffle": gr.Rule("2 * dy")}}
    found = either.compare(g, {"x": np.arange(1, 30, dtype=np.float32)}, ys="y", xs="x", overrides=maps)
    assert (found.labels, found.reference) == (("one", "two"), "one")
    assert found.first_differences.keys() == {"two"} and found.first_differences["two"].tensor == "s"
    assert any("no default" in note and "RandomShuffle" in note for note in found.notes)
    assert any("each time" in note for note in found.notes)


def test_surrogates_differ_from_finite_differences(client: Any) -> None:
    g = gr.Graph()
    g.op("Mul", g.op("Sign", g.placeholder("x", "float32", [None]), name="s"), 3.0, name="y")
    found = client.compare(g, {"x": [0.5, -2.0]}, ys="y", xs="x", overrides={"ste": {"Sign": "ste_sign"}})
    by_label = {row.label: row for row in found.rows if row.tensor == "x"}
    assert by_label["default"].from_finite_differences == 0
    assert by_label["ste"].from_finite_differences == float("inf")
    assert by_label["ste"].norm == pytest.approx(3)
    assert found.first_differences["ste"].tensor == "x"


def test_grad_ys_weight_the_comparison(either: Any) -> None:
    g = network()
    weights = RNG.normal(size=(3, 4)).astype(np.float32)
    upstream = g.constant(weights, name="upstream")
    for grad_ys in ({"r": weights}, [weights], {"r": upstream}, ["upstream"]):
        found = either.compare(
            g, FEEDS, ys=["r"], xs=["x"], overrides={"same": {"Relu": gr.Rule("default")}}, grad_ys=grad_ys
        )
        (row,) = [row for row in found.rows if row.label == "default" and row.is_x]
        assert row.from_finite_differences < 1e-5


def test_large_xs_are_compared_along_random_directions(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric_gradients, "MAX_ELEMENTS", 10)
    found = compared(client, {"half": {"BiasAdd": gr.Rule("(0.5 * default0, default1)")}})
    measured = found.finite_differences
    assert measured.gradients["x"] is None and measured.gradients["b"] is not None
    assert measured.directions["x"].shape == (numeric_gradients.DIRECTIONS, 3, 5)
    by_label = {row.label: row for row in found.rows if row.tensor == "w"}
    assert by_label["default"].from_finite_differences < 1e-5
    assert by_label["half"].from_finite_differences == pytest.approx(0.5, abs=1e-4)
    assert 0.3 < by_label["finite_differences"].norm / by_label["default"].norm < 3


@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-7), ("float16", 0.1), ("bfloat16", 0.3)])
def test_step_of_differences_depends_on_the_dtype(client: Any, dtype: str, within: float) -> None:
    g = gr.Graph()
    g.op("Square", g.placeholder("x", dtype, [None]), name="y")
    found = client.compare(
        g, {"x": [1.0, -0.5, 2.0]}, ys="y", xs="x", overrides={"double": {"Square": gr.Rule("2 * default")}}
    )
    assert found.finite_differences.dtype == dtype
    by_label = {row.label: row for row in found.rows if row.is_x}
    assert by_label["default"].from_finite_differences <= within
    assert by_label["double"].from_finite_differences == pytest.approx(1, abs=within)


def test_op_without_float64_kernel_is_compared_in_float32(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.op("Square", g.op("FakeQuantWithMinMaxArgs", x, min=-4.0, max=4.0, num_bits=16), name="y")
    found = client.compare(
        g, {"x": [1.0, -0.5, 2.0]}, ys="y", xs="x", overrides={"ste": {"FakeQuantWithMinMaxArgs": "ste"}}
    )
    assert "float32" in found.finite_differences.how
    assert all(row.from_finite_differences < 1e-2 for row in found.rows if row.label in ("default", "ste") and row.is_x)


def test_random_graph_has_no_finite_differences(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [3])
    g.op("Mul", x, g.op("RandomUniform", g.constant([3]), dtype="float32"), name="y")
    found = client.compare(g, {"x": [1.0, 2.0, 3.0]}, ys="y", xs="x", overrides={"none": []})
    assert found.finite_differences is None
    assert any("each time" in note for note in found.notes)


def test_xs_may_be_intermediate_and_nodes_inside_functions(client: Any) -> None:
    @tf.function
    def inner(v: Any) -> Any:
        return tf.nn.relu(tf.tanh(v))

    def build() -> None:
        tf.identity(inner(tf.identity(placeholder("x"), name="middle")) * 2.0, name="y")

    g = build_graph(build)
    found = client.compare(g, {"x": [0.5, -1.0]}, ys="y", xs=["middle"], overrides={"linear": {"Relu": "linearize"}})
    by_label = {row.label: row for row in found.rows if row.is_x}
    assert by_label["default"].from_finite_differences < 1e-6
    assert by_label["linear"].difference > 0.1
    assert found.first_differences["linear"].tensor == "middle"
    assert (
        client.compare(g.to_bytes(), {"x": [0.5]}, ys="y", xs="x", overrides={"linear": {"Relu": "linearize"}}).labels[
            1
        ]
        == "linear"
    )


def test_batch_norm_is_folded_for_all_maps(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 4, 4, 2])
    kernel = g.constant(RNG.normal(size=(3, 3, 2, 3)).astype(np.float32))
    h = g.op("Conv2D", x, kernel, strides=[1, 1, 1, 1], padding="SAME")
    ones = [g.constant(np.float32(values)) for values in ([1, 2, 3], [0, 1, 2], [0.5, 0, 1], [1, 2, 4])]
    h, *_ = g.op("FusedBatchNormV3", h, *ones, is_training=False)
    g.op("Relu", h, name="y")
    found = client.compare(
        g,
        {"x": RNG.normal(size=(1, 4, 4, 2)).astype(np.float32)},
        ys="y",
        xs="x",
        overrides={"lrp": gr.Preset("epsilon_plus")},
        rewrites=("fold_batch_norm",),
    )
    (row,) = [row for row in found.rows if row.is_x and row.label == "default"]
    assert row.from_finite_differences < 1e-2
    assert not any(row.op_type == "FusedBatchNormV3" for row in found.rows)


def test_large_feeds_are_sent_once_and_calls_are_reported(either: Any) -> None:
    g = gr.Graph()
    x, w = g.placeholder("x", "float32", [None, 4]), g.placeholder("w", "float32", [4])
    g.reduce_sum(g.op("Tanh", x * w, name="t"), axis=[0, 1], name="y")
    feeds: dict[str, Any] = {"x": RNG.normal(size=(70_000, 4)).astype(np.float32), "w": np.float32([1, -1, 0.5, 2])}
    x64 = gr.Blob(feeds["x"].astype(np.float64))
    reports: list[gr.ProgressReport] = []
    maps = {"half": {"Tanh": gr.Rule("0.5 * default")}}
    found = either.compare(g, feeds, ys="y", xs="w", overrides=maps, progress=reports.append)
    # Finite differences run in float64.
    assert either.find_missing_blobs([gr.Blob(feeds["x"]).sha256, x64.sha256]) == []
    assert reports[-1].is_finished and {report.task for report in reports} == {"running"}
    # Two maps are explained and evaluated; the forward runs four times, and twice for each element of w.
    assert reports[-1].done == 2 * 2 + 4 + 2 * 4
    by_label = {row.label: row for row in found.rows if row.is_x}
    assert by_label["default"].from_finite_differences < 1e-5
    assert by_label["half"].from_finite_differences == pytest.approx(0.5, abs=1e-4)


def test_refusal_names_the_override_map(either: Any) -> None:
    with refused("UNKNOWN_RULE") as refusal:
        compared(either, {"good": {"Relu": "linearize"}, "bad": {"Relu": "linearise"}})
    refusal.says("overrides['bad']", "'linearize'")
    with refused("INVALID_OVERRIDE") as refusal:
        compared(either, {"default": {}})
    refusal.says("'default'")
    with refused("INVALID_OVERRIDE"):
        compared(either, [gr.Override("ste", op_type="Relu")])
    with refused("INVALID_DERIVATIVE"):
        either.compare(network(), FEEDS, ys=[], xs=["x"], overrides={"a": {}})
    with refused("MISSING_FEED"):
        either.compare(network(), {"x": FEEDS["x"]}, ys=["loss"], xs=["x"], overrides={"a": {"Relu": "linearize"}})


def test_comparison_has_plain_data(client: Any) -> None:
    found = compared(client, {"guided": {"Relu": "guided_relu"}}, finite_differences=False)
    rows = found.table()
    assert len(rows) == len(found.rows)
    assert rows[0].keys() == {field.name for field in dataclasses.fields(gr.ComparedRow)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.labels = ()
