"""The engine's own bound on its memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine import memory
from gradrule_server.engine.memory import memory_error, out_of_memory

_OOM = "OOM when allocating tensor with shape[10000000000] and type float on /device:CPU:0 by allocator cpu"


@pytest.mark.parametrize(
    ("cause", "is_so"),
    [
        (tf.errors.ResourceExhaustedError(None, None, _OOM), True),
        (tf.errors.ResourceExhaustedError(None, None, "the table is full"), False),
        (tf.errors.InvalidArgumentError(None, None, "cannot allocate"), False),
        (tf.errors.UnknownError(None, None, "Out of memory"), False),
    ],
)
def test_which_errors_say_that_there_is_no_memory(cause: tf.errors.OpError, is_so: bool) -> None:
    assert out_of_memory(cause) is is_so


@pytest.mark.parametrize(("limit", "words"), [(2**31, "2147483648 bytes"), (0, "the machine's memory")])
def test_the_limit_is_told(monkeypatch: pytest.MonkeyPatch, limit: int, words: str) -> None:
    monkeypatch.setattr(memory._Bound, "bytes", limit)
    found = memory_error("40 GB of zeros")
    assert found.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED
    assert words in found.message
    assert "40 GB of zeros" in found.message


_IN_A_PROCESS = """
import json
import numpy as np
import tensorflow as tf
from gradrule_server.engine.memory import limit_memory, out_of_memory

limit_memory(2 << 30)
found = {"small": float(tf.reduce_sum(tf.ones([1 << 26])))}
for name, make in {
    "tensorflow": lambda: tf.zeros([1 << 30]),
    "numpy": lambda: np.ones(1 << 30, np.float32),
}.items():
    try:
        make()
    except tf.errors.OpError as cause:
        found[name] = out_of_memory(cause)
    except MemoryError:
        found[name] = True
print(json.dumps(found))
"""


def test_the_kernel_gives_no_more_and_the_process_lives() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(ended.stdout)
    assert found == {"small": float(1 << 26), "tensorflow": True, "numpy": True}
