"""Code rules: what they refuse, nested graphs, equal special cases, and single known values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.code_rules import CODE_RULES
from gradrule_server.engine.code_rules.target import Dependence
from gradrule_server.errors import GradruleError
from tests.rules.code_cases import CASES, SEED, Case
from tests.rules.code_layers import Array, values
from tests.rules.code_sites import evaluate, given, site_of

LINEAR_RULES = sorted(rule for rule in CODE_RULES if rule.startswith("lrp_") and rule != "lrp_norm")


def case_of(rule: str, label: str = "") -> Case:
    return next(case for case in CASES if case.rule == rule and label in ("", case.label))


def first_gradient(results: Sequence[Array | None]) -> Array:
    """Returns the gradient of the first input."""
    assert results[0] is not None
    return results[0]


# Refusals


def _relu() -> list[tf.Operation]:
    return [tf.raw_ops.Relu(features=tf.ones([2, 3])).op]


def _mul() -> list[tf.Operation]:
    return [tf.raw_ops.Mul(x=tf.ones([2, 3]), y=tf.ones([2, 3])).op]


def _matmul_then_mul() -> list[tf.Operation]:
    product = tf.raw_ops.MatMul(a=tf.ones([2, 3]), b=tf.ones([3, 4]))
    return [product.op, tf.raw_ops.Mul(x=product, y=tf.ones([4])).op]


def _complex_matmul() -> list[tf.Operation]:
    return [tf.raw_ops.MatMul(a=tf.ones([2, 3], tf.complex64), b=tf.ones([3, 4], tf.complex64)).op]


def _two_relus() -> list[tf.Operation]:
    first = tf.raw_ops.Relu(features=tf.ones([2, 3]))
    return [first.op, tf.raw_ops.Relu(features=first).op]


def _max_pool(**changes: Any) -> Callable[[], list[tf.Operation]]:
    def build() -> list[tf.Operation]:
        attributes = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID", **changes}
        return [tf.raw_ops.MaxPool(input=tf.ones([1, 4, 4, 2]), **attributes).op]

    return build


_across_channels = _max_pool(ksize=[1, 1, 1, 2], strides=[1, 1, 1, 2])
_explicit = _max_pool(padding="EXPLICIT", explicit_paddings=[0, 0, 1, 1, 1, 1, 0, 0])


@pytest.mark.parametrize(
    ("rule", "build"),
    [
        *((rule, build) for rule in [*LINEAR_RULES, "feedback_alignment"] for build in (_relu, _matmul_then_mul)),
        ("lrp_epsilon", _complex_matmul),
        ("rectgrad", _mul),
        ("rectgrad", _max_pool()),
        ("deeplift_rescale", _mul),
        ("deeplift_rescale", _two_relus),
        *((rule, build) for rule in ("maxpool_as_avgpool", "maxpool_smooth") for build in (_relu, _explicit)),
        ("maxpool_as_avgpool", _across_channels),
        ("eigh_lorentzian", _relu),
    ],
)
def test_rule_refuses_unsupported_ops(rule: str, build: Callable[[], list[tf.Operation]]) -> None:
    with tf.Graph().as_default():
        ops = build()
        produced = {id(op) for op in ops}
        inputs = [x for op in ops for x in op.inputs if id(x.op) not in produced]
        site = site_of(lambda *_: ops, inputs)
        with pytest.raises(GradruleError) as caught:
            CODE_RULES[rule](site, [tf.ones_like(y) for y in site.outputs], {"eps": tf.constant(0.1, tf.float64)})
    assert caught.value.reason == errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE
    for part in (repr(rule), repr(site.node), site.what, "it is for"):
        assert part in caught.value.message
    assert caught.value.findings[0].node == site.node


# Nested graphs


def test_rule_uses_ops_of_an_outer_graph() -> None:
    """As in a loop's gradient: the forward ops are in another graph than the tensors that the rule gets."""
    case = case_of("lrp_zplus", "conv2d_same_strides_biasadd")
    operands, dys = given(case, "float64")
    forward = tf.Graph()
    with forward.as_default():
        tensors = tuple(map(tf.constant, operands))
        ops = case.build(*tensors)

    @tf.function(autograph=False)
    def run() -> Any:
        inner = site_of(case.build, list(map(tf.constant, operands)))
        site = replace(inner, find_ops=lambda: tuple(ops), sources=tensors, dependence=Dependence(tensors))
        return CODE_RULES[case.rule](site, dys, {"eps": tf.constant(case.params["eps"], tf.float64)})

    result, *others = run()
    assert others == [None, None]
    np.testing.assert_array_equal(result, first_gradient(evaluate(case, operands, dys)))


