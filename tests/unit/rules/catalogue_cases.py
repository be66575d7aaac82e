"""One case per rule of the catalogue: what the rule's source says, written out slowly, one element at a time.

`element(x, y, dy, default, params)` gives the gradient of one element; `primitive(x, params)` is the smooth function
whose slope a surrogate is. Rules that look at a whole tensor, or at two inputs, have `whole(values, params)` instead,
which gives a tuple.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Params = Mapping[str, Any]
Element = Callable[[float, float, float, float, Any], float]


@dataclass(frozen=True)
class Case:
    """`other`: values of params that differ from the defaults; params without a default must be here."""

    element: Element | None = None
    primitive: Callable[[float, Any], float] | None = None
    whole: Callable[[dict[str, Any], Any], tuple[Any, ...]] | None = None
    other: Params = field(default_factory=dict)
    inputs: int = 1


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > 0 else math.exp(value) / (1 + math.exp(value))


def density(value: float, mean: float, deviation: float) -> float:
    return math.exp(-((value - mean) ** 2) / (2 * deviation**2)) / math.sqrt(2 * math.pi * deviation**2)


def sign(value: float) -> float:
    return float(value > 0) - float(value < 0)


def reste_factor(x: float, p: Any) -> float:
    if abs(x) <= p.m:
        return float(p.m ** (1 / p.o) / p.m)
    return float(abs(x) ** ((1 - p.o) / p.o) / p.o) if abs(x) <= p.t else 0.0


def multi_gaussian(x: float, p: Any) -> float:
    narrow = (1 + p.h) * density(x, 0, p.lens)
    wide = p.h * density(x, p.lens, p.s * p.lens) + p.h * density(x, -p.lens, p.s * p.lens)
    return float(p.gamma * (narrow - wide))


def clip_norm(values: dict[str, Any], p: Any) -> tuple[Any, ...]:
    length = math.sqrt(math.fsum(float(entry) ** 2 for entry in values["dy0"].ravel()))
    return (values["dy0"] * min(1.0, p.norm / length),)


def normalize(values: dict[str, Any], p: Any) -> tuple[Any, ...]:
    length = math.sqrt(math.fsum(float(entry) ** 2 for entry in values["dy0"].ravel()))
    return (values["dy0"] / (length + p.eps),)


def safe_div(values: dict[str, Any], p: Any) -> tuple[Any, ...]:
    dy, y, below = values["dy0"], values["y0"], values["x1"]
    above_gradient, below_gradient = np.zeros(dy.shape), np.zeros(dy.shape)
    for place in np.ndindex(dy.shape):
        if below[place] != 0:
            above_gradient[place] = dy[place] / below[place]
            below_gradient[place] = -dy[place] * y[place] / below[place]
    return above_gradient, below_gradient


def bound(keeps: Callable[[float, float, float], bool]) -> Callable[[dict[str, Any], Any], tuple[Any, ...]]:
    def bounded(values: dict[str, Any], p: Any) -> tuple[Any, ...]:
        triples = zip(values["x0"].ravel(), values["x1"].ravel(), values["dy0"].ravel(), strict=True)
        kept = [dy if keeps(x, edge, dy) else 0.0 for x, edge, dy in triples]
        return np.reshape(kept, values["x0"].shape), None

    return bounded


CASES: Mapping[str, Case] = {
    # straight_through
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
    "dorefa_activation": Case(lambda x, y, dy, own, p: dy if 0 <= x <= 1 else 0.0),
    "sign_clip_gradient": Case(lambda x, y, dy, own, p: max(-p.c, min(p.c, dy)), other={"c": 0.4}),
    "ede": Case(
        lambda x, y, dy, own, p: dy * p.k * p.t / math.cosh(p.t * x) ** 2,
        primitive=lambda x, p: p.k * math.tanh(p.t * x),
        other={"k": 2.0, "t": 0.5},
    ),
    "reste": Case(lambda x, y, dy, own, p: dy * reste_factor(x, p), other={"o": 2.0, "t": 1.2, "m": 0.3}),
    "ewgs": Case(lambda x, y, dy, own, p: dy * (1 + p.delta * sign(dy) * (x - y)), other={"delta": 0.25}),
    "clamp_window": Case(lambda x, y, dy, own, p: dy if p.lo <= x <= p.hi else 0.0, other={"lo": -0.75, "hi": 1.0}),
    "abs_binary_sign": Case(lambda x, y, dy, own, p: dy if x >= 0 else -dy),
    "log_tailed_relu": Case(
        lambda x, y, dy, own, p: dy * (p.alpha if x <= 0 else 1 if x <= 1 else 1 / x), other={"alpha": 0.125}
    ),
    "lower_bound": Case(whole=bound(lambda x, edge, dy: x >= edge or dy < 0), inputs=2),
    "upper_bound": Case(whole=bound(lambda x, edge, dy: x <= edge or dy > 0), inputs=2),
    "passthrough_sigmoid": Case(lambda x, y, dy, own, p: dy),
    # surrogate
    "fast_sigmoid": Case(
        lambda x, y, dy, own, p: dy / (1 + p.slope * abs(x)) ** 2,
        primitive=lambda x, p: x / (1 + p.slope * abs(x)),
        other={"slope": 3.0},
    ),
    "superspike_unit": Case(
        lambda x, y, dy, own, p: dy * p.alpha / (1 + abs(x)) ** 2,
        primitive=lambda x, p: p.alpha * x / (1 + abs(x)),
        other={"alpha": 3.0},
    ),
    "soft_sign": Case(
        lambda x, y, dy, own, p: dy * p.alpha / 2 / (1 + abs(p.alpha * x)) ** 2,
        primitive=lambda x, p: (p.alpha * x / (1 + abs(p.alpha * x)) + 1) / 2,
        other={"alpha": 0.7},
    ),
    "atan": Case(
        lambda x, y, dy, own, p: dy * p.alpha / 2 / (1 + (math.pi / 2 * p.alpha * x) ** 2),
        primitive=lambda x, p: math.atan(math.pi / 2 * p.alpha * x) / math.pi + 0.5,
        other={"alpha": 0.7},
    ),
    "sigmoid_surrogate": Case(
        lambda x, y, dy, own, p: dy * p.slope / (2 * math.cosh(p.slope * x / 2)) ** 2,
        primitive=lambda x, p: logistic(p.slope * x),
        other={"slope": 4.0},
    ),
    "tanh_surrogate": Case(
        lambda x, y, dy, own, p: dy / math.cosh(p.alpha * x) ** 2,
        primitive=lambda x, p: math.tanh(p.alpha * x) / p.alpha,
        other={"alpha": 0.7},
    ),
    "erf": Case(
        lambda x, y, dy, own, p: dy * p.alpha / math.sqrt(math.pi) * math.exp(-((p.alpha * x) ** 2)),
        primitive=lambda x, p: math.erfc(-p.alpha * x) / 2,
        other={"alpha": 0.7},
    ),
    "heavi_erfc": Case(
        lambda x, y, dy, own, p: dy * 2 * math.exp(-(p.k**2) * x**2) / math.sqrt(math.pi),
        primitive=lambda x, p: math.erf(p.k * x) / p.k,
        other={"k": 1.5},
    ),
    "circ": Case(
        lambda x, y, dy, own, p: (
            dy * 2 * p.alpha * (1 / (2 * math.sqrt(p.alpha**2 + x**2)) - x**2 / (2 * (p.alpha**2 + x**2) ** 1.5))
        ),
        primitive=lambda x, p: p.alpha * x / math.sqrt(x**2 + p.alpha**2),
        other={"alpha": 1.5},
    ),
    "triangle": Case(lambda x, y, dy, own, p: dy * p.gamma * max(0.0, 1 - abs(x)), other={"gamma": 2.0}),
    "piecewise_quadratic": Case(
        lambda x, y, dy, own, p: dy * (p.alpha - p.alpha**2 * abs(x)) if abs(x) <= 1 / p.alpha else 0.0,
        primitive=lambda x, p: (
            (x > 0) + 0.0 if abs(x) > 1 / p.alpha else -(p.alpha**2) / 2 * abs(x) * x + p.alpha * x + 0.5
        ),
        other={"alpha": 0.5},
    ),
    "piecewise_exp": Case(
        lambda x, y, dy, own, p: dy * p.alpha / 2 * math.exp(-p.alpha * abs(x)),
        primitive=lambda x, p: math.exp(p.alpha * x) / 2 if x < 0 else 1 - math.exp(-p.alpha * x) / 2,
        other={"alpha": 2.0},
    ),
    "boxcar": Case(lambda x, y, dy, own, p: dy * p.alpha if abs(x) < 1 / p.alpha / 2 else 0.0, other={"alpha": 0.5}),
    "gaussian": Case(
        lambda x, y, dy, own, p: dy * p.gamma * density(x, 0, p.lens),
        primitive=lambda x, p: p.gamma * math.erfc(-x / p.lens / math.sqrt(2)) / 2,
        other={"lens": 1.5, "gamma": 2.0},
    ),
    "multi_gaussian": Case(
        lambda x, y, dy, own, p: dy * multi_gaussian(x, p), other={"lens": 1.5, "h": 0.3, "s": 2.0, "gamma": 2.0}
    ),
    "slayer": Case(
        lambda x, y, dy, own, p: dy * p.gamma * math.exp(-p.alpha * abs(x)), other={"alpha": 0.5, "gamma": 2.0}
    ),
    "piecewise_leaky_relu": Case(
        lambda x, y, dy, own, p: dy / (2 * p.w) if -p.w < x < p.w else dy * p.c, other={"w": 0.75, "c": 0.1}
    ),
    "leaky_k_relu": Case(lambda x, y, dy, own, p: dy * (p.k if x >= 0 else p.leak), other={"leak": 0.1, "k": 2.0}),
    "leaky_spike_operator": Case(lambda x, y, dy, own, p: dy if x > 0 else dy * p.slope, other={"slope": 0.3}),
    "spike_rate_escape": Case(
        lambda x, y, dy, own, p: dy * p.slope * math.exp(-p.beta * abs(x - 1)), other={"beta": 0.5, "slope": 2.0}
    ),
    "heaviside_gradient": Case(lambda x, y, dy, own, p: dy if x > 0 else 0.0),
    "s2nn": Case(
        lambda x, y, dy, own, p: (
            dy * p.alpha / (2 * math.cosh(p.alpha * x / 2)) ** 2 if x < 0 else dy * p.beta / (x + 1)
        ),
        primitive=lambda x, p: logistic(p.alpha * x) if x < 0 else p.beta * math.log(abs(x + 1)) + 0.5,
        other={"alpha": 2.0, "beta": 0.5},
    ),
    "q_pseudo_spike": Case(
        lambda x, y, dy, own, p: dy / (1 + 2 / (p.q - 1) * abs(x)) ** p.q,
        primitive=lambda x, p: sign(x) / 2 * (1 - (1 + 2 / (p.q - 1) * abs(x)) ** (1 - p.q)),
        other={"q": 3.5},
    ),
    "nonzero_sign_log_abs": Case(
        lambda x, y, dy, own, p: dy * p.alpha / (1 + p.alpha * abs(x)),
        primitive=lambda x, p: sign(x) * math.log(abs(p.alpha * x) + 1),
        other={"alpha": 2.0},
    ),
    "multi_level": Case(lambda x, y, dy, own, p: dy if 0 <= x <= p.levels else 0.0, other={"levels": 1.0}),
    # attribution
    "guided_relu": Case(lambda x, y, dy, own, p: own if dy > 0 else 0.0),
    "deconvnet": Case(lambda x, y, dy, own, p: max(dy, 0.0)),
    "relu_beta_smooth": Case(
        lambda x, y, dy, own, p: dy * logistic(p.beta * x),
        primitive=lambda x, p: math.log1p(math.exp(p.beta * x)) / p.beta,
        other={"beta": 2.0},
    ),
    "linearize": Case(lambda x, y, dy, own, p: dy),
    "elrp_activation": Case(
        lambda x, y, dy, own, p: dy * y / (x + p.eps if x >= 0 else x - p.eps), other={"eps": 0.25}
    ),
    "lrp_pass": Case(lambda x, y, dy, own, p: dy),
    # flow
    "gradient_reversal": Case(lambda x, y, dy, own, p: -p.scale * dy, other={"scale": 0.3}),
    "gradient_scale": Case(lambda x, y, dy, own, p: p.factor * dy, other={"factor": -2.5}),
    "gradient_clip": Case(lambda x, y, dy, own, p: min(p.high, max(p.low, dy)), other={"low": -0.5, "high": 2.0}),
    "gradient_clip_norm": Case(whole=clip_norm, other={"norm": 100.0}),
    "gradient_zero": Case(lambda x, y, dy, own, p: 0.0),
    "gradient_mask": Case(lambda x, y, dy, own, p: dy * p.mask, other={"mask": 0.5}),
    "gradient_sign": Case(lambda x, y, dy, own, p: sign(dy)),
    "gradient_normalize": Case(whole=normalize, other={"eps": 0.5}),
    "nan_to_zero": Case(lambda x, y, dy, own, p: dy if math.isfinite(dy) else 0.0),
    "tanh_agree": Case(lambda x, y, dy, own, p: dy * abs(sign(y) + sign(dy)) / 2),
    # stable
    "log1pexp": Case(lambda x, y, dy, own, p: dy / (1 + math.exp(-x)), primitive=lambda x, p: math.log1p(math.exp(x))),
    "safe_sqrt": Case(lambda x, y, dy, own, p: dy * 0.5 / y if y > 0 else 0.0),
    "safe_log": Case(lambda x, y, dy, own, p: dy / max(x, p.eps), other={"eps": 0.5}),
    "safe_div": Case(whole=safe_div, inputs=2),
}
