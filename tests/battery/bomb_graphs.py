"""Lists small graphs that need more memory than the machine has, visible from shapes or only at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from tests.service import bombs
from tests.service.graph_defs import build_graph_def, placeholder
from tests.service.harmful_graphs import HarmfulGraph


def _sum(build: Callable[[], Any]) -> Callable[[], Any]:
    """Reduces a large intermediate result to one number."""
    return lambda: build_graph_def(lambda: tf.identity(tf.reduce_sum(build()), name="y"))


def _visible_from_shapes(name: str, bomb: bombs.Bomb) -> HarmfulGraph:
    return HarmfulGraph(name, lambda: tf_graph_pb2.GraphDef.FromString(bomb.build()), bomb.feeds, told=bomb.reason)


def _doubled() -> Any:
    def double(count: Any, value: Any) -> Any:
        return count + 1, tf.concat([value, value], 0)

    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    return tf.while_loop(lambda count, _: count < 60, double, [0, placeholder("x")], shape_invariants=shapes)[1]


def _doubled_strings() -> Any:
    text = placeholder("text", tf.string, ())
    for _ in range(50):
        text = tf.strings.join([text, text])
    return tf.strings.length(text)


def _kept_by_a_loop() -> Any:
    """Makes a list that grows by 64 MiB per iteration."""

    def grow(count: Any, kept: Any) -> Any:
        return count + 1, kept.write(count, tf.fill([2**24], tf.cast(count, tf.float32)))

    kept = tf.TensorArray(tf.float32, size=0, dynamic_size=True, clear_after_read=False, element_shape=[2**24])
    turns = placeholder("n", tf.int32, ())
    return tf.while_loop(lambda count, _: count < turns, grow, [0, kept])[1].stack()


GROWING = (
    HarmfulGraph("doubling in a loop", _sum(_doubled), {"x": np.ones(1000, np.float32)}, told=bombs.EXCEEDED),
    HarmfulGraph(
        "doubling of a string", _sum(_doubled_strings), {"text": np.array(b"0123456789abcdef")}, told=bombs.EXCEEDED
    ),
    HarmfulGraph("kept by a loop", _sum(_kept_by_a_loop), {"n": np.int32(200)}, told=bombs.EXCEEDED),
)
"""Each takes more and more while it runs, and nothing tells before."""

BOMBS = (*(_visible_from_shapes(name, bomb) for name, bomb in bombs.BOMBS.items()), *GROWING)
