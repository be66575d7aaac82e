"""Lists the cases of the family straight_through, in the order of the catalogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.rules.expression_case import Array, Case, Results, Values, logistic, sign
from tests.unit.rules.running import Draws

DRAWS = Draws()


def reste_factor(x: float, p: Any) -> float:
    if abs(x) <= p.m:
        return float(p.m ** (1 / p.o) / p.m)
    return float(abs(x) ** ((1 - p.o) / p.o) / p.o) if abs(x) <= p.t else 0.0


def bound(keeps: Callable[[float, float, float], bool]) -> Callable[[Values, Any], Results]:
    def bounded(values: Values, p: Any) -> Results:
        triples = zip(values["x0"].ravel(), values["x1"].ravel(), values["dy0"].ravel(), strict=True)
        kept = [dy if keeps(x, edge, dy) else 0.0 for x, edge, dy in triples]
        return np.reshape(kept, values["x0"].shape), None

    return bounded


def magnitude_aware(values: Values, p: Any) -> Results:
    x, dy = values["x0"], values["dy0"]
    result = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        channel = [abs(float(entry)) for entry in x[..., place[-1]].ravel()]
        if abs(x[place]) <= p.clip:
            result[place] = dy[place] * math.fsum(channel) / len(channel)
    return (result,)


def dorefa_weight(values: Values, p: Any) -> Results:
    x, dy = values["x0"], values["dy0"]
    largest = max((abs(math.tanh(float(entry))) for entry in x.ravel()), default=0.0)
    return (np.zeros(x.shape) if largest == 0 else dy / np.cosh(x) ** 2 / largest,)


def dorefa_gradient(values: Values, p: Any) -> Results:
    dy = values["dy0"]
    noise = (DRAWS.uniform(dy, int(p.seed), dtype=p.dtype) - 0.5) / (2**p.bits - 1)
    result = np.zeros(dy.shape)
    for sample in range(dy.shape[0]):
        largest = np.abs(dy[sample]).max(initial=0.0)
        if largest > 0:
            unit = np.clip(dy[sample] / (2 * largest) + 0.5 + noise[sample], 0, 1)
            levels = np.round(unit * (2**p.bits - 1)) / (2**p.bits - 1)
            result[sample] = 2 * largest * (levels - 0.5)
    return (result,)


def pact(values: Values, p: Any) -> Results:
    x, level, dy = values["x0"], float(values["x1"]), values["dy0"]
    return np.where(x > level, 0, dy), np.asarray(math.fsum(dy[x >= level].ravel()))


def lsq(values: Values, p: Any) -> Results:
    x, step, dy = values["x0"], float(values["x1"]), values["dy0"]
    to_x, to_step = np.zeros(x.shape), 0.0
    for place in np.ndindex(x.shape):
        v = float(x[place]) / step
        to_x[place] = dy[place] if p.qn < v < p.qp else 0.0
        to_step += float(dy[place]) * (p.qn if v <= p.qn else p.qp if v >= p.qp else round(v) - v)
    return to_x, np.asarray(to_step / math.sqrt(x.size * p.qp) if x.size else np.nan)


def half_steps(values: Values) -> None:
    values["x1"] = np.full_like(values["x1"], 0.5)


def fake_quant(values: Values, p: Any) -> Results:
    """Follows the formulas of TensorFlow's documentation, which use scale and adjusted bounds, not levels."""
    x, dy, low, high = values["x0"], values["dy0"], float(values["x1"]), float(values["x2"])
    assert low < 0 < high
    scale = (high - low) / (2**p.num_bits - 1 - p.narrow_range)
    adjusted_low = scale * round(low / scale)
    adjusted_high = high + adjusted_low - low
    below, above = x < adjusted_low, x > adjusted_high
    return (
        np.where(below | above, 0, dy),
        np.asarray(math.fsum(dy[below].ravel())),
        np.asarray(math.fsum(dy[above].ravel())),
    )


def bounds(values: Values) -> None:
    values["x1"], values["x2"] = np.full_like(values["x1"], -1.03125), np.full_like(values["x2"], 1.90625)


def softmax_slope(logits: Array, dy: Array, tau: float) -> Array:
    """Applies the Jacobian of softmax(logits / tau) to dy, row by row of the last axis."""
    result = np.zeros(dy.shape)
    for place in np.ndindex(dy.shape[:-1]):
        p = (
            np.array([math.exp((a - logits[place].max()) / tau) for a in logits[place]])
            if dy.shape[-1]
            else np.zeros(0)
        )
        p = p / p.sum()
        jacobian = (np.diag(p) - np.outer(p, p)) / tau
        result[place] = jacobian.T @ dy[place]
    return result


