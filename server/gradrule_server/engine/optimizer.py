"""What TensorFlow's graph optimizer may do to a program."""

from __future__ import annotations

import tensorflow as tf


def configure_optimizer() -> None:
    """Turns off the arithmetic optimizer, which changes results.

    In TensorFlow 2.21 it makes `maximum(2 * v, v)` the smaller of the two, and argmin of a relu another index
    (tensorflow issues 116436, 118374, 118675).
    """
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
