"""Lists the exact results of rules at kinks, just beyond them, and for NaN, as the sources define them."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Rule → x → dx for dy = 1 and y = 1, with the rule's defaults (or the case's values where there is none).
KINKS: Mapping[str, Mapping[float, float]] = {
    "ste_sign": {-1: 1, 1: 1, 1.001: 0, -1.001: 0},
    "approx_sign": {0: 2, 1: 0, -1: 0, 1.001: 0},
    "swish_sign": {0: 5},
    "dorefa_activation": {0: 1, 1: 1, -0.001: 0, 1.001: 0},
    "ede": {0: 1},
    "reste": {0: 0.1 ** (1 / 3) / 0.1, 0.1: 0.1 ** (1 / 3) / 0.1, 1.5: 1.5 ** (-2 / 3) / 3, 1.501: 0},
    "clamp_window": {-0.75: 1, 1: 1, 1.001: 0, -0.751: 0},
    "abs_binary_sign": {0: 1, -0.001: -1},
    "log_tailed_relu": {0: 0, 0.001: 1, 1: 1, 2: 0.5},
    "fast_sigmoid": {0: 1},
    "superspike_unit": {0: 1},
    "soft_sign": {0: 1},
    "atan": {0: 1},
    "sigmoid_surrogate": {0: 6.25},
    "tanh_surrogate": {0: 1},
    "erf": {0: 2 / math.sqrt(math.pi)},
    "heavi_erfc": {0: 2 / math.sqrt(math.pi)},
    "circ": {0: 1},
    "triangle": {0: 0.3, 1: 0, -1: 0, 1.001: 0},
    "piecewise_quadratic": {0: 1, 1: 0, -1: 0, 1.001: 0},
    "piecewise_exp": {0: 0.5},
    "boxcar": {0: 1, 0.499: 1, 0.5: 0, -0.5: 0},
    "gaussian": {0: 1 / math.sqrt(2 * math.pi)},
    "slayer": {0: 1},
    "piecewise_leaky_relu": {0: 0.5, 1: 0.01, -1: 0.01, 0.999: 0.5},
    "leaky_k_relu": {0: 1, -0.001: 0},
    "leaky_spike_operator": {0: 0.1, 0.001: 1},
    "spike_rate_escape": {1: 25},
    "sparse_fast_sigmoid": {1: 0, 0: 0, -2: 0, 3: 1 / 76**2},
    "heaviside_gradient": {0: 0, 0.001: 1},
    "s2nn": {0: 1, -1e-9: 1},
    "q_pseudo_spike": {0: 1},
    "nonzero_sign_log_abs": {0: 1},
    "squarewave_fourier": {0: 0.5, 2: 0, 4: -0.5, 8: 0.5, -4: -0.5, 4000: 0.5},
    "multi_level": {0: 1, 1: 1, -0.001: 0, 1.001: 0},
    "relu_beta_smooth": {0: 0.5},
    "elrp_activation": {0: 1e4, -1e-4: -5e3},
    "log1pexp": {0: 0.5, 100: 1, -1000: 0},
    "safe_log": {0: 1e7, -1: 1e7, 1e-7: 1e7},
}

# Rule → the result of x = NaN and dy = 1: rules that compare x give a number, the others give NaN.
NAN_IN_X: Mapping[str, float] = {
    "ste": 1,
    "ste_sign": 0,
    "approx_sign": 0,
    "dorefa_activation": 0,
    "clamp_window": 0,
    "reste": 0,
    "ewgs": math.nan,
    "fast_sigmoid": math.nan,
    "atan": math.nan,
    "triangle": math.nan,
    "piecewise_quadratic": 0,
    "boxcar": 0,
    "piecewise_leaky_relu": 0.01,
    "leaky_k_relu": 0,
    "leaky_spike_operator": 0.1,
    "sparse_fast_sigmoid": 0,
    "heaviside_gradient": 0,
    "multi_level": 0,
    "squarewave_fourier": math.nan,
    "log1pexp": math.nan,
    "gradient_zero": 0,
    "gradient_reversal": -1,
}

# Rule → the result of dy = NaN and x = 1/4.
NAN_IN_DY: Mapping[str, float] = {
    "ste": math.nan,
    "ste_sign": math.nan,
    "guided_relu": 0,
    "deconvnet": math.nan,
    "gradient_clip": math.nan,
    "gradient_zero": 0,
    "nan_to_zero": 0,
}
