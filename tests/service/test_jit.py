"""Programs with jit="on" are computed by XLA: against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import program_pb2, program_pb2_grpc
from tests.service.servers import RunningServer, running_server

_SIZE = 1 << 12
_LAYERS = 12
_rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("jit"), []) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[gr.Client]:
    with gr.connect(server.target) as connected:
        yield connected


def chain() -> gr.Graph:
    """Makes Sign with a straight-through gradient between multiplications, maxima and minima."""
    g = gr.Graph()
    h: Any = g.placeholder("x", "float32", [None])
    for _ in range(_LAYERS):
        h = g.op_output("Sign", h) * 0.5 + g.op_output("Minimum", g.op_output("Maximum", h * 1.25, -1.0), 1.0) * 0.75
    g.op_output("Identity", h, name="y")
    return g


def compiled(client: Any, graph: gr.Graph, **words: Any) -> Any:
    return client.compile(
        graph, fetches=["y"], ys=["y"], xs=["x"], overrides={"Sign": gr.Rule("where(abs(x) <= 1, dy, 0)")}, **words
    )


def feed(size: int = _SIZE) -> np.ndarray:
    return _rng.normal(size=size).astype(np.float32)


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in ((found.outputs["y"], wanted.outputs["y"]), (found.gradients["x"], wanted.gradients["x"])):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_all_calls_of_a_program_run_with_xla(client: gr.Client) -> None:
    program, plain = compiled(client, chain(), jit="on"), compiled(client, chain())
    assert program.name != plain.name
    # The first calls compile, one for each shape.
    for size in (_SIZE, 16, _SIZE):
        x = feed(size)
        answer, wanted = program(x=x), plain(x=x)
        assert answer.jit and not wanted.jit
        assert_equal(answer, wanted)


def test_async_clients_and_inline_calls_accept_jit(server: RunningServer, client: gr.Client) -> None:
    x = feed()
    words: Any = {"fetches": ["y"], "jit": "on"}

    async def evaluated() -> Any:
        async with gr.aio.connect(server.target) as connected:
            program = await connected.compile(chain(), **words)
            return await program(x=x), await connected.evaluate(chain(), feeds={"x": x}, **words)

    of_program, inline = asyncio.run(evaluated())
    np.testing.assert_array_equal(of_program.outputs["y"], inline.outputs["y"])
    assert of_program.jit and inline.jit and client.evaluate(chain(), feeds={"x": x}, **words).jit


def test_forward_handles_do_not_use_xla(client: gr.Client) -> None:
    program = compiled(client, chain(), jit="on")
    x = feed(8)
    with program.forward({"x": x}) as handle:
        gradient = handle.vjp()["x"]
    np.testing.assert_allclose(gradient, program(x=x).gradients["x"], rtol=1e-5)


def test_the_automatic_choice_of_earlier_servers_is_off(server: RunningServer) -> None:
    spec = program_pb2.ProgramSpec(fetches=["y"], jit=program_pb2.JIT_AUTO)
    spec.graph.serialized = chain().to_bytes()
    with grpc.insecure_channel(server.target) as channel, gr.connect(server.target) as connected:
        stub = program_pb2_grpc.ProgramServiceStub(channel)
        stub.CompileProgram(program_pb2.CompileProgramRequest(spec=spec, program_id="old"))
        assert not connected.program("old")(x=feed(4)).jit


def test_unknown_jit_values_are_refused(client: gr.Client, server: RunningServer) -> None:
    with pytest.raises(gr.errors.GradruleError, match=r"off.*on.*auto"):
        compiled(client, chain(), jit="auto")
    spec = program_pb2.ProgramSpec(fetches=["y"], jit=7)
    spec.graph.serialized = chain().to_bytes()
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        program_pb2_grpc.ProgramServiceStub(channel).CompileProgram(program_pb2.CompileProgramRequest(spec=spec))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "JIT_ON" in str(caught.value.details())


def test_a_program_with_an_op_that_xla_computes_differently_is_refused(client: gr.Client) -> None:
    """GatherV2 fails beyond the table; XLA would take the last row."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    index = g.placeholder("index", "int32", [None])
    h: Any = g.op_output("GatherV2", x, index, g.constant(np.int32(0)), name="taken")
    g.op_output("Identity", h * 0.5, name="y")
    with pytest.raises(gr.errors.UnsupportedOpError, match=r"'taken' \(GatherV2\).*jit=off") as caught:
        client.compile(g, fetches=["y"], jit="on")
    assert caught.value.details[0].node == "taken"
    assert not client.evaluate(g, feeds={"x": feed(4), "index": np.int32([1])}, fetches=["y"]).jit


def test_an_error_of_a_call_names_the_node(client: gr.Client) -> None:
    g = gr.Graph()
    one, other = (g.placeholder(name, "float32", [None]) for name in ("one", "other"))
    g.op_output("AddV2", one, other, name="y")
    program = client.compile(g, fetches=["y"], jit="on")
    with pytest.raises(gr.errors.ExecutionFailedError, match=r"node 'y'.*Incompatible shapes"):
        program(one=feed(2), other=feed(3))
    assert program(one=feed(3), other=feed(3)).jit


def test_xla_does_not_regroup_floats(client: gr.Client) -> None:
    """Sums and products that XLA could fold give the results of TensorFlow's kernels."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    parts = {"sum": (x + 1e8) - 1e8, "product": (x * 1e-30) * 1e30, "chain": ((x - 1e8) + 1e8) * 0.5}
    for name, part in parts.items():
        g.op_output("Identity", part, name=name)
    program = client.compile(g, fetches=list(parts), jit="on")
    value = feed(4 * _SIZE) * np.float32(100)
    answer = program(x=value)
    assert answer.jit
    found = answer.outputs
    large, small = np.float32(1e8), np.float32(1e-30)
    np.testing.assert_array_equal(found["sum"], (value + large) - large)
    np.testing.assert_array_equal(found["product"], (value * small) * np.float32(1e30))
    np.testing.assert_array_equal(found["chain"], ((value - large) + large) * np.float32(0.5))
