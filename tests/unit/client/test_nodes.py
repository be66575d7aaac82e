"""Tests that nodes are accepted as tensors and nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gradrule as gr
from gradrule._builder import names
from gradrule._messages import call_arguments, request_messages
from gradrule._messages.request_encoding import RequestEncoder
from tests.unit.client.plain_requests import plain


def graph() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.sign(x, name="y")
    g.top_k(x, 1, name="top")
    g.op("NoOp", name="nothing")
    return g


def test_a_node_of_one_output_is_that_tensor() -> None:
    g = graph()
    (y,), x = g.find(op_type="Sign"), g.node("x")
    words = call_arguments.ProgramArguments(fetches=y, ys=[y], xs=x, stop_gradients=[x], grad_ys={y: x})
    spec, _ = request_messages.program_spec(g, words)
    assert (list(spec.fetches), list(spec.vjp.ys), list(spec.vjp.xs)) == (["y:0"], ["y:0"], ["x:0"])
    assert [(item.y, item.tensor) for item in spec.vjp.grad_ys] == [("y:0", "x:0")]
    encoder = RequestEncoder(g, request_messages.types_of_graph(g))
    request = plain(encoder.encode({"feeds": {x: [1, 2]}}))
    assert (request.feeds[0].name, request.feeds[0].value.inline_tensor.dtype) == ("x:0", 1)
    assert g.op("AddN", [y, x]).node.inputs == ("y", "x")
    assert g.matmul(y, x).node.inputs == ("y", "x")
    results: Any = names.ByName({"y": 1})
    assert (results[y], y in results, x in results) == (1, True, False)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (
            lambda g: request_messages.program_spec(g, call_arguments.ProgramArguments(fetches=g.node("top"))),
            r"2 outputs.*'top:0', 'top:1'",
        ),
        (lambda g: g.neg(g.node("top")), r"TopKV2 node 'top'.*'top:1'"),
        (lambda g: g.neg(g.node("nothing")), "no output"),
    ],
)
def test_a_node_of_more_or_less_outputs_is_refused(use: Callable[[gr.Graph], Any], says: str) -> None:
    with pytest.raises(gr.errors.UnknownTensorError, match=says):
        use(graph())


def test_overrides_take_nodes() -> None:
    (y,) = graph().find(op_type="Sign")
    override = gr.Override("ste", node=y)
    assert override == gr.Override("ste", node="y")
    assert override.message().selector.node == "y"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"node": 3}, r"node of an override is a string or a node of a graph, not 3"),
        ({"node": graph().tensor("y")}, "node of an override"),
        ({"node": []}, "node of an override"),
        ({"node": ["a", 3]}, r"not \['a', 3\]; or a list of these"),
        ({"op_type": graph().node("y")}, "op_type of an override is a string"),
        ({"scope": ["a"]}, "scope"),
        ({"op_type": "Sign", "label": 1}, "label"),
        ({"op_type": "Sign", "params": [1]}, "params of an override are a dict"),
    ],
)
def test_overrides_refuse_values_that_select_nothing(words: dict[str, Any], says: str) -> None:
    with pytest.raises(gr.errors.InvalidOverrideError, match=says):
        gr.Override("ste", **words)


def test_control_inputs() -> None:
    g, other = graph(), graph()
    after = g.identity(g.tensor("x"), control_inputs=g.node("nothing"))
    assert after.node.inputs == ("x", "^nothing")
    assert g.identity(after, control_inputs=[g.tensor("y")]).node.inputs[-1] == "^y"
    with pytest.raises(gr.errors.TypeMismatchError, match=r"not 'y'; g\.node"):
        g.identity(after, control_inputs=["y"])
    with pytest.raises(gr.errors.InvalidGraphError, match="another graph"):
        g.identity(after, control_inputs=[other.node("y")])
