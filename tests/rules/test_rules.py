"""Every expression rule against its case: dtypes, shapes, kinks, NaN, samples, differentiation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule_server.rules.catalogue import BUILTINS
from tests.rules.edges import KINKS, NAN_IN_DY, NAN_IN_X
from tests.rules.evaluation import BoundRule, compare, expected, in_type, params_of, quarters, raw_values, smooth
from tests.rules.expression_case import Array, Case, Values
from tests.rules.expression_cases import CASES

SHAPES = [(), (5,), (6, 20), (2, 3, 4), (2, 2, 3, 2), (1, 2, 2, 3, 2)]
EMPTY = [(0,), (0, 3), (2, 0)]
NOT_FINITE = np.array([np.nan, np.inf, -np.inf, 1.0])

PRIMITIVES = [name for name, case in CASES.items() if case.primitive is not None]
TRUE = [rule.name for rule in BUILTINS if rule.true_gradient and not rule.code]
PER_SAMPLE = [name for name in CASES if BUILTINS[name].per_sample]
MIXING = [name for name in CASES if not BUILTINS[name].per_sample]


def shapes_of(case: Case, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shape for shape in shapes if len(shape) >= case.least_rank]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_rule_equals_its_reference(name: str, dtype: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    with BoundRule(rule, case, dtype) as ask:
        for own in (True, False):
            params = params_of(rule, case, own=own)
            for shape in shapes_of(case, SHAPES):
                values = in_type(raw_values(case, shape, quarters()), dtype)
                results = ask(values, params)
                compare(results, expected(case, values, params, dtype), values, dtype)


@pytest.mark.parametrize("name", CASES)
def test_rule_accepts_empty_tensors_and_infinities(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    params = params_of(rule, case, own=True)
    everything = [*EMPTY, (4,), (4, 4)]
    with BoundRule(rule, case, "float32") as ask:
        for shape in shapes_of(case, everything):
            values = in_type(raw_values(case, shape, quarters()), "float32")
            for variable in ("x0", "dy0"):
                values[variable] = np.resize(NOT_FINITE, values[variable].shape).astype(np.float32)
                for index, result in enumerate(ask(values, params)):
                    if result is not None:
                        assert result.dtype == np.float32
                        assert result.shape in (values[f"x{index}"].shape, ())


@pytest.mark.parametrize("name", CASES)
def test_comparison_detects_an_error_of_a_thousandth(name: str) -> None:
    """Checks every gradient of every rule."""
    rule, case = BUILTINS[name], CASES[name]
    params = params_of(rule, case, own=False)
    for dtype in ("float64", "float32"):
        values = in_type(raw_values(case, (6, 20), quarters()), dtype)
        wanted = expected(case, values, params, dtype)
        with BoundRule(rule, case, dtype) as ask:
            results = ask(values, params)
        compare(results, wanted, values, dtype)
        for index, result in enumerate(results):
            if result is None:
                continue
            # An error factor does not change a rule that gives only zeros.
            planted = result * np.asarray(1.001, dtype) if result.any() else result + np.asarray(0.001, dtype)
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                compare([*results[:index], planted, *results[index + 1 :]], wanted, values, dtype)


def at_x(case: Case, x: Array, dy: Array) -> Values:
    ones = np.ones_like(x)
    return {"x0": x, "y0": ones, "dy0": dy, "default0": ones}


@pytest.mark.parametrize("name", KINKS)
def test_rule_has_its_exact_values_at_kinks(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    x = np.array(list(KINKS[name]), np.float64)
    with BoundRule(rule, case, "float64") as ask:
        (result,) = ask(at_x(case, x, np.ones_like(x)), params_of(rule, case, own=True))
    np.testing.assert_allclose(np.asarray(result), list(KINKS[name].values()), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", sorted({*NAN_IN_X, *NAN_IN_DY}))
def test_rule_has_its_exact_values_for_nan(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    params = params_of(rule, case, own=True)
    nan = np.array([np.nan])
    with BoundRule(rule, case, "float64") as ask:
        for table, values in (
            (NAN_IN_X, at_x(case, nan, np.ones(1))),
            (NAN_IN_DY, at_x(case, np.full(1, 0.25), nan)),
        ):
            if name in table:
                np.testing.assert_array_equal(np.asarray(ask(values, params)[0]), [table[name]])


def with_another_sample(values: Values, sample: int) -> Values:
    """Changes all values of one sample; values without a sample axis stay."""
    other = {name: value.copy() for name, value in values.items()}
    for name, value in other.items():
        if value.ndim:
            value[sample] = 3 * value[sample] + 1 if name.startswith("x") else -2 * value[sample] + 0.5
    return other


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_samples_are_independent(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    params = params_of(rule, case, own=False)
    with BoundRule(rule, case, "float64") as ask:
        for shape in ((4, 3), (4,), (3, 2, 2)):
            values = raw_values(case, shape, quarters())
            before, after = ask(values, params), ask(with_another_sample(values, 1), params)
            for first, second in zip(before, after, strict=True):
                if first is not None and second is not None:
                    np.testing.assert_array_equal(np.delete(first, 1, 0), np.delete(second, 1, 0))


@pytest.mark.parametrize("name", MIXING)
def test_rule_that_is_not_per_sample_mixes_samples(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    asked = case if case.mixing is None else replace(case, inputs=case.mixing)
    changed = False
    with BoundRule(rule, asked, "float64") as ask:
        for shape, own in itertools.product([(4, 3), (4,)], [True, False]):
            params = params_of(rule, case, own=own)
            values = raw_values(asked, shape, quarters())
            other = with_another_sample(values, 1)
            for first, second in zip(ask(values, params), ask(other, params), strict=True):
                if first is not None and second is not None:
                    kept = (np.delete(first, 1, 0), np.delete(second, 1, 0)) if first.ndim else (first, second)
                    changed = changed or not np.array_equal(*kept)
    assert changed


@pytest.mark.parametrize("name", PRIMITIVES)
def test_surrogate_is_the_slope_of_its_primitive(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    primitive = case.primitive
    assert primitive is not None
    params = params_of(rule, case, own=False)
    # Not at kinks, where central differences are meaningless.
    x = np.array([-2.3, -1.7, -0.61, -0.27, 0.13, 0.43, 0.83, 1.31, 2.9])
    step = 1e-5
    p = SimpleNamespace(**params)
    slopes = [(primitive(at + step, p) - primitive(at - step, p)) / (2 * step) for at in x]
    with BoundRule(rule, case, "float64") as ask:
        (result,) = ask(at_x(case, x, np.ones_like(x)), params)
    np.testing.assert_allclose(np.asarray(result), slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", TRUE)
def test_true_gradient_equals_finite_differences(name: str) -> None:
    rule, case = BUILTINS[name], CASES[name]
    forward = case.true
    assert forward is not None
    params = params_of(rule, case, own=True)
    draw = smooth()
    shapes = {"same": (3, 4), "scalar": ()}
    xs = list(case.domain([draw(shapes[kind]) for kind in case.inputs]))
    y = forward(xs, SimpleNamespace(**params))
    for seed in (1, 2):
        dy = np.asarray(np.random.default_rng(seed).normal(size=y.shape))
        values: Values = {f"x{index}": x for index, x in enumerate(xs)} | {"y0": y, "dy0": dy}
        with BoundRule(rule, case, "float64") as ask:
            results = ask(values, params)
        for index, result in enumerate(results):
            slopes = differences(forward, SimpleNamespace(**params), xs, index, dy)
            np.testing.assert_allclose(np.asarray(result), slopes, rtol=1e-6, atol=1e-8)


def differences(
    forward: Callable[[Sequence[Array], Any], Array], params: Any, xs: list[Array], index: int, dy: Array
) -> Array:
    """Returns central differences of sum(dy * forward(xs)) in one of the xs."""
    step = 1e-6
    slopes = np.zeros(xs[index].shape)
    for place in np.ndindex(slopes.shape):
        sums = []
        for moved in (step, -step):
            inputs = [x.copy() for x in xs]
            inputs[index][place] += moved
            sums.append(float(np.sum(dy * forward(inputs, params))))
        slopes[place] = (sums[0] - sums[1]) / (2 * step)
    return slopes


@pytest.mark.parametrize("name", CASES)
def test_rule_can_be_differentiated_again(name: str) -> None:
    """Compares TensorFlow's gradient of an elementwise rule with finite differences of its case."""
    rule, case = BUILTINS[name], CASES[name]
    params = params_of(rule, case, own=False)
    x = np.array([-2.31, -1.67, -0.61, -0.27, 0.13, 0.43, 0.83, 1.31, 2.91])
    if case.element is not None:
        values = {"x0": x, "y0": np.roll(x, 1), "dy0": np.roll(x, 2) + 0.05, "default0": np.roll(x, 3)}
    else:
        values = raw_values(case, (4, 3), smooth())
    with BoundRule(rule, case, "float64") as ask, ask.graph.as_default():
        results = [ask.graph.get_tensor_by_name(found) for found in ask.rule_graph.results if found is not None]
        for variable in ("x0", "dy0"):
            placeholder = ask.placeholder(variable)
            slope = None if placeholder is None else tf.gradients(results, placeholder)[0]
            got = np.zeros_like(values[variable]) if slope is None else ask.fetch([slope], values, params)[0]
            assert np.isfinite(got).all()
            if case.element is None:
                continue
            step = 1e-6
            up, down = dict(values), dict(values)
            up[variable], down[variable] = values[variable] + step, values[variable] - step
            (above,), (below,) = (expected(case, moved, params, "float64") for moved in (up, down))
            assert above is not None
            assert below is not None
            np.testing.assert_allclose(got, (above - below) / (2 * step), rtol=1e-5, atol=1e-7)
