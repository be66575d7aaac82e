"""Builds sites around real ops, evaluates rules at them, and compares the results with the cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from gradrule_server.engine.code_rules import CODE_RULES
from gradrule_server.engine.code_rules.target import Dependence, RuleTarget
from gradrule_server.engine.op_gradients import gradient_of
from gradrule_server.engine.tf_private import GRADIENT_ATTR
from tests.rules.code_cases import SALT, Case
from tests.rules.code_layers import Array, Build

# Relative to the largest expected element. 16-bit types are calculated in float32 and rounded once.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2**-11 + 1e-4, "bfloat16": 2**-8 + 1e-4}
# TensorFlow's own gradients for 16-bit types: kernels differ in how often they round.
_OF_KERNELS = {**TOLERANCES, "float16": 0.02, "bfloat16": 0.1}


@tf.RegisterGradient("gradrule_conv2d")
def _conv2d_gradient(op: tf.Operation, dy: Any) -> Any:
    gradient = gradient_of("Conv2D")
    assert gradient is not None
    return gradient(op, dy)


def site_of(build: Build, operands: Sequence[tf.Tensor]) -> RuleTarget:
    """Returns a site of the current graph. The inputs of a single op that are no operands come last."""
    ops = build(*operands)
    *_, last = ops
    for op in ops:
        if op.type == "Conv2D":
            op._set_attr(GRADIENT_ATTR, attr_value_pb2.AttrValue(s=b"gradrule_conv2d"))
    others = [value for value in last.inputs if all(value is not x for x in operands)] if len(ops) == 1 else []
    inputs = (*operands, *others)

    def reference(tensor: tf.Tensor, baseline: tf.Tensor) -> tf.Tensor:
        x0 = tf.broadcast_to(tf.cast(baseline, operands[0].dtype), tf.shape(operands[0]))
        return x0 if tensor is ops[0].inputs[0] else build(x0)[-1].outputs[0]

    def own(dys: Sequence[Any]) -> Sequence[Any]:
        return [*tf.gradients(last.outputs, list(operands), list(dys)), *[None] * len(others)]

    what = "+".join(op.type for op in ops)
    return RuleTarget(
        "layer/node",
        what,
        inputs=inputs,
        outputs=tuple(last.outputs),
        find_ops=lambda: tuple(ops),
        own_gradients=own,
        reference=reference,
        sources=inputs,
        dependence=Dependence(operands),
        salt=SALT,
        op=last if len(ops) == 1 else None,
    )


def evaluate(
    case: Case,
    operands: Sequence[Array],
    dys: Sequence[Array],
    *,
    params: Mapping[str, Any] | None = None,
    jit: bool = False,
    batch_unknown: bool = False,
    then: Callable[[list[tf.Tensor], Sequence[tf.Tensor]], Any] | None = None,
) -> list[Array | None]:
    """Evaluates the rule at the case's site; `then` transforms the result and the operands."""

    params = case.params if params is None else params
    operand_specs = [_spec(value, batch_unknown and index == 0) for index, value in enumerate(operands)]
    dy_specs = [_spec(dy, batch_unknown) for dy in dys]
    # The function with `then` belongs to one test, so it is not cached.
    trace = _trace.__wrapped__ if then else _trace
    function = trace(case, tuple(operand_specs), tuple(dy_specs), tuple(params), jit, then)
    values = {name: tf.constant(value, tf.float64) for name, value in params.items()}
    results = function(list(map(tf.constant, operands)), list(map(tf.constant, dys)), values)
    return [None if result is None else result.numpy() for result in results]


def _spec(value: Array, unknown: bool) -> tf.TensorSpec:
    return tf.TensorSpec([None, *value.shape[1:]] if unknown else value.shape, value.dtype)


@cache
def _trace(
    case: Case,
    operands: tuple[tf.TensorSpec, ...],
    dys: tuple[tf.TensorSpec, ...],
    params: tuple[str, ...],
    jit: bool,
    then: Callable[[list[tf.Tensor], Sequence[tf.Tensor]], Any] | None,
) -> Any:
    """Returns the function that `evaluate` calls; tests of one case and dtype share it, because tracing is slow."""

    def run(operands: Sequence[tf.Tensor], dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]) -> Any:
        site = site_of(case.build, operands)
        results = CODE_RULES[case.rule](site, case.upstream(site.outputs, dys), params)[: len(operands)]
        return list(results) if then is None else then([r for r in results if r is not None], operands)

    signature = [list(operands), list(dys), {name: tf.TensorSpec(None, tf.float64) for name in params}]
    return tf.function(run, jit_compile=jit, autograph=False, input_signature=signature)


def forget_traces() -> None:
    """Frees the functions that `evaluate` caches, and the settings they were traced with."""
    _trace.cache_clear()


def given(case: Case, dtype: str) -> tuple[list[Array], list[Array]]:
    """Returns new arrays of operands and dys of a case in a dtype; complex where the case is."""
    operands, dys = _given(case, dtype)
    return [value.copy() for value in operands], [dy.copy() for dy in dys]


@cache
def _given(case: Case, dtype: str) -> tuple[list[Array], list[Array]]:
    is_complex = case.operands[0].dtype.kind == "c"
    kind: Any = {"float32": np.complex64, "float64": np.complex128}[dtype] if is_complex else dtype
    kind = tf.as_dtype(kind).as_numpy_dtype

    def fit(value: Array) -> Array:
        return (np.clip(np.round(2 * value) / 2, -4, 4) if case.coarse else value).astype(kind)

    operands = [fit(value) for value in case.operands]
    with tf.Graph().as_default():
        shapes = [output.shape.as_list() for output in case.build(*map(tf.constant, operands))[-1].outputs]
    random = np.random.default_rng(7)
    dys = [random.normal(size=shape) + (1j * random.normal(size=shape) if is_complex else 0) for shape in shapes]
    return operands, [fit(dy) for dy in dys]


def check(case: Case, results: Sequence[Array | None], operands: Sequence[Array], dys: Sequence[Array]) -> None:
    """Asserts that each gradient is present or None as expected, with its operand's dtype and close values."""
    exact: Any = np.complex128 if operands[0].dtype.kind == "c" else np.float64
    wanted = case.expected([v.astype(exact) for v in operands], [v.astype(exact) for v in dys])
    for index, (result, want, operand) in enumerate(zip(results, wanted, operands, strict=True)):
        assert (result is None) == (want is None)
        if result is None or want is None:
            continue
        assert result.dtype == operand.dtype
        assert result.shape == want.shape == operand.shape
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        tolerance = (_OF_KERNELS if case.only_data and index else TOLERANCES)[operand.real.dtype.name]
        np.testing.assert_allclose(result.astype(exact), want, rtol=0, atol=scale * tolerance, equal_nan=False)
