"""Compares a graph, plain and with an override, against local TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from tests.service import reference
from tests.service.answers import dense, rules_by_node
from tests.service.graph_defs import all_nodes, build_graph_def, load_graph

FIVE = "5 * dy"
RNG = np.random.default_rng(0)


def five(op: Any, dy: Any) -> Any:
    return dy * tf.constant(5, dy.dtype)


def both_halves(op: Any, *dys: Any) -> Any:
    return tuple(None if own is None else own / 2 for own in reference.own_gradient(op.type)(op, *dys))


@dataclass(frozen=True)
class Structure:
    """Describes a graph: `make` returns a GraphDef with placeholders named as `feeds` and a y; the rule of `op_type` is
    in both languages.
    """

    make: Callable[[], Any]
    feeds: Mapping[str, Any]
    xs: list[str]
    op_type: str
    expression: str = FIVE
    python: Callable[..., Any] = five
    fetches: list[str] = field(default_factory=lambda: ["y"])
    tolerance: float = 1e-9


Table = dict[str, Structure]


def register(
    table: Table, name: str, feeds: Mapping[str, Any], op_type: str, xs: list[str] | None = None, **more: Any
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds the decorated builder to the table; `xs`: all float feeds unless given."""
    floats = [key for key, value in feeds.items() if np.asarray(value).dtype.kind in "fc"]

    def registered(build: Callable[[], None]) -> Callable[[], None]:
        table[name] = Structure(lambda: build_graph_def(build), feeds, xs or floats, op_type, **more)
        return build

    return registered


def feed(name: str, of: Mapping[str, Any]) -> Any:
    """Makes a placeholder for a value; its first dimension is unknown."""
    value = np.asarray(of[name])
    shape = [None, *value.shape[1:]] if value.ndim else []
    return tf.compat.v1.placeholder(tf.string if value.dtype.kind in "OSU" else value.dtype, shape, name=name)


def values(*shape: int) -> Any:
    return RNG.normal(size=shape)


def check(client: Any, item: Structure) -> None:
    """Compares outputs and gradients with TensorFlow, and asserts that the override changes a gradient."""
    plain, ruled = (compare(client, item, overridden=overridden) for overridden in (False, True))
    assert any(not np.allclose(a, b) for a, b in zip(plain, ruled, strict=True)), "the override changes nothing"


def compare(client: Any, item: Structure, *, overridden: bool) -> list[Any]:
    """Returns the gradients after comparing them."""
    graph_def = item.make()
    chosen = {node.name: item.python for node in all_nodes(graph_def) if node.op == item.op_type}
    assert chosen
    words: dict[str, Any] = {"fetches": item.fetches, "ys": ["y"], "xs": item.xs}
    wanted = reference.evaluate(graph_def, item.feeds, **words, rules=chosen if overridden else None)
    overrides = {item.op_type: gr.Rule(item.expression)} if overridden else None
    r = client.evaluate(load_graph(graph_def), feeds=item.feeds, **words, overrides=overrides)
    for name in item.fetches:
        assert_near(r.outputs[name], wanted.outputs[name], item.tolerance)
    for x in item.xs:
        assert_near(dense(r.gradients[x]), wanted.gradients[x], item.tolerance)
    if overridden:
        assert wanted.asked
        assert {name.rpartition("/")[2] for name in rules_by_node(r)} & {
            name.rpartition("/")[2] for name in wanted.asked
        }
    return [np.asarray(dense(r.gradients[x])) for x in item.xs]


def assert_near(got: Any, wanted: Any, tolerance: float) -> None:
    wanted = np.asarray(wanted)
    if wanted.dtype.kind in "OS":
        np.testing.assert_array_equal(got, wanted)
        return
    assert np.asarray(got).dtype == wanted.dtype
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * scale)
    assert np.shape(got) == wanted.shape
