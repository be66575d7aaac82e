"""Tests the conversion of arguments to requests, and of answers to results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.duration_pb2 import Duration

import gradrule as gr
from gradrule._builder import names
from gradrule._messages import call_arguments, request_messages
from gradrule._messages.request_encoding import EncodedRequest, RequestEncoder
from gradrule._results import call_results
from gradrule.common.tensor_codec import to_message, to_numpy
from gradrule.v1 import evaluate_pb2, override_pb2, program_pb2, rule_pb2
from tests.unit.client.plain_requests import plain


def simple() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    n = g.placeholder("n", "int64", [])
    y = g.sign(x, name="y")
    g.mul(y, g.cast(n, "float32"), name="z")
    return g


def spec(graph: Any, **words: Any) -> tuple[program_pb2.ProgramSpec, dict[str, Any]]:
    return request_messages.program_spec(graph, call_arguments.ProgramArguments(**words))


def fed(graph: Any, feeds: Any, params: Any = None) -> evaluate_pb2.EvaluateRequest:
    return plain(encoded(graph, feeds, params))


def encoded(graph: Any, feeds: Any, params: Any = None) -> EncodedRequest:
    encoder = RequestEncoder(graph, request_messages.types_of_graph(graph))
    return encoder.encode({"feeds": feeds}, params)


def test_names_and_handles_are_equivalent() -> None:
    g = simple()
    by_name, _ = spec(g, fetches=["z:0", "y:0"], ys=["z:0"], xs=["x:0"], stop_gradients=["y:0"])
    z, y, x = (g.tensor(name) for name in "zyx")
    by_handle, _ = spec(g, fetches=(z, y), ys=z, xs=[x], stop_gradients=y)
    assert by_handle == by_name
    assert by_name.graph.serialized == g.to_bytes()


def test_programs_without_ys_have_no_derivative() -> None:
    found, _ = spec(simple(), fetches="y")
    assert not found.HasField("vjp")
    assert list(found.fetches) == ["y"]


@pytest.mark.parametrize(
    "form",
    [
        lambda g: g,
        lambda g: g.to_bytes(),
        lambda g: bytearray(g.to_bytes()),
        lambda g: tf.compat.v1.GraphDef.FromString(g.to_bytes()),
    ],
    ids=["Graph", "bytes", "bytearray", "GraphDef"],
)
def test_graphs_in_every_form(form: Callable[[gr.Graph], Any]) -> None:
    g = simple()
    found, _ = spec(form(g), fetches=["y"])
    assert gr.Graph.from_bytes(found.graph.serialized)._message == g._message
    assert fed(form(g), {"x": [1, 2]}).feeds[0].value.inline_tensor.dtype == 1


def test_lists_take_the_tensors_type_and_arrays_keep_theirs() -> None:
    request = fed(simple(), {"x": [1, 2.5], "n": 3, "y:0": np.float32([1, 2])})
    found = {feed.name: to_numpy(feed.value.inline_tensor) for feed in request.feeds}
    assert {name: array.dtype.name for name, array in found.items()} == {"x": "float32", "n": "int64", "y:0": "float32"}
    assert found["x"].tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("feeds", "kind", "says"),
    [
        (
            {"x": np.float64([1, 0.1])},
            gr.errors.FeedDtypeError,
            r"feeds\['x'\].*float64.*float32: 0.1 \(at \[1\]\)",
        ),
        ({"x": np.float64(0.1)}, gr.errors.FeedDtypeError, "float64"),
        ({"n": np.array([1], ml_dtypes.bfloat16)}, gr.errors.FeedDtypeError, "bfloat16"),
        ({"n": 1.5}, gr.errors.FeedDtypeError, "int64.*floats"),
        ({"x": ["a"]}, gr.errors.FeedDtypeError, "strings"),
        ({"x": [[1], [1, 2]]}, gr.errors.InvalidTensorError, "ragged"),
        ({"x": None}, gr.errors.InvalidTensorError, "None"),
        ({"unknown": np.array([object()])}, gr.errors.InvalidTensorError, "bytes or str"),
        ({3: 1.0}, gr.errors.UnknownTensorError, "int"),
        ([1.0], gr.errors.InvalidTensorError, "dict"),
    ],
)
def test_feeds_that_do_not_fit(feeds: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        fed(simple(), feeds)


def test_handles_of_other_graphs_are_refused() -> None:
    foreign = simple().tensor("x")
    with pytest.raises(gr.errors.UnknownTensorError, match="another graph"):
        fed(simple(), {foreign: [1.0]})
    with pytest.raises(gr.errors.UnknownTensorError, match="another graph"):
        spec(simple(), ys="y", xs=foreign)


@pytest.mark.parametrize("form", [dict, list], ids=["dict", "list"])
def test_grad_ys(form: type) -> None:
    g = simple()
    up = np.float32([1])
    given: Any = {"y": up, g.tensor("z"): "x"} if form is dict else [up, g.tensor("x")]
    found, values = spec(g, ys=["y", "z"], xs=["x"], grad_ys=given)
    assert [(item.y, item.tensor.removesuffix(":0")) for item in found.vjp.grad_ys] == [("z", "x")]
    assert values == {"y": up}


@pytest.mark.parametrize(
    ("grad_ys", "says"),
    [([[1.0]], "1 entries for 2 ys"), ({"x": [1.0]}, "none of the ys"), (np.float32([1, 2]), "ndarray")],
)
def test_grad_ys_that_do_not_fit(grad_ys: Any, says: str) -> None:
    with pytest.raises(gr.errors.InvalidDerivativeError, match=says):
        spec(simple(), ys=["y", "z"], xs=["x"], grad_ys=grad_ys)


def test_none_among_grad_ys_is_omitted() -> None:
    found, values = spec(simple(), ys=["y", "z"], xs=["x"], grad_ys=[None, [2.0]])
    assert not found.vjp.grad_ys
    assert values == {"z": [2.0]}


def test_options() -> None:
    found, _ = spec(simple(), ys="y", xs="x", unconnected_gradients="zero")
    assert found.vjp.unconnected_gradients == program_pb2.UNCONNECTED_GRADIENTS_ZERO
    with pytest.raises(gr.errors.InvalidDerivativeError, match="'none' or 'zero'"):
        spec(simple(), ys="y", xs="x", unconnected_gradients="zeros")
    for value in ("skip", ["error"], None):
        with pytest.raises(
            gr.errors.InvalidDerivativeError, match=rf"no_gradient is 'error'.*{re.escape(repr(value))}"
        ):
            spec(simple(), ys="y", xs="x", no_gradient=value)


def test_override_dicts_in_every_form() -> None:
    inline = gr.Rule("alpha * dy", params={"alpha": 2.0})
    found, _ = spec(
        simple(),
        ys="y",
        xs="x",
        overrides={
            "Sign": "ste",
            "Relu": ("ste", {"threshold": 3}),
            "Abs": inline,
            "Neg": (inline, {"alpha": [1.0, 2.0]}),
            "Exp": (gr.Rule("beta * dy"), {"beta": 5.0}),
        },
    )
    by_type = {override.selector.op_type: override for override in found.overrides}
    assert list(by_type) == ["Sign", "Relu", "Abs", "Neg", "Exp"]
    assert by_type["Sign"].rule == "ste"
    assert by_type["Relu"].params["threshold"].number == 3
    assert by_type["Abs"].definition.expression == "alpha * dy"
    assert by_type["Abs"].definition.params[0].default_value.number == 2
    assert to_numpy(by_type["Neg"].params["alpha"].tensor).tolist() == [1.0, 2.0]
    # A rule that declares nothing takes the params that its use gives, without defaults.
    assert by_type["Exp"].definition.params == [rule_pb2.RuleParam(name="beta")]


def test_text_that_cannot_be_a_name_is_a_formula() -> None:
    formula = gr.Rule("slope * dy")
    given = {"Sign": "ste", "Tanh": "dy * (1 - y ** 2)", "Relu": ("slope * dy", {"slope": 2})}
    found, _ = spec(simple(), ys="y", xs="x", overrides=given)
    assert list(found.overrides) == [
        gr.Override("ste", op_type="Sign").message(),
        gr.Override(gr.Rule("dy * (1 - y ** 2)"), op_type="Tanh").message(),
        gr.Override(formula, op_type="Relu", params={"slope": 2}).message(),
    ]
    assert gr.Override(" -dy", node="a").message().definition.expression == " -dy"
    assert gr.Override("dy", node="a").message().rule == "dy"


def test_override_lists() -> None:
    given = [
        gr.Override("default", node="a/*", scope="a", optional=True),
        gr.Override("ste", op_type="Sign", label="L"),
    ]
    found, _ = spec(simple(), ys="y", xs="x", overrides=given)
    first, second = found.overrides
    assert first == override_pb2.GradientOverride(
        selector=override_pb2.Selector(node="a/*", scope="a"), rule="default", optional=True
    )
    assert (second.rule, second.label, second.selector.op_type) == ("ste", "L", "Sign")


def test_recorded_overrides_follow_those_of_the_request() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32")
    with g.gradient_override_map({"Sign": ("ste", {"threshold": 2.0})}):
        g.sign(x, name="s")
    found, _ = spec(g, ys="s", xs="x", overrides={"Sign": "other"})
    assert [(override.rule, override.selector.node) for override in found.overrides] == [("other", ""), ("ste", "s")]
    forward, _ = spec(g, fetches="s")
    assert not forward.overrides


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: gr.Override("r"), gr.errors.InvalidOverrideError, "selects nothing"),
        (lambda: gr.Override(3, op_type="Sign"), gr.errors.InvalidOverrideError, "int"),
        (gr.Rule, gr.errors.InvalidRuleError, "either"),
        (lambda: gr.Rule("dy", graph=simple()), gr.errors.InvalidRuleError, "either"),
        (lambda: spec(simple(), overrides={"Sign": 5}), gr.errors.InvalidOverrideError, "'Sign'"),
        (lambda: spec(simple(), overrides={"Sign": ("r", 5)}), gr.errors.InvalidOverrideError, "dict"),
        (lambda: spec(simple(), overrides=[("Sign", "r")]), gr.errors.InvalidOverrideError, r"overrides\[0\]"),
        (lambda: spec(simple(), overrides={"Sign": ("r", {"a": "b"})}), gr.errors.InvalidParamError, "'a'"),
        (lambda: fed(simple(), {}, params={"Sign": 3}), gr.errors.InvalidParamError, "Sign"),
        (lambda: spec(3, fetches="y"), gr.errors.InvalidGraphError, "int is no graph"),
    ],
)
def test_refusals(make: Callable[[], Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        make()


def test_params_of_a_call() -> None:
    request = fed(simple(), {}, params={"Sign": {"alpha": 2, "w": np.float32([1, 2])}})
    assert request.params["Sign"].values["alpha"].number == 2
    assert to_numpy(request.params["Sign"].values["w"].tensor).tolist() == [1, 2]


def check(graph: Any, feeds: Any = None, params: Any = None, **words: Any) -> None:
    found, _ = spec(graph, **words)
    header = evaluate_pb2.EvaluateHeader.FromString(encoded(graph, feeds, params).header)
    request_messages.check_call(found, header, graph)


@pytest.mark.parametrize("form", [lambda g: g, lambda g: g.to_bytes()], ids=["Graph", "bytes"])
@pytest.mark.parametrize(
    ("feeds", "params", "kind", "says"),
    [
        ({"xx": [1.0]}, None, gr.errors.UnknownFeedError, r"feeds\['xx'\].*Did you mean 'x'.*'x', 'n'"),
        ({"x:1": [1.0]}, None, gr.errors.UnknownFeedError, "'x:1'"),
        ({"x": [1.0], "x:0": [2.0]}, None, gr.errors.UnknownFeedError, "twice"),
        ({"x": np.float64([0.1])}, None, gr.errors.FeedDtypeError, "float64"),
        (
            None,
            {"Sgin": {"a": 1}},
            gr.errors.UnknownParamError,
            r"'Sgin'.*Did you mean 'Sign'.*Labels: 'L', 'Sign', 'z'",
        ),
        (None, {"Mul": {}, "Sign": 3}, gr.errors.InvalidParamError, "'Sign'"),
        (None, {3: {"a": 1}}, gr.errors.InvalidParamError, "not by 3"),
        (None, [("Sign", 1)], gr.errors.InvalidParamError, "not list"),
    ],
)
def test_calls_that_do_not_match_the_program_are_refused(
    form: Any, feeds: Any, params: Any, kind: type[Exception], says: str
) -> None:
    overrides = [
        gr.Override("ste", op_type="Sign"),
        gr.Override("ste", node="z"),
        gr.Override("ste", op_type="Mul", label="L"),
    ]
    check(form(simple()), {"x": [1.0]}, {"L": {"a": 1}, "z": {"a": 2}}, ys="z", xs="x", overrides=overrides)
    with pytest.raises(kind, match=says):
        check(form(simple()), feeds, params, ys="z", xs="x", overrides=overrides)


def test_nodes_that_name_their_rule_are_labels() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32")
    with g.gradient_override_map({"Sign": "ste", "Relu": ("ste", {"a": 1})}):
        g.relu(g.sign(x), name="y")
    check(g, {}, {"Sign": {"a": 1}, "Relu": {"a": 2}}, ys="y", xs="x")
    with pytest.raises(gr.errors.UnknownParamError, match="Labels: 'Relu', 'Sign'"):
        check(g, {}, {"Abs": {"a": 1}}, ys="y", xs="x")


def test_feeds_of_malformed_graphs_are_left_to_the_server() -> None:
    check(b"\xff\xff", {"x": np.float32([1])}, fetches="x")


def response() -> evaluate_pb2.EvaluateResponse:
    found = evaluate_pb2.EvaluateResponse(device="CPU:0", default_gradient_nodes=["a"])
    found.outputs.add(name="y:0").value.inline_tensor.CopyFrom(to_message(np.float32([1, 2])))
    found.gradients.add(x="a").dense.CopyFrom(to_message(np.float32([3])))
    sparse = found.gradients.add(x="b").sparse
    sparse.values.CopyFrom(to_message(np.float32([[1, 2], [3, 4], [5, 6]])))
    sparse.indices.CopyFrom(to_message(np.array([2, 0, 2])))
    sparse.dense_shape.CopyFrom(to_message(np.array([4, 2])))
    found.gradients.add(x="c").unconnected.SetInParent()
    found.gradients.add(x="d").not_differentiable.SetInParent()
    found.timings.run.CopyFrom(Duration(seconds=1, nanos=500_000_000))
    found.overrides.add(
        node="n", op_type="Sign", rule="r", label="l", status=override_pb2.RESOLUTION_STATUS_OFF_PATH, function="f"
    )
    return found


def test_results() -> None:
    r = call_results.result(response().SerializeToString())
    assert list(r.outputs) == ["y:0"]
    assert r.outputs["y"] is r.outputs["y:0"]
    assert "y" in r.outputs
    assert r.gradients["a"].tolist() == [3.0]
    assert (r.gradients["c"], r.gradients["d"]) == (None, None)
    assert list(r.gradient_kinds.values()) == ["dense", "sparse", "unconnected", "not_differentiable"]
    assert r.overrides == [gr.Resolution("n", "Sign", "r", "l", "off_path", "f")]
    assert (r.timings.run, r.device, r.default_gradient_nodes) == (1.5, "CPU:0", ["a"])
    with pytest.raises(KeyError, match=r"there is 'y:0'"):
        r.outputs["z"]


def test_results_can_be_changed_in_place() -> None:
    r = call_results.result(response().SerializeToString())
    gradient: Any = r.gradients["a"]
    gradient *= 2
    assert r.gradients["a"].tolist() == [6.0]


def test_sparse_slices_add_up() -> None:
    sparse = call_results.result(response().SerializeToString()).gradients["b"]
    assert isinstance(sparse, gr.Sparse)
    reference = tf.convert_to_tensor(tf.IndexedSlices(sparse.values, sparse.indices, sparse.dense_shape))
    np.testing.assert_array_equal(sparse.to_dense(), reference.numpy())


def test_sparse_gradients_are_arrays_to_numpy() -> None:
    sparse: Any = call_results.result(response().SerializeToString()).gradients["b"]
    assert np.asarray(sparse).tolist() == [[3, 4], [0, 0], [6, 8], [0, 0]]
    assert np.asarray(sparse).dtype == np.float32
    assert np.asarray(sparse, np.float64).dtype == np.float64
    assert np.sum(sparse) == 21.0
    with pytest.raises(ValueError, match="copy"):
        sparse.__array__(copy=False)


def test_results_by_handle() -> None:
    g = simple()
    values: Any = names.ByName({"y": 1, "z:0": 2})
    assert (values[g.tensor("y")], values[g.tensor("z")], values["z"], values.get("q", 5)) == (1, 2, 2, 5)
    assert g.tensor("x") not in values


def test_explanations_raise_their_findings() -> None:
    answer = program_pb2.CompileProgramResponse()
    answer.findings.add(reason="ERROR_REASON_UNKNOWN_RULE", message="no rule 'a'", field="overrides[0].rule")
    answer.findings.add(reason="ERROR_REASON_GRAPH_CYCLE", message="a cycle", node="n")
    found = call_results.explanation(answer)
    with pytest.raises(gr.errors.UnknownRuleError) as caught:
        found.raise_for_findings()
    assert [detail.reason for detail in caught.value.details] == ["UNKNOWN_RULE", "GRAPH_CYCLE"]
    assert "a cycle" in str(caught.value)
    call_results.explanation(program_pb2.CompileProgramResponse()).raise_for_findings()
