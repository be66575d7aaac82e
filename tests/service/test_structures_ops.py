"""Normalization, dropout, ragged, sparse, string, image, complex and linear algebra ops equal local TensorFlow."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.service.structures import Table, both_halves, check, feed, register, values

TABLE: Table = {}
IMAGE = {"x": values(2, 4, 4, 3).astype(np.float32), "scale": values(3).astype(np.float32)}


def batch_norm(training: bool) -> None:
    x, scale = feed("x", IMAGE), tf.compat.v1.placeholder(tf.float32, [3], name="scale")
    offset = tf.constant([0.1, -0.2, 0.3])
    moments: dict[str, Any] = {} if training else {"mean": offset, "variance": offset * offset + 1.0}
    normal, _, _ = tf.compat.v1.nn.fused_batch_norm(
        tf.nn.relu(x), scale, offset, **moments, is_training=training, epsilon=1e-3
    )
    tf.identity(normal * normal * normal, name="y")


for training in (False, True):
    words: dict[str, Any] = {"tolerance": 1e-3}
    register(TABLE, f"batch norm, training={training}", IMAGE, "Relu", **words)(functools.partial(batch_norm, training))
ROWS = {"x": values(4, 3), "w": values(3, 3)}
SEEDED = {"x": values(6, 5), "seed": np.int32([3, 4])}


@register(TABLE, "stateless dropout", SEEDED, "Sign")
def with_stateless_dropout() -> None:
    x = feed("x", SEEDED)
    kept = tf.nn.experimental.stateless_dropout(
        tf.sign(x) * x, rate=0.4, seed=tf.compat.v1.placeholder(tf.int32, [2], name="seed")
    )
    tf.identity(kept, name="y")


RAGGED = {"flat": values(7), "splits": np.int64([0, 3, 3, 5, 7])}


@register(TABLE, "ragged", RAGGED, "Sin")
def with_ragged() -> None:
    ragged = tf.RaggedTensor.from_row_splits(feed("flat", RAGGED), feed("splits", RAGGED), validate=False)
    doubled = tf.ragged.map_flat_values(tf.sin, ragged) * 2.0
    sums = tf.reduce_sum(doubled, axis=1)
    tf.identity(tf.concat([sums, tf.reshape(doubled.to_tensor(), [-1])], axis=0), name="y")


SPARSE = {"indices": np.int64([[0, 1], [1, 0], [2, 2]]), "nonzero": values(3), "w": values(3, 2)}


@register(TABLE, "sparse", SPARSE, "Sin")
def with_sparse() -> None:
    indices = tf.compat.v1.placeholder(tf.int64, [None, 2], name="indices")
    matrix = tf.SparseTensor(indices, tf.sin(feed("nonzero", SPARSE)), tf.constant([3, 3], tf.int64))
    tf.identity(tf.sparse.sparse_dense_matmul(matrix, feed("w", SPARSE)), name="y")


@register(
    TABLE,
    "sparse matmul overridden",
    SPARSE,
    "SparseTensorDenseMatMul",
    expression="each(0.5 * default)",
    python=both_halves,
)
def with_sparse_overridden() -> None:
    with_sparse()


WORDS = {"words": np.array([b"1.5 2", b"-0.25 4"], object), "x": values(2, 2)}


@register(TABLE, "strings", WORDS, "Tanh", xs=["x"])
def with_strings() -> None:
    parts = tf.strings.split(feed("words", WORDS), " ").to_tensor("0")
    numbers = tf.strings.to_number(tf.strings.regex_replace(parts, "-", ""), tf.float64)
    x = feed("x", WORDS)
    tf.identity(tf.strings.join([tf.strings.as_string(tf.cast(numbers, tf.int32)), "!"]), name="text")
    tf.identity(tf.tanh(numbers * x), name="y")


TABLE["strings"].fetches.append("text")


@register(TABLE, "einsum", ROWS, "Einsum", expression="each(0.5 * default)", python=both_halves)
def with_einsum() -> None:
    tf.identity(tf.einsum("ij,jk->ki", feed("x", ROWS), feed("w", ROWS)), name="y")


PICTURE = {"x": values(1, 4, 5, 2).astype(np.float32)}


def resized(method: str) -> None:
    tf.identity(tf.image.resize(tf.tanh(feed("x", PICTURE)), [7, 6], method), name="y")


for method in ("bilinear", "nearest", "bicubic"):
    register(TABLE, f"resize {method}", PICTURE, "Tanh", tolerance=1e-4)(functools.partial(resized, method))
register(TABLE, "crop and resize", PICTURE, "Tanh", tolerance=1e-4)(
    lambda: tf.image.crop_and_resize(tf.tanh(feed("x", PICTURE)), [[0.1, 0.2, 0.8, 0.9]], [0], [3, 3], name="y")
)
WAVE = {"x": values(2, 8)}


@register(TABLE, "fft", WAVE, "Sin", tolerance=1e-6)
def with_fft() -> None:
    spectrum = tf.signal.rfft(tf.sin(feed("x", WAVE)))
    tf.identity(tf.abs(spectrum) + tf.math.real(spectrum * spectrum), name="y")


@register(TABLE, "complex inside", WAVE, "Exp", expression="2 * dy", python=lambda op, dy: dy * 2)
def with_complex() -> None:
    x = feed("x", WAVE)
    turned = tf.exp(tf.complex(tf.zeros_like(x), x))
    tf.identity(tf.math.real(turned) * tf.math.imag(turned), name="y")


SQUARE = {"a": values(3, 3), "b": values(3, 2)}


def positive() -> Any:
    a = tf.compat.v1.placeholder(tf.float64, [3, 3], name="a")
    return tf.tanh(a) @ tf.transpose(a) + 4.0 * tf.eye(3, dtype=tf.float64)


@register(TABLE, "cholesky", SQUARE, "Tanh")
def with_cholesky() -> None:
    symmetric = positive()
    root = tf.linalg.cholesky(symmetric + tf.transpose(symmetric))
    tf.identity(tf.linalg.triangular_solve(root, feed("b", SQUARE)), name="y")


@register(TABLE, "svd", SQUARE, "Tanh", xs=["a"], tolerance=1e-7)
def with_svd() -> None:
    singular, left, right = tf.linalg.svd(positive())
    feed("b", SQUARE)
    tf.identity(left @ tf.linalg.diag(singular**2) @ tf.transpose(right), name="y")


@register(TABLE, "inverse, determinant and solve", SQUARE, "Tanh")
def with_inverse() -> None:
    matrix = positive()
    solved = tf.linalg.solve(matrix, feed("b", SQUARE))
    tf.identity(tf.linalg.inv(matrix) @ solved * tf.linalg.slogdet(matrix)[1], name="y")


@register(TABLE, "self-adjoint eigenvalues", SQUARE, "Tanh", xs=["a"], tolerance=1e-7)
def with_eigenvalues() -> None:
    symmetric = positive()
    feed("b", SQUARE)
    tf.identity(tf.linalg.eigh(symmetric + tf.transpose(symmetric))[0], name="y")


@pytest.mark.parametrize("name", sorted(TABLE))
def test_structure_equals_tensorflow(client: Any, name: str) -> None:
    check(client, TABLE[name])
