"""Formulas of libraries that cannot be installed here, and of papers, in NumPy.

larq: written from its documentation and `larq/quantizers.py`, 0.14.0. norse: `norse/torch/functional/threshold.py`,
`superspike.py`, 1.1.0. Each gives dx from x and dy.
"""

from __future__ import annotations

import numpy as np

from tests.peers.cases import Array


def larq_clipped(x: Array, dy: Array, clip: float = 1.0) -> Array:
    """`_clipped_gradient`: of ste_sign, ste_tern and ste_heaviside."""
    return np.where(np.abs(x) <= clip, dy, np.zeros_like(dy))


def larq_approx_sign(x: Array, dy: Array) -> Array:
    return np.where(np.abs(x) <= 1, (1 - np.abs(x)) * 2 * dy, np.zeros_like(dy))


def larq_swish_sign(x: Array, dy: Array, beta: float = 5.0) -> Array:
    b_x = (beta * x).astype(x.dtype)
    with np.errstate(over="ignore"):
        return np.asarray(dy * beta * (2 - b_x * np.tanh(b_x * 0.5)) / (1 + np.cosh(b_x)), x.dtype)


def larq_magnitude_aware_sign(x: Array, dy: Array, clip: float = 1.0) -> Array:
    """`scale_factor * ste_sign(x)`, the scale under a stop_gradient: the mean of abs(x) over all axes but the last."""
    scale = np.mean(np.abs(x), axis=tuple(range(x.ndim - 1)))
    return larq_clipped(x, (scale * dy).astype(x.dtype), clip)


def larq_dorefa_activation(x: Array, dy: Array) -> Array:
    """clip_by_value(x, 0, 1), then a rounding whose gradient is dy."""
    return np.where((x >= 0) & (x <= 1), dy, np.zeros_like(dy))


def larq_dorefa_weight(x: Array, dy: Array) -> Array:
    """2·round(n·(tanh(x)/(2·max abs tanh) + 1/2))/n - 1: the 2 and the 1/2 cancel, the maximum is held fixed."""
    limited = np.tanh(x)
    return np.asarray(dy * (1 - limited**2) / np.max(np.abs(limited)), x.dtype)


def norse_superspike(x: Array, dy: Array, alpha: float = 100.0) -> Array:
    """1.1.0 takes alpha, the beta of the paper's 1/(beta·abs(x) + 1)², and does not use it."""
    del alpha
    return np.asarray(dy / (np.abs(x) + 1) ** 2, x.dtype)


def norse_tanh(x: Array, dy: Array, k: float) -> Array:
    return np.asarray(dy * (1 - np.tanh(x * k) ** 2), x.dtype)


def norse_heavi_erfc(x: Array, dy: Array, k: float) -> Array:
    return np.asarray(dy * 2 * np.exp(-((k * x) ** 2)) / np.sqrt(np.pi), x.dtype)


def norse_circ(x: Array, dy: Array, alpha: float) -> Array:
    """As norse writes it: a difference of two terms, which cancel for large x; so in float64."""
    x = x.astype(np.float64)
    spread = alpha**2 + x**2
    return np.asarray(dy * (-(x**2) / (2 * spread**1.5) + 1 / (2 * spread**0.5)) * 2 * alpha, dy.dtype)


def norse_triangle(x: Array, dy: Array, alpha: float) -> Array:
    return np.asarray(dy * alpha * np.maximum(1 - np.abs(x), 0), x.dtype)


def _density(x: Array, mean: float, deviation: float) -> Array:
    """Yin's `gaussian`: the normal density."""
    return np.asarray(np.exp(-((x - mean) ** 2) / (2 * deviation**2)) / np.sqrt(2 * np.pi) / deviation)


def yin_gaussian(x: Array, dy: Array, lens: float, gamma: float) -> Array:
    """Yin, Corradi, Bohté 2021, surrogate 'G'."""
    return np.asarray(dy * gamma * _density(x, 0.0, lens), x.dtype)


def yin_multi_gaussian(x: Array, dy: Array, lens: float, h: float, s: float, gamma: float) -> Array:
    """Yin, Corradi, Bohté 2021, surrogate 'MG'."""
    side = _density(x, lens, s * lens) + _density(x, -lens, s * lens)
    return np.asarray(dy * gamma * (_density(x, 0.0, lens) * (1 + h) - h * side), x.dtype)


def slayer(x: Array, dy: Array, alpha: float, gamma: float) -> Array:
    """Shrestha, Orchard 2018: a spike escape rate."""
    return np.asarray(dy * gamma * np.exp(-alpha * np.abs(x)), x.dtype)
