"""Requests for derivatives that make no sense are refused with a message that names the right request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, program_pb2, program_pb2_grpc
from tests.service import raw
from tests.service.answers import refused, refused_raw

X = np.float32([1.0, 2.0])
Change = Callable[[evaluate_pb2.EvaluateRequest], None]


def graph() -> gr.Graph:
    """Makes y = x², z = x + 1, and a fed integer."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.placeholder("n", "int32", [])
    g.square(x, name="y")
    g.add(x, 1.0, name="z")
    return g


def request(**derivative: Any) -> evaluate_pb2.EvaluateRequest:
    """Makes a request with an inline program and feeds."""
    asked = evaluate_pb2.EvaluateRequest(feeds=raw.feeds({"x": raw.tensor([1.0, 2.0])}))
    asked.spec.CopyFrom(program_pb2.ProgramSpec(**derivative))
    asked.spec.graph.serialized = graph().to_bytes()
    return asked


def add_tensors(field: str, **values: Any) -> Change:
    """Adds tensors to a field of the request."""

    def change(asked: evaluate_pb2.EvaluateRequest) -> None:
        getattr(asked, field).extend(raw.feeds({name: raw.tensor(value) for name, value in values.items()}))

    return change


VJP = {"vjp": program_pb2.Vjp(ys=["y"], xs=["x"])}
JVP = {"jvp": program_pb2.Jvp(ys=["y"], xs=["x"])}
JACOBIAN = {"jacobian": program_pb2.Jacobian(ys=["y"], xs=["x"])}
HVP = {"hvp": program_pb2.Hvp(ys=["y"], xs=["x"])}
ONES = [1.0, 1.0]


@pytest.mark.parametrize(
    ("derivative", "change", "words"),
    [
        (VJP, add_tensors("tangents", x=ONES), ["tangents belong to a Jacobian-vector product"]),
        (VJP, add_tensors("vectors", x=ONES), ["vectors belong to a Hessian-vector product"]),
        (JVP, add_tensors("vectors", x=ONES), ["vectors", "takes tangents"]),
        (
            JVP,
            add_tensors("grad_ys", y=ONES),
            ["grad_ys belong to a vector-Jacobian product or a Hessian-vector product"],
        ),
        (HVP, add_tensors("tangents", x=ONES), ["tangents", "takes vectors"]),
        (JACOBIAN, add_tensors("grad_ys", y=ONES), ["grad_ys", "this is a Jacobian"]),
        (JACOBIAN, add_tensors("tangents", x=ONES), ["tangents"]),
        (JVP, add_tensors("tangents", z=ONES), ["'z'", "not one of the xs"]),
        (HVP, add_tensors("vectors", q=ONES), ["'q'", "not one of the xs"]),
        (VJP, lambda asked: setattr(asked, "stacked_grad_ys", True), ["there are no grad_ys"]),
        (HVP, lambda asked: setattr(asked, "stacked_grad_ys", True), ["stacked_grad_ys", "Hessian"]),
        ({}, lambda asked: asked.spec.fetches.append("y"), None),
        ({"fetches": ["y"]}, lambda asked: setattr(asked, "derivative", evaluate_pb2.DERIVATIVE_JVP), ["no ys"]),
        ({"fetches": ["y"]}, add_tensors("tangents", x=ONES), ["no ys"]),
        ({"fetches": ["y"], "jvp": program_pb2.Jvp()}, lambda _: None, ["no ys"]),
        ({"jacobian": program_pb2.Jacobian(ys=["y"])}, lambda _: None, ["no xs"]),
        ({"hvp": program_pb2.Hvp(xs=["x"])}, lambda _: None, ["no ys"]),
    ],
)
def test_contradictory_fields_are_refused(
    channel: grpc.Channel, derivative: Any, change: Change, words: list[str] | None
) -> None:
    asked = request(**derivative)
    change(asked)
    if words is None:
        assert raw.evaluate(channel, asked).outputs[0].name == "y"
        return
    with refused_raw("INVALID_DERIVATIVE") as refusal:
        raw.evaluate(channel, asked)
    refusal.says(*words)


