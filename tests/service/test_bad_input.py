"""Invalid requests, graphs and feeds get typed errors, and the next request works."""

from __future__ import annotations

import os
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.message import Message

import gradrule as gr
from gradrule.v1 import graph_pb2, program_pb2, rule_pb2, tensor_pb2
from tests.service import raw
from tests.service.answers import keeps_engine, provokes, refused, refused_raw
from tests.service.graph_defs import SIGN_FEEDS, sign_graph

# Requests.


@provokes("MALFORMED_REQUEST")
@keeps_engine
@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0fgarbage", b"\x00", os.urandom(4096)])
@pytest.mark.parametrize(
    "method",
    [
        "GradientService/Evaluate",
        "ProgramService/CompileProgram",
        "ProgramService/GetProgram",
        "RuleService/CreateRule",
    ],
)
def test_random_bytes_are_refused(channel: grpc.Channel, method: str, data: bytes) -> None:
    with refused_raw("MALFORMED_REQUEST") as refusal:
        raw.send(channel, method, data)
    refusal.says(f"{method.rpartition('/')[2]}Request")


@keeps_engine
@pytest.mark.parametrize(
    ("method", "field"),
    [
        ("GradientService/Evaluate", "target"),
        ("ProgramService/CompileProgram", "spec"),
        ("RuleService/CreateRule", "definition"),
    ],
)
def test_empty_request_is_refused(channel: grpc.Channel, method: str, field: str) -> None:
    with refused_raw("MALFORMED_REQUEST") as refusal:
        raw.send(channel, method, b"")
    assert field in f"{refusal.message} {refusal.fields}"


@keeps_engine
@pytest.mark.parametrize("method", ["RuleService/ListRules", "ProgramService/ListPrograms"])
def test_page_token_of_another_list_is_refused(channel: grpc.Channel, method: str) -> None:
    message: Message = (
        rule_pb2.ListRulesRequest(page_token="bogus")
        if "Rules" in method
        else program_pb2.ListProgramsRequest(page_token="bogus")
    )
    with refused_raw("MALFORMED_REQUEST"):
        raw.send(channel, method, message.SerializeToString())


# Graphs.


@provokes("INVALID_GRAPH")
@keeps_engine
@pytest.mark.parametrize("data", [b"no graph", b"\x0a\x05abc"])
def test_bytes_that_are_no_graph_are_refused(channel: grpc.Channel, data: bytes) -> None:
    with refused_raw("INVALID_GRAPH"):
        raw.evaluate(channel, raw.request(data))


@keeps_engine
def test_incompatible_shapes_are_refused(channel: grpc.Channel) -> None:
    shaped = [
        raw.node(
            name,
            "Placeholder",
            dtype=graph_pb2.AttrValue(type=raw.DT_FLOAT),
            shape=graph_pb2.AttrValue(
                shape=tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=n) for n in (2, 3)])
            ),
        )
        for name in ("x", "w")
    ]
    with refused_raw("INVALID_GRAPH") as refusal:
        raw.evaluate(channel, raw.request(raw.graph(*shaped, raw.node("y", "MatMul", "x", "w"))))
    refusal.says("y")


