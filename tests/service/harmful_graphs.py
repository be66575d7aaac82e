"""Lists graphs of a few hundred bytes that crash or hang a TensorFlow 2.21 process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from tests.service import bombs
from tests.service.graph_defs import build_graph_def, placeholder

Feeds = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HarmfulGraph:
    """Describes a graph that harms the process that evaluates its tensor `y`.

    says: part of TensorFlow's message, if any. told: the error reason that the caller gets in the end.
    """

    name: str
    build: Callable[[], Any]
    feeds: Feeds = field(default_factory=dict)
    says: str = ""
    told: str = "ENGINE_CRASHED"


def _ops(build: Callable[[], tf.Tensor]) -> Callable[[], Any]:
    return lambda: build_graph_def(lambda: tf.identity(build(), name="y"))


def _parsed(build: Callable[[], bytes]) -> Callable[[], Any]:
    return lambda: tf_graph_pb2.GraphDef.FromString(build())


def _unknown(name: str) -> tf.Tensor:
    return placeholder(name, shape=None)


def _conv_input() -> tf.Tensor:
    return tf.raw_ops.Conv2DBackpropInput(
        input_sizes=placeholder("sizes", tf.int32, None),
        filter=_unknown("x"),
        out_backprop=_unknown("dy"),
        strides=[1, 1, 1, 1],
        padding="SAME",
    )


def _lstm() -> tf.Tensor:
    ones = tf.ones([1, 1])
    return tf.raw_ops.LSTMBlockCell(
        x=ones,
        cs_prev=_unknown("x"),
        h_prev=ones,
        w=tf.ones([2, 4]),
        wci=tf.ones([1]),
        wcf=tf.ones([1]),
        wco=tf.ones([1]),
        b=tf.ones([4]),
    ).h


def _irfft() -> tf.Tensor:
    return tf.raw_ops.IRFFT(input=tf.cast(_unknown("x"), tf.complex64), fft_length=placeholder("n", tf.int32, None))


def _irfft2d() -> tf.Tensor:
    return tf.raw_ops.IRFFT2D(input=tf.cast(_unknown("x"), tf.complex64), fft_length=placeholder("n", tf.int32, None))


def _list() -> tf.Tensor:
    items = tf.raw_ops.TensorListReserve(
        element_shape=tf.constant([1]), num_elements=placeholder("n", tf.int32, None), element_dtype=tf.float32
    )
    return tf.raw_ops.TensorListLength(input_handle=items)


_MOST = np.int32(2**31 - 1)

FAILED_CHECK = HarmfulGraph("LSTMBlockCell", _ops(_lstm), {"x": np.float32(1)}, "Check failed")
"""Fails a check of TensorFlow's: the only kernel of the op reads a dimension that the input lacks."""

CRASHES = (
    FAILED_CHECK,
    HarmfulGraph(
        "Conv2DBackpropInput",
        _ops(_conv_input),
        {"sizes": np.int32([1, 1]), "x": np.ones(1, np.float32), "dy": np.ones((1, 1, 1, 1), np.float32)},
        "Check failed",
    ),
    HarmfulGraph("IRFFT", _ops(_irfft), {"x": np.ones(4, np.float32), "n": np.int32([0])}),
    HarmfulGraph("IRFFT2D", _ops(_irfft2d), {"x": np.ones((8, 0, 0), np.float32), "n": np.int32([_MOST, _MOST])}),
    HarmfulGraph("TensorListReserve", _ops(_list), {"n": _MOST}, "bad_alloc", "MEMORY_EXCEEDED"),
)
"""Each kills the process that runs it, by a signal, with every choice of kernels: with oneDNN, whatever the processor
has, and without oneDNN."""


def _endless_loop() -> tf.Tensor:
    (last,) = tf.while_loop(lambda _: tf.constant(True), lambda value: (value * 1.0,), [placeholder("x", shape=())])
    return last


def _doubled_strings() -> tf.Tensor:
    text = tf.constant("0123456789abcdef")
    for _ in range(40):
        text = tf.strings.join([text, text])
    return tf.strings.length(text)


_ONE = {"x": np.float32(1)}
_HUNG = "DEADLINE_EXCEEDED"

HANGS = (
    HarmfulGraph("While", _ops(_endless_loop), _ONE, told=_HUNG),
    HarmfulGraph("Const", _parsed(lambda: bombs.large_constant(1_100_000_000)), told=_HUNG),
    HarmfulGraph("calls", _parsed(lambda: bombs.doubling_calls(22)), _ONE, told="LIMIT_EXCEEDED"),
    HarmfulGraph("StringJoin", _ops(_doubled_strings), told=_HUNG),
    HarmfulGraph(
        "num_split", _parsed(lambda: bombs.many_outputs(30_000_000)), {"x": np.ones(30, np.float32)}, told=_HUNG
    ),
)
"""Each takes a process's time or memory without an end, unless a check refuses it first.

`told` is the error of a server whose limits accept the graph.
"""
