"""The rows of docs/reference/expression-language.md, computed with NumPy, PyTorch and JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradrule._bridges import philox
from gradrule._bridges.jax_arrays import JAX
from gradrule._bridges.rule_graphs import NUMPY, run_rule_graph
from gradrule._bridges.torch_arrays import TORCH, array_of, tensor_of
from gradrule_server.rules import Signature
from gradrule_server.rules.language import lower, parse
from tests.unit.rules.running import exact
from tests.unit.rules.test_language import ROWS, TOLERANCE, reference

LIBRARIES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "numpy": (NUMPY, np.asarray, np.asarray),
    "torch": (TORCH, lambda value: tensor_of(value, torch.empty(())), array_of),
    "jax": (JAX, jnp.asarray, np.asarray),
}


# Limits of TensorFlow's kernels are not those of the other libraries.
WITH_VALUES = [row for row in ROWS if isinstance(row.gives, str) and not row.section.startswith("Limits of")]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("row", WITH_VALUES, ids=lambda row: row.id)
def test_rows_give_what_they_say(row: Any, name: str) -> None:
    library, convert, back = LIBRARIES[name]
    graph = lower(parse(row.expression, list(row.params)), Signature(row.types("x"), row.types("y")))
    values = row.values()
    with jax.enable_x64(True):
        # As in a call, params and strings are NumPy arrays.
        given = {
            key: value if key == "salt" or key.startswith("param/") or value.dtype == object else convert(value)
            for key, value in values.items()
        }
        results = run_rule_graph(library, graph.graph, graph.results, graph.inputs, given)
        found = [None if result is None else back(result) for result in results]
    for index, (result, wanted) in enumerate(zip(found, reference(row, values), strict=True)):
        assert (result is None) == (wanted is None)
        if result is not None:
            kind = row.specs()[f"x{index}"][0]
            assert result.dtype.name == kind
            assert result.shape == np.shape(wanted)
            np.testing.assert_allclose(exact(result), wanted, rtol=4 * TOLERANCE[kind], atol=4 * TOLERANCE[kind])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
@pytest.mark.parametrize("seed", [[3, -7], [2**62, 5]])
def test_random_numbers_are_those_of_tensorflow(dtype: str, shape: Any, seed: Any) -> None:
    import tensorflow as tf

    key, counter = philox.key_and_counter(np.array(seed))
    uniform = tf.random.stateless_uniform(shape, seed=seed, dtype=dtype, alg="philox")
    np.testing.assert_array_equal(philox.uniform(shape, key, counter, np.dtype(dtype)), uniform)
    normal = tf.random.stateless_normal(shape, seed=seed, dtype=dtype, alg="philox")
    np.testing.assert_allclose(philox.normal(shape, key, counter, np.dtype(dtype)), normal, rtol=2e-6, atol=2e-6)