def test_unknown_enum_values_are_refused(channel: grpc.Channel) -> None:
    asked = request(**VJP)
    asked.derivative = 99  # type: ignore[assignment]  # no value of the enum
    with refused_raw("MALFORMED_REQUEST") as refusal:
        raw.evaluate(channel, asked)
    refusal.says("99", "DERIVATIVE_JVP")
    asked = request(hvp=program_pb2.Hvp(ys=["y"], xs=["x"], unconnected_gradients=99))
    with refused_raw("MALFORMED_REQUEST") as refusal:
        raw.evaluate(channel, asked)
    assert refusal.fields == ["spec.hvp.unconnected_gradients"]
    asked = request(**VJP)
    asked.spec.overrides.add(rule="dead", order=99).selector.op_type = "Square"
    with refused_raw("MALFORMED_REQUEST") as refusal:
        raw.evaluate(channel, asked)
    assert refusal.fields[0] == "overrides[0].order"


def test_unknown_name_is_reported_with_its_field(channel: grpc.Channel) -> None:
    with refused_raw("UNKNOWN_TENSOR") as refusal:
        raw.evaluate(channel, request(jvp=program_pb2.Jvp(ys=["y"], xs=["x", "w"])))
    assert refusal.fields == ["spec.jvp.xs[1]"]


def test_direction_given_twice_is_refused(channel: grpc.Channel) -> None:
    asked = request(**JVP)
    asked.tangents.extend(raw.feeds({"x": raw.tensor(ONES), "x:0": raw.tensor(ONES)}))
    with refused_raw("UNKNOWN_FEED") as refusal:
        raw.evaluate(channel, asked)
    refusal.says("tangents", "'x' twice")


def test_direction_of_wrong_shape_or_dtype_is_refused(client: Any) -> None:
    g = graph()
    for ask, word in ((client.jvp, "tangent"), (client.hvp, "vector")):
        with refused("FEED_SHAPE") as refusal:
            ask(g, {"x": X}, {"x": np.ones(3, np.float32)}, ys=["y"], xs=["x"])
        refusal.says(f"{word} of 'x'", "(3)", "(2)")
        with refused("FEED_SHAPE") as refusal:
            ask(g, {"x": X}, {"x": np.ones((2, 1), np.float32)}, ys=["y"], xs=["x"])
        refusal.says("'x'", "(2, 1)")
        with refused("FEED_DTYPE") as refusal:
            ask(g, {"x": X}, {"x": np.full(2, 0.1)}, ys=["y"], xs=["x"])
        with refused("INVALID_DERIVATIVE") as refusal:
            ask(g, {"x": X, "n": 1}, {"n": 1}, ys=["y"], xs=["x", "n"])
        refusal.says("'n'", "omit it")
        with refused("INVALID_DERIVATIVE") as refusal:
            ask(g, {"x": X}, {}, ys=["y"], xs=["x"])
        refusal.says("at least one x")


def test_direction_of_another_dtype_in_a_plain_message_is_refused(channel: grpc.Channel) -> None:
    asked = request(**JVP)
    asked.tangents.extend(raw.feeds({"x": tensor_codec.to_message(np.ones(2))}))
    with refused_raw("FEED_DTYPE") as refusal:
        raw.evaluate(channel, asked)
    refusal.says("tangent 'x'", "float64", "float32")


def test_program_without_its_direction_is_refused(channel: grpc.Channel) -> None:
    for derivative, word in ((JVP, "tangent"), (HVP, "vector")):
        with refused_raw("MISSING_FEED") as refusal:
            raw.evaluate(channel, request(**derivative))
        refusal.says(f"{word} 'x' is missing", "float32")


