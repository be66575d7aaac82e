"""Lists the cases of the family surrogate, in the order of the catalogue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.rules.expression_case import Case, Results, Values, density, logistic, sign
from tests.unit.rules.running import Draws


def multi_gaussian(x: float, p: Any) -> float:
    narrow = (1 + p.h) * density(x, 0, p.lens)
    wide = p.h * density(x, p.lens, p.s * p.lens) + p.h * density(x, -p.lens, p.s * p.lens)
    return float(p.gamma * (narrow - wide))


def stochastic_spike_operator(values: Values, p: Any) -> Results:
    uniform = Draws().uniform(values["x0"], int(p.seed), dtype=p.dtype)
    slopes = np.where(values["x0"] > 0, 1.0, (uniform - 0.5 + p.mean) * p.var)
    return (values["dy0"] * slopes,)


CASES: Mapping[str, Case] = {
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
    "stochastic_spike_operator": Case(
        whole=stochastic_spike_operator, other={"mean": 0.25, "var": 0.5, "seed": 5.0}, random=True
    ),
    "spike_rate_escape": Case(
        lambda x, y, dy, own, p: dy * p.slope * math.exp(-p.beta * abs(x - 1)), other={"beta": 0.5, "slope": 2.0}
    ),
    "sparse_fast_sigmoid": Case(
        lambda x, y, dy, own, p: (
            dy / (1 + p.slope * abs(x)) ** 2 if (abs(x) < p.band if p.mode else x > p.band) else 0.0
        ),
        other={"slope": 3.0, "band": 1.25, "mode": 1.0},
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
    "squarewave_fourier": Case(
        lambda x, y, dy, own, p: (
            dy * 4 / p.period * sum(math.cos((2 * i - 1) * 2 * math.pi / p.period * x) for i in range(1, int(p.n)))
        ),
        primitive=lambda x, p: (
            0.5
            + 2
            / math.pi
            * sum(math.sin(odd * 2 * math.pi / p.period * x) / odd for odd in range(1, 2 * int(p.n) - 2, 2))
        ),
        other={"n": 6.0, "period": 5.0},
    ),
    "multi_level": Case(lambda x, y, dy, own, p: dy if 0 <= x <= p.levels else 0.0, other={"levels": 1.0}),
}
