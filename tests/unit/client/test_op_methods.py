"""Ops by the names and arguments of TensorFlow's Python: what they compute, and which name was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule._builder.op_methods import op_type_of, snake_case
from gradrule.common import op_definitions

X = np.float32([[0.5, -2.0, 3.0], [1.5, 0.25, -1.0]])
INFINITE = np.float32([[-np.inf, -np.inf], [np.inf, 1.0], [1000.0, 1000.0]])

# Each takes the builder, or what stands for it in TensorFlow, and x.
CASES: dict[str, tuple[Callable[[gr.Graph, Any], Any], Callable[[Any], Any]]] = {
    "transpose": (lambda g, x: g.transpose(x), tf.transpose),
    "transpose perm": (lambda g, x: g.transpose(x, perm=[1, 0]), lambda x: tf.transpose(x, perm=[1, 0])),
    "einsum": (lambda g, x: g.einsum("ij,kj->ik", x, x), lambda x: tf.einsum("ij,kj->ik", x, x)),
    "einsum list": (lambda g, x: g.einsum("ij->j", [x]), lambda x: tf.einsum("ij->j", x)),
    "unstack": (lambda g, x: g.unstack(x, axis=1)[2], lambda x: tf.unstack(x, axis=1)[2]),
    "unstack num": (lambda g, x: g.unstack(g.neg(x), 3, axis=1)[0], lambda x: tf.unstack(-x, 3, 1)[0]),
    "stack": (lambda g, x: g.stack(values=[x, x], axis=-1), lambda x: tf.stack(values=[x, x], axis=-1)),
    "split": (
        lambda g, x: g.split(x, num_or_size_splits=3, axis=1)[1],
        lambda x: tf.split(x, num_or_size_splits=3, axis=1)[1],
    ),
    "zeros": (lambda g, x: g.zeros([2, 3], "float64"), lambda x: tf.zeros([2, 3], tf.float64)),
    "zeros scalar": (lambda g, x: g.zeros([]), lambda x: tf.zeros([])),
    "zeros string": (lambda g, x: g.op("StringLength", g.zeros([2], "string")), lambda x: tf.zeros([2], tf.int32)),
    "ones": (lambda g, x: g.ones((3,), "int64"), lambda x: tf.ones((3,), tf.int64)),
    "ones bfloat16": (lambda g, x: g.ones(2, "bfloat16"), lambda x: tf.ones([2], tf.bfloat16)),
    "ones of handles": (lambda g, x: g.ones([g.size(x), 2]), lambda x: tf.ones([tf.size(x), 2])),
    "ones of a shape": (lambda g, x: g.ones(g.shape(x)), lambda x: tf.ones(tf.shape(x))),
    "zeros_like": (lambda g, x: g.zeros_like(x), tf.zeros_like),
    "zeros_like dtype": (lambda g, x: g.zeros_like(x, dtype="int32"), lambda x: tf.zeros_like(x, dtype=tf.int32)),
    "ones_like": (lambda g, x: g.ones_like(x), tf.ones_like),
    "ones_like dtype": (lambda g, x: g.ones_like(x, "float64"), lambda x: tf.ones_like(x, tf.float64)),
    "fill": (lambda g, x: g.fill([], 2.5), lambda x: tf.fill([], 2.5)),
    "range": (lambda g, x: g.range(3), lambda x: tf.range(3)),
    "range of all": (lambda g, x: g.range(1, 2, delta=0.25), lambda x: tf.range(1, 2, delta=0.25)),
    "range mixed": (lambda g, x: g.range(0, g.size(x), 2), lambda x: tf.range(0, tf.size(x), 2)),
    "reduce_logsumexp": (lambda g, x: g.reduce_logsumexp(x, axis=1), lambda x: tf.reduce_logsumexp(x, axis=1)),
    "reduce_logsumexp all": (lambda g, x: g.reduce_logsumexp(x), tf.reduce_logsumexp),
    "reduce_logsumexp infinite": (
        lambda g, x: g.reduce_logsumexp(INFINITE, 1, keepdims=True),
        lambda x: tf.reduce_logsumexp(INFINITE, 1, keepdims=True),
    ),
    "reduce_variance": (lambda g, x: g.reduce_variance(x, 0), lambda x: tf.math.reduce_variance(x, 0)),
    "reduce_std": (lambda g, x: g.reduce_std(x, keepdims=True), lambda x: tf.math.reduce_std(x, keepdims=True)),
    "reduce_euclidean_norm": (lambda g, x: g.reduce_euclidean_norm(x, 1), lambda x: tf.norm(x, axis=1)),
    "reduce keyword": (lambda g, x: g.reduce_sum(input_tensor=x), lambda x: tf.reduce_sum(input_tensor=x)),
    "l2_normalize": (lambda g, x: g.l2_normalize(x, 1), lambda x: tf.math.l2_normalize(x, 1)),
    "softmax": (lambda g, x: g.softmax(x), tf.nn.softmax),
    "softmax axis": (lambda g, x: g.softmax(logits=x, axis=0), lambda x: tf.nn.softmax(x, axis=0)),
    "softmax axis in the middle": (
        lambda g, x: g.softmax(g.reshape(x, [1, 2, 3, 1]), axis=-3),
        lambda x: tf.nn.softmax(tf.reshape(x, [1, 2, 3, 1]), axis=-3),
    ),
    "softmax last axis by number": (lambda g, x: g.softmax(x, axis=1), lambda x: tf.nn.softmax(x, axis=1)),
    "log_softmax": (lambda g, x: g.log_softmax(x, 0), lambda x: tf.nn.log_softmax(x, 0)),
    "expand_dims": (lambda g, x: g.expand_dims(x, axis=-1), lambda x: tf.expand_dims(x, axis=-1)),
    "squeeze": (lambda g, x: g.squeeze(g.expand_dims(x, 0)), tf.identity),
    "argmax": (lambda g, x: g.argmax(x), tf.argmax),
    "argmin": (lambda g, x: g.argmin(x, axis=1, output_type="int32"), lambda x: tf.argmin(x, 1, tf.int32)),
    "cumsum": (lambda g, x: g.cumsum(x, 1, exclusive=True), lambda x: tf.cumsum(x, 1, exclusive=True)),
    "cumprod": (lambda g, x: g.cumprod(x, reverse=True), lambda x: tf.math.cumprod(x, reverse=True)),
    "pad": (lambda g, x: g.pad(x, [[1, 0], [0, 1]]), lambda x: tf.pad(x, [[1, 0], [0, 1]])),
    "pad value": (
        lambda g, x: g.pad(x, [[1, 0], [0, 1]], constant_values=7),
        lambda x: tf.pad(x, [[1, 0], [0, 1]], constant_values=7),
    ),
    "pad mirror": (
        lambda g, x: g.pad(x, [[1, 0], [0, 2]], "reflect"),
        lambda x: tf.pad(x, [[1, 0], [0, 2]], "REFLECT"),
    ),
    "gather batch": (
        lambda g, x: g.gather(x, [[0], [2]], axis=1, batch_dims=1),
        lambda x: tf.gather(x, [[0], [2]], axis=1, batch_dims=1),
    ),
    "boolean_mask": (lambda g, x: g.boolean_mask(x, x > 0), lambda x: tf.boolean_mask(x, x > 0)),
    "where": (lambda g, x: g.where(x > 0), lambda x: tf.where(x > 0)),
    "one_hot": (
        lambda g, x: g.one_hot([0, 2], 3, axis=0, dtype="float64"),
        lambda x: tf.one_hot([0, 2], 3, axis=0, dtype=tf.float64),
    ),
    "logical_xor": (lambda g, x: g.logical_xor(x > 0, x > 1), lambda x: tf.math.logical_xor(x > 0, x > 1)),
    "divide_no_nan": (lambda g, x: g.divide_no_nan(x, x - 3), lambda x: tf.math.divide_no_nan(x, x - 3)),
}  # fmt: skip


def run(g: gr.Graph, fetch: Any, x: Any = X) -> Any:
    with tf.Graph().as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(g.to_bytes()), name="")
        with tf.compat.v1.Session() as session:
            return session.run(fetch.name, {"x:0": x})


@pytest.mark.parametrize("case", CASES)
def test_values_equal_tensorflows(case: str) -> None:
    build, reference = CASES[case]
    g = gr.Graph()
    got = np.asarray(run(g, build(g, g.placeholder("x", "float32", [None, 3]))))
    wanted = reference(tf.constant(X)).numpy()
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=1e-6)


V1: Any = tf.compat.v1


@pytest.mark.parametrize(
    "draw",
    [
        lambda m, dtype: m.random_uniform([4], seed=5),
        lambda m, dtype: m.random_uniform([4], minval=-2, maxval=3, seed=5),
        lambda m, dtype: m.random_uniform([], -2.0, dtype=dtype("float64"), seed=5),
        lambda m, dtype: m.random_uniform([4], -2, 3, dtype=dtype("int64"), seed=5),
        lambda m, dtype: m.random_normal([4], 1.0, 2.0, seed=5),
        lambda m, dtype: m.random_normal([4], dtype=dtype("float64"), seed=0),
        lambda m, dtype: m.truncated_normal([4], mean=3, stddev=0.5, seed=5),
    ],
)
def test_random_numbers_are_tensorflows_of_the_same_seed(draw: Callable[[Any, Any], Any]) -> None:
    g = gr.Graph()
    g.placeholder("x", "float32")
    got = run(g, draw(g, str))
    with tf.Graph().as_default(), V1.Session() as session:
        wanted = session.run(draw(V1, tf.as_dtype))
    assert np.asarray(got).dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_random_numbers_without_a_seed_differ() -> None:
    g = gr.Graph()
    g.placeholder("x", "float32")
    first, second = g.random_normal([8]), g.random_normal([8], name="second")
    assert second.name == "second:0"
    assert run(g, first).tolist() != run(g, second).tolist()


@pytest.mark.parametrize(
    ("build", "kind", "says"),
    [
        (lambda g, x: g.zeros([None]), gr.errors.InvalidTensorError, "list of sizes"),
        (lambda g, x: g.zeros([1.5]), gr.errors.InvalidTensorError, "list of sizes"),
        (lambda g, x: g.ones([1], "flaot32"), gr.errors.InvalidAttrError, "flaot32"),
        (lambda g, x: g.ones([1], "string"), gr.errors.InvalidAttrError, "no ones of type string"),
        (lambda g, x: g.random_uniform([1], dtype="int32"), gr.errors.InvalidAttrError, "maxval"),
        (lambda g, x: g.random_normal([1], dtype="int32"), gr.errors.GradruleError, "int32"),
        (lambda g, x: g.unstack(x), gr.errors.InvalidAttrError, "num"),
        (lambda g, x: g.unstack(x, axis=5), gr.errors.InvalidAttrError, "axis 5"),
        (lambda g, x: g.where(x > 0, x), gr.errors.InvalidAttrError, "both"),
        (lambda g, x: g.pad(x, [[0, 0], [0, 0]], "WRAP"), gr.errors.InvalidAttrError, "REFLECT.*'WRAP'"),
        (lambda g, x: g.einsum(x, x), gr.errors.InvalidAttrError, "equation"),
    ],
)
def test_refusals(build: Callable[[gr.Graph, Any], Any], kind: type[Exception], says: str) -> None:
    g = gr.Graph()
    with pytest.raises(kind, match=says):
        build(g, g.placeholder("x", "float32", [None, 3]))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("redcue_sum", "reduce_sum"),
        ("batch_matmull", "batch_matmul"),
        ("sparse_softmax_cross_entropy", "sparse_softmax_cross_entropy_with_logits"),
        ("Sing", "sin"),
        ("bias_ad", "bias_add"),
        ("conv_2", "conv2d"),
        ("name_scop", "name_scope"),
    ],
)
def test_suggestions_are_names_as_they_are_written(written: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{written}'.*Did you mean .*'{meant}'"):
        getattr(gr.Graph(), written)


def test_snake_case_is_tensorflows() -> None:
    # TensorFlow gives its raw ops their own names and, in `tf.math` and elsewhere, these.
    from tensorflow.python.ops import gen_math_ops, gen_nn_ops

    functions = {*dir(gen_math_ops), *dir(gen_nn_ops)}
    assert {snake_case(name) for name in ("MatMul", "Conv2D", "L2Loss", "TopKV2", "BatchMatMulV2", "LRN")} <= functions


def test_every_snake_name_is_a_method() -> None:
    names = [name for name in op_definitions.names() if name.isidentifier() and not name.startswith("_")]
    assert [name for name in names if op_type_of(snake_case(name)) is None] == []


@pytest.mark.parametrize(
    ("a", "b", "words", "fits"),
    [
        ([2, 3], [2, 3], {}, False),
        ([2, 3], [3, 2], {}, True),
        ([2, 3], [2, 3], {"transpose_a": True}, True),
        ([2, 3], [2, 3], {"transpose_b": True}, True),
        ([2, 3], [3, 2], {"transpose_a": True}, False),
        ([5, 2, 3], [5, 2, 3], {}, False),
        ([5, 2, 3], [3, 4], {}, True),
        ([None, None], [2, 3], {}, True),
        ([None, 4], [3, 3], {}, False),
        (None, [2, 3], {}, True),
    ],
)
def test_matmul_of_sizes_that_do_not_fit_is_refused(
    a: list[int | None] | None, b: list[int | None], words: dict[str, bool], fits: bool
) -> None:
    g = gr.Graph()
    left, right = g.placeholder("a", "float32", a), g.placeholder("b", "float32", b)
    if fits:
        assert g.matmul(left, right, **words).name
        return
    with pytest.raises(gr.errors.InvalidAttrError, match=r"the inner sizes . and . differ"):
        g.matmul(left, right, **words)
    assert len(g) == 2


def test_matmul_of_an_array_that_does_not_fit_is_refused() -> None:
    g = gr.Graph()
    with pytest.raises(gr.errors.InvalidAttrError, match=r"matmul of \[\?, 3\] and \[2, 4\]: the inner sizes 3 and 2"):
        g.placeholder("a", "float32", [None, 3]) @ np.zeros((2, 4), np.float32)
