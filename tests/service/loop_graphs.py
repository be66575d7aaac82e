"""Builds programs that run for a long time or never end."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.service.graph_defs import build_graph_def, placeholder

ENDLESS = 0.0
"""The value of x for which the loop of `endless` never ends."""

ENDS = 2.0
"""The value of x for which the loop of `endless` makes no iteration."""


def endless() -> Any:
    """Returns y = x after a loop that runs while its value, which never changes, is below 1."""

    def build() -> None:
        x = placeholder("x", shape=())
        (last,) = tf.while_loop(lambda value: value < 1.0, lambda value: (value * 1.0,), [x])
        tf.identity(last, name="y")

    return build_graph_def(build)


def counted(iterations: int) -> Any:
    """Returns y = x after a loop of that many iterations; a million take a few seconds."""

    def build() -> None:
        x = placeholder("x", shape=())
        _, last = tf.while_loop(lambda i, _: i < iterations, lambda i, value: (i + 1, value * 1.0), [0, x])
        tf.identity(last, name="y")

    return build_graph_def(build)
