"""What TensorFlow's graph optimizer may do to a program: nothing that changes a result.

A program computes each op of its graph and of its rules as it is written, so floats are not regrouped. Left on are the
passes that only remove, move or inline ops. Constants are still folded: not by the optimizer's pass, but by
TensorFlow's executor, which computes the ops all of whose inputs are constant, and nothing else.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2

_PASSES_THAT_CHANGE_RESULTS = (
    # Regroups operands to bring constants together: (x + 1e8) - 1e8 becomes x, and x / 3 becomes x * (1 / 3).
    "constant_folding",
    # Regroups the operands of AddN, and makes argmin of a relu another index (tensorflow issues 118374, 118675).
    "arithmetic_optimization",
    # Makes maximum(2 * v, v) a LeakyRelu of slope 2, which is the smaller of the two (tensorflow issue
    # 116436); replaces swish, mish and batch normalization by ops that round in another way.
    "remapping",
)


def configure_optimizer() -> None:
    """Turns off, for the whole process, the passes that change results. Sessions take these options over."""
    tf.config.optimizer.set_experimental_options(dict.fromkeys(_PASSES_THAT_CHANGE_RESULTS, False))


def limit_to_cpu_passes(rewrites: rewriter_config_pb2.RewriterConfig) -> None:
    """Turns off the passes that serve GPUs alone, and the second round, which finds next to nothing."""
    rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    rewrites.layout_optimizer = rewriter_config_pb2.RewriterConfig.OFF
    rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
