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
from gradrule_server.errors import GradruleError
from gradrule_server.rules import RuleGraph, Signature
from gradrule_server.rules.language import lower, parse
from gradrule_server.rules.language.functions import FUNCTIONS
from tests.unit.rules.running import exact, number_of
from tests.unit.rules.test_language import ROWS, TOLERANCE, reference

LIBRARIES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "numpy": (NUMPY, np.asarray, np.asarray),
    "torch": (TORCH, lambda value: tensor_of(value, torch.empty(())), array_of),
    "jax": (JAX, jnp.asarray, np.asarray),
}


def converted(values: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns values as those of a call: params and strings are NumPy arrays."""
    return {
        key: value if key == "salt" or key.startswith("param/") or value.dtype == object else convert(value)
        for key, value in values.items()
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
        results = run_rule_graph(library, graph.graph, graph.results, graph.inputs, converted(values, convert))
        found = [None if result is None else back(result) for result in results]
    for index, (result, wanted) in enumerate(zip(found, reference(row, values), strict=True)):
        assert (result is None) == (wanted is None)
        if result is not None:
            kind = row.specs()[f"x{index}"][0]
            assert result.dtype.name == kind
            assert result.shape == np.shape(wanted)
            np.testing.assert_allclose(exact(result), wanted, rtol=4 * TOLERANCE[kind], atol=4 * TOLERANCE[kind])


def weights_of(shape: tuple[int, ...]) -> Any:
    """Returns upstream gradients of the results of a rule, all of them different."""
    return np.linspace(1.0, 2.0, int(np.prod(shape))).reshape(shape)


def is_real(value: Any) -> bool:
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"


def derivatives_by_tensorflow(graph: RuleGraph, values: dict[str, Any], of: list[str]) -> list[Any]:
    """Returns the gradients of the results, times `weights_of` their shapes, by some of the variables."""
    import tensorflow as tf

    with tf.Graph().as_default() as own:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(graph.graph.SerializeToString()), name="")
        ys = [own.get_tensor_by_name(name) for name in graph.results if name is not None]
        feeds = {f"{placeholder}:0": values[variable] for variable, placeholder in graph.inputs.items()}
        with tf.compat.v1.Session(graph=own) as session:
            grad_ys = [tf.constant(weights_of(np.shape(y)), y.dtype) for y in session.run(ys, feeds)]
        ys = [tf.broadcast_to(y, tf.shape(grad_y)) for y, grad_y in zip(ys, grad_ys, strict=True)]
        xs = [own.get_tensor_by_name(f"{graph.inputs[name]}:0") for name in of]
        found = tf.gradients(ys, xs, grad_ys)
        found = [
            tf.zeros_like(x) if one is None else tf.convert_to_tensor(one) for x, one in zip(xs, found, strict=True)
        ]
        with tf.compat.v1.Session(graph=own) as session:
            return [exact(one) for one in session.run(found, feeds)]


def derivatives_by_torch(graph: RuleGraph, values: dict[str, Any], of: list[str]) -> list[Any]:
    """As `derivatives_by_tensorflow`."""
    given = converted(values, lambda value: tensor_of(value, torch.empty(())))
    for name in of:
        given[name].requires_grad_()
    results = [y for y in run_rule_graph(TORCH, graph.graph, graph.results, graph.inputs, given) if y is not None]
    total = sum((y * torch.tensor(weights_of(tuple(y.shape))).to(y.dtype)).sum() for y in results)
    xs = [given[name] for name in of]
    if not (isinstance(total, torch.Tensor) and total.requires_grad):
        return [np.zeros(x.shape) for x in xs]
    found = torch.autograd.grad(total, xs, allow_unused=True)
    return [np.zeros(x.shape) if one is None else exact(array_of(one)) for x, one in zip(xs, found, strict=True)]


def derivatives_by_jax(graph: RuleGraph, values: dict[str, Any], of: list[str]) -> list[Any]:
    """As `derivatives_by_tensorflow`."""

    def total(xs: list[Any]) -> Any:
        given = converted(values, jnp.asarray) | dict(zip(of, xs, strict=True))
        results = [y for y in run_rule_graph(JAX, graph.graph, graph.results, graph.inputs, given) if y is not None]
        return sum(jnp.sum(y * jnp.asarray(weights_of(y.shape), y.dtype)).astype(jnp.float64) for y in results)

    with jax.enable_x64(True):
        return [exact(np.asarray(one)) for one in jax.grad(total)([jnp.asarray(values[name]) for name in of])]


def check_derivatives(graph: RuleGraph, values: dict[str, Any], of: list[str], tolerance: float) -> None:
    """Compares the derivatives of a rule in PyTorch and JAX with TensorFlow's, where TensorFlow's are numbers."""
    wanted = derivatives_by_tensorflow(graph, values, of)
    for derivatives in (derivatives_by_torch, derivatives_by_jax):
        for name, one, reference_ in zip(of, derivatives(graph, values, of), wanted, strict=True):
            is_number = ~np.isnan(reference_)
            np.testing.assert_allclose(
                one[is_number],
                reference_[is_number],
                rtol=tolerance,
                atol=tolerance,
                err_msg=f"{derivatives.__name__} by {name}",
            )


# The row of digamma contains its pole 0.
@pytest.mark.parametrize("row", [row for row in WITH_VALUES if row.id != "fn-digamma"], ids=lambda row: row.id)
def test_derivatives_of_rows_are_those_of_tensorflow(row: Any) -> None:
    graph = lower(parse(row.expression, list(row.params)), Signature(row.types("x"), row.types("y")))
    values = row.values()
    of = [
        name
        for name in graph.inputs
        if name != "salt" and not name.startswith("param/") and is_real(np.asarray(values[name]))
    ]
    kinds = [row.specs()[f"x{index}"][0] for index, result in enumerate(graph.results) if result is not None]
    if not of or any("float" not in kind for kind in kinds):
        return
    narrow = {values[name].dtype.name for name in of} & {"float16", "bfloat16"}
    check_derivatives(graph, values, of, 0.05 if narrow else 1e-6 if "float32" in kinds else 1e-9)


KINKS = [[-1000.0, -90.0, -2.5, -1.0, -0.5, 0.0], [0.5, 1.0, 2.0, 2.5, 90.0, 1000.0]]
CALLS = ["{}(x)", "{}(x, 0)", "{}(x, 1)", "{}(0.5, x)", "{}(x, -1, 1)", "{}(x > 0, x, 2 * x)"]
# Functions of bool, and functions with poles. TensorFlow's second derivative of digamma is wrong below 0 in float32,
# that of JAX in float64.
OTHERS = ["where(any(x > 0), x, 0)", "where(all(x > 0), x, 0)", "lgamma(x + 0.25)", "digamma(abs(x) + 0.25)"]
OTHERS += [
    "where(x > 0, x, 0)",
    "x ** 2",
    "x ** 0",
    "abs(x) ** 0.5",
    "2 ** x",
    "x % 2",
    "x // 2",
    "max(x)",
    "min(abs(x))",
    "prod(x)",
]


def expressions_at_kinks() -> list[str]:
    """Returns calls of all functions of the language that fit one input."""
    found = []
    calls = [call.format(name) for name in FUNCTIONS for call in CALLS if name not in ("lgamma", "digamma")]
    for expression in [*calls, *OTHERS]:
        try:
            graph = lower(parse(f"dy * {expression}", []), Signature((number_of("float64"),), (number_of("float64"),)))
        except GradruleError:
            continue
        if "x0" in graph.inputs and not expression.startswith("sum_to(0.5"):
            found.append(expression)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("expression", expressions_at_kinks())
def test_second_derivatives_at_kinks_and_at_large_numbers_are_those_of_tensorflow(expression: str, dtype: str) -> None:
    """Sigmoids do not overflow; abs, relu, maximum and clip have TensorFlow's derivatives at their kinks."""
    number = number_of(dtype)
    graph = lower(parse(f"dy * {expression}", []), Signature((number,), (number,)))
    ones = np.ones(np.shape(KINKS), dtype)
    values = {"x0": np.array(KINKS, dtype), "y0": ones, "dy0": ones, "default0": ones, "salt": np.int64(7)}
    check_derivatives(graph, values, ["x0"], 2e-5 if dtype == "float32" else 1e-9)


def test_derivatives_that_are_no_numbers_stay_so() -> None:
    """The slope of the root of abs(x) at 0 is 0 times infinity, as in TensorFlow."""
    number = number_of("float64")
    graph = lower(parse("dy * abs(x) ** 0.5", []), Signature((number,), (number,)))
    values = {"x0": np.zeros(1), "dy0": np.ones(1)}
    for derivatives in (derivatives_by_tensorflow, derivatives_by_torch, derivatives_by_jax):
        assert np.isnan(derivatives(graph, values, ["x0"])).all()


def test_every_function_is_tried_at_kinks() -> None:
    # These are no functions of one value.
    names = FUNCTIONS.keys() - {"each", "first", "ignore_dy"}
    missing = [name for name in names if not any(f"{name}(" in one for one in expressions_at_kinks())]
    assert missing == []


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
