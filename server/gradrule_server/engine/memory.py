"""The engine's own bound on its memory: the kernel gives no more, and TensorFlow tells the caller so."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

# TensorFlow runs out of other things too, of rows in a table for example.
_NO_MEMORY = re.compile(r"OOM|[Oo]ut of memory|allocat")


class _Bound:
    """What the process was told that it may take."""

    bytes = 0


def limit_memory(limit: int) -> None:
    """From now on this process may take `limit` bytes, as far as the kernel can count them; 0: any.

    What is reserved and never used (stacks, heaps of threads) does not count.
    """
    _Bound.bytes = limit
    if not limit:
        return
    reserved = max(0, _status("VmData") - _status("RssAnon"))
    most = limit + reserved
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def out_of_memory(cause: tf.errors.OpError) -> bool:
    """Whether an error of TensorFlow's says that there is no memory left."""
    return isinstance(cause, tf.errors.ResourceExhaustedError) and _NO_MEMORY.search(cause.message) is not None


def memory_error(what: str) -> GradruleError:
    """MEMORY_EXCEEDED, with the limit."""
    least = f"{_Bound.bytes} bytes (--memory-limit)" if _Bound.bytes else "the machine's memory"
    return error(
        errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, f"the program takes more than the engine has, {least}: {what}"
    )


def _status(field: str) -> int:
    """A size of this process's, in bytes; 0 where the system does not tell."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
