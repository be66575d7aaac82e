"""A program that ends only for some inputs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.service.graph_defs import drawn, placeholder

STAYS = 0.0
"""Fed to x, the loop never ends."""

ENDS = 2.0
"""Fed to x, the loop has nothing to do."""


def graph_def() -> Any:
    """y = x after a loop that runs for as long as its value is below 1, and never changes it."""

    def build() -> None:
        x = placeholder("x", shape=())
        (last,) = tf.while_loop(lambda value: value < 1.0, lambda value: (value * 1.0,), [x])
        tf.identity(last, name="y")

    return drawn(build)
