"""Evaluate with the arguments of `tf.gradients`, compared with local TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service import reference
from tests.service.answers import assert_close, dense, refused
from tests.service.graph_defs import build_graph, build_graph_def, load_graph, placeholder

A, B = np.float32([1, -2, 3]), np.float32([0.5, 2, -1])


def two_layers() -> None:
    a, b = placeholder("a"), placeholder("b")
    middle = tf.multiply(a, b, name="middle")
    tf.square(middle, name="p")
    tf.add(tf.sin(middle), a, name="q")
    tf.reduce_sum(b, name="only_b")


GRAPH = build_graph_def(two_layers)
FEEDS = {"a": A, "b": B}


def check(client: Any, ys: list[str], xs: list[str], fetches: tuple[str, ...] = (), **words: Any) -> Any:
    """Asserts that the server's answer equals TensorFlow's."""
    r = client.evaluate(load_graph(GRAPH), feeds=FEEDS, fetches=fetches, ys=ys, xs=xs, **words)
    wanted = reference.evaluate(GRAPH, FEEDS, fetches, ys, xs, **words)
    assert list(r.outputs) == list(fetches)
    assert list(r.gradients) == xs
    for name in fetches:
        assert_close(r.outputs[name], wanted.outputs[name])
    for x in xs:
        assert (r.gradients[x] is None) == (wanted.gradients[x] is None)
        if wanted.gradients[x] is not None:
            assert_close(r.gradients[x], wanted.gradients[x])
    return r


@pytest.mark.parametrize("ys", [["p"], ["q"], ["p", "q"], ["q", "p", "middle"]])
@pytest.mark.parametrize("xs", [["a"], ["b", "a"], ["middle"], ["middle", "a"]])
def test_gradients_of_ys_and_xs_equal_tensorflow(either: Any, ys: list[str], xs: list[str]) -> None:
    check(either, ys, xs, fetches=("q", "middle"))


def test_names_are_returned_as_given(either: Any) -> None:
    check(either, ["p:0"], ["a:0"], fetches=("p:0", "p"))


def test_tensor_handles_may_replace_names(either: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    y = g.square(x, name="y")
    r = either.evaluate(g, feeds={x: [3.0]}, fetches=[y], ys=[y], xs=[x])
    assert_close(r.outputs[y], np.float32([9]))
    assert_close(r.gradients[x], np.float32([6]))


def test_evaluate_may_only_fetch(either: Any) -> None:
    r = either.evaluate(load_graph(GRAPH), feeds=FEEDS, fetches=["p"])
    assert_close(r.outputs["p"], (A * B) ** 2)
    assert not r.gradients


def test_only_requested_tensors_need_feeds(either: Any) -> None:
    r = either.evaluate(load_graph(GRAPH), feeds={"b": B}, fetches=["only_b"])
    assert_close(r.outputs["only_b"], B.sum())


@pytest.mark.parametrize("form", ["dict", "list", "partial"])
def test_grad_ys_may_be_arrays(either: Any, form: str) -> None:
    up, uq = np.float32([1, 10, 100]), np.float32([-1, 0, 2])
    given: Any = {"dict": {"p": up, "q": uq}, "list": [up, uq], "partial": {"q": uq}}[form]
    r = either.evaluate(load_graph(GRAPH), feeds=FEEDS, ys=["p", "q"], xs=["a", "b"], grad_ys=given)
    wanted = reference.evaluate(
        GRAPH, FEEDS, ys=["p", "q"], xs=["a", "b"], grad_ys=[np.ones(3, np.float32) if form == "partial" else up, uq]
    )
    for x in ("a", "b"):
        assert_close(r.gradients[x], wanted.gradients[x])


def test_grad_ys_may_be_names_of_tensors(either: Any) -> None:
    r = either.evaluate(load_graph(GRAPH), feeds=FEEDS, ys=["p", "q"], xs=["a"], grad_ys=["middle", "b"])
    wanted = reference.evaluate(GRAPH, FEEDS, ys=["p", "q"], xs=["a"], grad_ys=[A * B, B])
    assert_close(r.gradients["a"], wanted.gradients["a"])
    mixed = either.evaluate(load_graph(GRAPH), feeds=FEEDS, ys=["p", "q"], xs=["a"], grad_ys={"p": "middle", "q": B})
    assert_close(mixed.gradients["a"], wanted.gradients["a"])


def test_grad_ys_of_wrong_shape_or_dtype_are_refused(either: Any) -> None:
    words: dict[str, Any] = {"feeds": FEEDS, "ys": ["p"], "xs": ["a"]}
    with refused("FEED_DTYPE"):
        either.evaluate(load_graph(GRAPH), grad_ys=[np.full(3, 0.1)], **words)
    with refused("FEED_SHAPE"):
        either.evaluate(load_graph(GRAPH), grad_ys=[np.ones((2, 2), np.float32)], **words)
    with refused("UNKNOWN_TENSOR"):
        either.evaluate(load_graph(GRAPH), grad_ys=["nowhere"], **words)


@pytest.mark.parametrize("stopped", [["middle"], ["a"], ["a", "b"]])
def test_stop_gradients_equal_tensorflow(either: Any, stopped: list[str]) -> None:
    check(either, ["p", "q"], ["a", "b"], stop_gradients=stopped)


def test_unconnected_is_none_or_zeros(either: Any) -> None:
    assert check(either, ["only_b"], ["a", "b"]).gradients["a"] is None
    r = check(either, ["only_b"], ["a", "b"], unconnected_gradients="zero")
    assert_close(r.gradients["a"], np.zeros(3, np.float32))


def test_fed_intermediate_tensor_is_not_computed(either: Any) -> None:
    middle = np.float32([2, 4, 8])
    r = either.evaluate(
        load_graph(GRAPH), feeds={"a": A, "middle": middle}, fetches=["p", "q"], ys=["p", "q"], xs=["a", "middle"]
    )
    assert_close(r.outputs["p"], middle**2)
    assert_close(r.outputs["q"], np.sin(middle) + A)
    assert_close(r.gradients["middle"], 2 * middle + np.cos(middle))
    assert_close(r.gradients["a"], np.ones(3, np.float32))


def test_placeholder_with_default_needs_no_feed(either: Any) -> None:
    def build() -> None:
        scale = tf.compat.v1.placeholder_with_default(tf.constant(3.0), [], name="scale")
        tf.multiply(placeholder("x"), scale, name="y")

    graph = build_graph(build)
    r = either.evaluate(graph, feeds={"x": A}, fetches=["y"], ys=["y"], xs=["x", "scale"])
    assert_close(r.outputs["y"], 3 * A)
    assert_close(r.gradients["scale"], A.sum())
    fed = either.evaluate(graph, feeds={"x": A, "scale": -1.0}, fetches=["y"], ys=["y"], xs=["x"])
    assert_close(fed.outputs["y"], -A)
    assert_close(fed.gradients["x"], -np.ones(3, np.float32))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 2, 1, 2)])
def test_unknown_rank_and_dimensions_accept_any_shape(either: Any, shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    for stated in (None, [None] * len(shape)):
        g = gr.Graph()
        g.op("Square", g.placeholder("x", "float32", stated), name="y")
        r = either.evaluate(
            g, feeds={"x": x}, fetches=["y"], ys=["y"], xs=["x"], overrides={"Square": gr.Rule("x * dy")}
        )
        assert_close(r.outputs["y"], x**2)
        assert_close(r.gradients["x"], x)


def test_empty_tensors_have_empty_gradients(either: Any) -> None:
    g = gr.Graph()
    g.op("Square", g.placeholder("x", "float32", [None, 3]), name="y")
    r = either.evaluate(g, feeds={"x": np.zeros((0, 3), np.float32)}, fetches=["y"], ys=["y"], xs=["x"])
    assert r.outputs["y"].shape == r.gradients["x"].shape == (0, 3)


def test_gradient_of_a_lookup_is_sparse(either: Any) -> None:
    def build() -> None:
        table = placeholder("table", shape=(5, 2))
        tf.square(tf.gather(table, placeholder("rows", tf.int32)), name="y")

    graph_def = build_graph_def(build)
    feeds = {"table": np.arange(10, dtype=np.float32).reshape(5, 2), "rows": np.int32([3, 0, 3])}
    r = either.evaluate(load_graph(graph_def), feeds=feeds, ys=["y"], xs=["table"])
    wanted = reference.evaluate(graph_def, feeds, ys=["y"], xs=["table"])
    sparse = r.gradients["table"]
    assert isinstance(sparse, gr.Sparse)
    assert np.asarray(sparse.indices).tolist() == [3, 0, 3]
    assert np.asarray(sparse.values).shape == (3, 2)
    assert_close(dense(sparse), wanted.gradients["table"])


def test_three_kinds_of_no_gradient_are_distinguished(either: Any, channel: Any) -> None:
    from gradrule.v1 import tensor_pb2
    from tests.service import raw

    graph = raw.graph(
        raw.placeholder(),
        raw.placeholder("apart"),
        raw.placeholder("i", tensor_pb2.DT_INT32),
        raw.node("y", "Sign", "x"),
    )
    i = tensor_pb2.Tensor(dtype=tensor_pb2.DT_INT32, int_val=[1])
    feeds = {"x": raw.tensor([1.0]), "apart": raw.tensor([1.0]), "i": i}
    answer = raw.evaluate(channel, raw.request(graph, feeds, vjp=raw.vjp(xs=["x", "apart", "i"])))
    assert [gradient.WhichOneof("value") for gradient in answer.gradients] == [
        "dense",
        "unconnected",
        "not_differentiable",
    ]
    r = either.evaluate(
        graph.SerializeToString(), feeds={"x": [1.0], "apart": [1.0], "i": 1}, ys=["y"], xs=["apart", "i"]
    )
    assert dict(r.gradient_kinds) == {"apart": "unconnected", "i": "not_differentiable"}
    assert r.gradients["apart"] is None
    assert r.gradients["i"] is None


def test_x_that_nothing_depends_on_needs_no_feed(either: Any) -> None:
    g = gr.Graph()
    g.op("Square", g.placeholder("x", "float32", [None]), name="y")
    g.placeholder("apart", "float32", [None])
    r = either.evaluate(g, feeds={"x": [3.0]}, ys=["y"], xs=["x", "apart"])
    assert_close(r.gradients["x"], np.float32([6]))
    assert r.gradients["apart"] is None


FLOATS = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])
def test_gradients_of_every_float_dtype_equal_tensorflow(either: Any, dtype: str) -> None:
    g = gr.Graph()
    g.op("Square", g.placeholder("x", dtype, [None]), name="y")
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    x = np.array([1.5, -2.0, 0.0]).astype(numpy_dtype)
    words: dict[str, Any] = {"fetches": ["y"], "ys": ["y"], "xs": ["x"], "grad_ys": [np.ones(3).astype(numpy_dtype)]}
    for feed in (x, [1.5, -2.0, 0.0]):
        r = either.evaluate(g, feeds={"x": feed}, **words)
        assert r.outputs["y"].dtype == r.gradients["x"].dtype == numpy_dtype
        assert r.outputs["y"].tolist() == [2.25, 4.0, 0.0]
        assert r.gradients["x"].tolist() == [3.0, -4.0, 0.0]
    ruled = either.evaluate(g, feeds={"x": x}, overrides={"Square": gr.Rule("0.5 * dy")}, **words)
    assert ruled.gradients["x"].dtype == numpy_dtype
    assert ruled.gradients["x"].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integer_dtypes_are_exact(either: Any, dtype: str) -> None:
    g = gr.Graph()
    g.op("Identity", g.placeholder("x", dtype, [None]), name="y")
    limits = np.iinfo(dtype)
    x = np.array([limits.min, 0, 1, limits.max], dtype)
    r = either.evaluate(g, feeds={"x": x}, fetches=["y"])
    assert r.outputs["y"].dtype == x.dtype
    assert r.outputs["y"].tolist() == x.tolist()


def test_bools_are_evaluated(either: Any) -> None:
    g = gr.Graph()
    g.op("LogicalNot", g.placeholder("x", "bool", [None, 1]), name="y")
    r = either.evaluate(g, feeds={"x": [[True], [False]]}, fetches=["y"])
    assert r.outputs["y"].dtype == np.bool_
    assert r.outputs["y"].tolist() == [[False], [True]]


def test_strings_are_evaluated(either: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "string", [None])
    g.op("StringLength", x, name="length")
    words: dict[str, Any] = {"fetches": ["length", "x"]}
    # NumPy's fixed-length byte strings drop trailing zero bytes.
    texts = [b"abc", b"\x00\xff", b"", b"a\x00"]
    for feed in (texts, np.array(texts, object)):
        r = either.evaluate(g, feeds={"x": feed}, **words)
        assert r.outputs["length"].tolist() == [3, 2, 0, 2]
        assert r.outputs["x"].tolist() == texts
    r = either.evaluate(g, feeds={"x": ["héllo", ""]}, **words)
    assert r.outputs["x"].tolist() == ["héllo".encode(), b""]


def test_strings_and_bytes_together(either: Any) -> None:
    g = gr.Graph()
    g.op("Identity", g.placeholder("x", "string", [None]), name="y")
    assert either.evaluate(g, feeds={"x": ["a", b"\xff"]}, fetches=["y"]).outputs["y"].tolist() == [b"a", b"\xff"]


def test_special_values_pass_unchanged(either: Any) -> None:
    g = gr.Graph()
    g.op("Identity", g.placeholder("x", "float32", [None]), name="y")
    x = np.float32([np.nan, np.inf, -np.inf, -0.0, 1e-45])
    r = either.evaluate(g, feeds={"x": x}, fetches=["y"])
    assert r.outputs["y"].tobytes() == x.tobytes()


def test_answer_reports_device_and_times(either: Any) -> None:
    r = either.evaluate(load_graph(GRAPH), feeds=FEEDS, fetches=["p"])
    assert r.device == "CPU:0"
    assert len(r.digests.graph) == len(r.digests.program) == 64
    import hashlib

    assert r.digests.graph == hashlib.sha256(GRAPH.SerializeToString()).hexdigest()
    assert all(0 <= part < 30 for part in (r.timings.queue, r.timings.compile, r.timings.run))
    assert r.timings.run > 0


def test_second_call_does_not_compile(either: Any) -> None:
    g = gr.Graph()
    g.op("Square", g.placeholder("x", "float32", [None]), name=f"y{id(either)}")
    words: dict[str, Any] = {"fetches": [f"y{id(either)}"]}
    first = either.evaluate(g, feeds={"x": [1.0]}, **words)
    second = either.evaluate(g, feeds={"x": [2.0, 3.0]}, **words)
    assert first.timings.compile > 0
    assert second.timings.compile == 0
    assert first.digests == second.digests


def test_program_is_compiled_evaluated_and_listed(either: Any) -> None:
    p = either.compile(load_graph(GRAPH), fetches=["p"], ys=["p"], xs=["a", "b"])
    assert p.name.startswith("programs/")
    assert {name: (spec.dtype, spec.shape) for name, spec in p.inputs.items()} == {
        "a": ("float32", (None,)),
        "b": ("float32", (None,)),
    }
    assert list(p.outputs) == ["p"]
    called = p(a=A, b=B)
    evaluated = p.evaluate(FEEDS)
    by_name = either.program(p.name).evaluate(FEEDS)
    for r in (called, evaluated, by_name):
        assert_close(r.outputs["p"], (A * B) ** 2)
        assert_close(r.gradients["a"], 2 * A * B * B)
    assert evaluated.timings.compile == 0
    upstream = p.evaluate(FEEDS, grad_ys=[np.float32([1, 0, 0])])
    assert_close(upstream.gradients["a"], 2 * A * B * B * np.float32([1, 0, 0]))


def test_program_of_equal_content_is_the_same(either: Any) -> None:
    words: dict[str, Any] = {"fetches": ["p"], "ys": ["p"], "xs": ["a"]}
    first, again = either.compile(load_graph(GRAPH), **words), either.compile(load_graph(GRAPH), **words)
    other = either.compile(load_graph(GRAPH), fetches=["p"], ys=["p"], xs=["b"])
    assert first.name == again.name != other.name


def test_listed_program_is_complete(either: Any) -> None:
    overrides = [gr.Override("ste", op_type="Square")]
    p = either.compile(load_graph(GRAPH), ys=["p"], xs=["a"], overrides=overrides)
    (listed,) = (item for item in either.list_programs() if item.name == p.name)
    assert [item.rule for item in listed.overrides] == ["ste"]
    assert listed.overrides == p.overrides
    assert listed.default_gradient_nodes == p.default_gradient_nodes != []


def test_deleted_program_is_gone(either: Any) -> None:
    p = either.compile(load_graph(GRAPH), fetches=["q"], name="short-lived")
    assert p.name in {item.name for item in either.list_programs()}
    either.delete_program(p.name)
    assert p.name not in {item.name for item in either.list_programs()}
    with refused("PROGRAM_NOT_FOUND"):
        p.evaluate(FEEDS)


def test_parallel_calls_do_not_mix(client: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    p = client.compile(load_graph(GRAPH), fetches=["p"], ys=["p"], xs=["a"])

    def call(number: int) -> bool:
        a = np.float32([number, number + 1, number + 2])
        r = p.evaluate({"a": a, "b": B})
        return np.allclose(r.outputs["p"], (a * B) ** 2) and np.allclose(r.gradients["a"], 2 * a * B * B)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(200)))


def test_gradient_of_a_gather_is_sparse_or_dense_on_request(either: Any) -> None:
    g = gr.Graph()
    table = g.placeholder("table", "float32", [4, 2])
    g.op("GatherV2", table, g.constant([1, 1, 3]), g.constant(0), name="y")
    feeds = {"table": np.arange(8, dtype=np.float32).reshape(4, 2)}
    whole = np.float32([[0, 0], [2, 2], [0, 0], [1, 1]])
    slices = either.evaluate(g, feeds, ys=["y"], xs=["table"]).gradients["table"]
    assert isinstance(slices, gr.Sparse)
    assert_close(slices.to_dense(), whole)
    r = either.evaluate(g, feeds, ys=["y"], xs=["table"], dense_gradients=True)
    assert r.gradient_kinds["table"] == "dense"
    assert_close(r.gradients["table"], whole)
    program = either.compile(g, ys=["y"], xs=["table"], dense_gradients=True)
    assert_close(program.evaluate(feeds).gradients["table"], whole)
    with program.forward(feeds) as handle:
        assert_close(handle.vjp()["table"], whole)
