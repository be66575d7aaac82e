"""One tenant's graphs that harm engines affect neither other tenants nor the tenant's own sessions."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import session_pb2
from tests.processes import engines
from tests.service import loop_graphs, raw
from tests.service.answers import assert_close, refused
from tests.service.graph_defs import sign_graph
from tests.service.guarded import Guarded
from tests.service.harmful_graphs import FAILED_CHECK
from tests.service.streams import error_reason
from tests.waiting import wait_until

EVALUATE = "/gradrule.v1.GradientService/Evaluate"
RUN_SESSION = "/gradrule.v1.SessionService/RunSession"

_STORM = 6
_LOOPS = 8
_FEEDS = {"x": np.float32([1, 2])}


@pytest.fixture
def engines_of(guarded: Guarded) -> Iterator[Callable[..., set[int]]]:
    """Returns a tenant's engine processes as the server reports them."""
    with guarded.connect("root") as root:

        def pids(tenant: str, *, sessions: bool = False) -> set[int]:
            engines = root.server_status().engines
            return {
                engine.pid
                for engine in engines
                if engine.pid and (engine.tenant, engine.holds_sessions) == (tenant, sessions)
            }

        yield pids


def counter() -> gr.Graph:
    """Makes loss = sum(w): a step with learning rate 1 subtracts 1 from each value of w."""
    graph = gr.Graph()
    graph.op("Sum", graph.variable("w", np.zeros(2, np.float32)), graph.constant([0]), name="loss")
    return graph


def square() -> gr.Graph:
    graph = gr.Graph()
    x = graph.placeholder("x", "float32", [None])
    graph.op("Mul", x, x, name="y")
    return graph


def step(session: Any) -> int:
    number: int = session.step({}, "loss", gr.optimizers.SGD(1.0), timeout=60.0).step
    return number


def crashing(number: int) -> Any:
    """Makes a graph that crashes its engine and differs from all earlier ones."""
    graph = FAILED_CHECK.build()
    graph.node.add(name=f"copy-{number}", op="NoOp")
    return graph


class ContinuousWork:
    """Uses a session, a forward handle and calls in a thread; asserts that none fails."""

    def __init__(self, client: gr.Client) -> None:
        self.rounds = 0
        self.slowest_s = 0.0
        self._client = client
        self._stop = threading.Event()

    def run(self) -> None:
        """Works until `stop`."""
        with self._client.session(counter()) as session:
            handle = self._client.compile(square(), fetches=["y"], ys=["y"], xs=["x"]).forward(_FEEDS)
            while not self._stop.is_set():
                self.rounds += 1
                assert step(session) == self.rounds
                assert_close(handle.vjp({"y": np.ones(2, np.float32)})["x"], np.float32([2, 4]))
                r = self._client.evaluate(sign_graph(), feeds=_FEEDS, fetches=["y"], timeout=60.0)
                assert r.outputs["y"].tolist() == [1.0, 1.0]
            assert_close(session.read()["w"], np.full(2, -self.rounds, np.float32))

    def stop(self) -> None:
        self._stop.set()


def test_crashing_graphs_harm_neither_others_nor_the_tenants_own_sessions(
    ada: gr.Client, grace: gr.Client, names: tuple[str, str], engines_of: Callable[..., set[int]]
) -> None:
    noticing = ContinuousWork(grace)
    with ada.session(counter()) as own, futures.ThreadPoolExecutor() as pool:
        step(own)
        others = pool.submit(noticing.run)
        wait_until(lambda: noticing.rounds > 1 or others.done() or None, "a first round")
        before = engines_of(names[1])
        for number in range(_STORM):
            with refused("ENGINE_CRASHED"):
                ada.evaluate(crashing(number), feeds=FAILED_CHECK.feeds, fetches=["y"], timeout=60.0)
        # The tenant's other calls are run again on another engine.
        assert ada.evaluate(sign_graph(), feeds=_FEEDS, fetches=["y"]).outputs["y"].tolist() == [1.0, 1.0]
        assert step(own) == 2
        rounds = noticing.rounds
        wait_until(lambda: noticing.rounds > rounds + 1 or others.done() or None, "another round")
        noticing.stop()
        others.result()
    assert before == engines_of(names[1])


def test_engine_serves_only_one_tenant(
    ada: gr.Client, grace: gr.Client, names: tuple[str, str], engines_of: Callable[..., set[int]]
) -> None:
    with ada.session(counter()), grace.session(counter()):
        for client in (ada, grace):
            client.evaluate(sign_graph(), feeds=_FEEDS, fetches=["y"])
        found = [engines_of(name, sessions=sessions) for name in names for sessions in (False, True)]
        assert [len(pids) for pids in found] == [1, 1, 1, 1]
        assert len(set.union(*found)) == 4


def test_endless_loops_of_one_tenant_delay_no_other(
    guarded: Guarded,
    ada: gr.Client,
    grace: gr.Client,
    names: tuple[str, str],
    channels: Callable[[str], grpc.Channel],
) -> None:
    grace.evaluate(sign_graph(), feeds=_FEEDS, fetches=["y"])
    loops = [start_loop(channels(names[0])) for _ in range(_LOOPS)]
    # The loops occupy all threads once a call of the same tenant waits.
    with refused("DEADLINE_EXCEEDED"):
        wait_until(lambda: ada.evaluate(sign_graph(), feeds=_FEEDS, fetches=["y"], timeout=1.0) and None, "a call")
    for _ in range(10):
        assert grace.evaluate(sign_graph(), feeds=_FEEDS, fetches=["y"], timeout=20.0).outputs["y"].tolist() == [
            1.0,
            1.0,
        ]
    assert not any(loop.done() for loop in loops), "the loops had ended: nothing is shown"
    for loop in loops:
        loop.cancel()


