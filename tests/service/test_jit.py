"""Programs with jit="auto" are compiled with XLA once they run often: against a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import program_pb2, program_pb2_grpc
from tests.service.servers import RunningServer, running_server

# XLA needs a fifth of the time for such a chain.
_SIZE = 1 << 18
_LAYERS = 12
# Only a server that hangs reaches this limit.
_LIMIT_S = 600.0
_rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server that compiles programs almost at once."""
    with running_server(tmp_path_factory.mktemp("jit"), ["--jit-after-s", "0.005"]) as running:
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


def call_until(server: RunningServer, call: Callable[[], Any], is_reached: Callable[[Any], bool]) -> Any:
    """Returns the first answer for which the condition holds; fails if the server reports that it refuses XLA."""
    end = time.monotonic() + _LIMIT_S
    position = server.log.stat().st_size
    while time.monotonic() < end:
        answer = call()
        if is_reached(answer):
            return answer
        refusals = [line for line in server.log.read_bytes()[position:].splitlines() if b"runs without XLA" in line]
        if refusals:
            pytest.fail(refusals[0].decode())
    pytest.fail("the server neither uses XLA nor refuses it")


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in ((found.outputs["y"], wanted.outputs["y"]), (found.gradients["x"], wanted.gradients["x"])):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def jit_programs(client: gr.Client) -> int:
    return sum(engine.jit_programs for engine in client.server_status().engines)


@pytest.mark.fast_path("sessions")
def test_frequently_called_program_runs_with_xla(server: RunningServer, client: gr.Client) -> None:
    program, plain = compiled(client, chain(), jit="auto"), compiled(client, chain())
    assert program.name != plain.name
    x = feed()
    wanted = plain(x=x)
    found = call_until(server, lambda: program(x=x), lambda answer: jit_programs(client) == 1 and answer.jit)
    assert_equal(found, wanted)
    for _ in range(5):
        other = feed()
        answer = program(x=other)
        assert answer.jit
        assert_equal(answer, plain(x=other))
    # Other shapes are counted separately, and a program without jit never uses XLA.
    assert not program(x=feed(16)).jit
    assert not any(plain(x=x).jit for _ in range(20))


@pytest.mark.fast_path("sessions")
def test_answers_stay_the_same_while_the_server_changes_to_xla(server: RunningServer, client: gr.Client) -> None:
    program = compiled(client, chain(), jit="auto")
    x = feed(_SIZE // 2)
    wanted = compiled(client, chain())(x=x)
    seen: list[Any] = []

    def checked() -> Any:
        seen.append(answer := program(x=x))
        assert_equal(answer, wanted)
        return answer

    call_until(server, checked, lambda _: sum(answer.jit for answer in seen) > 20)
    assert not seen[0].jit


@pytest.mark.fast_path("sessions")
def test_async_clients_and_inline_calls_accept_jit(server: RunningServer, client: gr.Client) -> None:
    x = feed()
    words: Any = {"fetches": ["y"], "jit": "auto"}

    async def evaluated() -> Any:
        async with gr.aio.connect(server.target) as connected:
            program = await connected.compile(chain(), **words)
            return await program(x=x), await connected.evaluate(chain(), feeds={"x": x}, **words)

    of_program, inline = asyncio.run(evaluated())
    np.testing.assert_array_equal(of_program.outputs["y"], inline.outputs["y"])
    # Inline calls of one program are counted together.
    call_until(server, lambda: client.evaluate(chain(), feeds={"x": x}, **words), lambda answer: answer.jit)


def test_unknown_jit_values_are_refused(client: gr.Client, server: RunningServer) -> None:
    with pytest.raises(gr.errors.GradruleError, match="jit"):
        compiled(client, chain(), jit="always")
    spec = program_pb2.ProgramSpec(fetches=["y"], jit=7)
    spec.graph.serialized = chain().to_bytes()
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        program_pb2_grpc.ProgramServiceStub(channel).CompileProgram(program_pb2.CompileProgramRequest(spec=spec))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "JIT_AUTO" in str(caught.value.details())


def test_program_with_op_that_xla_computes_differently_is_not_compiled(
    client: gr.Client, server: RunningServer
) -> None:
    """GatherV2 fails beyond the table; XLA would take the last row."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    index = g.placeholder("index", "int32", [None])
    zero = g.constant(np.int32(0))
    h: Any = g.op_output("GatherV2", x, index, zero)
    for _ in range(_LAYERS):
        h = h * 0.5 + 1.0
    g.op_output("Identity", h, name="y")
    program = client.compile(g, fetches=["y"], jit="auto")
    feeds: dict[Any, Any] = {"x": feed(), "index": np.arange(_SIZE, dtype=np.int32)}
    assert not any(program.evaluate(feeds).jit for _ in range(60))
    with pytest.raises(gr.errors.ExecutionFailedError, match="indices"):
        program.evaluate({**feeds, "index": np.full(4, _SIZE, np.int32)})


def test_server_setting_turns_xla_off(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("off")
    with running_server(folder, ["--jit-after-s", "0"]) as running, gr.connect(running.target) as client:
        program = compiled(client, chain(), jit="auto")
        x = feed()
        assert not any(program(x=x).jit for _ in range(60))


@pytest.mark.fast_path("sessions")
def test_xla_does_not_regroup_floats(server: RunningServer, client: gr.Client) -> None:
    """Sums and products that XLA could fold give the results of TensorFlow's kernels."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    parts = {"sum": (x + 1e8) - 1e8, "product": (x * 1e-30) * 1e30, "chain": ((x - 1e8) + 1e8) * 0.5}
    for name, part in parts.items():
        g.op_output("Identity", part, name=name)
    program = client.compile(g, fetches=list(parts), jit="auto")
    value = feed(4 * _SIZE) * np.float32(100)
    found = call_until(server, lambda: program(x=value), lambda answer: answer.jit).outputs
    large, small = np.float32(1e8), np.float32(1e-30)
    np.testing.assert_array_equal(found["sum"], (value + large) - large)
    np.testing.assert_array_equal(found["product"], (value * small) * np.float32(1e30))
    np.testing.assert_array_equal(found["chain"], ((value - large) + large) * np.float32(0.5))
