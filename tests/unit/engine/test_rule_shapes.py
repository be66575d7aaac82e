"""A formula whose shapes do not fit names the user's node, the rule and the column."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gradrule_server.engine.tf_errors import failed_node
from gradrule_server.errors import GradruleError, reason_name
from tests.service.graph_defs import build_graph, placeholder
from tests.unit.engine.building import differentiate

X, W = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("rule", "column"),
    [
        ("(dy * x1, None)", 5),
        ("(None, 2 * dy + x1)", 15),
        ("(where(dy > x1, x0, 0), None)", 11),
        ("(None, sum_to(maximum(dy, x0), x1))", 15),
        ("(dy * size(x0, axis=(0, -3)), None)", 7),
    ],
)
def test_shapes_that_do_not_fit_are_located(rule: str, column: int) -> None:
    def build() -> None:
        product = tf.matmul(placeholder("x", shape=X.shape), placeholder("w", shape=W.shape), name="enc/l1/matmul")
        tf.multiply(product, 1.0, name="y")

    with pytest.raises(GradruleError) as caught:
        differentiate(build_graph(build), {"x": X, "w": W}, np.ones((2, 4), np.float32), {"MatMul": rule})
    assert reason_name(caught.value.reason) == "RULE_NOT_APPLICABLE"
    assert caught.value.findings[0].node == "enc/l1/matmul"
    for words in (
        f"column {column} of its expression",
        "'enc/l1/matmul' (MatMul)",
        "must be equal" if "size" not in rule else "Invalid reduction dimension",
    ):
        assert words in caught.value.message
    assert "rule/" not in caught.value.message


def test_a_gradient_that_fails_while_it_runs_names_the_node_that_it_belongs_to() -> None:
    """Where shapes are not known before running, TensorFlow's message names a node of the gradient only."""

    def build() -> None:
        product = tf.matmul(
            placeholder("x", shape=(None, None)), placeholder("w", shape=(None, None)), name="enc/l1/matmul"
        )
        tf.multiply(product, 1.0, name="y")

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        differentiate(build_graph(build), {"x": X, "w": W}, np.ones((2, 4), np.float32), {"MatMul": "(dy * x1, None)"})
    assert failed_node(caught.value.message) == "enc/l1/matmul"
