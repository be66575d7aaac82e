"""What the engine says where its memory ends."""

from __future__ import annotations

import pytest
import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine import memory
from gradrule_server.engine.memory import memory_error
from gradrule_server.engine.tf_errors import out_of_memory

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