BAD_GRAPHS: list[tuple[str, graph_pb2.Graph, list[str]]] = [
    ("DUPLICATE_NODE", raw.graph(raw.placeholder(), raw.node("y", "Sign", "x"), raw.node("y", "Neg", "x")), ["y"]),
    ("DANGLING_INPUT", raw.graph(raw.placeholder(), raw.node("y", "Sign", "lost")), ["y", "lost"]),
    ("DANGLING_INPUT", raw.graph(raw.placeholder(), raw.node("y", "Sign", "x:3")), ["y", "x"]),
    ("DANGLING_INPUT", raw.graph(raw.placeholder(), raw.node("y", "Sign", "x", "^lost")), ["lost"]),
    ("GRAPH_CYCLE", raw.graph(raw.node("y", "Sign", "z"), raw.node("z", "Neg", "y")), ["y", "z"]),
    ("GRAPH_CYCLE", raw.graph(raw.node("y", "Sign", "y")), ["y"]),
    ("UNKNOWN_OP_TYPE", raw.graph(raw.placeholder(), raw.node("y", "Sgin", "x")), ["y", "Sgin", "'Sign'"]),
    ("INVALID_ATTR", raw.graph(raw.node("x", "Placeholder"), raw.node("y", "Sign", "x")), ["x", "dtype"]),
    (
        "INVALID_ATTR",
        raw.graph(raw.placeholder(), raw.node("y", "Sign", "x", T=graph_pb2.AttrValue(s=b"float"))),
        ["y", "T"],
    ),
    (
        "TYPE_MISMATCH",
        raw.graph(raw.placeholder(), raw.placeholder("i", tensor_pb2.DT_INT32), raw.node("y", "AddV2", "x", "i")),
        ["y"],
    ),
    ("TYPE_MISMATCH", raw.graph(raw.placeholder(), raw.node("y", "AddV2", "x")), ["y"]),
    (
        "UNSUPPORTED_OP",
        raw.graph(raw.placeholder(), raw.node("y", "Enter", "x", frame_name=graph_pb2.AttrValue(s=b"f"))),
        ["y", "Enter"],
    ),
]


@provokes(*(reason for reason, _, _ in BAD_GRAPHS))
@keeps_engine
@pytest.mark.parametrize(("reason", "graph", "words"), BAD_GRAPHS)
def test_invalid_graph_is_refused(channel: grpc.Channel, reason: str, graph: graph_pb2.Graph, words: list[str]) -> None:
    for of in (graph, graph.SerializeToString()):
        with refused_raw(reason) as refusal:
            raw.evaluate(channel, raw.request(of))
        refusal.says(*words)


@keeps_engine
def test_recursive_function_is_refused(channel: grpc.Channel) -> None:
    signature = graph_pb2.OpSignature(
        name="again",
        input_arg=[graph_pb2.OpSignature.ArgDef(name="a", type=raw.DT_FLOAT)],
        output_arg=[graph_pb2.OpSignature.ArgDef(name="b", type=raw.DT_FLOAT)],
    )
    again = graph_pb2.Function(signature=signature, node_def=[raw.node("inner", "again", "a")], ret={"b": "inner:b:0"})
    graph = raw.graph(raw.placeholder(), raw.node("y", "again", "x"), functions=[again])
    with refused_raw("GRAPH_CYCLE") as refusal:
        raw.evaluate(channel, raw.request(graph))
    refusal.says("again")


@keeps_engine
def test_all_problems_of_a_graph_are_reported_together(channel: grpc.Channel) -> None:
    graph = raw.graph(
        raw.placeholder(), raw.node("a", "Sgin", "x"), raw.node("b", "Sign", "lost"), raw.node("y", "Neg", "a")
    )
    with pytest.raises(grpc.RpcError) as caught:
        raw.evaluate(channel, raw.request(graph, fetches=["y", "b"]))
    findings = str(caught.value.trailing_metadata())
    assert "UNKNOWN_OP_TYPE" in findings
    assert "DANGLING_INPUT" in findings


# Tensors and feeds.


@provokes("INVALID_TENSOR")
@keeps_engine
@pytest.mark.parametrize("length", [0, 3, 7, 9, 400])
def test_truncated_tensor_is_refused(channel: grpc.Channel, length: int) -> None:
    value = raw.tensor([1.0, 2.0])
    value.tensor_content = (value.tensor_content * 50)[:length]
    if not length:
        value.float_val.extend([1.0, 2.0, 3.0])
    with refused_raw("INVALID_TENSOR") as refusal:
        raw.evaluate(channel, raw.request(raw.sign_graph(), {"x": value}))
    refusal.says("x")


@keeps_engine
def test_feed_without_a_tensor_is_refused(channel: grpc.Channel) -> None:
    message = raw.request(raw.sign_graph(), {})
    message.feeds.add(name="x")
    with refused_raw("INVALID_TENSOR"):
        raw.evaluate(channel, message)


