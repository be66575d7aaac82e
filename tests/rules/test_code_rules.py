"""Code rules give the results of NumPy written from their formulas, and are defined at zeros and borders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule_server.engine.code_rules import CODE_RULES
from tests.rules.code_cases import CASES, CODE_CASES, LAYER_RULES, Case, windows
from tests.rules.code_sites import check, evaluate, forget_traces, given
from tests.samples import WHOLE

ON_CPU = [case for case in CASES if not case.only_xla]
# Very different layers, for properties that do not depend on the formula.
_TELLING = ("matmul_bias_broadcasts", "batch_matmul_adj", "conv2d_same_strides_biasadd", "depthwise_biasadd")
FEW = [case for case in ON_CPU if case.label in _TELLING or case.rule not in LAYER_RULES]

_BIASED_CONVOLUTIONS = ("conv2d_same_strides_biasadd", "conv2d_explicit_add", "depthwise_biasadd")


@pytest.fixture(autouse=True, scope="module")
def unoptimized_graphs() -> Iterator[None]:
    """Disables graph optimization, which takes longer than the one run of each graph."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    forget_traces()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def of_type(cases: Sequence[Case], *dtypes: str) -> list[tuple[Case, str]]:
    """Returns cases with each of the dtypes that their ops have."""
    return [(case, dtype) for case in cases for dtype in dtypes if dtype in case.dtypes]


def each(pairs: Sequence[tuple[Case, str]]) -> pytest.MarkDecorator:
    """Runs a test with each of the cases and dtypes."""
    return pytest.mark.parametrize(("case", "dtype"), pairs, ids=[f"{case}-{dtype}" for case, dtype in pairs])


def test_every_rule_has_a_case() -> None:
    assert set(CODE_RULES) == CODE_CASES


# A rule has one code for all types, so a few layers show what the other types need.
@each([*of_type(ON_CPU, "float64"), *of_type(ON_CPU if WHOLE else FEW, "float32", "float16", "bfloat16")])
def test_rule_equals_its_formula(case: Case, dtype: str) -> None:
    operands, dys = given(case, dtype)
    check(case, evaluate(case, operands, dys), operands, dys)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("label", ["add", "mean", "avgpool"])
def test_lrp_norm_rounds_once(label: str, dtype: str) -> None:
    """The quotient by a small output overflows float16, and it is no number of 16 bits."""
    case = next(case for case in CASES if case.rule == "lrp_norm" and case.label == label)
    operands, dys = given(case, dtype)
    small = operands[0].dtype.type(2.0**-10)
    operands = [operand * small for operand in operands]
    found = evaluate(case, operands, dys, params={"eps": 0.0})
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        exact = [tf.constant(operand, tf.float64) for operand in operands]
        ratio = dys[0].astype(np.float64) / session.run(case.build(*exact)[-1].outputs[0])
    assert np.abs(ratio).max() > 1000
    for operand, got in zip(operands, found, strict=True):
        assert got is not None
        shares = _spread(label, ratio, operand.shape)
        wanted = operand.astype(np.float64) * shares
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=1.01 * _HALF_ULP[dtype])


_HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def _nearly_zero(label: str, dtype: str) -> list[Any]:
    """Returns operands of a layer whose Wx is slightly below 1, but 1 in 16 bits, and whose bias is -1."""
    case = next(case for case in CASES if case.label == label)
    x, w, b = (np.zeros(value.shape, tf.as_dtype(dtype).as_numpy_dtype) for value in case.operands)
    if label.startswith("matmul"):
        taken = np.moveaxis(x, 0 if "_ta" in label else 1, 0)
        w[...] = 1
    else:
        # Each output takes two neighbours of a row.
        taken = np.moveaxis(x, 2, 0)
        w[0, :2, : None if label.startswith("depthwise") else 1] = 1
    taken[0::2], taken[1::2] = 1, -_HALF_ULP[dtype] / 4
    if label.startswith("matmul"):
        taken[2:] = 0
    b[...] = -1
    return [x, w, b]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("label", ["matmul_tb_biasadd", "matmul_ta_tb_add", *_BIASED_CONVOLUTIONS])
@pytest.mark.parametrize("rule", ["lrp_epsilon", "lrp_0", "lrp_gamma"])
def test_sum_near_zero_keeps_its_sign(rule: str, label: str, dtype: str) -> None:
    """The op's own output is 0 there; a kernel that rounds Wx to 16 bits before it adds the bias makes it so."""
    case = next(case for case in CASES if (case.rule, case.label) == (rule, label))
    # Small, so that no quotient overflows.
    operands, dys = _nearly_zero(label, dtype), [np.abs(dy) / 16 for dy in given(case, dtype)[1]]
    check(case, evaluate(case, operands, dys), operands, dys)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_second_derivative_of_16_bits_is_that_of_the_formula(dtype: str) -> None:
    """The rule's own y is a constant for TensorFlow; its derivative is that of the output."""
    case = next(case for case in CASES if (case.rule, case.label) == ("lrp_epsilon", "matmul_tb_biasadd"))

    def again(results: list[tf.Tensor], operands: Sequence[tf.Tensor]) -> Any:
        return tf.gradients(results, list(operands), [tf.ones_like(result) for result in results])

    operands, dys = given(case, dtype)
    found = evaluate(case, operands, dys, then=again)
    exact = [[v.astype(np.float64) for v in values] for values in (operands, dys)]
    for got, wanted in zip(found, evaluate(case, *exact, then=again), strict=True):
        assert got is not None
        assert wanted is not None
        np.testing.assert_allclose(got.astype(np.float64), wanted, atol=0.02 * np.abs(wanted).max())


