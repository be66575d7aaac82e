"""Graphs of a few hundred bytes that ask for more memory than there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.service.corpus import Bad, splat
from tests.service.graph_defs import drawn, placeholder

_LARGE = 100_000
_HUGE = 10**10
_VECTOR = {"x": np.ones(_LARGE, np.float32)}


def _sum(build: Callable[[], Any]) -> Callable[[], Any]:
    """The answer is one number; what it takes on the way is the bomb."""
    return lambda: drawn(lambda: tf.identity(tf.reduce_sum(build()), name="y"))


def _fed(dtype: Any = tf.int64, shape: Any = (None,), name: str = "n") -> Any:
    return placeholder(name, dtype, shape)


def _x() -> Any:
    return placeholder("x", shape=(None,))


def _outer() -> Any:
    x = _x()
    return tf.reshape(x, [-1, 1]) * tf.reshape(x, [1, -1])


def _doubled() -> Any:
    def double(count: Any, value: Any) -> Any:
        return count + 1, tf.concat([value, value], 0)

    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    return tf.while_loop(lambda count, _: count < 60, double, [0, _x()], shape_invariants=shapes)[1]


def _doubled_strings() -> Any:
    text = placeholder("text", tf.string, ())
    for _ in range(50):
        text = tf.strings.join([text, text])
    return tf.strings.length(text)


def _many_at_once() -> Any:
    """Each fits, all together do not: none can go before the last is there."""
    n = _fed(shape=())
    return tf.add_n([tf.fill(tf.reshape(n, [1]), float(number)) for number in range(64)])


def _kept_by_a_loop() -> Any:
    """A list that grows by 64 MiB a turn."""

    def grow(count: Any, kept: Any) -> Any:
        return count + 1, kept.write(count, tf.fill([2**24], tf.cast(count, tf.float32)))

    kept = tf.TensorArray(tf.float32, size=0, dynamic_size=True, clear_after_read=False, element_shape=[2**24])
    turns = _fed(tf.int32, ())
    return tf.while_loop(lambda count, _: count < turns, grow, [0, kept])[1].stack()


BOMBS = (
    Bad("zeros", _sum(lambda: tf.raw_ops.Fill(dims=tf.constant([_HUGE], tf.int64), value=0.0))),
    Bad("Fill, fed", _sum(lambda: tf.raw_ops.Fill(dims=_fed(), value=1.0)), {"n": np.int64([_HUGE])}),
    Bad("Tile, fed", _sum(lambda: tf.tile(_x(), _fed())), {**_VECTOR, "n": np.int64([_LARGE])}),
    Bad(
        "BroadcastTo, fed",
        _sum(lambda: tf.broadcast_to(_x(), _fed())),
        {**_VECTOR, "n": np.int64([_LARGE, _LARGE])},
    ),
    Bad("outer product", _sum(_outer), _VECTOR),
    Bad("MatrixDiag", _sum(lambda: tf.linalg.diag(_x())), _VECTOR),
    Bad("Const of one value", lambda: splat(_HUGE // 10)),
    Bad("OneHot, fed", _sum(lambda: tf.one_hot([0, 1, 2, 3], _fed(tf.int32, ()))), {"n": np.int32(2**31 - 1)}),
    Bad(
        "Range, fed",
        _sum(lambda: tf.range(tf.constant(0, tf.int64), _fed(shape=()), tf.constant(1, tf.int64))),
        {"n": np.int64(10**12)},
    ),
    Bad(
        "ScatterNd, fed",
        _sum(lambda: tf.scatter_nd(tf.constant([[0]], tf.int64), tf.constant([1.0]), _fed())),
        {"n": np.int64([_HUGE])},
    ),
    Bad("Pad, fed", _sum(lambda: tf.pad(_x(), _fed(shape=(1, 2)))), {**_VECTOR, "n": np.int64([[0, _HUGE]])}),
    Bad("random, fed", _sum(lambda: tf.random.stateless_normal(_fed(), [1, 2])), {"n": np.int64([_HUGE])}),
    Bad("doubling in a loop", _sum(_doubled), {"x": np.ones(1000, np.float32)}),
    Bad("doubling of a string", _sum(_doubled_strings), {"text": np.array(b"0123456789abcdef")}),
    Bad("many at once", _sum(_many_at_once), {"n": np.int64(5 * 10**7)}),
    Bad("kept by a loop", _sum(_kept_by_a_loop), {"n": np.int32(200)}),
)
"""Each takes more than 8 GiB, where nothing stops it."""
