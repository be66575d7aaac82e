"""Ops that were not reviewed are refused anywhere in a graph, unless the server trusts its callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.common import op_definitions
from gradrule.common.op_definitions import OpDef
from gradrule.v1 import errors_pb2, graph_pb2, program_pb2, program_pb2_grpc
from gradrule_server import graphs, policy
from gradrule_server.errors import GradruleError
from tests.policy import minimal
from tests.service import raw
from tests.service.answers import keeps_engine, provokes, refused, refused_raw
from tests.service.custom_gradient_graphs import graph_with_gradients
from tests.service.graph_defs import SIGN_FEEDS, build_graph, build_graph_def, load_graph, placeholder, sign_graph
from tests.service.servers import RunningServer, running_server

SECRET = b"what is in the file"


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file that no graph may read."""
    path = tmp_path_factory.mktemp("canary") / "secret"
    path.write_bytes(SECRET)
    return path


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server that trusts all callers."""
    # The sandbox would block files whatever the policy says.
    flags = ("--trust", "full", "--sandbox", "off", "--device", "cpu")
    with running_server(tmp_path_factory.mktemp("trusting"), flags) as running:
        yield running


@pytest.fixture(scope="module")
def trusting_client(trusting: RunningServer) -> Iterator[Any]:
    with gr.connect(trusting.target) as connected:
        yield connected


def _op(name: str) -> OpDef:
    found = op_definitions.find(name)
    assert found is not None
    return found


def _runs_when_trusted(op: OpDef) -> bool:
    try:
        graphs.expand(minimal.graph_of([op], "top"), graphs.ExpandRequest(fetches=["y0"]), graphs.Limits(trusted=True))
    except GradruleError:
        return False
    return True


def _samples() -> dict[str, OpDef]:
    """Returns for each category of denied ops one op that only the policy blocks."""
    found: dict[str, OpDef] = {}
    for name, review in policy.op_reviews().items():
        op = op_definitions.find(name)
        if not review.allowed and review.category not in found and op is not None and _runs_when_trusted(op):
            found[review.category] = op
    return found


def validate(channel: grpc.Channel, graph: graph_pb2.Graph, fetches: list[str]) -> list[program_pb2.Finding]:
    """Returns the findings of `validate_only`."""
    request = program_pb2.CompileProgramRequest(validate_only=True)
    request.spec.graph.inline_graph.CopyFrom(graph)
    request.spec.fetches.extend(fetches)
    return list(program_pb2_grpc.ProgramServiceStub(channel).CompileProgram(request, timeout=60).findings)


@pytest.mark.parametrize("place", minimal.PLACES)
def test_each_category_is_refused_at_each_place(channel: grpc.Channel, place: str) -> None:
    samples = _samples()
    assert {"file read", "file write", "network", "process", "code", "across runs", "debug", "test"} <= samples.keys()
    ops = list(samples.values())
    findings = validate(channel, minimal.graph_of(ops, place), [f"y{number}" for number in range(len(ops))])
    told = {finding.message.split("(")[1].split(")")[0]: finding for finding in findings}
    for category, op in samples.items():
        finding = told[op.name]
        assert finding.reason == errors_pb2.ERROR_REASON_OP_NOT_ALLOWED
        assert category in finding.message
        assert minimal.OP in finding.node


def test_allowed_ops_are_not_reported(channel: grpc.Channel) -> None:
    ops = [_op(name) for name in ("Sign", "MatMul", "StringJoin", "TensorListFromTensor", "SparseTensorDenseMatMul")]
    assert not validate(channel, minimal.graph_of(ops, "branch"), [f"y{number}" for number in range(len(ops))])


def _read(path: Path) -> Any:
    return tf.strings.length(tf.io.read_file(str(path)))


def _in_loop(path: Path) -> Any:
    return tf.while_loop(lambda i, _: i < 1, lambda i, n: (i + 1, n + _read(path)), [0, 0])[1]


def _in_condition_of_loop(path: Path) -> Any:
    return tf.while_loop(lambda i: i < _read(path), lambda i: (i + 1,), [0])[0]


def _in_branch(path: Path) -> Any:
    return tf.cond(placeholder("x", shape=()) > 0, lambda: 1, lambda: _read(path))


def _in_function_of_function(path: Path) -> Any:
    inner = tf.function(lambda: _read(path), autograph=False)
    return tf.function(lambda: inner() + 1, autograph=False)()


def _as_control_input(path: Path) -> Any:
    with tf.control_dependencies([tf.io.write_file(str(path), "")]):
        return tf.constant(1)


PLACES: dict[str, Callable[[Path], Any]] = {
    "top": _read,
    "loop": _in_loop,
    "condition of a loop": _in_condition_of_loop,
    "branch": _in_branch,
    "function of a function": _in_function_of_function,
    "control input": _as_control_input,
}


def _graph(place: str, path: Path) -> gr.Graph:
    return build_graph(lambda: tf.identity(PLACES[place](path), name="y"))


@provokes("OP_NOT_ALLOWED")
@keeps_engine
@pytest.mark.parametrize("place", PLACES)
def test_file_ops_are_refused_at_each_place(client: Any, canary: Path, place: str) -> None:
    graph = _graph(place, canary)
    with refused("OP_NOT_ALLOWED") as refusal:
        client.evaluate(graph, {"x": np.float32(1)} if place == "branch" else {}, fetches=["y"])
    refusal.says("file", "--trust full")
    assert refusal.error.details[0].node
    assert canary.read_bytes() == SECRET


@keeps_engine
def test_all_denied_ops_are_reported_together(client: Any, canary: Path) -> None:
    def build() -> None:
        tf.identity(_read(canary) + _in_loop(canary), name="y")
        with tf.control_dependencies([tf.raw_ops.Abort(error_msg="")]):
            tf.constant(1, name="z")

    with refused("OP_NOT_ALLOWED") as refusal:
        client.evaluate(build_graph(build), fetches=["y", "z"])
    found = [(finding.reason, finding.message) for finding in refusal.error.details]
    assert sum("(ReadFile)" in message for _, message in found) == 2
    assert sum("(Abort)" in message for _, message in found) == 1


@keeps_engine
def test_unused_denied_ops_are_accepted(client: Any, canary: Path) -> None:
    def build() -> None:
        tf.identity(placeholder("x") * 2, name="y")
        _read(canary)

    answer = client.evaluate(build_graph(build), SIGN_FEEDS, fetches=["y"])
    np.testing.assert_array_equal(answer.outputs["y"], [2.0, -4.0])


def _reading_rule(path: Path) -> gr.Graph:
    """Makes the rule dx = dy * the length of a file."""

    def build() -> None:
        dy = placeholder("dy")
        tf.multiply(dy, tf.cast(_read(path), tf.float32), name="dx")

    return build_graph(build)


@keeps_engine
def test_rules_by_graph_obey_the_policy(client: Any, canary: Path) -> None:
    with refused("OP_NOT_ALLOWED") as refusal:
        client.create_rule("Reads", graph=_reading_rule(canary))
    refusal.says("ReadFile", "file read")
    with refused("UNKNOWN_RULE"):
        client.get_rule("Reads")


@keeps_engine
def test_inline_rules_by_graph_obey_the_policy(client: Any, canary: Path) -> None:
    rule = gr.Rule(graph=_reading_rule(canary))
    with refused("OP_NOT_ALLOWED") as refusal:
        client.evaluate(sign_graph(), SIGN_FEEDS, ys=["y"], xs=["x"], overrides={"Sign": rule})
    refusal.says("ReadFile")


@keeps_engine
def test_embedded_custom_gradients_obey_the_policy(client: Any, canary: Path) -> None:
    def build(custom_gradient: Any) -> None:
        def region(x: Any) -> Any:
            return tf.exp(x), lambda dy: dy * tf.cast(_read(canary), tf.float32)

        tf.identity(custom_gradient(region)(placeholder("x")), name="y")

    with refused("OP_NOT_ALLOWED") as refusal:
        client.evaluate(graph_with_gradients(build), SIGN_FEEDS, ys=["y"], xs=["x"])
    refusal.says("ReadFile")


def test_trusting_server_runs_denied_ops(trusting_client: Any, canary: Path) -> None:
    for place in PLACES:
        if place not in ("condition of a loop", "control input"):
            feeds = {"x": np.float32(-1)} if place == "branch" else {}
            answer = trusting_client.evaluate(_graph(place, canary), feeds, fetches=["y"])
            assert answer.outputs["y"] == len(SECRET) + (place == "function of a function")
    trusting_client.create_rule("Reads", graph=_reading_rule(canary))
    answer = trusting_client.evaluate(sign_graph(), SIGN_FEEDS, ys=["y"], xs=["x"], overrides={"Sign": "Reads"})
    np.testing.assert_array_equal(answer.gradients["x"], [len(SECRET)] * 2)


def test_trusting_server_keeps_other_limits(trusting_client: Any) -> None:
    graph = raw.graph(raw.placeholder(), raw.node("s", "Split", "a", "x", num_split=graph_pb2.AttrValue(i=5000)))
    graph.node.append(raw.node("a", "Placeholder", dtype=graph_pb2.AttrValue(type=3)))
    graph.node.append(raw.node("y", "Identity", "s"))
    with refused("LIMIT_EXCEEDED") as refusal:
        trusting_client.evaluate(gr.Graph.from_bytes(graph.SerializeToString()), SIGN_FEEDS, fetches=["y"])
    refusal.says("num_split", "5000", "1024")


@keeps_engine
def test_placement_attributes_of_nodes_are_dropped(client: Any) -> None:
    """Devices, groups and containers of other machines have no effect, and resource names reach no other program."""

    def build() -> None:
        x = placeholder("x")
        variable = tf.compat.v1.get_variable(
            "v", initializer=np.float32([3.0, 4.0]), use_resource=True, trainable=False
        )
        tf.multiply(x, variable, name="y")

    graph_def = build_graph_def(build)
    for node in graph_def.node:
        node.device = "/job:elsewhere/task:7/device:TPU:3"
        node.attr["_class"].list.s.append(b"loc:@nowhere")
        if node.op == "VarHandleOp":
            node.attr["shared_name"].s, node.attr["container"].s = b"of somebody else", b"theirs"
    answer = client.evaluate(load_graph(graph_def), SIGN_FEEDS, fetches=["y"])
    np.testing.assert_array_equal(answer.outputs["y"], [3.0, -8.0])


@keeps_engine
@pytest.mark.parametrize("where", ["constant", "placeholder", "feed"])
def test_rank_of_tensors_is_limited(client: Any, channel: grpc.Channel, where: str) -> None:
    graph = raw.sign_graph()
    value = raw.tensor(np.ones([1] * 9, np.float32))
    if where == "placeholder":
        graph.node[0].attr["shape"].shape.CopyFrom(value.tensor_shape)
    if where == "constant":
        graph.node[0].op = "Const"
        graph.node[0].attr["value"].tensor.CopyFrom(value)
    feeds = {"x": value} if where == "feed" else {}
    with refused_raw("LIMIT_EXCEEDED") as refusal:
        raw.evaluate(channel, raw.request(graph, feeds))
    refusal.says("rank 9", "8")
