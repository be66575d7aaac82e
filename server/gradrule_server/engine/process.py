"""Runs an engine process after its fork: enters the sandbox, configures TensorFlow, sends a greeting, serves frames.

A program computes each op of its graph and of its rules as it is written, so floats are not regrouped. TensorFlow's
graph optimizer keeps the passes that only remove, move or inline ops. The executor, not the optimizer, computes ops
whose inputs are all constant.
"""

from __future__ import annotations

import argparse
import logging
import queue
import socket
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import tensorflow as tf

from gradrule.common import op_definitions
from gradrule.common.fast_paths import disabled_paths
from gradrule_server.engine import tf_private
from gradrule_server.engine.client_memory import AttachedMemories
from gradrule_server.engine.memory import limit_memory
from gradrule_server.engine.sandbox import SandboxRefused, enter_sandbox
from gradrule_server.engine.service import EngineService
from gradrule_server.engine.tensor_sources import BlobReader
from gradrule_server.link.arena import Arenas
from gradrule_server.link.framing import LINK_VERSION, FrameSocket, Kind, MainCalls, serve_frames
from gradrule_server.link.operating_system import set_process_name
from gradrule_server.link.shared_memory import ReceivedMemories
from gradrule_server.link.v1 import link_pb2

# The same for all engines of a fork server, so computed before the fork.
_OP_TABLE_DIGEST = op_definitions.digest_of(tf_private.all_op_definitions())
_GRADIENTS = sorted(name for name, function in tf_private.registered_gradients().items() if function is not None)

_REFUSED_EXIT_CODE = 3
# Shown by `ps` and `top` once a process reads graphs.
_WORKER_NAME = "gradrule-worker"

_log = logging.getLogger(__name__)
# The largest value: the kernel ends engines before any other process.
_OOM_SCORE_ADJ = 1000


def run_engine(flags: Sequence[str], link: int, arenas: Sequence[int]) -> int:
    """Serves frames until the front end closes the socket `link`.

    Args:
        flags: `--device`, `--threads`, `--blobs`, `--sandbox`, `--memory-limit`, `--disabled-fast-paths`.
        link: Descriptor of a connected stream socket.
        arenas: Descriptors of the shared memory that the engine reads, of the one that it writes, and of the socket
            over which it receives memory of clients; empty if there is none.

    Returns:
        The exit code: 0 once the socket was closed, 3 if the engine cannot run as requested, 1 after another error.
    """
    options = _parse(flags)
    _raise_oom_score()
    frames = FrameSocket(socket.socket(fileno=link), Arenas.from_descriptors(arenas[0], arenas[1]) if arenas else None)
    memories = AttachedMemories(ReceivedMemories(socket.socket(fileno=arenas[2])) if arenas else None)
    try:
        sandbox = enter_sandbox(options.sandbox, options.blobs)
        device = choose_device(options.device)
    except (SandboxRefused, DeviceRefused) as refusal:
        greeting = link_pb2.Greeting(link_version=LINK_VERSION, refusal=str(refusal))
        frames.send(Kind.GREETING, 0, greeting.SerializeToString())
        return _REFUSED_EXIT_CODE
    greeting = link_pb2.Greeting(
        link_version=LINK_VERSION,
        tensorflow_version=tf.__version__,
        op_table_digest=_OP_TABLE_DIGEST,
        gradients=_GRADIENTS,
        device=device,
        sandbox=sandbox.held,
        sandbox_missing=sandbox.missing,
    )
    configure_optimizer()
    limit_memory(options.memory_limit, options.threads + 1)
    calls: MainCalls = queue.SimpleQueue()
    # The name of the process is that of its main thread, so the main thread has to set it.
    service = EngineService(
        frames,
        device,
        BlobReader(options.blobs),
        memories,
        lambda: calls.put(partial(set_process_name, _WORKER_NAME)),
        options.disabled_fast_paths,
    )
    frames.send(Kind.GREETING, 0, greeting.SerializeToString())
    try:
        serve_frames(frames, service.handle, service.refuse, options.threads, calls)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class DeviceRefused(Exception):
    """The requested device does not exist; the message lists the devices."""


def choose_device(wanted: str) -> str:
    """Selects the device `auto` (the first GPU, else the CPU), `cpu` or `gpu:N`; returns its name, such as `CPU:0`."""
    gpus = tf.config.list_physical_devices("GPU")
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        tf.config.set_visible_devices([], "GPU")
        return "CPU:0"
    index = 0 if wanted == "auto" else int(wanted.removeprefix("gpu:"))
    if index >= len(gpus):
        there = f"TensorFlow sees {len(gpus)} GPUs" if gpus else "TensorFlow sees no GPU"
        raise DeviceRefused(f"device {wanted!r} was asked for, but {there}; use --device cpu or --device auto")
    tf.config.set_visible_devices([gpus[index]], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return f"GPU:{index}"


_PASSES_THAT_CHANGE_RESULTS = (
    # Regroups operands to bring constants together: (x + 1e8) - 1e8 becomes x, and x / 3 becomes x * (1 / 3).
    "constant_folding",
    # Regroups the operands of AddN, and makes argmin of a relu another index (tensorflow issues 118374, 118675).
    "arithmetic_optimization",
    # Makes maximum(2 * v, v) a LeakyRelu of slope 2, which computes the minimum (tensorflow issue 116436); replaces
    # swish, mish and batch normalization by ops that round in another way.
    "remapping",
)


def configure_optimizer() -> None:
    """Turns off, for the whole process, the passes that change results. Sessions use these options too."""
    tf.config.optimizer.set_experimental_options(dict.fromkeys(_PASSES_THAT_CHANGE_RESULTS, False))


def _raise_oom_score() -> None:
    """Makes the kernel end engines before the front end when memory runs out: only an engine can be replaced."""
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ))
    except OSError as cause:
        _log.warning("cannot set oom_score_adj: %s; the kernel may end the server when memory runs out", cause)


def _parse(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gradrule-engine")
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--blobs", type=Path)
    parser.add_argument("--sandbox", choices=("on", "auto", "off"), default="auto")
    parser.add_argument("--memory-limit", type=int, default=0)
    parser.add_argument("--disabled-fast-paths", type=disabled_paths, default=frozenset())
    return parser.parse_args(flags)
