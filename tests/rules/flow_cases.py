"""Lists the cases of expression rules of the families flow and stable, in the order of the catalogue."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.rules.expression_case import Array, Case, Results, Values, sign
from tests.unit.rules.running import Draws


def clip_norm(values: Values, p: Any) -> Results:
    length = math.sqrt(math.fsum(float(entry) ** 2 for entry in values["dy0"].ravel()))
    return (values["dy0"] * min(1.0, p.norm / (length or p.norm)),)


def normalize(values: Values, p: Any) -> Results:
    length = math.sqrt(math.fsum(float(entry) ** 2 for entry in values["dy0"].ravel()))
    return (values["dy0"] / (length + p.eps),)


def safe_div(values: Values, p: Any) -> Results:
    dy, y, below = values["dy0"], values["y0"], values["x1"]
    above_gradient, below_gradient = np.zeros(dy.shape), np.zeros(dy.shape)
    for place in np.ndindex(dy.shape):
        if below[place] != 0:
            above_gradient[place] = dy[place] / below[place]
            below_gradient[place] = -dy[place] * y[place] / below[place]
    return above_gradient, below_gradient


def gradient_noise(values: Values, p: Any) -> Results:
    deviation = math.sqrt(p.eta / (1 + p.step) ** 0.55)
    return (values["dy0"] + deviation * Draws().normal(values["dy0"], int(p.seed), dtype=p.dtype),)


def safe_norm(values: Values, p: Any) -> Results:
    x, length = values["x0"], float(values["y0"])
    return (values["dy0"] * (x / length if length else np.zeros(x.shape)),)


def norm_of_x(values: Values) -> None:
    values["y0"] = np.asarray(np.linalg.norm(values["x0"].ravel()))


def positive(xs: Sequence[Array]) -> Sequence[Array]:
    return [np.abs(x) + 0.75 for x in xs]


FLOW: Mapping[str, Case] = {
    "gradient_reversal": Case(lambda x, y, dy, own, p: -p.scale * dy, other={"scale": 0.3}),
    "gradient_scale": Case(lambda x, y, dy, own, p: p.factor * dy, other={"factor": -2.5}),
    "gradient_clip": Case(lambda x, y, dy, own, p: min(p.high, max(p.low, dy)), other={"low": -0.5, "high": 2.0}),
    "gradient_clip_norm": Case(whole=clip_norm, other={"norm": 100.0}),
    "gradient_zero": Case(lambda x, y, dy, own, p: 0.0),
    "gradient_mask": Case(lambda x, y, dy, own, p: dy * p.mask, other={"mask": 0.5}),
    "gradient_sign": Case(lambda x, y, dy, own, p: sign(dy)),
    "gradient_normalize": Case(whole=normalize, other={"eps": 0.5}),
    "gradient_noise": Case(whole=gradient_noise, other={"eta": 1.0, "step": 100.0, "seed": 5.0}, random=True),
    "nan_to_zero": Case(lambda x, y, dy, own, p: dy if math.isfinite(dy) else 0.0),
    "tanh_agree": Case(lambda x, y, dy, own, p: dy * abs(sign(y) + sign(dy)) / 2),
}

STABLE: Mapping[str, Case] = {
    "log1pexp": Case(
        lambda x, y, dy, own, p: dy / (1 + math.exp(-x)),
        primitive=lambda x, p: math.log1p(math.exp(x)),
        true=lambda xs, p: np.log1p(np.exp(xs[0])),
    ),
    "safe_sqrt": Case(
        lambda x, y, dy, own, p: dy * 0.5 / y if y > 0 else 0.0,
        true=lambda xs, p: np.sqrt(xs[0]),
        domain=positive,
    ),
    "safe_norm": Case(
        whole=safe_norm,
        output="scalar",
        prepare=norm_of_x,
        true=lambda xs, p: np.asarray(np.linalg.norm(xs[0].ravel())),
    ),
    "safe_log": Case(
        lambda x, y, dy, own, p: dy / max(x, p.eps),
        other={"eps": 0.5},
        true=lambda xs, p: np.log(xs[0]),
        domain=positive,
    ),
    "safe_div": Case(
        whole=safe_div, inputs=("same", "same"), mixing=("same", "scalar"), true=lambda xs, p: xs[0] / xs[1]
    ),
}
