"""The memory limit of an engine, in a process with an engine's environment."""

from __future__ import annotations

import json
import subprocess
import sys

from gradrule_server.link.fork_server import engine_environment

_IN_A_PROCESS = """
import json
import numpy as np
import tensorflow as tf
from gradrule_server.engine.memory import limit_memory
from gradrule_server.engine.tf_errors import out_of_memory

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


def test_allocation_beyond_the_limit_fails_and_the_process_survives() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=engine_environment(),
    )
    found = json.loads(ended.stdout)
    assert found == {"small": float(1 << 26), "tensorflow": True, "numpy": True}
