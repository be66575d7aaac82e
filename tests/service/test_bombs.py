"""Requests that need too much memory get typed errors with the figures, and the next request works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.processes import peak_bytes, reset_peak
from tests.service import raw
from tests.service.answers import provokes, refused, refused_raw
from tests.service.bombs import BOMBS, HUGE, MESSAGES
from tests.service.graph_defs import build_graph_def, placeholder
from tests.service.servers import RunningServer, running_server

MEMORY_LIMIT = 1 << 30
FREE_BYTES = 64 << 20
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server with a memory limit of 1 GiB per engine."""
    flags = ("--memory-limit", str(MEMORY_LIMIT), "--device", "cpu")
    with running_server(tmp_path_factory.mktemp("limited"), flags) as running:
        yield running


@pytest.fixture
def limited_channel(limited: RunningServer) -> Iterator[grpc.Channel]:
    """Returns a channel; checks after the test that the same engine still answers."""
    before = limited.wait_for_engine()
    with grpc.insecure_channel(limited.target) as opened:
        yield opened
        raw.assert_healthy(opened)
    assert limited.engine_pid() == before


@pytest.fixture
def limited_client(limited: RunningServer, limited_channel: grpc.Channel) -> Iterator[Any]:
    with gr.connect(limited.target) as connected:
        yield connected


def start_measuring(server: RunningServer) -> int:
    """Starts to measure the peak memory of the front end; returns its current memory in bytes."""
    reset_peak(server.process.pid)
    return peak_bytes(server.process.pid)


@provokes("MEMORY_EXCEEDED", "LIMIT_EXCEEDED")
@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_refused_and_takes_no_memory(limited: RunningServer, limited_client: Any, name: str) -> None:
    bomb = BOMBS[name]
    data = bomb.build()
    assert len(data) < 64 * 1024
    before, started = start_measuring(limited), time.monotonic()
    with refused(bomb.reason) as refusal:
        limited_client.evaluate(gr.Graph.from_bytes(data), bomb.feeds, fetches=["y"], timeout=PATIENCE_S)
    refusal.says(*bomb.words)
    assert time.monotonic() - started < PATIENCE_S
    sent = len(data) + sum(np.asarray(value).nbytes for value in bomb.feeds.values())
    assert peak_bytes(limited.process.pid) - before < FREE_BYTES + 10 * sent


@pytest.mark.parametrize("name", MESSAGES)
def test_large_message_without_content_is_refused_and_takes_no_memory(
    limited: RunningServer, limited_channel: grpc.Channel, name: str
) -> None:
    data = MESSAGES[name]()
    before = start_measuring(limited)
    with refused_raw("LIMIT_EXCEEDED") as refusal:
        raw.send(limited_channel, "GradientService/Evaluate", data)
    refusal.says("--max-unpacking")
    assert peak_bytes(limited.process.pid) - before < FREE_BYTES + 10 * len(data)


def test_refusal_names_limit_and_shape(limited_client: Any) -> None:
    bomb = BOMBS["Fill, fed"]
    with refused("MEMORY_EXCEEDED") as refusal:
        limited_client.evaluate(gr.Graph.from_bytes(bomb.build()), bomb.feeds, fetches=["y"])
    refusal.says("of 1 GiB (--memory-limit) were in use", f"shape[{HUGE}]")


def test_same_graph_runs_for_sizes_that_fit(limited_client: Any) -> None:
    """Refused and accepted sizes alternate."""

    def build() -> None:
        tf.identity(tf.reduce_sum(tf.fill(placeholder("n", tf.int64), 1.0)), name="y")

    graph = gr.Graph.from_bytes(build_graph_def(build).SerializeToString())
    for size in (10, HUGE, 2**20, 10, HUGE, 2**22):
        feeds = {"n": np.int64([size])}
        if size == HUGE:
            with refused("MEMORY_EXCEEDED"):
                limited_client.evaluate(graph, feeds, fetches=["y"])
        else:
            assert limited_client.evaluate(graph, feeds, fetches=["y"]).outputs["y"] == size
