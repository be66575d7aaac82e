"""The comparison itself: that it sees what it is there to see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.models.architectures import ERFC, RELU, RELU6, SIGMOID, TANH
from tests.models.comparing import TOLERANCE, Row, difference
from tests.models.substitution import Substitution, straight_through
from tests.models.telling import page

WANTED: Any = np.float32([1.0, -20.0, 0.5])


def test_a_planted_error_is_seen() -> None:
    assert difference(WANTED.copy(), WANTED) == 0.0
    for place in range(3):
        found = WANTED.copy()
        found[place] += 0.001
        assert difference(found, WANTED) > TOLERANCE


@pytest.mark.parametrize("wanted", [np.zeros(3, np.float32), WANTED * np.float32(np.nan), WANTED.astype(np.float64)])
def test_nothing_is_compared_with_nothing(wanted: Any) -> None:
    with pytest.raises(AssertionError):
        difference(wanted, wanted)


@pytest.mark.parametrize("substitution", [RELU, RELU6, SIGMOID, TANH, ERFC], ids=lambda item: item.op_type)
def test_a_substitute_is_the_op_with_another_gradient(substitution: Substitution) -> None:
    x = tf.constant([-1.5, 0.5, 7.0])

    @tf.function(autograph=False)
    def own() -> tuple[tf.Tensor, tf.Tensor]:
        y = getattr(substitution.module, substitution.function)(x)
        return y, tf.gradients(y, x)[0]

    plain = own.get_concrete_function()
    asked: set[str] = set()
    with substitution.by(straight_through, asked):
        replaced = tf.function(own.python_function, autograph=False).get_concrete_function()
    assert any(op.type == substitution.op_type for op in plain.graph.get_operations())
    assert len(asked) == 1
    np.testing.assert_allclose(replaced()[0], plain()[0], rtol=1e-6)
    assert not np.allclose(replaced()[1], plain()[1])


def test_the_page_has_a_line_for_each_model() -> None:
    rows = [Row(name, "Relu", 10, 1234, differences={"plain": 1e-7, "ste": 0.0}) for name in ("First", "Second")]
    lines = page(rows).splitlines()
    assert [line for line in lines if line.startswith("| First |")] == [
        "| First | 10 | 1,234 | Relu | 0.00 | 0.00 | 0.00 | 0.00 | 1e-07 | 0e+00 |"
    ]
    assert sum(line.startswith("| Second |") for line in lines) == 1