def test_stacked_grad_ys_of_wrong_shape_are_refused(client: Any) -> None:
    asked: dict[str, Any] = {"feeds": {"x": X}, "ys": ["y", "z"], "xs": ["x"], "stacked_grad_ys": True}
    with refused("FEED_SHAPE") as refusal:
        stacks = {"y": np.ones((3, 2), np.float32), "z": np.ones((4, 2), np.float32)}
        client.evaluate(graph(), grad_ys=stacks, **asked)
    refusal.says("'y': 3", "'z': 4", "one size")
    with refused("FEED_SHAPE") as refusal:
        client.evaluate(graph(), grad_ys={"y": np.ones((3, 5), np.float32)}, **asked)
    refusal.says("grad_y of 'y'", "(5)", "(2)")
    with refused("FEED_SHAPE"):
        client.evaluate(graph(), grad_ys={"y": np.float32(1)}, **asked)
    found = client.evaluate(graph(), grad_ys={"y": np.ones((3, 2), np.float32)}, **asked).gradients["x"]
    assert found.tolist() == [[3.0, 5.0]] * 3


def test_batch_jacobian_without_a_batch_is_refused(client: Any) -> None:
    g = gr.Graph()
    x, w = g.placeholder("x", "float32", [None]), g.placeholder("w", "float32", [2])
    g.multiply(x, g.reduce_sum(w), name="y")
    g.reduce_sum(x, name="s")
    feeds = {"x": np.ones(3, np.float32), "w": X}
    with refused("INVALID_DERIVATIVE") as refusal:
        client.jacobian(g, feeds, ys=["y"], xs=["w"], batched=True)
    refusal.says("axis 0", "(3)", "(2)")
    h = gr.Graph()
    x = h.placeholder("x", "float32", [3])
    h.reduce_sum(x, name="s")
    with refused("INVALID_DERIVATIVE") as refusal:
        client.jacobian(h, {"x": np.ones(3, np.float32)}, ys=["s"], xs=["x"], batched=True)
    refusal.says("'s'", "axis 0")


@pytest.fixture
def compiled(client: Any) -> Iterator[gr.Program]:
    program = client.compile(graph(), ys=["y"], xs=["x"], fetches=["y"])
    yield program
    program.delete()


def test_program_works_after_a_refused_request(compiled: gr.Program) -> None:
    for _ in range(2):
        with refused("FEED_SHAPE"):
            compiled.jvp({"x": X}, {"x": np.ones(3, np.float32)})
        assert compiled.jvp({"x": X}, {"x": np.ones(2, np.float32)})["y"] is not None
        with refused("FEED_SHAPE"):
            compiled.hvp({"x": X}, {"x": np.ones(3, np.float32)})
        assert compiled.hvp({"x": X}, {"x": np.ones(2, np.float32)})["x"].tolist() == [2.0, 2.0]


def test_programs_of_every_derivative_are_stored(client: Any, channel: grpc.Channel) -> None:
    stub = program_pb2_grpc.ProgramServiceStub(channel)
    digests = set()
    for derivative in (VJP, JVP, JACOBIAN, HVP):
        asked = request(**derivative)
        program = stub.CompileProgram(program_pb2.CompileProgramRequest(spec=asked.spec), timeout=60).program
        digests.add(program.digests.program)
        call = evaluate_pb2.EvaluateRequest(program=program.name, feeds=asked.feeds)
        if derivative is JVP:
            add_tensors("tangents", x=ONES)(call)
        if derivative is HVP:
            add_tensors("vectors", x=ONES)(call)
        answer = raw.evaluate(channel, call)
        assert (len(answer.gradients), len(answer.output_tangents), len(answer.jacobians)) == {
            "vjp": (1, 0, 0), "jvp": (0, 1, 0), "jacobian": (0, 0, 1), "hvp": (1, 0, 0)
        }[next(iter(derivative))]  # fmt: skip
        assert answer.digests.program == program.digests.program
        client.delete_program(program.name)
    assert len(digests) == 4


def test_jacobian_larger_than_any_message_is_refused(client: Any) -> None:
    g = gr.Graph()
    g.square(g.placeholder("x", "float32", [None]), name="y")
    with refused("MESSAGE_TOO_LARGE") as refusal:
        client.jacobian(g, {"x": np.zeros(100_000, np.float32)}, ys=["y"], xs=["x"])
    refusal.says("Jacobian of 'y'", "40000000000 bytes")
    # A product of sizes above 32 bits is computed correctly where one of them is small.
    found = client.jacobian(g, {"x": np.ones(300, np.float32)}, ys=["y"], xs=["x"])["y"]["x"]
    assert found.shape == (300, 300)
