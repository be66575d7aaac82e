"""Indexing and operators of the builder, evaluated and differentiated by a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.service.answers import assert_close, dense, refused

CUBE = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5) - 7


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        (1, -2, 3),
        slice(1, 3),
        slice(None, None, -2),
        (Ellipsis, 0),
        (0, Ellipsis, slice(None, None, 2)),
        (Ellipsis, None, slice(1, 3)),
        (slice(2, 100), None, -1, slice(None, 2)),
        CUBE > 7,
    ],
    ids=lambda index: repr(index)[:40],
)
def test_indexing_gives_the_values_and_gradients_of_numpy(client: Any, index: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3, 5])
    y = g.square(x[index], name="y")
    r = client.evaluate(g, {x: CUBE}, fetches=y, ys=y, xs=x)
    assert_close(r.outputs[y], CUBE[index] ** 2)
    taken = np.zeros_like(CUBE)
    taken[index] = 1
    assert_close(dense(r.gradients[x]), 2 * CUBE * taken)


def test_scalar_tensors_can_be_indices(client: Any) -> None:
    g = gr.Graph()
    x, i, j = g.placeholder("x", "float32"), g.placeholder("i", "int32", []), g.placeholder("j", "int64", [])
    y = g.identity(x[i, 1:, :j], name="y")
    p = client.compile(g, fetches=y, ys=y, xs=x)
    for at, stop in ((0, 5), (-1, 2), (3, 0)):
        r = p(x=CUBE, i=at, j=stop)
        assert_close(r.outputs["y"], CUBE[at, 1:, :stop])
        taken = np.zeros_like(CUBE)
        taken[at, 1:, :stop] = 1
        assert_close(dense(r.gradients["x"]), taken)
    p.delete()


def test_override_applies_to_a_slice(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.identity(x[1:], name="y")
    r = client.evaluate(g, {"x": [1, 2, 3]}, ys="y", xs="x", overrides={"StridedSlice": gr.Rule("5 * default")})
    assert_close(r.gradients["x"], np.float32([0, 5, 5]))


def test_index_out_of_range_is_refused(client: Any) -> None:
    g = gr.Graph()
    y = g.placeholder("x", "float32", [None])[7]
    with refused("EXECUTION_FAILED"):
        client.evaluate(g, {"x": [1, 2, 3]}, fetches=y)


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x % 3,
        lambda x: x // 2,
        lambda x: ~(x > 0),
        lambda x: (x > 0) & (x < 4),
        lambda x: (x > 0) | (x < -4),
        lambda x: (x > 0) ^ (x < 4),
    ],
)
def test_operators_give_the_values_of_numpy(client: Any, operate: Callable[[Any], Any]) -> None:
    g = gr.Graph()
    y = operate(g.placeholder("x", "float32"))
    np.testing.assert_array_equal(client.evaluate(g, {"x": CUBE}, fetches=y).outputs[y], operate(CUBE))


def test_found_nodes_can_be_used_as_tensors(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.sign(x, name="y")
    (y,) = g.find(op_type="Sign")
    r = client.evaluate(g, {g.node("x"): [2.0]}, fetches=y, ys=y, xs=x, overrides=[gr.Override("ste", node=y)])
    assert (r.outputs[y].tolist(), r.gradients[x].tolist()) == ([1.0], [1.0])


def test_integers_in_lists_become_floats_for_a_rule(client: Any) -> None:
    sampled = client.sample_rule(gr.Rule("(dy * x1, dy * x)"), x=[1, 2], x1=[3, 4], dy=[1, 10])
    assert_close(sampled.gradients["dx"], np.float32([3, 40]))
    assert_close(sampled.gradients["dx1"], np.float32([1, 20]))
    gathered = client.sample_rule("GatherV2", x=[1, 2], x1=[1], x2=0, dy=[3])
    assert_close(dense(gathered.gradients["dx"]), np.float32([0, 3]))
