"""Configures TensorFlow for an engine: its device and its graph optimizer.

A program computes each op of its graph and of its rules as it is written, so floats are not regrouped. The optimizer
keeps the passes that only remove, move or inline ops. The executor, not the optimizer, computes ops whose inputs are
all constant.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2


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


def limit_to_cpu_passes(rewrites: rewriter_config_pb2.RewriterConfig) -> None:
    """Turns off the passes that help GPUs only, and the second round, which improves almost nothing."""
    rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    rewrites.layout_optimizer = rewriter_config_pb2.RewriterConfig.OFF
    rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
