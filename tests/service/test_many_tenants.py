"""Many tenants in a small container: an idle engine costs little, and memory that is short is shared."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule_server.identity.token_file import add_token, new_token
from gradrule_server.limits import MEMORY_SHARES
from tests.service.graph_defs import build_graph_def, placeholder
from tests.service.servers import running_server
from tests.waiting import wait_until

_MANY = 32
_ADMIN = "admin"
_WARM_CALLS = 40
# A server that believes to run in a container with this many bytes.
_IN_CONTAINER = """
import sys
from gradrule_server.link import operating_system
operating_system._container_limits = lambda *_: [{size}]
from gradrule_server.__main__ import main
sys.exit(main())
"""

Connect = Callable[[str], gr.Client]


@contextlib.contextmanager
def container(folder: Path, size: int, tenants: int, *flags: str) -> Iterator[Connect]:
    """Starts a server in a container of `size` bytes, and returns what connects the tenants `0`, `1`, … and `admin`."""
    folder.mkdir(exist_ok=True)
    given = {}
    for tenant in (_ADMIN, *map(str, range(tenants))):
        given[tenant], token = new_token(tenant, is_admin=tenant == _ADMIN)
        add_token(folder / "tokens", token)
    flags = ("--tokens", str(folder / "tokens"), "--spares", "1", "--device", "cpu", *flags)
    program = ("-c", _IN_CONTAINER.format(size=size))
    with running_server(folder / "server", flags, program=program) as server, contextlib.ExitStack() as clients:
        yield lambda tenant: clients.enter_context(gr.connect(server.target, token=given[tenant], timeout=120.0))


def network(factor: int) -> gr.Graph:
    graph = gr.Graph()
    x = graph.placeholder("x", "float32", [None])
    graph.op("Tanh", graph.op("Mul", x, graph.constant(np.float32(factor))), name="y")
    return graph


def call(client: gr.Client, factor: int) -> float:
    """Calls the tenant's program, checks the result, and returns how long it took in seconds."""
    started = time.perf_counter()
    r = client.evaluate(network(factor), feeds={"x": np.float32([0.5])}, fetches=["y"], ys=["y"], xs=["x"])
    assert r.outputs["y"] == pytest.approx(np.tanh(np.float32([0.5 * factor])), rel=1e-5)
    return time.perf_counter() - started


def test_thirty_two_tenants_keep_their_programs_in_a_container_of_4_gb(tmp_path: Path) -> None:
    with container(tmp_path, 4 * 10**9, _MANY) as connect:
        clients = [connect(str(number)) for number in range(_MANY)]
        first = [call(client, number + 1) for number, client in enumerate(clients)]
        engines = {engine.tenant: engine.pid for engine in connect(_ADMIN).server_status().engines}
        assert len(engines) == _MANY
        in_turn = [call(client, number + 1) for _ in range(5) for number, client in enumerate(clients)]
        alone = [call(clients[0], 1) for _ in range(_WARM_CALLS)]
        status = connect(_ADMIN).server_status()
        assert {engine.tenant: engine.pid for engine in status.engines} == engines
        assert [engine.programs for engine in status.engines] == [1] * _MANY
        use = status.engine_use
        assert not use.evictions
        assert use.since_eviction is None
        assert use.engines.used == _MANY
        assert 0 < use.memory_bytes.used < use.memory_bytes.limit == int(4 * 10**9 * 0.6)
    p50 = [statistics.median(times) * 1000 for times in (first, in_turn, alone)]
    print(
        f"{_MANY} tenants: first call {p50[0]:.0f} ms, in turn {p50[1]:.2f} ms, one tenant {p50[2]:.2f} ms "
        f"(ratio {p50[1] / p50[2]:.2f}); {use.memory_bytes.used >> 20} MiB"
    )


def test_tenants_take_turns_where_memory_is_short_and_status_says_so(tmp_path: Path) -> None:
    """Four of five tenants take more than the engines' share, as a server with more memory measures it."""
    tenants = 5

    def work(client: gr.Client) -> None:
        for factor in (*range(1, 9), 1, 2):
            call(client, factor)

    with container(tmp_path / "large", 4 << 30, tenants) as connect:
        for number in range(tenants - 1):
            work(connect(str(number)))
        enough = connect(_ADMIN).server_status().engine_use.memory_bytes.used
    with container(tmp_path / "small", int(0.8 * enough / MEMORY_SHARES["engines"]), tenants) as connect:
        with futures.ThreadPoolExecutor(tenants) as threads:
            list(threads.map(work, [connect(str(number)) for number in range(tenants)]))
        use = connect(_ADMIN).server_status().engine_use
        assert sum(use.evictions.values()) > 0
        assert set(use.evictions) <= {"turn", "memory"}
        assert use.since_eviction is not None


def _large(size: str = "n") -> None:
    """Computes with tensors of n elements for some seconds."""
    ones = tf.fill([placeholder(size, tf.int32, [])], placeholder("v", tf.float32, []))
    for _ in range(20):
        ones = tf.sin(ones)
    tf.reduce_sum(ones, name="y")


def test_a_tenant_that_fills_its_engine_pushes_no_other_tenant_out(tmp_path: Path) -> None:
    """Its engine may take 1 GiB, all engines together 0.6 GiB."""
    graph = gr.Graph.from_bytes(build_graph_def(_large).SerializeToString())
    with container(tmp_path, 1 << 30, 4) as connect:
        admin, greedy = connect(_ADMIN), connect("3")
        others = [connect(str(number)) for number in range(3)]
        for number, client in enumerate(others):
            call(client, number + 1)
        pids = {engine.tenant: engine.pid for engine in admin.server_status().engines}

        def fill() -> str:
            try:
                greedy.evaluate(graph, feeds={"n": np.int32(100_000_000), "v": np.float32(1)}, fetches=["y"])
            except gr.errors.OverloadedError as refusal:
                return str(refusal)
            return "answered"

        with futures.ThreadPoolExecutor(1) as thread:
            filling = thread.submit(fill)
            wait_until(lambda: admin.server_status().engine_use.evictions.get("memory"), "eviction")
            for number, client in enumerate(others):
                call(client, number + 1)
            assert "those of this tenant took the most" in filling.result(120)
        found = {engine.tenant: engine.pid for engine in admin.server_status().engines}
        assert {tenant: found.get(tenant) for tenant in "012"} == {tenant: pids[tenant] for tenant in "012"}
        # Smaller work of the same tenant goes on.
        call(greedy, 4)
