"""Graphs and rules compute exactly what they say: no optimizer regroups floating-point operations or replaces ops."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import gradrule as gr

# Each text is valid in Python, in the rules' language and with operators of the builder.
EXPRESSIONS = [
    "(x + 1e8) - 1e8",
    "(x - 1e8) + 1e8",
    "1e8 + (x - 1e8)",
    "1e8 - (1e8 - x)",
    "1e8 - (x + 1e8)",
    "((x + 1e8) + x) - 1e8",
    "(x * 1e30) * 1e-30",
    "(x * 1e-30) * 1e30",
    "(x * 3e38) * 1e-37",
    "(x * 3) * 0.1",
    "x / 3",
    "x / 49",
    "(x / 3) / 7",
    "(x / 3) * 3",
    "(x * 3) / 3",
    "7 / (3 / x)",
    "x * 0",
    "(x + x) - x",
    "0.1 * x + 0.2 * x",
    "(x * 0.1 + x) * 10",
    "maximum(2 * x, x)",
    "maximum(x, x * 1.5)",
    "minimum(2 * x, x)",
]
# Inexact fractions, a number that overflows when multiplied, and NaN.
X = np.array([0.1, -0.7, 1.2345678, 3e10, -2.5, -0.0, np.inf, np.nan], np.float32)


def as_numpy(expression: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        found: np.ndarray = eval(expression, {"x": X, "maximum": np.maximum, "minimum": np.minimum})
    return found


def assert_same_bits(found: dict[str, Any], wanted: dict[str, np.ndarray]) -> None:
    """Fails with the expressions whose results differ; all NaN count as equal."""
    differ = {
        name: (found[name], value)
        for name, value in wanted.items()
        if not np.array_equal(found[name], value, equal_nan=True)
        or not np.array_equal(np.signbit(found[name])[~np.isnan(value)], np.signbit(value)[~np.isnan(value)])
    }
    assert not differ


def test_graph_computes_each_op_as_written(client: gr.Client) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    words = {
        "x": x,
        "maximum": lambda a, b: g.op_output("Maximum", a, b),
        "minimum": lambda a, b: g.op_output("Minimum", a, b),
    }
    for index, expression in enumerate(EXPRESSIONS):
        g.op_output("Identity", eval(expression, words), name=f"y{index}")
    names = [f"y{index}" for index in range(len(EXPRESSIONS))]
    found = client.evaluate(g, feeds={"x": X}, fetches=names).outputs
    assert_same_bits(
        {expression: found[name] for expression, name in zip(EXPRESSIONS, names, strict=True)},
        {expression: as_numpy(expression) for expression in EXPRESSIONS},
    )


def test_rule_computes_each_operation_as_written(client: gr.Client) -> None:
    g = gr.Graph()
    for index in range(len(EXPRESSIONS)):
        g.op("Sign", g.placeholder(f"x{index}", "float32", [None]), name=f"y{index}")
    numbers = range(len(EXPRESSIONS))
    found = client.evaluate(
        g,
        feeds={f"x{index}": np.zeros_like(X) for index in numbers},
        ys=[f"y{index}" for index in numbers],
        xs=[f"x{index}" for index in numbers],
        grad_ys={f"y{index}": X for index in numbers},
        overrides=[
            gr.Override(gr.Rule(re.sub(r"\bx\b", "dy", expression)), node=f"y{index}")
            for index, expression in enumerate(EXPRESSIONS)
        ],
    ).gradients
    assert_same_bits(
        {expression: found[f"x{index}"] for index, expression in enumerate(EXPRESSIONS)},
        {expression: as_numpy(expression) for expression in EXPRESSIONS},
    )


@pytest.mark.parametrize("as_handle", [False, True], ids=["call", "forward"])
def test_ops_with_constants_are_not_merged(client: gr.Client, *, as_handle: bool) -> None:
    """Sums of constants, a convolution and a matrix product, in a session and in a `tf.function`."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 4])
    large = g.constant(np.full(4, 1e8, np.float32))
    image = g.op_output("Reshape", x, g.constant(np.array([-1, 2, 2, 1], np.int32)))
    one = g.constant(np.full((1, 1, 1, 1), 1e30, np.float32))
    g.op("AddN", g.op_output("AddV2", x, large), g.op_output("Neg", large * g.op_output("OnesLike", x)), name="sum")
    g.op("Mul", g.op_output("Conv2D", image, one, strides=[1, 1, 1, 1], padding="SAME"), 1e-30, name="convolved")
    g.op("MatMul", x * 1e30, g.constant(np.eye(4, dtype=np.float32) * np.float32(1e-30)), name="product")
    value = np.array([[0.1, -0.7, 2.5, 3e10]], np.float32)
    with np.errstate(all="ignore"):
        wide = value * np.float32(1e30)
        wanted = {
            "sum": (value + np.float32(1e8)) - np.float32(1e8),
            "convolved": (wide * np.float32(1e-30)).reshape(1, 2, 2, 1),
        }
    names = [*wanted, "product"]
    program = client.compile(g, fetches=names, ys=["sum"], xs=["x"])
    if as_handle:
        with program.forward({"x": value}) as handle:
            found = handle.outputs
    else:
        found = program(x=value).outputs
    assert np.isinf(found["convolved"]).sum() == 1 and not np.isfinite(found["product"]).all()
    assert_same_bits(found, wanted)
