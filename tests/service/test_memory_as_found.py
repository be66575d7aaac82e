"""Tensors that an op leaves unwritten contain nothing of other calls: engines fill new memory with zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.graph_defs import build_graph, placeholder
from tests.service.servers import RunningServer, running_server

SECRET = 1234.5
# From the smallest allocations to those that the allocator requests from the kernel each time.
ROWS = (16, 2**8, 2**12, 2**16, 2**20, 2**22)
ATTEMPTS = 12

# Starts a server whose engines get uninitialized memory.
UNFILLED = """
import sys
from gradrule_server.link import fork_server
filled = fork_server.engine_environment
def unfilled():
    return {k: v for k, v in filled().items() if k not in ("GLIBC_TUNABLES", "TF_ONEDNN_USE_SYSTEM_ALLOCATOR")}
fork_server.engine_environment = unfilled
from gradrule_server.__main__ import main
sys.exit(main())
"""
# None of these functions may disable the filling.
MEDDLING = {
    "GLIBC_TUNABLES": "glibc.malloc.perturb=0",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "0",
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
}
FLAGS = ("--trust", "full", "--device", "cpu", "--engines", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("filled"), FLAGS, MEDDLING) as running:
        yield running


@pytest.fixture(scope="module")
def unfilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("unfilled"), FLAGS, program=("-c", UNFILLED)) as running:
        yield running


def stored_values() -> gr.Graph:
    """Makes several tensors of n × 4 that contain what is fed."""

    def build() -> None:
        value = tf.fill(tf.stack([placeholder("n", tf.int32, ()), 4]), placeholder("secret", tf.float32, ()))
        tf.identity(tf.reduce_sum(tf.tanh(value) + tf.reverse(value, [0])), name="y")

    return build_graph(build)


def nonzero_values(rows: int) -> gr.Graph:
    """Counts nonzero numbers in a tensor of rows × 4 of which one row is fed as zero."""

    def build() -> None:
        found = tf.raw_ops.ParallelConcat(values=[placeholder("x", tf.float32, (1, 4))], shape=[rows, 4])
        tf.identity(tf.math.count_nonzero(found), name="y")

    return build_graph(build)


def largest_leak(running: RunningServer) -> dict[int, int]:
    """Returns by size the most numbers of other calls that a call found."""
    found = dict.fromkeys(ROWS, 0)
    with gr.connect(running.target) as client:
        secrets: Any = client.compile(stored_values(), fetches=["y"])
        for rows in ROWS:
            finder: Any = client.compile(nonzero_values(rows), fetches=["y"])
            for _ in range(ATTEMPTS):
                secrets.evaluate({"n": np.int32(rows), "secret": np.float32(SECRET)})
                answer = finder.evaluate({"x": np.zeros([1, 4], np.float32)})
                found[rows] = max(found[rows], int(answer.outputs["y"]))
    return found


def test_results_contain_no_memory_of_other_calls(server: RunningServer) -> None:
    assert largest_leak(server) == dict.fromkeys(ROWS, 0)


def test_unfilled_memory_would_be_detected(unfilled: RunningServer) -> None:
    found = largest_leak(unfilled)
    assert found[2**16] > 2**16 and found[2**20] > 2**20
