"""Bad input: each a typed error, with nothing lost and the next request fine. Every reason has a test that provokes it."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.message import Message

import gradrule as gr
from gradrule.v1 import errors_pb2, graph_pb2, override_pb2, program_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import error, reason_name
from gradrule_server.front.status import code_of, status_of
from tests.service import answers, endless, raw
from tests.service.answers import refused, refused_raw
from tests.service.graph_defs import drawn, loaded, placeholder
from tests.service.servers import RunningServer, running_server, wait_until

Test = TypeVar("Test", bound=Callable[..., None])

PROVOKED: dict[str, Callable[..., None]] = {}
"""Reason → a test that provokes it at a real server."""

UNIT_LEVEL = {"INTERNAL"}
"""Reasons that nothing from outside can provoke: a fault of the server's own."""


def provokes(reason: str) -> Callable[[Test], Test]:
    """Enters a test for its reason, and has the test prove that it met it."""

    def enter(test: Test) -> Test:
        @functools.wraps(test)
        def proven(*args: Any, **kwargs: Any) -> None:
            before = len(answers.RECORDED)
            test(*args, **kwargs)
            assert reason in answers.RECORDED[before:]

        PROVOKED[reason] = proven
        return proven  # type: ignore[return-value]  # wraps keeps the signature

    return enter


def test_every_reason_has_a_test() -> None:
    reasons = {reason_name(number) for number in errors_pb2.ErrorReason.values() if number}
    assert reasons == set(PROVOKED) | UNIT_LEVEL
    assert not set(PROVOKED) & UNIT_LEVEL


@pytest.fixture
def same_engine(server: RunningServer, channel: grpc.Channel) -> Iterator[None]:
    """After the test the same engine still answers right."""
    before = server.engine_pid()
    assert before is not None
    yield
    raw.assert_healthy(channel)
    assert server.engine_pid() == before


