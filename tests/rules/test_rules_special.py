"""Properties of single rules beside their case: tables of their sources, extreme numbers, broadcasting, noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule_server.rules import Signature
from gradrule_server.rules.catalogue import BUILTINS
from tests.rules.evaluation import BoundRule, params_of
from tests.rules.expression_case import Array
from tests.rules.expression_cases import CASES
from tests.unit.rules.running import exact, number_of, numpy_type, run


def evaluate_default(name: str, values: dict[str, Any], dtype: str = "float64", **params: float) -> Array:
    """Returns the first gradient of a rule with its defaults for values by variable."""
    rule, case = BUILTINS[name], CASES[name]
    with BoundRule(rule, case, dtype) as ask:
        given = {key: np.asarray(value, numpy_type(dtype)) for key, value in values.items()}
        result = ask(given, _all(name, params))[0]
    assert result is not None
    return result


def _all(name: str, params: dict[str, float]) -> dict[str, Any]:
    defaults = {param.name: param.default for param in BUILTINS[name].params}
    return defaults | params


# dy, x, dx: the tables of Lucid's tests.
REDIRECTED = [(1, -1, 0), (-1, -1, -1), (1, 1, 1), (-1, 1, -1)]
REDIRECTED_6 = [*REDIRECTED, (1, 0, 1), (-1, 0, -1), (1, 6, 1), (-1, 6, -1), (1, 9, 1), (-1, 9, 0)]
PLAIN = [(1, -1, 0), (-1, -1, 0), (1, 1, 1), (-1, 1, -1)]
PLAIN_6 = [*PLAIN, (1, 9, 0), (-1, 9, 0)]


@pytest.mark.parametrize(
    ("name", "step", "table"),
    [
        ("redirected_relu", 0, REDIRECTED),
        ("redirected_relu", 16, REDIRECTED),
        ("redirected_relu", 17, PLAIN),
        ("redirected_relu6", 0, REDIRECTED_6),
        ("redirected_relu6", 17, PLAIN_6),
    ],
)
def test_redirected_relu_equals_lucids_tables(name: str, step: int, table: list[tuple[int, int, int]]) -> None:
    dy, x, wanted = (np.array(column, np.float64)[:, None] for column in zip(*table, strict=True))
    np.testing.assert_array_equal(evaluate_default(name, {"x0": x, "dy0": dy}, step=step), wanted)


def test_sample_with_a_gradient_is_not_redirected() -> None:
    x, dy = np.array([[-1.0, 2.0], [-1.0, -2.0]]), np.array([[-1.0, 3.0], [-1.0, 3.0]])
    np.testing.assert_array_equal(evaluate_default("redirected_relu", {"x0": x, "dy0": dy}, step=0), [[0, 3], [-1, 0]])


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("bits", [2, 8])
def test_fake_quant_equals_tensorflows_gradient(bits: int, narrow: bool, per_channel: bool) -> None:
    lows = [-1.03, 0.0, 0.3, -3.0, -1.5, -0.01, 0.0]
    highs = [1.9, 2.0, 1.7, -1.0, 1.5, 6.0, 0.0]
    rule = BUILTINS["fake_quant"]
    number = number_of("float32")
    graph = rule.content.bind(Signature((number,) * 3, (number,)))
    params = {"param/num_bits": np.float64(bits), "param/narrow_range": np.float64(narrow)}
    random = np.random.default_rng(2)
    x, dy = (random.normal(scale=2, size=(40, len(lows))).astype(np.float32) for _ in range(2))

    name = "PerChannel" if per_channel else ""
    own = getattr(tf.raw_ops, f"FakeQuantWithMinMaxVars{name}Gradient")
    pairs = [(lows, highs)] if per_channel else list(zip(lows, highs, strict=True))
    for low, high in pairs:
        bounds = np.asarray(low, np.float32), np.asarray(high, np.float32)
        got = run(graph, {"x0": x, "x1": bounds[0], "x2": bounds[1], "dy0": dy} | params)
        wanted = own(gradients=dy, inputs=x, min=bounds[0], max=bounds[1], num_bits=bits, narrow_range=narrow)
        for result, reference in zip(got, list(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(result), reference.numpy(), rtol=1e-5, atol=1e-5)


def test_lsq_treats_edges_as_outside_like_the_paper() -> None:
    x = np.array([-1.0, -0.75, 0.0, 1.5, 2.0])
    values = {"x0": x, "x1": np.float64(0.5), "dy0": np.ones(5)}
    with BoundRule(BUILTINS["lsq"], CASES["lsq"], "float64") as ask:
        to_x, to_step = ask(values, {"qn": -2.0, "qp": 3.0})
    np.testing.assert_array_equal(np.asarray(to_x), [0, 1, 1, 0, 0])
    # -2 at the lower edge, round(-1.5) + 1.5 = -0.5, 0, then 3 at the upper edge and beyond it.
    np.testing.assert_allclose(np.asarray(to_step), (-2 - 0.5 + 0 + 3 + 3) / np.sqrt(5 * 3))


def test_lsq_and_pact_sum_over_broadcast_axes() -> None:
    """A step or a level for each channel."""
    number = number_of("float64")
    x, dy = np.arange(12.0).reshape(4, 3) - 5, np.ones((4, 3))
    pact = BUILTINS["pact"].content.bind(Signature((number,) * 2, (number,)))
    to_x, to_level = run(pact, {"x0": x, "x1": np.array([0.0, 2.0, 9.0]), "dy0": dy})
    np.testing.assert_array_equal(np.asarray(to_level), [2, 2, 0])
    np.testing.assert_array_equal(np.asarray(to_x).sum(0), [2, 3, 4])
    lsq = BUILTINS["lsq"].content.bind(Signature((number,) * 2, (number,)))
    params = {"param/qn": np.float64(-2), "param/qp": np.float64(3)}
    _, to_steps = run(lsq, {"x0": x, "x1": np.full(3, 100.0), "dy0": dy} | params)
    np.testing.assert_allclose(np.asarray(to_steps), -x.sum(0) / 100 / np.sqrt(12 * 3))


def test_gradients_of_broadcast_division_inputs_are_summed() -> None:
    x0, x1 = np.array([[1.0], [2.0]]), np.array([1.0, 0.0, 4.0])
    dy, y = np.full((2, 3), 3.0), np.array([[1.0, 0.0, 0.25], [2.0, 0.0, 0.5]])
    graph = BUILTINS["safe_div"].content.bind(Signature((number_of("float64"),) * 2, (number_of("float64"),)))
    first, second = run(graph, {"x0": x0, "x1": x1, "y0": y, "dy0": dy})
    np.testing.assert_allclose(np.asarray(first), [[3.75], [3.75]])
    np.testing.assert_allclose(np.asarray(second), [-9.0, 0.0, -0.5625])


def test_safe_norm_along_a_kept_axis() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0]])
    result = evaluate_default("safe_norm", {"x0": x, "y0": [[5.0], [0.0]], "dy0": [[2.0], [1.0]]})
    np.testing.assert_allclose(result, [[1.2, 1.6], [0, 0]])


def test_zero_rule_gives_a_gradient_for_every_input() -> None:
    float32, int32 = number_of("float32"), number_of("int32")
    graph = BUILTINS["gradient_zero"].content.bind(Signature((float32, int32, float32), (float32,)))
    assert [result is None for result in graph.results] == [False, True, False]


def test_step_rules_accept_extreme_numbers() -> None:
    x = np.array([-200.0, -3.6, 0.0, 3.6, 200.0])
    for name in ("sigmoid_surrogate", "fast_sigmoid", "erf", "atan", "log1pexp", "s2nn", "swish_sign"):
        assert np.isfinite(evaluate_default(name, {"x0": x, "dy0": np.ones(5)}, "float32")).all(), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["swish_sign", "squarewave_fourier"])
def test_the_largest_inputs_give_finite_slopes(name: str, dtype: str) -> None:
    largest = float(tf.as_dtype(dtype).max)
    x = np.array([-largest, -0.7 * largest, 0.7 * largest, largest]).astype(numpy_type(dtype))
    found = exact(evaluate_default(name, {"x0": x, "dy0": np.ones(4)}, dtype))
    assert np.isfinite(found).all()
    if name == "swish_sign":
        np.testing.assert_array_equal(found, 0)


def test_a_periodic_slope_is_exact_far_from_zero() -> None:
    x = np.array([3.0 + 5 * 10**5, -3.0 - 5 * 2**17])
    wanted = np.cos(2 * np.pi * 3 / 5) * 4 / 5
    found = evaluate_default("squarewave_fourier", {"x0": x, "dy0": np.ones(2)}, "float32", period=5.0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 40000.0), ("bfloat16", 2.0**100), ("float32", 1e30), ("float64", 1e300)]
)
@pytest.mark.parametrize("name", ["gradient_clip_norm", "gradient_normalize"])
def test_squares_of_large_and_small_gradients_do_not_overflow(name: str, dtype: str, large: float) -> None:
    """16 equal elements have a norm of four times their size."""
    dy = np.full(16, large).astype(numpy_type(dtype))
    np.testing.assert_allclose(exact(evaluate_default(name, {"x0": dy, "dy0": dy}, dtype)), 0.25, rtol=1e-3)
    small = np.full(16, 1 / large).astype(numpy_type(dtype))
    if name == "gradient_normalize" and dtype != "float16":
        found = exact(
            evaluate_default(name, {"x0": small, "dy0": small}, dtype, eps=1e-305 if dtype == "float64" else 1e-37)
        )
        np.testing.assert_allclose(found, 0.25, rtol=1e-2)


@pytest.mark.parametrize(("dtype", "large"), [("float16", 6e4), ("bfloat16", 3e38), ("float32", 3e38)])
@pytest.mark.parametrize("name", ["gradient_clip_norm", "gradient_normalize"])
def test_a_norm_may_be_too_large_for_the_type_of_its_elements(name: str, dtype: str, large: float) -> None:
    dy = np.full(16, large).astype(numpy_type(dtype))
    dy[0] *= dy.dtype.type(-0.5)
    wanted = exact(dy) / np.sqrt(np.sum(exact(dy) ** 2))
    found = exact(evaluate_default(name, {"x0": dy, "dy0": dy}, dtype))
    np.testing.assert_allclose(found, wanted, rtol=2**-8 if dtype == "bfloat16" else 2**-11)
    if name == "gradient_clip_norm":
        below = dy / dy.dtype.type(8)
        limit = exact(np.array(large))
        np.testing.assert_array_equal(evaluate_default(name, {"x0": dy, "dy0": below}, dtype, norm=limit), below)


def test_a_step_learned_from_no_elements_gets_zero() -> None:
    with BoundRule(BUILTINS["lsq"], CASES["lsq"], "float32") as ask:
        values = {"x0": np.zeros((0, 3), np.float32), "x1": np.float32(0.5), "dy0": np.zeros((0, 3), np.float32)}
        _, to_step = ask(values, {"qn": -2.0, "qp": 3.0})
    np.testing.assert_array_equal(np.asarray(to_step), 0)


def test_a_steep_surrogate_is_right_in_16_bits() -> None:
    """In bfloat16 itself, 1 - sigmoid(6.25) would be 0."""
    found = exact(evaluate_default("sigmoid_surrogate", {"x0": [0.25], "dy0": [1.0]}, "bfloat16"))
    np.testing.assert_allclose(found, 25 / (2 + 2 * np.cosh(6.25)), rtol=2**-8)


@pytest.mark.parametrize("name", ["gradient_clip_norm", "gradient_normalize", "dorefa_gradient"])
def test_zero_gradient_stays_zero(name: str) -> None:
    zeros = np.zeros((2, 3))
    seed = {"seed": 1.0} if name == "dorefa_gradient" else {}
    np.testing.assert_array_equal(evaluate_default(name, {"x0": zeros, "dy0": zeros}, **seed), zeros)


def test_dorefa_gradient_of_zero_weights_is_zero() -> None:
    np.testing.assert_array_equal(
        evaluate_default("dorefa_weight", {"x0": np.zeros(3), "dy0": np.ones(3)}), np.zeros(3)
    )


def test_nan_to_zero_replaces_infinities() -> None:
    dy = np.array([np.nan, np.inf, -np.inf, 0.0, 2.0])
    np.testing.assert_array_equal(evaluate_default("nan_to_zero", {"x0": dy, "dy0": dy}), [0, 0, 0, 0, 2])


RANDOM = [name for name, case in CASES.items() if case.random]


@pytest.mark.parametrize("name", RANDOM)
def test_noise_depends_on_the_seed(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    params = params_of(rule, case, own=True)
    values = {"x0": np.linspace(-2, -1, 60).reshape(6, 10), "dy0": np.linspace(0.5, 1, 60).reshape(6, 10)}
    with BoundRule(rule, case, "float64") as ask:
        first, again, other = (ask(values, params | {"seed": seed})[0] for seed in (3.0, 3.0, 4.0))
    np.testing.assert_array_equal(np.asarray(first), np.asarray(again))
    assert not np.array_equal(np.asarray(first), np.asarray(other))


@pytest.mark.parametrize("name", RANDOM)
def test_noise_differs_from_op_to_op(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    number = number_of("float64")
    graph = rule.content.bind(Signature((number,), (number,)))
    params = {f"param/{key}": np.float64(value) for key, value in params_of(rule, case, own=True).items()}
    values = {"x0": np.full((6, 10), -1.0), "dy0": np.linspace(0.5, 1, 60).reshape(6, 10)}
    results = [np.asarray(run(graph, values | params | {"salt": np.int64(salt)})[0]) for salt in (0, 1, -(2**63))]
    assert not any(np.array_equal(results[index], results[index - 1]) for index in range(3))


def test_noise_has_the_moments_of_its_source() -> None:
    many = (200, 500)
    values = {"x0": np.full(many, -1.0), "dy0": np.ones(many)}
    spike = evaluate_default("stochastic_spike_operator", values, mean=1.0, var=0.2, seed=1)
    assert abs(spike.mean() - 0.2) < 1e-3
    assert abs(spike.std() - 0.2 / np.sqrt(12)) < 1e-3
    assert spike.min() >= 0.1
    assert spike.max() < 0.3
    noisy = evaluate_default("gradient_noise", values, eta=0.3, step=9.0, seed=1)
    assert abs(noisy.mean() - 1) < 5e-3
    assert abs(noisy.var() - 0.3 / 10**0.55) < 2e-3


def test_dorefa_rounding_is_unbiased() -> None:
    """The probability of each level depends on the distance to dy, except at the ends, where the noise is clipped."""
    dy = np.broadcast_to(np.linspace(-1, 1, 9), (20000, 9))
    levels = evaluate_default("dorefa_gradient", {"x0": dy, "dy0": dy}, bits=2, seed=1)
    assert set(np.unique(levels.round(12))) == {-1.0, round(-1 / 3, 12), round(1 / 3, 12), 1.0}
    np.testing.assert_allclose(levels.mean(0)[1:-1], dy[0][1:-1], atol=0.02)


def test_gumbel_noise_selects_classes_with_softmax_probabilities() -> None:
    x = np.broadcast_to(np.log([0.5, 0.3, 0.2]), (20000, 3))
    # The slope of class j for dy = class k is -p[j] p[k]; the smallest product excludes the largest p.
    zeroth, first = (evaluate_default("gumbel_softmax", {"x0": x, "dy0": 0 * x + np.eye(3)[k]}, seed=1) for k in (0, 1))
    products = -np.stack([first[:, 2], zeroth[:, 2], zeroth[:, 1]], axis=1)
    picked = np.bincount(products.argmin(1), minlength=3) / len(x)
    np.testing.assert_allclose(picked, [0.5, 0.3, 0.2], atol=0.02)