def test_rule_inside_a_loop() -> None:
    """Operands are captured from the outer graph, because the body has its own."""
    case = case_of("lrp_epsilon", "matmul_tb_biasadd")
    operands, dys = given(case, "float64")

    @tf.function(autograph=False)
    def run() -> tf.Tensor:
        site = site_of(case.build, list(map(tf.constant, operands)))

        def body(index: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            inputs = tuple(tf_private.in_graph(tf.compat.v1.get_default_graph(), value) for value in site.inputs)
            relevance, *_ = CODE_RULES[case.rule](
                replace(site, inputs=inputs), dys, {"eps": tf.constant(case.params["eps"], tf.float64)}
            )
            return index + 1, total + relevance

        return tf.while_loop(lambda index, _: index < 3, body, [0, tf.zeros_like(operands[0])])[1]

    np.testing.assert_allclose(run(), 3 * first_gradient(evaluate(case, operands, dys)), rtol=1e-12)


def test_repeated_ops_have_no_override() -> None:
    """The attribute that selects the rule is not copied: the second derivative is that of the plain op."""
    with tf.Graph().as_default() as graph:
        with graph.gradient_override_map({"MatMul": "NoSuchGradient"}):
            product = tf.raw_ops.MatMul(a=tf.ones([2, 3]), b=tf.ones([3, 4]))
        assert product.op.get_attr("_gradient_op_type") == b"NoSuchGradient"
        x = product.op.inputs[0]
        site = site_of(lambda *_: [product.op], list(product.op.inputs))
        relevance = CODE_RULES["lrp_flat"](site, [tf.ones_like(product)], {"eps": tf.constant(0.1, tf.float64)})[0]
        assert tf.gradients(relevance, x, unconnected_gradients="zero")[0].shape == x.shape


# Equal special cases


def test_gamma_0_equals_epsilon() -> None:
    case = case_of("lrp_gamma", "conv2d_same_strides_biasadd")
    operands, dys = given(case, "float64")
    by_epsilon = evaluate(replace(case, rule="lrp_epsilon"), operands, dys, params={"eps": 0.01})
    by_gamma = evaluate(case, operands, dys, params={"gamma": 0.0, "eps": 0.01})
    np.testing.assert_allclose(first_gradient(by_gamma), first_gradient(by_epsilon), rtol=1e-9)


def test_alpha_1_equals_zplus() -> None:
    case = case_of("lrp_alpha_beta", "matmul_bias_first")
    operands, dys = given(case, "float64")
    by_zplus = evaluate(replace(case, rule="lrp_zplus"), operands, dys, params={"eps": 0.01})
    by_both = evaluate(case, operands, dys, params={"alpha": 1.0, "beta": 0.0, "eps": 0.01})
    np.testing.assert_allclose(first_gradient(by_both), first_gradient(by_zplus), rtol=1e-12)


@pytest.mark.parametrize("jit", [False, True])
def test_zbox_takes_bounds_per_channel(jit: bool) -> None:
    case = case_of("lrp_zbox", "conv2d")
    operands, dys = given(case, "float64")
    low, high = np.full([2], -3.0), np.full([1, 1, 1, 2], 4.0)
    by_number = evaluate(case, operands, dys)
    by_channel = evaluate(case, operands, dys, params={"low": low, "high": high, "eps": 0.01}, jit=jit)
    np.testing.assert_allclose(first_gradient(by_channel), first_gradient(by_number), rtol=1e-9)
    wider = evaluate(case, operands, dys, params={"low": low * [1, 2], "high": high, "eps": 0.01})
    assert not np.allclose(first_gradient(wider), first_gradient(by_number))


def test_relevance_of_a_zero_output() -> None:
    """sgn(0) = +1: with eps it is divided by eps; without it nothing is passed on."""
    case = case_of("lrp_epsilon", "matmul")
    operands = [np.array([[1.0, -1.0]]), np.array([[1.0], [1.0]])]
    dys = [np.array([[3.0]])]
    with_eps = first_gradient(evaluate(case, operands, dys, params={"eps": 0.5}))
    np.testing.assert_array_equal(with_eps, [[6.0, -6.0]])
    without = first_gradient(evaluate(replace(case, rule="lrp_0"), operands, dys, params={}))
    np.testing.assert_array_equal(without, [[0.0, 0.0]])
    negative_zero = first_gradient(evaluate(case, [-0.0 * operands[0], operands[1]], dys, params={"eps": 0.5}))
    np.testing.assert_array_equal(negative_zero, [[0.0, 0.0]])


# Activations


def test_rescale_is_the_gradient_at_the_baseline() -> None:
    case = case_of("deeplift_rescale", "relu")
    x, dy = np.array([[0.25, -1.0, 1.0, 0.25 + 1e-9]]), np.full((1, 4), 2.0)
    result = first_gradient(evaluate(case, [x], [dy], params={"baseline": 0.25, "eps": 1e-7}))
    np.testing.assert_allclose(result, [[2.0, 2 * 0.25 / 1.25, 2.0, 2.0]])
    exactly = first_gradient(evaluate(case, [x], [dy], params={"baseline": 0.25, "eps": 0.0}))
    assert np.isfinite(exactly).all()


def test_rectgrad_treats_ties_equally() -> None:
    case = case_of("rectgrad", "q0")
    x, dy = np.array([[1.0, 2.0, 2.0, 3.0, 3.0]]), np.ones((1, 5))
    for q, kept in [
        (0, [0, 1, 1, 1, 1]),
        (25, [0, 0, 0, 1, 1]),
        (74, [0, 0, 0, 1, 1]),
        (75, [0] * 5),
        (-5, [0, 1, 1, 1, 1]),
    ]:
        np.testing.assert_array_equal(first_gradient(evaluate(case, [x], [dy], params={"q": q})), [kept])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 3, 0)])
