"""Tests that operators and indexing of handles compute what NumPy or TensorFlow computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr

FLOATS = np.float32([[7.5, -7.5, 3.0], [-3.0, 0.25, 5.0]])
INTS = np.int32([[7, -7, 3], [-3, 2, 5]])
CUBE = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)


def run(g: gr.Graph, fetch: Any, feeds: dict[str, Any]) -> Any:
    with tf.Graph().as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(g.to_bytes()), name="")
        with tf.compat.v1.Session() as session:
            return session.run(fetch.name, {f"{name}:0": value for name, value in feeds.items()})


ARITHMETIC: list[Callable[[Any], Any]] = [
    lambda x: x % 3,
    lambda x: 20 % x,
    lambda x: x // 2,
    lambda x: 20 // x,
    lambda x: x % -3,
    lambda x: +x,
]

BITS: list[Callable[[Any], Any]] = [
    lambda x: ~x,
    lambda x: x & 6,
    lambda x: 6 & x,
    lambda x: x | 8,
    lambda x: 8 | x,
    lambda x: x ^ 5,
    lambda x: 5 ^ x,
]

LOGIC: list[Callable[[Any], Any]] = [
    lambda x: ~(x > 0),
    lambda x: (x > 0) & (x < 4),
    lambda x: (x > 0) | (x < -4),
    lambda x: (x > 0) ^ (x < 4),
    lambda x: (x > 0) & True,
    lambda x: False | (x > 0),
    lambda x: True ^ (x > 0),
]


@pytest.mark.parametrize("data", [FLOATS, INTS], ids=["float", "int"])
@pytest.mark.parametrize("operate", [*ARITHMETIC, *LOGIC])
def test_operators_are_numpys(operate: Callable[[Any], Any], data: Any) -> None:
    g = gr.Graph()
    got = run(g, operate(g.placeholder("x", data.dtype)), {"x": data})
    np.testing.assert_array_equal(got, operate(data))
    assert got.dtype == operate(data).dtype


@pytest.mark.parametrize("operate", BITS)
def test_bits_are_numpys(operate: Callable[[Any], Any]) -> None:
    g = gr.Graph()
    got = run(g, operate(g.placeholder("x", "int32")), {"x": INTS})
    np.testing.assert_array_equal(got, operate(INTS))


@pytest.mark.parametrize("operate", [lambda x: ~x, lambda x: x & x, lambda x: x | 1, lambda x: x ^ x])
def test_logic_of_floats_is_refused(operate: Callable[[Any], Any]) -> None:
    with pytest.raises(gr.errors.TypeMismatchError, match="float32, not bool"):
        operate(gr.Graph().placeholder("x", "float32"))


INDICES: list[Any] = [
    0,
    -1,
    np.int64(2),
    slice(None),
    slice(1, 3),
    slice(-2, None),
    slice(None, None, 2),
    slice(None, None, -1),
    slice(3, 0, -2),
    slice(2, 100),
    slice(0, 10**30),
    slice(-(2**40), 2**40),
    (),
    (0, 1, 2),
    (slice(1, 2), 0),
    Ellipsis,
    (Ellipsis, 0),
    (0, Ellipsis),
    (1, Ellipsis, slice(None, None, 2)),
    None,
    (None, Ellipsis, None),
    (Ellipsis, None, slice(1, 3)),
    (slice(None), None, -1, slice(None, 2)),
    (2, None, Ellipsis, None, 1),
    (slice(0, 0), Ellipsis),
    CUBE > 7,
    CUBE[:, :, 0] > 7,
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: repr(index)[:40])
def test_indices_are_numpys(index: Any) -> None:
    g = gr.Graph()
    got = run(g, g.placeholder("x", "float32")[index], {"x": CUBE})
    np.testing.assert_array_equal(got, CUBE[index])


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
@pytest.mark.parametrize(
    "use",
    [
        lambda x, i: x[i],
        lambda x, i: x[i, ..., 1],
        lambda x, i: x[..., i, None],
        lambda x, i: x[i : i + 2],
        lambda x, i: x[:i, 1:, ::i],
        lambda x, i: x[2, :i, -1],
        lambda x, i: x[slice(0, 2**40), i],
    ],
)
def test_scalars_of_the_graph_are_indices(use: Callable[[Any, Any], Any], dtype: str) -> None:
    g = gr.Graph()
    x, i = g.placeholder("x", "float32"), g.placeholder("i", dtype, [])
    np.testing.assert_array_equal(run(g, use(x, i), {"x": CUBE, "i": 2}), use(CUBE, 2))


def test_scalars_may_differ_in_type_and_be_nodes() -> None:
    g = gr.Graph()
    x, j = g.placeholder("x", "float32"), g.placeholder("j", "int64", [])
    g.placeholder("i", "int32", [])
    got = run(g, x[g.node("i"), g.node("j") : j + 1], {"x": CUBE, "i": 3, "j": 1})
    np.testing.assert_array_equal(got, CUBE[3, 1:2])


def test_a_bool_tensor_picks_entries() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32")
    np.testing.assert_array_equal(run(g, x[x % 2 > 0], {"x": CUBE}), CUBE[CUBE % 2 > 0])


def test_an_index_is_one_strided_slice_as_tensorflow_writes_it() -> None:
    with tf.Graph().as_default() as graph:
        tf.compat.v1.placeholder(tf.float32)[1:, ..., None, -1]
    wanted = next(node for node in graph.as_graph_def().node if node.op == "StridedSlice")
    g = gr.Graph()
    made = g.placeholder("x", "float32")[1:, ..., None, -1].node
    assert made.op_type == "StridedSlice"
    masks = [name for name in made.attrs if name.endswith("_mask")]
    assert {name: made.attrs[name].i for name in masks} == {name: wanted.attr[name].i for name in masks}
    assert len(masks) == 5


@pytest.mark.parametrize(
    ("index", "kind", "says"),
    [
        (1.5, gr.errors.TypeMismatchError, r"1\.5 is no index"),
        ("a", gr.errors.TypeMismatchError, "'a' is no index"),
        (True, gr.errors.TypeMismatchError, "True is no index"),
        ([0, 2], gr.errors.TypeMismatchError, r"\[0, 2\] is no index.*gather"),
        (np.array([0, 2]), gr.errors.TypeMismatchError, "gather"),
        (slice(None, 1.5), gr.errors.TypeMismatchError, r"1\.5"),
        ((Ellipsis, Ellipsis), gr.errors.InvalidGraphError, "one `...` at most"),
        (slice(None, None, 0), gr.errors.InvalidGraphError, "cannot be 0"),
    ],
    ids=repr,
)
def test_values_that_are_no_index_are_refused(index: Any, kind: type[Exception], says: str) -> None:
    x = gr.Graph().placeholder("x", "float32", [None])
    with pytest.raises(kind, match=says):
        x[index]


def test_tensors_that_are_no_index_are_refused() -> None:
    g = gr.Graph()
    x, many = g.placeholder("x", "float32", [None]), g.placeholder("many", "int32", [3])
    with pytest.raises(gr.errors.TypeMismatchError, match="'x:0' is float32; an index is int32 or int64"):
        x[x]
    with pytest.raises(gr.errors.TypeMismatchError, match="'many:0' is no scalar; `gather`"):
        x[many]
    with pytest.raises(gr.errors.InvalidGraphError, match="another graph"):
        x[gr.Graph().placeholder("i", "int32", [])]


def test_handles_cannot_be_iterated_over() -> None:
    x = gr.Graph().placeholder("x", "float32", [2])
    with pytest.raises(TypeError, match="unstack"):
        tuple(x)
    with pytest.raises(TypeError):
        _ = 1 in x  # type: ignore[operator]