def start_loop(channel: grpc.Channel) -> Any:
    """Starts a call that runs until it is cancelled."""
    request = raw.request(loop_graphs.endless().SerializeToString(), {"x": raw.tensor(loop_graphs.ENDLESS)})
    return channel.unary_unary(EVALUATE).future(request.SerializeToString(), timeout=300)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_overrunning_or_cancelled_call_ends_no_session(
    ada: gr.Client,
    names: tuple[str, str],
    engines_of: Callable[..., set[int]],
    channels: Callable[[str], grpc.Channel],
    is_cancelled: bool,
) -> None:
    program = ada.compile(loop_graphs.endless(), fetches=["y"])
    program.evaluate({"x": loop_graphs.ENDS})
    with ada.session(counter()) as session:
        step(session)
        (before,) = engines_of(names[0])
        if is_cancelled:
            loop = start_loop(channels(names[0]))
            with refused("DEADLINE_EXCEEDED"):
                program.evaluate({"x": loop_graphs.ENDLESS}, timeout=0.5)
            loop.cancel()
        else:
            with refused("DEADLINE_EXCEEDED"):
                program.evaluate({"x": loop_graphs.ENDLESS}, timeout=1.0)
        wait_until(lambda: before not in engines_of(names[0]) or None, "the end of the engine that ran it")
        assert step(session) == 2


def test_session_opened_during_anothers_overrun_survives_that_engine(
    ada: gr.Client, names: tuple[str, str], engines_of: Callable[..., set[int]]
) -> None:
    graph = gr.Graph.from_bytes(loop_graphs.endless().SerializeToString())
    graph.op("Sum", graph.variable("w", np.zeros(2, np.float32)), graph.constant([0]), name="loss")
    first = ada.session(graph)
    first.__enter__()
    (before,) = engines_of(names[0], sessions=True)
    # The next call needs no compilation.
    first.evaluate({"x": loop_graphs.ENDS}, fetches=["y"])
    with refused("DEADLINE_EXCEEDED"):
        first.evaluate({"x": loop_graphs.ENDLESS}, fetches=["y"], timeout=1.0)
    with ada.session(counter()) as second:
        assert before not in engines_of(names[0], sessions=True) or len(engines_of(names[0], sessions=True)) == 2
        step(second)
        wait_until(lambda: before not in engines_of(names[0], sessions=True) or None, "the end of the first engine")
        assert step(second) == 2
    first.close()


def test_lost_session_is_reported_without_a_pending_request(
    names: tuple[str, str], engines_of: Callable[..., set[int]], channels: Callable[[str], grpc.Channel]
) -> None:
    start = session_pb2.RunSessionRequest()
    start.start.graph.serialized = counter().to_bytes()
    outgoing = threading.Event()

    def requests() -> Iterator[bytes]:
        yield start.SerializeToString()
        outgoing.wait(60)

    stream: Any = channels(names[0]).stream_stream(RUN_SESSION)(requests(), timeout=60)
    assert session_pb2.RunSessionResponse.FromString(next(stream)).HasField("started")
    (pid,) = engines_of(names[0], sessions=True)
    os.kill(pid, signal.SIGKILL)
    told = session_pb2.RunSessionResponse.FromString(next(stream))
    outgoing.set()
    assert error_reason(told) == "SESSION_LOST"
    message = told.status.message
    assert "SIGKILL" in message
    assert "the last complete step is 0" in message


def test_lost_session_restarts_from_the_values_read_last(
    ada: gr.Client, names: tuple[str, str], engines_of: Callable[..., set[int]]
) -> None:
    graph, values = counter(), dict[str, Any]()
    with ada.session(graph) as session:
        for number in range(1, 6):
            assert step(session) == number
            if number % 2 == 0:
                values = dict(session.read())
        (pid,) = engines_of(names[0], sessions=True)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: None if engines_of(names[0], sessions=True) else True, "the end of the engine")
        with refused("SESSION_LOST") as lost:
            step(session)
    lost.says("the last complete step is 5", "SIGKILL")
    with ada.session(graph, variables=values) as again:
        assert step(again) == 1
        assert_close(again.read()["w"], np.float32([-5, -5]))


async def test_lost_session_is_reported_to_async_clients(
    guarded: Guarded, names: tuple[str, str], engines_of: Callable[..., set[int]]
) -> None:
    credentials = gr.tls(guarded.authority.file)
    async with (
        gr.aio.connect(
            guarded.running.target, credentials=credentials, token=guarded.web_token(names[0]), timeout=60.0
        ) as client,
        client.session(counter()) as session,
    ):
        (pid,) = engines_of(names[0], sessions=True)
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with refused("SESSION_LOST"):
                await session.read()


def test_kernel_kills_engines_before_the_server(guarded: Guarded, ada: gr.Client, names: tuple[str, str]) -> None:
    ada.evaluate(sign_graph(), feeds=_FEEDS, fetches=["y"])
    server = guarded.running.process.pid
    scores = {pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (server, *engines(server))}
    assert all(score == 1000 for pid, score in scores.items() if pid != server)
    assert scores[server] < 1000
