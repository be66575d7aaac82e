"""Provides a program that terminates only for some inputs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.service.graph_defs import build_graph_def, placeholder

STAYS = 0.0
"""Fed to x, the loop never ends."""

ENDS = 2.0
"""Fed to x, the loop has nothing to do."""


def graph_def() -> Any:
    """Makes y = x after a loop that runs while its value, which never changes, is below 1."""

    def build() -> None:
        x = placeholder("x", shape=())
        (last,) = tf.while_loop(lambda value: value < 1.0, lambda value: (value * 1.0,), [x])
        tf.identity(last, name="y")

    return build_graph_def(build)
