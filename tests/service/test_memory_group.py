"""What the kernel ends when a control group (a container) has no memory left. Needs the right to make one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import refused
from tests.service.graph_defs import build_graph_def, placeholder
from tests.service.servers import running_server

_ROOT = Path("/sys/fs/cgroup/memory")
_BYTES = 1200 << 20


@contextlib.contextmanager
def _memory_group() -> Iterator[Path]:
    """Makes a group of the older kind with little memory; skips the test where that is not allowed."""
    group = _ROOT / f"gradrule-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(_BYTES))
    except OSError as cause:
        pytest.skip(f"no control group for memory can be made: {cause}")
    try:
        yield group
    finally:
        group.rmdir()


def _doubled() -> None:
    """Sums ones that grow to n elements in a loop."""
    n = placeholder("n", tf.int64, [])
    (grown,) = tf.while_loop(
        lambda ones: tf.size(ones, out_type=tf.int64) < n,
        lambda ones: (tf.concat([ones, ones], 0),),
        [tf.ones([1])],
        shape_invariants=[tf.TensorShape([None])],
    )
    tf.reduce_sum(grown, name="y")


def test_full_container_ends_an_engine_and_its_call_is_told_so(tmp_path: Path) -> None:
    """The limit of the engine is larger than the container, so the kernel ends the engine."""
    graph = gr.Graph.from_bytes(build_graph_def(_doubled).SerializeToString())
    with _memory_group() as group:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.split(":")[2] for line in groups if ":memory:" in line)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            server = running_server(tmp_path, ("--memory-limit", "4GiB", "--device", "cpu"))
            running = server.__enter__()
        finally:
            (_ROOT / own.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        try:
            with gr.connect(running.target) as client:
                with refused("MEMORY_EXCEEDED") as refusal:
                    client.evaluate(graph, {"n": np.int64(500_000_000)}, fetches=["y"], timeout=120.0)
                refusal.says("SIGKILL", "no more memory")
                assert client.evaluate(graph, {"n": np.int64(1000)}, fetches=["y"], timeout=60.0).outputs["y"] == 1024
                assert not client.server_status().quarantined_programs
            assert running.process.poll() is None
        finally:
            server.__exit__(None, None, None)
