"""Lists the cases of expression rules of the family attribution, in the order of the catalogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.rules.expression_case import Case, Results, Values, logistic


def redirected(
    passes: Callable[[float], bool], against: Callable[[float, float], bool]
) -> Callable[[Values, Any], Results]:
    def redirect(values: Values, p: Any) -> Results:
        x, dy = values["x0"], values["dy0"]
        result = np.zeros(x.shape)
        for sample in range(x.shape[0]):
            pairs = list(zip(x[sample].ravel(), dy[sample].ravel(), strict=True))
            own = [d if passes(v) else 0.0 for v, d in pairs]
            if not any(own) and p.step <= p.warmup:
                own = [0.0 if against(v, d) else d for v, d in pairs]
            result[sample] = np.reshape(own, x[sample].shape)
        return (result,)

    return redirect


CASES: Mapping[str, Case] = {
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
    "redirected_relu": Case(
        whole=redirected(lambda x: x >= 0, lambda x, dy: x < 0 and dy > 0),
        other={"step": 20.0, "warmup": 25.0},
        least_rank=1,
    ),
    "redirected_relu6": Case(
        whole=redirected(lambda x: 0 <= x <= 6, lambda x, dy: (x < 0 and dy > 0) or (x > 6 and dy < 0)),
        other={"step": 20.0, "warmup": 25.0},
        least_rank=1,
    ),
    "lrp_pass": Case(lambda x, y, dy, own, p: dy),
}
