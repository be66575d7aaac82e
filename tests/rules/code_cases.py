"""Lists the cases of code rules: sites around real ops, and their expected results in NumPy.

The LRP references use no transposed ops: with the layer as a matrix W, they divide R[j] in proportion to the
contributions C[j, i] = W[j, i]·x[i].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tests.rules.code_layers import Array, Build, Layer, layers, values

EPS = 0.01
SALT = 1234567
SEED = 42

Expected: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array | None]]
Index: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """Describes a site: `build` makes its ops from tensors of `operands`; `expected` computes the gradients from
    operands and dys.
    """

    rule: str
    label: str
    build: Build
    operands: Sequence[Array]
    expected: Expected
    params: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False
    """Whether the relevance that arrives is the relevance that leaves, where eps is 0."""
    coarse: bool = False
    """Whether operands and dys must be so coarse that 16-bit products of them are exact."""
    dtypes: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
    only_xla: bool = False
    has_xla: bool = True
    upstream: Callable[[Any, Any], Any] = lambda outputs, dys: dys
    """The upstream gradients, from outputs and dys, for tensors and arrays alike."""
    only_data: bool = False
    """Whether the rule computes the first gradient only, and the others are TensorFlow's own."""

    def __str__(self) -> str:
        return f"{self.rule}-{self.label}"


def spread(contributions: Array, r: Array, bias: Array | float = 0.0, eps: float = EPS) -> Array:
    """Divides each output's R among the inputs in proportion to what each input, the bias and eps contribute."""
    total = contributions.sum(axis=1) + bias
    total = total + np.where(total >= 0, eps, -eps)
    shares = [c * (rj / t) if t else 0 * c for c, rj, t in zip(contributions, r, total, strict=True)]
    return np.array(shares).sum(axis=0)


@dataclass(frozen=True, eq=False)
class Flat:
    """Holds a layer as matrices: `m` weights, `ones` where there is a weight, `x`, `b` and `r` as vectors."""

    m: Array
    ones: Array
    x: Array
    b: Array
    r: Array


def _pos(v: Array) -> Array:
    return np.where(v > 0, v, 0)


def _neg(v: Array) -> Array:
    return np.where(v < 0, v, 0)


def _gamma(f: Flat, gamma: float = 0.25) -> Array:
    c, b = f.m * f.x, f.b
    z = c.sum(axis=1) + b
    excited = spread(c + gamma * _pos(c), f.r * (z > 0), b + gamma * _pos(b))
    return excited + spread(c + gamma * _neg(c), f.r * (z < 0), b + gamma * _neg(b))


def _alpha_beta(f: Flat, alpha: float, beta: float) -> Array:
    c = f.m * f.x
    return alpha * spread(_pos(c), f.r, _pos(f.b)) - beta * spread(_neg(c), f.r, _neg(f.b))


LOW, HIGH = -3.0, 4.0

_LRP: Mapping[str, tuple[Callable[[Flat], Array], Mapping[str, Any]]] = {
    "lrp_epsilon": (lambda f: spread(f.m * f.x, f.r, f.b), {"eps": EPS}),
    "lrp_0": (lambda f: spread(f.m * f.x, f.r, f.b, eps=0.0), {}),
    "lrp_zplus": (lambda f: spread(_pos(f.m * f.x), f.r, _pos(f.b)), {"eps": EPS}),
    "lrp_alpha_beta": (lambda f: _alpha_beta(f, 2.0, 1.0), {"alpha": 2.0, "beta": 1.0, "eps": EPS}),
    "lrp_gamma": (_gamma, {"gamma": 0.25, "eps": EPS}),
    "lrp_zbox": (
        lambda f: spread(f.m * f.x - _pos(f.m) * LOW - _neg(f.m) * HIGH, f.r),
        {"low": LOW, "high": HIGH, "eps": EPS},
    ),
    "lrp_wsquare": (lambda f: spread(f.m**2, f.r, f.b**2), {"eps": EPS}),
    "lrp_flat": (lambda f: spread(f.ones, f.r), {"eps": EPS}),
}