@provokes("UNKNOWN_TENSOR")
@keeps_engine
@pytest.mark.parametrize("words", [{"fetches": ["yy"]}, {"ys": ["yy"], "xs": ["x"]}, {"ys": ["y"], "xs": ["y:7"]}])
def test_unknown_tensor_is_refused(client: Any, words: dict[str, Any]) -> None:
    with refused("UNKNOWN_TENSOR") as refusal:
        client.evaluate(sign_graph(), feeds=SIGN_FEEDS, **words)
    refusal.says(next(iter(name for names in words.values() for name in names if name not in ("x", "y"))))


@provokes("MISSING_FEED")
@keeps_engine
def test_missing_feed_is_refused(either: Any) -> None:
    with refused("MISSING_FEED") as refusal:
        either.evaluate(sign_graph(), feeds={}, fetches=["y"])
    refusal.says("x", "float32")


@provokes("UNKNOWN_FEED")
@keeps_engine
def test_unknown_feed_is_refused(either: Any) -> None:
    with refused("UNKNOWN_FEED") as refusal:
        either.evaluate(sign_graph(), feeds={"x": [1.0], "xx": [1.0]}, fetches=["y"])
    refusal.says("xx")


@keeps_engine
def test_tensor_fed_twice_is_refused(channel: grpc.Channel) -> None:
    message = raw.request(raw.sign_graph())
    message.feeds.add(name="x:0").value.inline_tensor.CopyFrom(raw.tensor([1.0]))
    with refused_raw("UNKNOWN_FEED") as refusal:
        raw.evaluate(channel, message)
    refusal.says("x", "twice")


@provokes("FEED_DTYPE")
@keeps_engine
def test_feed_of_wrong_dtype_is_refused(either: Any) -> None:
    with refused("FEED_DTYPE") as refusal:
        either.evaluate(sign_graph(), feeds={"x": np.float64([0.1])}, fetches=["y"])
    refusal.says("x", "float64", "float32")


@provokes("FEED_SHAPE")
@keeps_engine
def test_feed_of_wrong_shape_is_refused(either: Any) -> None:
    with refused("FEED_SHAPE") as refusal:
        either.evaluate(sign_graph(), feeds={"x": np.ones((2, 2), np.float32)}, fetches=["y"])
    refusal.says("x", "(2, 2)")


def product(shape: list[int | None]) -> gr.Graph:
    g = gr.Graph()
    a, b = g.placeholder("a", "float32", shape), g.placeholder("b", "float32", shape)
    g.matmul(a, g.negative(b, name="inner/negated"), name="product")
    return g


@keeps_engine
@pytest.mark.parametrize("shape", [[2, 3], [None, None]], ids=["static", "running"])
def test_shapes_that_do_not_fit_name_the_users_nodes(either: Any, shape: list[int | None]) -> None:
    value = np.ones((2, 3), np.float32)
    reason = "EXECUTION_FAILED" if None in shape else "INVALID_GRAPH"
    with refused(reason) as refusal:
        either.evaluate(product(shape), {"a": value, "b": value}, ys=["product"], xs=["a"])
    refusal.says("'product'", "[2,3]", "'a'", "'inner/negated'", *([] if None in shape else ["MatMul"]))
    error = refusal.error
    assert error.details[0].node == "product"
    for internal in ("_gradient_op_type", "_kernel", "in0", "g/"):
        assert internal not in str(error)


@keeps_engine
def test_a_failure_in_a_loop_names_the_node(either: Any) -> None:
    def step(k: Any, v: Any) -> Any:
        return k + 1, tf.gather(v, [k, 7], name="taken")

    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    graph = gr.trace(
        lambda x: tf.while_loop(lambda k, v: k < 3, step, [0, x], shape_invariants=shapes)[1], ("float32", [None])
    )
    with refused("EXECUTION_FAILED") as refusal:
        either.evaluate(graph, {"x": [1.0]}, ["output"])
    refusal.says("node 'while/taken': indices[1] = 7")
