"""More tenants than engines: each tenant's calls get their turn, and sessions leave an engine for calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

import gradrule as gr
from gradrule_server.identity.token_file import add_token, new_token
from tests.service.answers import provokes, refused
from tests.service.servers import running_server

_ENGINES = 2
_TENANTS = ("ada", "grace", "alan", "edith", "kurt")
_CALLS = 12

Connect = Callable[..., gr.Client]


@contextlib.contextmanager
def crowded_server(folder: Path, *flags: str) -> Iterator[Connect]:
    """Starts a server with two engines, and returns what connects a tenant to it."""
    tokens = folder / "tokens"
    given = {}
    for tenant in _TENANTS:
        given[tenant], token = new_token(tenant)
        add_token(tokens, token)
    flags = ("--tokens", str(tokens), "--max-engines", str(_ENGINES), "--spares", "1", *flags)
    with running_server(folder / "server", flags) as server, contextlib.ExitStack() as clients:

        def connect_tenant(tenant: str, timeout: float = 120.0) -> gr.Client:
            return clients.enter_context(gr.connect(server.target, token=given[tenant], timeout=timeout))

        yield connect_tenant


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connect]:
    with crowded_server(tmp_path_factory.mktemp("turns")) as connect_tenant:
        yield connect_tenant


def scaled(factor: float) -> gr.Graph:
    graph = gr.Graph()
    graph.op("Mul", graph.placeholder("x", "float32", [None]), graph.constant(np.float32(factor)), name="y")
    return graph


def with_variable() -> gr.Graph:
    graph = gr.Graph()
    graph.op("Sum", graph.variable("w", np.ones(2, np.float32)), graph.constant([0]), name="loss")
    return graph


def test_all_calls_of_more_tenants_than_engines_are_answered(connect: Connect) -> None:
    """Each tenant sends calls without a break, two at a time."""
    together = threading.Barrier(len(_TENANTS))

    def work(number: int) -> int:
        client = connect(_TENANTS[number])
        together.wait(60)

        def call(index: int) -> bool:
            r = client.evaluate(scaled(number + 1), feeds={"x": np.float32([index])}, fetches=["y"])
            return r.outputs["y"].tolist() == [index * (number + 1)]

        with futures.ThreadPoolExecutor(2) as threads:
            return sum(threads.map(call, range(_CALLS)))

    with futures.ThreadPoolExecutor(len(_TENANTS)) as threads:
        assert list(threads.map(work, range(len(_TENANTS)))) == [_CALLS] * len(_TENANTS)


def test_idle_sessions_leave_an_engine_for_the_calls_of_others(connect: Connect) -> None:
    with connect("ada").session(with_variable()):
        for tenant in ("grace", "alan", "ada"):
            r = connect(tenant).evaluate(scaled(3), feeds={"x": np.float32([2])}, fetches=["y"])
            assert r.outputs["y"].tolist() == [6.0]
        # A second tenant's session would take the last engine.
        with refused("OVERLOADED") as held, connect("grace", timeout=2.0).session(with_variable()):
            pass
        held.says("sessions hold 1", "--max-engines")
    with connect("grace").session(with_variable()) as session:
        assert session.read()["w"].tolist() == [1.0, 1.0]


def test_forward_handles_leave_an_engine_for_the_calls_of_others(connect: Connect) -> None:
    run = {"feeds": {"x": np.float32([1])}}
    program = connect("ada").compile(scaled(2), fetches=["y"], ys=["y"], xs=["x"])
    other = connect("grace").compile(scaled(2), fetches=["y"], ys=["y"], xs=["x"])
    with program.forward(**run) as handle:
        with refused("OVERLOADED") as held:
            other.forward(**run, timeout=2.0)
        held.says("forward handles 1", "--max-engines")
        r = other.evaluate(**run)
        assert r.outputs["y"].tolist() == [2.0]
        assert handle.vjp({"y": np.float32([1])})["x"].tolist() == [2.0]
    other.forward(**run).close()


@provokes("SESSION_LOST")
def test_idle_session_ends_and_the_next_tenant_gets_its_engine(tmp_path: Path) -> None:
    with crowded_server(tmp_path, "--session-idle-s", "3") as connect_tenant:
        with connect_tenant("ada").session(with_variable()) as idle:
            # It waits for the engine.
            with connect_tenant("grace").session(with_variable()):
                pass
            with refused("SESSION_LOST") as held:
                idle.read()
        held.says("no message for 3 s", "--session-idle-s", "save", "last complete step is 0")