fine = pytest.mark.usefixtures("same_engine")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with tight limits: one request at a time."""
    flags = ("--max-message-bytes", "1MiB", "--max-concurrent-requests", "1", "--max-nodes", "40", "--max-rules", "3")
    with running_server(tmp_path_factory.mktemp("small"), flags) as running:
        yield running


@pytest.fixture
def small_channel(small: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(small.target) as opened:
        yield opened


def sign() -> gr.Graph:
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", [None]), name="y")
    return g


X = {"x": [1.0, -2.0]}


# Requests.


@provokes("MALFORMED_REQUEST")
@fine
@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0fgarbage", b"\x00", os.urandom(4096)])
@pytest.mark.parametrize(
    "method",
    ["GradientService/Evaluate", "ProgramService/CompileProgram", "ProgramService/GetProgram", "RuleService/CreateRule"],
)
def test_garbage_bytes(channel: grpc.Channel, method: str, data: bytes) -> None:
    with refused_raw("MALFORMED_REQUEST") as refusal:
        raw.send(channel, method, data)
    refusal.says(f"{method.rpartition('/')[2]}Request")


@fine
@pytest.mark.parametrize(
    ("method", "field"),
    [
        ("GradientService/Evaluate", "target"),
        ("ProgramService/CompileProgram", "spec"),
        ("RuleService/CreateRule", "definition"),
    ],
)
def test_empty_request(channel: grpc.Channel, method: str, field: str) -> None:
    with refused_raw("MALFORMED_REQUEST") as refusal:
        raw.send(channel, method, b"")
    assert field in f"{refusal.message} {refusal.fields}"


@fine
@pytest.mark.parametrize("method", ["RuleService/ListRules", "ProgramService/ListPrograms"])
def test_foreign_page_token(channel: grpc.Channel, method: str) -> None:
    message: Message = (
        rule_pb2.ListRulesRequest(page_token="bogus")
        if "Rules" in method
        else program_pb2.ListProgramsRequest(page_token="bogus")
    )
    with refused_raw("MALFORMED_REQUEST"):
        raw.send(channel, method, message.SerializeToString())


# Graphs.


@provokes("INVALID_GRAPH")
@fine
@pytest.mark.parametrize("data", [b"no graph", b"\x0a\x05abc"])
def test_bytes_that_are_no_graph(channel: grpc.Channel, data: bytes) -> None:
    with refused_raw("INVALID_GRAPH"):
        raw.evaluate(channel, raw.request(data))


@fine
def test_shapes_that_do_not_fit(channel: grpc.Channel) -> None:
    shaped = [
        raw.node(
            name,
            "Placeholder",
            dtype=graph_pb2.AttrValue(type=raw.DT_FLOAT),
            shape=graph_pb2.AttrValue(shape=tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=n) for n in (2, 3)])),
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


@fine
@pytest.mark.parametrize(("reason", "graph", "words"), BAD_GRAPHS)
def test_bad_graph(channel: grpc.Channel, reason: str, graph: graph_pb2.Graph, words: list[str]) -> None:
    for of in (graph, graph.SerializeToString()):
        with refused_raw(reason) as refusal:
            raw.evaluate(channel, raw.request(of))
        refusal.says(*words)


def enter_bad_graphs() -> None:
    """Each reason of BAD_GRAPHS is provoked by `test_bad_graph`, whose block names it."""
    for reason, _, _ in BAD_GRAPHS:
        PROVOKED[reason] = test_bad_graph


enter_bad_graphs()


@fine
def test_function_that_calls_itself(channel: grpc.Channel) -> None:
    signature = graph_pb2.OpSignature(
        name="again",
        input_arg=[graph_pb2.OpSignature.ArgDef(name="a", type=raw.DT_FLOAT)],
        output_arg=[graph_pb2.OpSignature.ArgDef(name="b", type=raw.DT_FLOAT)],
    )
    again = graph_pb2.Function(
        signature=signature, node_def=[raw.node("inner", "again", "a")], ret={"b": "inner:b:0"}
    )
    graph = raw.graph(raw.placeholder(), raw.node("y", "again", "x"), functions=[again])
    with refused_raw("GRAPH_CYCLE") as refusal:
        raw.evaluate(channel, raw.request(graph))
    refusal.says("again")


@fine
def test_all_problems_come_at_once(channel: grpc.Channel) -> None:
    graph = raw.graph(raw.placeholder(), raw.node("a", "Sgin", "x"), raw.node("b", "Sign", "lost"), raw.node("y", "Neg", "a"))
    for of in (graph,):
        with pytest.raises(grpc.RpcError) as caught:
            raw.evaluate(channel, raw.request(of, fetches=["y", "b"]))
        findings = str(caught.value.trailing_metadata())  # type: ignore[attr-defined]  # a Call too
        assert "UNKNOWN_OP_TYPE" in findings
        assert "DANGLING_INPUT" in findings


@provokes("LIMIT_EXCEEDED")
def test_graph_that_is_too_large(small_channel: grpc.Channel) -> None:
    chain = [raw.node(f"n{i}", "Neg", f"n{i - 1}" if i else "x") for i in range(50)]
    with refused_raw("LIMIT_EXCEEDED") as refusal:
        raw.evaluate(small_channel, raw.request(raw.graph(raw.placeholder(), *chain), fetches=["n49"]))
    refusal.says("40")
    raw.assert_healthy(small_channel)


# Tensors and feeds.


@provokes("INVALID_TENSOR")
@fine
@pytest.mark.parametrize("length", [0, 3, 7, 9, 400])
def test_truncated_tensor(channel: grpc.Channel, length: int) -> None:
    value = raw.tensor([1.0, 2.0])
    value.tensor_content = (value.tensor_content * 50)[:length]
    if not length:
        value.float_val.extend([1.0, 2.0, 3.0])
    with refused_raw("INVALID_TENSOR") as refusal:
        raw.evaluate(channel, raw.request(raw.sign_graph(), {"x": value}))
    refusal.says("x")


@fine
def test_feed_without_a_tensor(channel: grpc.Channel) -> None:
    message = raw.request(raw.sign_graph(), {})
    message.feeds.add(name="x")
    with refused_raw("INVALID_TENSOR"):
        raw.evaluate(channel, message)


@provokes("UNKNOWN_TENSOR")
@fine
@pytest.mark.parametrize("words", [{"fetches": ["yy"]}, {"ys": ["yy"], "xs": ["x"]}, {"ys": ["y"], "xs": ["y:7"]}])
def test_unknown_tensor(client: Any, words: dict[str, Any]) -> None:
    with refused("UNKNOWN_TENSOR") as refusal:
        client.evaluate(sign(), feeds=X, **words)
    refusal.says(next(iter(name for names in words.values() for name in names if name not in ("x", "y"))))


@provokes("MISSING_FEED")
@fine
def test_missing_feed(either: Any) -> None:
    with refused("MISSING_FEED") as refusal:
        either.evaluate(sign(), feeds={}, fetches=["y"])
    refusal.says("x", "float32")


@provokes("UNKNOWN_FEED")
@fine
def test_unknown_feed(either: Any) -> None:
    with refused("UNKNOWN_FEED") as refusal:
        either.evaluate(sign(), feeds={"x": [1.0], "xx": [1.0]}, fetches=["y"])
    refusal.says("xx")


@fine
def test_feed_twice(channel: grpc.Channel) -> None:
    message = raw.request(raw.sign_graph())
    message.feeds.add(name="x:0").value.inline.CopyFrom(raw.tensor([1.0]))
    with refused_raw("UNKNOWN_FEED") as refusal:
        raw.evaluate(channel, message)
    refusal.says("x", "twice")


@provokes("FEED_DTYPE")
@fine
def test_feed_of_wrong_dtype(either: Any) -> None:
    with refused("FEED_DTYPE") as refusal:
        either.evaluate(sign(), feeds={"x": np.float64([1.0])}, fetches=["y"])
    refusal.says("x", "float64", "float32")


@provokes("FEED_SHAPE")
@fine
def test_feed_of_wrong_shape(either: Any) -> None:
    with refused("FEED_SHAPE") as refusal:
        either.evaluate(sign(), feeds={"x": np.ones((2, 2), np.float32)}, fetches=["y"])
    refusal.says("x", "(2, 2)")


# Rules.


@provokes("INVALID_EXPRESSION")
@fine
@pytest.mark.parametrize(
    ("expression", "column", "word"),
    [("dy * ", 6, ""), ("dy * foo(x)", 6, "foo"), ("dy +* x", 5, ""), ("where(x, dy)", 1, "where"), ("dy.shape", 1, "")],
)
def test_bad_expression(either: Any, expression: str, column: int, word: str) -> None:
    with refused("INVALID_EXPRESSION") as refusal:
        either.create_rule("Bad", expression)
    refusal.says(f"column {column}", word)
    with refused("UNKNOWN_RULE"):
        either.get_rule("Bad")


@provokes("INVALID_RULE")
@fine
@pytest.mark.parametrize(("expression", "params"), [("3", None), ("dy * x", {"x": 1.0}), ("dy * lambda_", {"lambda": 1.0})])
def test_bad_rule(client: Any, expression: str, params: Any) -> None:
    with refused("INVALID_RULE"):
        client.create_rule("Bad", expression, params=params)


@provokes("UNKNOWN_RULE")
@fine
@pytest.mark.parametrize("action", ["get_rule", "delete_rule"])
def test_unknown_rule(either: Any, action: str) -> None:
    with refused("UNKNOWN_RULE") as refusal:
        getattr(either, action)("gradient_reversl")
    refusal.says("gradient_reversal")


@provokes("RULE_EXISTS")
@fine
def test_rule_exists(either: Any, rule: Callable[..., str]) -> None:
    rule("Once", "2 * dy")
    with refused("RULE_EXISTS"):
        either.create_rule("Once", "3 * dy")
    assert either.get_rule("Once").expression == "2 * dy"


@provokes("RULE_READ_ONLY")
@fine
@pytest.mark.parametrize("name", ["Relu", "ste", "builtin/ste"])
def test_rule_that_ships_cannot_be_deleted(either: Any, name: str) -> None:
    with refused("RULE_READ_ONLY"):
        either.delete_rule(name)


@provokes("UNKNOWN_PARAM")
@fine
def test_unknown_param(either: Any) -> None:
    words: dict[str, Any] = {"feeds": X, "ys": ["y"], "xs": ["x"]}
    scaled = gr.Rule("alpha * dy", params={"alpha": 1.0})
    with refused("UNKNOWN_PARAM") as refusal:
        either.evaluate(sign(), overrides={"Sign": (scaled, {"alhpa": 2.0})}, **words)
    refusal.says("alhpa", "alpha")
    with refused("UNKNOWN_PARAM") as refusal:
        either.evaluate(sign(), overrides={"Sign": scaled}, params={"Sing": {"alpha": 2.0}}, **words)
    refusal.says("Sing", "Sign")


@provokes("MISSING_PARAM")
@fine
def test_missing_param(either: Any) -> None:
    scaled = gr.Rule("alpha * dy", params=["alpha"])
    with refused("MISSING_PARAM") as refusal:
        either.evaluate(sign(), feeds=X, ys=["y"], xs=["x"], overrides={"Sign": scaled})
    refusal.says("alpha")


@provokes("INVALID_PARAM")
@fine
def test_param_without_a_value(channel: grpc.Channel) -> None:
    definition = rule_pb2.RuleDefinition(expression="alpha * dy", params=[rule_pb2.RuleParam(name="alpha")])
    override = override_pb2.Override(
        selector=override_pb2.Selector(op_type="Sign"), definition=definition, params={"alpha": rule_pb2.ParamValue()}
    )
    with refused_raw("INVALID_PARAM") as refusal:
        raw.evaluate(channel, raw.request(raw.sign_graph(), overrides=[override], vjp=raw.vjp()))
    refusal.says("alpha")


# Overrides and derivatives.


@provokes("INVALID_OVERRIDE")
@fine
def test_overrides_without_ys(either: Any) -> None:
    with refused("INVALID_OVERRIDE") as refusal:
        either.evaluate(sign(), feeds=X, fetches=["y"], overrides={"Sign": "ste"})
    refusal.says("ys")


@fine
def test_override_that_selects_nothing(channel: grpc.Channel) -> None:
    with refused_raw("INVALID_OVERRIDE"):
        raw.evaluate(
            channel, raw.request(raw.sign_graph(), overrides=[override_pb2.Override(rule="ste")], vjp=raw.vjp())
        )


@provokes("UNMATCHED_OVERRIDE")
@fine
def test_unmatched_override(either: Any) -> None:
    for override in (gr.Override("ste", op_type="Floor"), gr.Override("ste", node="z"), gr.Override("ste", scope="s")):
        with refused("UNMATCHED_OVERRIDE"):
            either.evaluate(sign(), feeds=X, ys=["y"], xs=["x"], overrides=[override])


@provokes("INACTIVE_OVERRIDE")
@fine
def test_inactive_override(either: Any) -> None:
    g = sign()
    g.op("Floor", g.tensor("x"), name="aside")
    with refused("INACTIVE_OVERRIDE") as refusal:
        either.evaluate(g, feeds=X, ys=["y"], xs=["x"], overrides={"Floor": "ste"})
    refusal.says("aside")


@provokes("RULE_ARITY")
@fine
@pytest.mark.parametrize("expression", ["(dy, dy)", "dy * x1"])
def test_wrong_arity(either: Any, expression: str) -> None:
    with refused("RULE_ARITY") as refusal:
        either.evaluate(sign(), feeds=X, ys=["y"], xs=["x"], overrides={"Sign": gr.Rule(expression)})
    refusal.says("y", "Sign")


@provokes("RULE_OUTPUT")
@fine
def test_shape_that_is_wrong_only_when_it_runs(either: Any) -> None:
    g = gr.Graph()
    g.op("Sign", g.placeholder("x", "float32", None), name="y")
    squeezed = gr.Rule("sum(dy, axis=0)")
    for shape in ((2, 3), (3, 3)):
        with refused("RULE_OUTPUT") as refusal:
            either.evaluate(
                g, feeds={"x": np.ones(shape, np.float32)}, ys=["y"], xs=["x"], overrides={"Sign": squeezed}
            )
        refusal.says("y", "(3)", str(shape))


@provokes("RULE_NOT_APPLICABLE")
@fine
def test_rule_that_does_not_apply(either: Any) -> None:
    with refused("RULE_NOT_APPLICABLE"):
        either.evaluate(sign(), feeds=X, ys=["y"], xs=["x"], overrides={"Sign": "Conv2D"})


@provokes("FOREIGN_GRADIENT")
@fine
def test_foreign_gradient(channel: grpc.Channel) -> None:
    foreign = raw.node("y", "Sign", "x", _gradient_op_type=graph_pb2.AttrValue(s=b"CustomGradient-3"))
    with refused_raw("FOREIGN_GRADIENT") as refusal:
        raw.evaluate(channel, raw.request(raw.graph(raw.placeholder(), foreign), vjp=raw.vjp()))
    refusal.says("CustomGradient-3", "y")


@provokes("NO_GRADIENT")
@fine
def test_no_gradient(either: Any) -> None:
    g = gr.Graph()
    g.op("RandomShuffle", g.placeholder("x", "float32", [None]), name="y")
    with refused("NO_GRADIENT") as refusal:
        either.evaluate(g, feeds=X, ys=["y"], xs=["x"])
    refusal.says("y", "RandomShuffle")


@provokes("INVALID_DERIVATIVE")
@fine
def test_derivative_that_makes_no_sense(either: Any) -> None:
    complex_sign = gr.Graph()
    complex_sign.op("Sign", complex_sign.placeholder("x", "complex64", [None]), name="y")
    with refused("INVALID_DERIVATIVE") as refusal:
        either.evaluate(complex_sign, feeds=X, ys=["y"], xs=["x"])
    refusal.says("y", "complex64")
    for words in ({"ys": ["y"]}, {"xs": ["x"], "fetches": ["y"]}, {"ys": ["y"], "xs": ["x"], "grad_ys": {"x": [1.0, 1.0]}}):
        with refused("INVALID_DERIVATIVE"):
            either.evaluate(sign(), feeds=X, **words)


# Programs and running.


@provokes("PROGRAM_NOT_FOUND")
@fine
def test_program_not_found(client: Any, channel: grpc.Channel) -> None:
    with refused("PROGRAM_NOT_FOUND") as refusal:
        client.program("programs/nowhere")
    refusal.says("programs/nowhere")
    message = raw.request(raw.sign_graph())
    message.program = "programs/nowhere"
    with refused_raw("PROGRAM_NOT_FOUND"):
        raw.evaluate(channel, message)


@provokes("PROGRAM_EXISTS")
@fine
def test_program_exists(either: Any) -> None:
    first = either.compile(sign(), fetches=["y"], name="taken")
    assert either.compile(sign(), fetches=["y"], name="taken").name == first.name == "programs/taken"
    with refused("PROGRAM_EXISTS") as refusal:
        either.compile(sign(), fetches=["x"], name="taken")
    refusal.says("taken")


@provokes("EXECUTION_FAILED")
@fine
def test_kernel_that_fails(either: Any) -> None:
    g = gr.Graph()
    g.op("FloorDiv", g.placeholder("x", "int32", []), g.placeholder("by", "int32", []), name="y")
    with refused("EXECUTION_FAILED") as refusal:
        either.evaluate(g, feeds={"x": 1, "by": 0}, fetches=["y"])
    refusal.says("y")


@provokes("DEADLINE_EXCEEDED")
def test_deadline(small: RunningServer, small_channel: grpc.Channel) -> None:
    with gr.connect(small.target) as client, refused("DEADLINE_EXCEEDED"):
        client.evaluate(endless.graph_def(), feeds={"x": endless.STAYS}, fetches=["y"], timeout=1.0)
    wait_until(lambda: small_is_free(small_channel), "a free server")


@provokes("MESSAGE_TOO_LARGE")
def test_message_that_is_too_large(small: RunningServer, small_channel: grpc.Channel) -> None:
    with gr.connect(small.target) as client, refused("MESSAGE_TOO_LARGE"):
        client.evaluate(sign(), feeds={"x": np.zeros(600_000, np.float32)}, fetches=["y"])
    raw.assert_healthy(small_channel)


def small_is_free(small_channel: grpc.Channel) -> bool | None:
    try:
        raw.assert_healthy(small_channel)
    except grpc.RpcError:
        return None
    return True


class Background:
    """An endless call in a thread, and what became of it."""

    def __init__(self, client: Any, timeout: float = 30.0) -> None:
        self.error: gr.errors.GradruleError | None = None
        self._words = {"feeds": {"x": endless.STAYS}, "fetches": ["y"], "timeout": timeout}
        self._client = client
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._client.evaluate(endless.graph_def(), **self._words)
        except gr.errors.GradruleError as caught:
            self.error = caught

    def join(self) -> gr.errors.GradruleError:
        self._thread.join(40)
        assert self.error is not None
        return self.error


def busy(small_channel: grpc.Channel) -> bool | None:
    """True as soon as the server turns a request away."""
    return True if small_is_free(small_channel) is None else None


@provokes("OVERLOADED")
def test_overloaded(small: RunningServer, small_channel: grpc.Channel) -> None:
    with gr.connect(small.target) as client:
        background = Background(client, timeout=6.0)
        wait_until(lambda: busy(small_channel), "a busy server")
        with refused_raw("OVERLOADED"):
            raw.evaluate(small_channel, raw.request(raw.sign_graph()))
        assert background.join().reason == "DEADLINE_EXCEEDED"
    wait_until(lambda: small_is_free(small_channel), "a free server")


@provokes("CANCELLED")
def test_cancelled(small: RunningServer, small_channel: grpc.Channel) -> None:
    client = gr.connect(small.target)
    background = Background(client)
    wait_until(lambda: busy(small_channel), "a busy server")
    client.close()
    with refused("CANCELLED"):
        raise background.join()
    wait_until(lambda: small_is_free(small_channel), "a free server", 60)


@provokes("ENGINE_CRASHED")
@provokes("ENGINE_UNAVAILABLE")
def test_engine_that_dies_while_it_works(small: RunningServer, small_channel: grpc.Channel) -> None:
    engine = small.wait_for_engine()
    with gr.connect(small.target) as client:
        background = Background(client)
        wait_until(lambda: busy(small_channel), "a busy server")
        time.sleep(0.5)  # the request is with the engine by now
        os.kill(engine, signal.SIGKILL)
        with refused("ENGINE_CRASHED"):
            raise background.join()
    with refused_raw("ENGINE_UNAVAILABLE"):
        raw.evaluate(small_channel, raw.request(raw.sign_graph()))
    wait_until(lambda: small_is_free(small_channel), "another engine", 60)
    assert small.engine_pid() != engine


@provokes("UNAVAILABLE")
def test_server_that_is_gone(tmp_path_factory: pytest.TempPathFactory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    started = time.monotonic()
    with gr.connect(f"127.0.0.1:{port}") as client, refused("UNAVAILABLE") as refusal:
        client.evaluate(sign(), feeds=X, fetches=["y"], timeout=5.0)
    assert time.monotonic() - started < 10
    assert refusal.error.code is grpc.StatusCode.UNAVAILABLE


@provokes("UNSUPPORTED")
def test_server_that_lacks_the_method() -> None:
    other = grpc.server(futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        with gr.connect(f"127.0.0.1:{port}") as client, refused("UNSUPPORTED"):
            client.get_rule("ste")
    finally:
        other.stop(None).wait()


# What cannot be provoked from outside, at the place where it would become a status.


@pytest.mark.parametrize("reason", sorted(UNIT_LEVEL))
def test_status_of_a_fault(reason: str) -> None:
    number = errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
    status = status_of(error(number, "the server failed"))
    assert code_of(number) is grpc.StatusCode.INTERNAL
    assert (status.code, status.message) == (grpc.StatusCode.INTERNAL.value[0], "the server failed")


def test_nothing_is_lost_over_all_of_this(client: Any, server: RunningServer) -> None:
    """The registry still holds what it held, and a graph of TensorFlow's still gives its gradient."""
    assert {item.name for item in client.list_rules(kind="user")} == set()
    graph = loaded(drawn(lambda: tf.square(placeholder("x"), name="y")))
    r = client.evaluate(graph, feeds={"x": [3.0]}, ys=["y"], xs=["x"])
    assert r.gradients["x"].tolist() == [6.0]
    assert server.process.poll() is None
