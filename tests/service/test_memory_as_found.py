"""Tensors that an op leaves unwritten contain nothing of other tenants: each tenant has engines of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.graph_defs import build_graph, placeholder
from tests.service.guarded import token_command
from tests.service.servers import RunningServer, running_server

SECRET = 1234.5
# From small allocations to those that the allocator requests from the kernel each time.
ROWS = (2**8, 2**12, 2**16, 2**20)
ATTEMPTS = 12


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Returns the file of tokens, and the tokens of two tenants."""
    file = str(tmp_path_factory.mktemp("tokens") / "tokens")
    return file, *(token_command("new", "--tenant", tenant, "--file", file).strip() for tenant in ("ada", "grace"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokens: tuple[str, ...]) -> Iterator[RunningServer]:
    """Returns a server that allows ops which leave parts of their outputs unwritten; other servers deny them."""
    flags = ("--trust", "full", "--device", "cpu", "--tokens", tokens[0])
    with running_server(tmp_path_factory.mktemp("shared"), flags) as running:
        yield running


def stored_values() -> gr.Graph:
    """Makes several tensors of n × 4 that contain what is fed."""

    def build() -> None:
        value = tf.fill(tf.stack([placeholder("n", tf.int32, ()), 4]), placeholder("secret", tf.float32, ()))
        tf.identity(tf.reduce_sum(tf.tanh(value) + tf.reverse(value, [0])), name="y")

    return build_graph(build)


def unwritten_values(rows: int) -> gr.Graph:
    """Counts a number in a tensor of rows × 4 of which one row is fed."""

    def build() -> None:
        found = tf.raw_ops.ParallelConcat(values=[placeholder("x", tf.float32, (1, 4))], shape=[rows, 4])
        tf.identity(tf.math.count_nonzero(tf.equal(found, placeholder("secret", tf.float32, ()))), name="y")

    return build_graph(build)


def most_found(running: RunningServer, owner: str, reader: str) -> int:
    """Returns how often a call with the token `reader` found the number of calls with the token `owner`, at most."""
    most = 0
    with gr.connect(running.target, token=owner) as one, gr.connect(running.target, token=reader) as other:
        secrets: Any = one.compile(stored_values(), fetches=["y"])
        for rows in ROWS:
            finder: Any = other.compile(unwritten_values(rows), fetches=["y"])
            for _ in range(ATTEMPTS):
                secrets.evaluate({"n": np.int32(rows), "secret": np.float32(SECRET)})
                answer = finder.evaluate({"x": np.zeros([1, 4], np.float32), "secret": np.float32(SECRET)})
                most = max(most, int(answer.outputs["y"]))
    return most


def test_results_contain_no_memory_of_other_tenants(server: RunningServer, tokens: tuple[str, ...]) -> None:
    _, ada, grace = tokens
    assert most_found(server, ada, grace) == 0


def test_results_may_contain_memory_of_the_same_tenant(server: RunningServer, tokens: tuple[str, ...]) -> None:
    """So the test above would notice memory of others."""
    _, ada, _ = tokens
    assert most_found(server, ada, ada) > 1000
