"""Loops, branches, maps and lookups, plain and with an override, give the results of local TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.service.structures import Table, check, feed, register, values

TABLE: Table = {}
ROWS = {"x": values(4, 3), "w": values(3, 3)}


@register(TABLE, "map_fn", ROWS, "Tanh")
def with_map_fn() -> None:
    x, w = feed("x", ROWS), feed("w", ROWS)
    tf.identity(tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)) * row, x), name="y")


@register(TABLE, "map_fn of several", ROWS, "Sin")
def with_map_fn_of_several() -> None:
    x, w = feed("x", ROWS), feed("w", ROWS)
    found = tf.map_fn(
        lambda pair: (tf.sin(pair[0]) * pair[1], tf.reduce_sum(pair[0])),
        (x, tf.matmul(x, w)),
        fn_output_signature=(tf.float64, tf.float64),
    )
    tf.identity(found[0] * found[1][:, None], name="y")


@register(TABLE, "scan", ROWS, "Tanh")
def with_scan() -> None:
    x, w = feed("x", ROWS), feed("w", ROWS)
    start = tf.zeros([3], tf.float64)
    tf.identity(tf.scan(lambda h, row: tf.tanh(tf.linalg.matvec(w, h) + row), x, start), name="y")


@register(TABLE, "scan backwards", ROWS, "Tanh")
def with_reverse_scan() -> None:
    x, w = feed("x", ROWS), feed("w", ROWS)
    start = tf.zeros([3], tf.float64)
    tf.identity(tf.scan(lambda h, row: tf.tanh(tf.linalg.matvec(w, h) + row), x, start, reverse=True), name="y")


@register(TABLE, "loop in loop", ROWS, "Sin")
def with_loop_in_loop() -> None:
    x, w = feed("x", ROWS), feed("w", ROWS)

    def outer(i: Any, value: Any) -> Any:
        inner = tf.while_loop(
            lambda j, now: tf.logical_and(j <= i, tf.reduce_sum(tf.abs(now)) < 9.0),
            lambda j, now: (j + 1, tf.sin(now @ w) + x),
            [0, value],
        )
        return i + 1, inner[1] * 0.5

    tf.identity(tf.while_loop(lambda i, _: i < 3, outer, [0, x])[1], name="y")


@register(TABLE, "cond", ROWS, "Sign")
def with_cond() -> None:
    x, w = feed("x", ROWS), feed("w", ROWS)
    tf.identity(tf.cond(tf.reduce_sum(x) < 100.0, lambda: tf.sign(x) @ w, lambda: x - w[:1]), name="y")


@register(TABLE, "cond in a loop", ROWS, "Tanh")
def with_cond_in_a_loop() -> None:
    x, w = feed("x", ROWS), feed("w", ROWS)

    def body(i: Any, value: Any) -> Any:
        return i + 1, tf.cond(i % 2 > 0, lambda: tf.tanh(value @ w), lambda: tf.cos(value) + x)

    tf.identity(tf.while_loop(lambda i, _: i < 4, body, [0, x])[1], name="y")


CHOICE = {"x": values(4, 3), "which": np.int32(1)}


@register(TABLE, "switch_case", CHOICE, "Sign")
def with_switch_case() -> None:
    x = feed("x", CHOICE)
    branches = [lambda: x * 2.0, lambda: tf.sign(x) * x, lambda: tf.cos(x)]
    tf.identity(tf.switch_case(feed("which", CHOICE), branches), name="y")


LOOKUP = {"table": values(6, 3), "ids": np.int32([1, 4, 1, 0])}


@register(TABLE, "embedding", LOOKUP, "Tanh", xs=["table"])
def with_embedding() -> None:
    found = tf.nn.embedding_lookup(feed("table", LOOKUP), feed("ids", LOOKUP))
    tf.identity(tf.tanh(found) * found, name="y")


@register(TABLE, "embedding behind an op", LOOKUP, "Sign", xs=["table"])
def with_embedding_behind_an_op() -> None:
    tf.identity(tf.gather(tf.sign(feed("table", LOOKUP)), feed("ids", LOOKUP)), name="y")


@register(TABLE, "embedding in a loop", LOOKUP, "Tanh", xs=["table"])
def with_embedding_in_a_loop() -> None:
    table, ids = feed("table", LOOKUP), feed("ids", LOOKUP)
    tf.identity(tf.map_fn(lambda i: tf.tanh(tf.gather(table, i)), ids, fn_output_signature=tf.float64), name="y")


@register(TABLE, "tensor lists of unknown shapes", ROWS, "Sin")
def with_lists() -> None:
    x, w = feed("x", ROWS), feed("w", ROWS)
    array = tf.TensorArray(tf.float64, size=0, dynamic_size=True, infer_shape=False)

    def body(i: Any, kept: Any) -> Any:
        # Each entry has a different length.
        return i + 1, kept.write(i, tf.sin(tf.reshape(x, [-1])[: i + 1]))

    kept = tf.while_loop(lambda i, _: i < tf.shape(x)[0], body, [0, array])[1]
    tf.identity(kept.concat() * tf.reduce_sum(w), name="y")


@pytest.mark.parametrize("name", sorted(TABLE))
def test_structure_equals_tensorflow(client: Any, name: str) -> None:
    check(client, TABLE[name])