def _lrp_case(rule: str, layer: Layer) -> Case:
    formula, params = _LRP[rule]

    def expected(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
        x, w = operands[:2]
        bias = operands[2].reshape(layer.bias_shape) if layer.b is not None else np.zeros(())
        y_shape = dys[0].shape

        def flat(dense: Array) -> Array:
            return np.broadcast_to(dense, (*y_shape, *x.shape)).reshape(-1, x.size)

        m, ones = flat(layer.matrix(w)), flat(layer.matrix(np.ones_like(w)))
        matrices = Flat(m, ones, x.ravel(), np.broadcast_to(bias, y_shape).ravel(), dys[0].ravel())
        return [formula(matrices).reshape(x.shape), *[None] * (len(operands) - 1)]

    keeps = layer.b is None or rule in ("lrp_flat", "lrp_zbox")
    return Case(rule, layer.label, layer.build, layer.operands, expected, params, keeps, only_xla=layer.only_xla)


def _single(op: Any, *names: str, **attributes: Any) -> Build:
    """Makes a site of one op whose inputs have these names."""

    def build(*operands: tf.Tensor) -> list[tf.Operation]:
        result = op(**dict(zip(names, operands, strict=True)), **attributes)
        return [(result if isinstance(result, tf.Tensor) else result[0]).op]

    return build


def _norm_cases() -> list[Case]:
    def of_add(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
        a, b = operands
        u = dys[0] / (a + b + np.where(a + b >= 0, EPS, -EPS))
        return [a * u, (b * u).sum(axis=0)]

    def of_mean(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
        x = operands[0]
        return [np.stack([spread(row[np.newaxis] / 4, np.array([r])) for row, r in zip(x, dys[0], strict=True)])]

    def of_pool(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
        x, result = operands[0], np.zeros_like(operands[0])
        for at, window in windows(x.shape, 2, 2, same=True):
            y = np.mean([x[i] for i in window])
            for i in window:
                result[i] += x[i] / len(window) * dys[0][at] / (y + (EPS if y >= 0 else -EPS))
        return [result]

    def mean(x: tf.Tensor) -> list[tf.Operation]:
        return [tf.raw_ops.Mean(input=x, axis=tf.constant([1])).op]

    add = _single(tf.raw_ops.AddV2, "x", "y")
    pool = _single(tf.raw_ops.AvgPool, "value", ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
    return [
        Case("lrp_norm", "add", add, [values(3, 4), values(4)], of_add, {"eps": EPS}, True),
        Case("lrp_norm", "mean", mean, [values(3, 4)], of_mean, {"eps": EPS}, True),
        Case("lrp_norm", "avgpool", pool, [values(2, 5, 4, 2)], of_pool, {"eps": EPS}, True),
    ]


def windows(shape: tuple[int, ...], size: int, stride: int, *, same: bool) -> Iterator[tuple[Index, list[Index]]]:
    """Maps each output index of a pooling in NHWC or NDHWC to the indices that it pools."""
    n, *spatial, channels = shape
    outs = [-(-s // stride) if same else (s - size) // stride + 1 for s in spatial]
    before = [max((o - 1) * stride + size - s, 0) // 2 if same else 0 for o, s in zip(outs, spatial, strict=True)]
    for b, out, c in itertools.product(range(n), np.ndindex(*outs), range(channels)):
        low = [o * stride - p for o, p in zip(out, before, strict=True)]
        ranges = [range(max(at, 0), min(at + size, s)) for at, s in zip(low, spatial, strict=True)]
        inside = [(b, *at, c) for at in itertools.product(*ranges)]
        yield (b, *out, c), inside


def _pool_cases() -> list[Case]:
    def cases(
        label: str, op: Any, shape: tuple[int, ...], size: int, stride: int, same: bool, *dtypes: str
    ) -> list[Case]:
        def average(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
            result = np.zeros(shape)
            for at, window in windows(shape, size, stride, same=same):
                for i in window:
                    result[i] += dys[0][at] / len(window)
            return [result]

        def smooth(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
            x, result = operands[0], np.zeros(shape)
            for at, window in windows(shape, size, stride, same=same):
                a = np.mean([x[i] ** 2 for i in window])
                d = EPS + np.mean([abs(x[i]) for i in window])
                for i in window:
                    result[i] += dys[0][at] * (2 * x[i] * d - np.sign(x[i]) * a) / (d * d * len(window))
            return [result]

        def along_space(count: int) -> list[int]:
            return [1, *[count] * (len(shape) - 2), 1]

        padding = "SAME" if same else "VALID"
        build = _single(op, "input", ksize=along_space(size), strides=along_space(stride), padding=padding)
        return [
            Case("maxpool_as_avgpool", label, build, [values(*shape)], average, dtypes=dtypes),
            Case("maxpool_smooth", label, build, [values(*shape)], smooth, {"eps": EPS}, dtypes=dtypes),
        ]

    every = ("float64", "float32", "float16", "bfloat16")
    return [
        *cases("same", tf.raw_ops.MaxPool, (2, 5, 4, 2), 3, 2, True, *every),
        *cases("valid", tf.raw_ops.MaxPool, (1, 5, 6, 2), 2, 1, False, *every),
        *cases("3d", tf.raw_ops.MaxPool3D, (1, 4, 3, 3, 2), 2, 2, True, "float32"),
    ]


def _rectgrad_cases() -> list[Case]:
    def case(label: str, x: Array, q: float) -> Case:
        def expected(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
            product = np.maximum(operands[0], 0) * dys[0]
            passed = [p > np.percentile(p, q) for p in product]
            return [np.where(np.reshape(passed, product.shape), dys[0], 0)]

        return Case("rectgrad", label, _single(tf.raw_ops.Relu, "features"), [x], expected, {"q": q}, coarse=True)

    return [
        case("q98", values(3, 10, 10, 2), 98.0),
        case("on_an_element", values(2, 11), 80.0),
        case("between_elements", values(2, 11), 77.7),
        case("q0", values(2, 7), 0.0),
        case("q100", values(2, 7), 100.0),
        case("rank1", values(5), 50.0),
        case("single", values(4, 1), 50.0),
    ]


def _deeplift_cases() -> list[Case]:
    def case(label: str, op: Any, name: str, forward: Callable[[Array], Array], baseline: Any) -> Case:
        def expected(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
            x = operands[0]
            x0 = np.broadcast_to(baseline, x.shape)
            return [dys[0] * (forward(x) - forward(x0)) / (x - x0)]

        params = {"baseline": baseline, "eps": 1e-7}
        return Case("deeplift_rescale", label, _single(op, name), [values(3, 4)], expected, params)

    return [
        case("relu", tf.raw_ops.Relu, "features", lambda x: np.maximum(x, 0), 0.25),
        case("tanh", tf.raw_ops.Tanh, "x", np.tanh, np.array([0.5, -0.25, 3.0, -4.0])),
    ]


def _eigen_cases() -> list[Case]:
    def along(v: Any, dys: Any) -> Any:
        """Returns upstream gradients that follow each eigenvector's sign or phase, which the solver chooses."""
        return [dys[0], (dys[1] @ v) * dys[0][..., None, :]]

    def case(label: str, matrices: Array, compute_v: bool) -> Case:
        def expected(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
            result = np.zeros_like(operands[0])
            for at in np.ndindex(*operands[0].shape[:-2]):
                e, v = np.linalg.eigh(operands[0][at])
                inner = np.diag(dys[0][at]).astype(v.dtype)
                if compute_v:
                    _, dv = along(v, [dys[0][at], dys[1][at]])
                for i, j in itertools.permutations(range(len(e)), 2) if compute_v else ():
                    d = e[j] - e[i]
                    inner[i, j] = d / (d * d + EPS) * (v[:, i].conj() @ dv[:, j])
                full = v @ inner @ v.conj().T
                result[at] = np.tril(full + full.conj().T, -1) + np.diag(np.diag(full + full.conj().T) / 2)
            return [result]

        build = _single(tf.raw_ops.SelfAdjointEigV2, "input", compute_v=compute_v)
        case = Case("eigh_lorentzian", label, build, [matrices], expected, {"eps": EPS}, dtypes=("float64", "float32"))
        # XLA cannot compile TensorFlow's decomposition of complex matrices.
        case = replace(case, has_xla=matrices.dtype.kind != "c")
        return replace(case, upstream=lambda outputs, dys: along(outputs[1], dys)) if compute_v else case

    real = values(2, 4, 4)
    real = real + np.swapaxes(real, -1, -2)
    hermitian = values(3, 3) + 1j * values(3, 3, seed=1)
    hermitian = hermitian + hermitian.conj().T
    return [
        case("batch", real, True),
        case("values_only", real, False),
        case("complex", hermitian, True),
    ]


# The number of outputs that an element of x feeds, away from borders, counted by hand.
_FEEDS = {
    "matmul": 5,
    "batch": 2,
    "conv2d": 3 * 2 * 3,
    "grouped": 3 * 2 * 2,
    "conv3d": 2 * 2 * 1 * 2,
    "depthwise": 3 * 2 * 2,
}


def _feedback_case(layer: Layer) -> Case:
    def expected(operands: Sequence[Array], dys: Sequence[Array]) -> list[Array | None]:
        x, w = operands[:2]
        dy = dys[0]
        bits = tf.random.stateless_uniform(w.shape, [SEED, SALT], minval=None, dtype=tf.int32, alg="philox")
        uniform = np.asarray(bits, np.float32).astype(np.float64) / 2**31
        b = layer.matrix(uniform * np.sqrt(3 / _FEEDS[layer.label.partition("_")[0]]))

        dx = np.tensordot(dy, np.broadcast_to(b, (*dy.shape, *x.shape)), dy.ndim)
        dw = np.zeros(w.shape)
        for at in np.ndindex(*w.shape):
            unit = np.zeros(w.shape)
            unit[at] = 1
            dw[at] = (np.tensordot(layer.matrix(unit), x, x.ndim) * dy).sum()
        if layer.b is None:
            return [dx, dw]
        db = np.zeros(operands[2].shape)
        for at in np.ndindex(*db.shape):
            unit = np.zeros(db.shape)
            unit[at] = 1
            db[at] = (unit.reshape(layer.bias_shape) * dy).sum()
        return [dx, dw, db]

    params = {"seed": float(SEED)}
    case = Case("feedback_alignment", layer.label, layer.build, layer.operands, expected, params)
    return replace(case, only_xla=layer.only_xla, only_data=True)


CASES: Sequence[Case] = [
    *(_lrp_case(rule, layer) for rule in _LRP for layer in layers()),
    *_norm_cases(),
    *_rectgrad_cases(),
    *_deeplift_cases(),
    *_pool_cases(),
    *map(_feedback_case, layers()),
    *_eigen_cases(),
]

LAYER_RULES = frozenset([*_LRP, "feedback_alignment"])
"""The rules whose cases are layers, labelled as those."""

CODE_CASES: frozenset[str] = frozenset(case.rule for case in CASES)
"""The rules that have a case."""