def test_rectgrad_accepts_empty_tensors(shape: tuple[int, ...]) -> None:
    case = case_of("rectgrad", "q0")
    assert first_gradient(evaluate(case, [np.zeros(shape)], [np.zeros(shape)])).shape == shape


# 16-bit types


@pytest.mark.parametrize(
    ("rule", "scale", "params"),
    [("rectgrad", 1e-4, {"q": 50.0}), ("deeplift_rescale", 1.0, {"baseline": 0.5, "eps": 1e-5})],
)
def test_rule_is_calculated_in_float32(rule: str, scale: float, params: dict[str, float]) -> None:
    """Products of small numbers are 0 in float16, and quotients are rounded more than once."""
    case = case_of(rule)
    operands, dys = given(case, "float32")
    for dtype, rounding in ((np.float16, 2.0**-11), (tf.bfloat16.as_numpy_dtype, 2.0**-8)):
        narrow = [(scale * value).astype(dtype) for value in (*operands, *dys)]
        widened = [value.astype(np.float32) for value in narrow]
        wanted = first_gradient(evaluate(case, widened[:1], widened[1:], params=params))
        found = first_gradient(evaluate(case, narrow[:1], narrow[1:], params=params))
        assert wanted.any()
        np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=1.001 * rounding)


@pytest.mark.parametrize(("dtype", "ulp"), [("float16", 2.0**-10), ("bfloat16", 2.0**-7)])
def test_rescale_near_the_baseline_is_the_slope(dtype: str, ulp: float) -> None:
    """Of two tanh's that are rounded to 16 bits, the difference has no correct digit."""
    case, baseline = case_of("deeplift_rescale", "tanh"), 1.5
    x = (baseline + ulp * np.arange(1, 9)[np.newaxis]).astype(tf.as_dtype(dtype).as_numpy_dtype)
    found = first_gradient(evaluate(case, [x], [np.ones_like(x)], params={"baseline": baseline, "eps": 1e-7}))
    change = x.astype(np.float64) - baseline
    wanted = (np.tanh(x.astype(np.float64)) - np.tanh(baseline)) / change
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=1.5 * ulp / 2)


# Feedback alignment


def test_feedback_matrix_is_fixed() -> None:
    case = case_of("feedback_alignment", "matmul")
    (x, w), (dy,) = given(case, "float64")
    first = first_gradient(evaluate(case, [x, w], [dy]))
    np.testing.assert_array_equal(first_gradient(evaluate(case, [-x, 2 * w], [dy])), first)
    assert not np.allclose(first_gradient(evaluate(case, [x, w], [dy], params={"seed": SEED + 1.0})), first)
    in_half = first_gradient(evaluate(case, [v.astype(np.float16) for v in (x, w)], [dy.astype(np.float16)]))
    np.testing.assert_allclose(in_half, first, atol=0.02)


def test_feedback_keeps_the_scale_of_errors() -> None:
    case = case_of("feedback_alignment", "matmul")
    x, w, dy = values(50, 300), values(300, 200), values(50, 200)
    assert np.std(first_gradient(evaluate(case, [x, w], [dy]))) == pytest.approx(1.0, rel=0.05)


# Eigenvalues


def _projector(v: Any) -> Any:
    """Returns upstream gradients of an invariant of eigenvectors, as of a function of the matrix."""
    n = v.shape[-1]
    return tf.linalg.matmul(tf.cast(values(n, n), v.dtype), v) * tf.cast(tf.range(1, n + 1), v.dtype)


@pytest.mark.parametrize("label", ["batch", "values_only", "complex"])
def test_lorentzian_converges_to_the_own_gradient(label: str) -> None:
    case = case_of("eigh_lorentzian", label)
    operands, dys = given(case, "float64")

    @tf.function(autograph=False)
    def run() -> Any:
        site = site_of(case.build, [tf.constant(operands[0])])
        upstream = case.upstream(site.outputs, list(map(tf.constant, dys)))
        own = tf_private.gradient_of("SelfAdjointEigV2")
        assert own is not None
        return CODE_RULES[case.rule](site, upstream, {"eps": tf.constant(1e-14, tf.float64)})[0], own(
            site.ops[0], *upstream
        )

    result, own = run()
    np.testing.assert_allclose(result, own, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_equal_eigenvalues_give_finite_gradients(dtype: str, eps: float) -> None:
    case = replace(case_of("eigh_lorentzian", "batch"), upstream=lambda outputs, dys: [dys[0], _projector(outputs[1])])
    operands = [np.stack([np.eye(4), np.diag([1.0, 1.0, 2.0, 2.0])]).astype(dtype)]
    dys = [np.ones((2, 4), dtype), np.ones((2, 4, 4), dtype)]
    assert np.isfinite(first_gradient(evaluate(case, operands, dys, params={"eps": eps}))).all()