def _spread(label: str, ratio: Any, shape: tuple[int, ...]) -> Any:
    """The gradient of the op's inputs for a gradient of its output, as the op is linear with equal weights."""
    if label == "add":
        return ratio.sum(0) if len(shape) < ratio.ndim else ratio
    if label == "mean":
        return np.broadcast_to(ratio[:, None] / shape[1], shape)
    result = np.zeros(shape)
    for at, window in windows(shape, 2, 2, same=True):
        for index in window:
            result[index] += ratio[at] / len(window)
    return result


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rule", sorted(CODE_RULES))
def test_comparison_detects_an_error_of_a_thousandth(rule: str, dtype: str) -> None:
    case = next(case for case in CASES if case.rule == rule)
    operands, dys = given(case, dtype)
    spoiled = [None if r is None else (r * 1.001).astype(r.dtype) for r in evaluate(case, operands, dys)]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(case, spoiled, operands, dys)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_rule_can_be_differentiated_again(case: Case) -> None:
    operands, dys = given(case, case.dtypes[0])

    def again(results: list[tf.Tensor], operands: Sequence[tf.Tensor]) -> Any:
        ones = [tf.ones_like(result) for result in results]
        return tf.gradients(results, list(operands), ones, unconnected_gradients="zero")

    for result, operand in zip(evaluate(case, operands, dys, then=again), operands, strict=True):
        assert result is not None
        assert result.shape == operand.shape
        assert np.isfinite(result).all()


# The eigendecomposition itself refuses NaN and infinity.
@pytest.mark.parametrize("case", [case for case in FEW if case.rule != "eigh_lorentzian"], ids=str)
def test_rule_accepts_nan_and_infinity(case: Case) -> None:
    operands, dys = given(case, "float32")
    operands[0].flat[0], operands[0].flat[-1], dys[0].flat[0] = np.nan, np.inf, np.inf
    evaluate(case, operands, dys)
    evaluate(case, operands, dys, params=dict.fromkeys(case.params, np.nan))


def _has_batch(case: Case) -> bool:
    """Returns whether axis 0 of x is that of the outputs and no axis of matrices."""
    return not any(part in case.label for part in ("_ta", "adj", "broadcasts", "complex"))


@pytest.mark.parametrize("case", [case for case in ON_CPU if _has_batch(case)], ids=str)
def test_rule_accepts_a_batch_of_unknown_size(case: Case) -> None:
    operands, dys = given(case, "float32")
    check(case, evaluate(case, operands, dys, batch_unknown=True), operands, dys)


# oneDNN's convolution of an empty batch returns the shape of its input: a TensorFlow bug.
@pytest.mark.parametrize(
    "case", [case for case in ON_CPU if _has_batch(case) and not case.label.startswith(("conv", "depthwise"))], ids=str
)
def test_rule_accepts_an_empty_batch(case: Case) -> None:
    operands, dys = given(case, "float32")
    x, *others = operands
    results = evaluate(case, [x[:0], *others], [dy[:0] for dy in dys], batch_unknown=True)
    assert results[0] is not None
    assert results[0].shape == (0, *x.shape[1:])
    for result, operand in zip(results[1:], others, strict=True):
        assert result is None or np.array_equal(result, np.zeros_like(operand))


@pytest.mark.parametrize("case", [case for case in ON_CPU if case.keeps], ids=str)
def test_relevance_is_conserved(case: Case) -> None:
    """Holds where eps is 0 and no bias takes part."""
    operands, dys = given(case, "float64")
    results = evaluate(case, operands, dys, params={**case.params, **({"eps": 0.0} if "eps" in case.params else {})})
    total = sum(float(r.sum()) for r in results if r is not None)
    assert total == pytest.approx(float(dys[0].sum()), rel=1e-9)


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@each(of_type([case for case in FEW if case.rule.startswith(("lrp_", "maxpool"))], "float32", "float16"))
def test_zeros_give_finite_gradients(case: Case, dtype: str, eps: float) -> None:
    operands, dys = given(case, dtype)
    params = {name: eps if name == "eps" else value for name, value in case.params.items()}
    results = evaluate(case, [np.zeros_like(v) for v in operands], dys, params=params)
    assert all(np.isfinite(r).all() for r in results if r is not None)