def argmax_softmax(values: Values, p: Any) -> Results:
    return (softmax_slope(values["x0"], values["dy0"], p.tau),)


def gumbel_softmax(values: Values, p: Any) -> Results:
    uniform = np.maximum(DRAWS.uniform(values["x0"], int(p.seed), dtype=p.dtype), 1e-7)
    return (softmax_slope(values["x0"] - np.log(-np.log(uniform)), values["dy0"], p.tau),)


CASES: Mapping[str, Case] = {
    "ste": Case(lambda x, y, dy, own, p: dy),
    "ste_sign": Case(lambda x, y, dy, own, p: dy if -p.clip <= x <= p.clip else 0.0, other={"clip": 0.6}),
    "approx_sign": Case(
        lambda x, y, dy, own, p: dy * (2 - 2 * abs(x)) if abs(x) <= 1 else 0.0,
        primitive=lambda x, p: sign(x) if abs(x) > 1 else 2 * x - sign(x) * x * x,
    ),
    "swish_sign": Case(
        lambda x, y, dy, own, p: (
            dy * p.beta * (2 - p.beta * x * math.tanh(p.beta * x / 2)) / (1 + math.cosh(p.beta * x))
        ),
        primitive=lambda x, p: 2 * logistic(p.beta * x) * (1 + p.beta * x * (1 - logistic(p.beta * x))) - 1,
        other={"beta": 2.0},
    ),
    "magnitude_aware_sign": Case(whole=magnitude_aware, other={"clip": 0.6}, least_rank=1),
    "dorefa_activation": Case(lambda x, y, dy, own, p: dy if 0 <= x <= 1 else 0.0),
    "sign_clip_gradient": Case(lambda x, y, dy, own, p: max(-p.c, min(p.c, dy)), other={"c": 0.4}),
    "ede": Case(
        lambda x, y, dy, own, p: dy * p.k * p.t / math.cosh(p.t * x) ** 2,
        primitive=lambda x, p: p.k * math.tanh(p.t * x),
        other={"k": 2.0, "t": 0.5},
    ),
    "reste": Case(lambda x, y, dy, own, p: dy * reste_factor(x, p), other={"o": 2.0, "t": 1.2, "m": 0.3}),
    "ewgs": Case(lambda x, y, dy, own, p: dy * (1 + p.delta * sign(dy) * (x - y)), other={"delta": 0.25}),
    "soft_round": Case(
        lambda x, y, dy, own, p: (
            dy * p.alpha / math.cosh(p.alpha * (x - math.floor(x) - 0.5)) ** 2 / (2 * math.tanh(p.alpha / 2))
        ),
        primitive=lambda x, p: (
            math.floor(x) + 0.5 + math.tanh(p.alpha * (x - math.floor(x) - 0.5)) / (2 * math.tanh(p.alpha / 2))
        ),
        other={"alpha": 2.0},
    ),
    "clamp_window": Case(lambda x, y, dy, own, p: dy if p.lo <= x <= p.hi else 0.0, other={"lo": -0.75, "hi": 1.0}),
    "abs_binary_sign": Case(lambda x, y, dy, own, p: dy if x >= 0 else -dy, true=lambda xs, p: np.abs(xs[0])),
    "log_tailed_relu": Case(
        lambda x, y, dy, own, p: dy * (p.alpha if x <= 0 else 1 if x <= 1 else 1 / x), other={"alpha": 0.125}
    ),
    "lower_bound": Case(whole=bound(lambda x, edge, dy: x >= edge or dy < 0), inputs=("same", "same")),
    "upper_bound": Case(whole=bound(lambda x, edge, dy: x <= edge or dy > 0), inputs=("same", "same")),
    "passthrough_sigmoid": Case(lambda x, y, dy, own, p: dy),
    "dorefa_weight": Case(whole=dorefa_weight),
    "dorefa_gradient": Case(whole=dorefa_gradient, other={"bits": 3.0, "seed": 5.0}, least_rank=1, random=True),
    "pact": Case(whole=pact, inputs=("same", "scalar"), true=lambda xs, p: np.minimum(xs[0], xs[1])),
    "lsq": Case(whole=lsq, other={"qn": -2.0, "qp": 3.0}, inputs=("same", "scalar"), prepare=half_steps),
    "fake_quant": Case(
        whole=fake_quant,
        other={"num_bits": 4.0, "narrow_range": 1.0},
        inputs=("same", "scalar", "scalar"),
        prepare=bounds,
    ),
    "argmax_softmax": Case(whole=argmax_softmax, other={"tau": 0.5}, least_rank=1),
    "gumbel_softmax": Case(whole=gumbel_softmax, other={"tau": 0.5, "seed": 5.0}, least_rank=1, random=True),
}
