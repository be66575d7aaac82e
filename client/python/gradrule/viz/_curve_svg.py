"""Draws a curve as an SVG picture for an HTML page."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from gradrule.viz._curves import Curve

if TYPE_CHECKING:
    from gradrule.common.tensor_codec import Array

_WIDTH, _HEIGHT = 300.0, 170.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 8.0, 8.0, 20.0


def curve_svg(curve: Curve) -> str:
    """Returns a curve as SVG text. Lines have the CSS classes `forward`, `gradient` and `opposite`."""
    low, high = span(curve)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + width * (x - float(curve.x[0])) / float(curve.x[-1] - curve.x[0])

    def down(value: float) -> float:
        return _TOP + height * (high - min(max(value, low), high)) / (high - low)

    parts = [f'<rect class="frame" x="{_LEFT:g}" y="{_TOP:g}" width="{width:g}" height="{height:g}"/>']
    if low < 0 < high:
        parts.append(_segment(_LEFT, down(0), _LEFT + width, down(0)))
    if curve.x[0] < 0 < curve.x[-1]:
        parts.append(_segment(across(0), _TOP, across(0), _TOP + height))
    for value in (float(curve.x[0]), 0.0, float(curve.x[-1])):
        if curve.x[0] <= value <= curve.x[-1]:
            parts.append(_text(across(value), _HEIGHT - 5, f"{value:g}", "middle"))
    parts.append(_text(_LEFT + 0.75 * width, _HEIGHT - 5, curve.axis, "middle"))
    for value in (_axis_label(low, high, up=False), _axis_label(low, high, up=True)):
        parts.append(_text(_LEFT - 4, down(value) + 4, f"{value:.3g}", "end"))
    for line in curve.lines:
        for points in _finite_parts(curve.x, line.values):
            path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
            parts.append(f'<polyline class="{line.role}" points="{path}"/>')
    title = escape(", ".join([curve.title, *(line.label for line in curve.lines)]))
    return f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img"><title>{title}</title>{"".join(parts)}</svg>'


def span(curve: Curve) -> tuple[float, float]:
    """Returns the range of shown values, with a margin and without a few outliers."""
    values = np.concatenate([line.values[np.isfinite(line.values)] for line in curve.lines])
    if not values.size:
        return -1.0, 1.0
    low, high = float(values.min()), float(values.max())
    near_low, near_high = (float(value) for value in np.percentile(values, [3, 97], method="nearest"))
    reach = 3 * max(near_high - near_low, 1e-3)
    low, high = max(low, near_low - reach), min(high, near_high + reach)
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


def _axis_label(low: float, high: float, up: bool) -> float:
    """Returns a round number near an end of the axis, for its label."""
    inner = (high - low) * 0.05
    value = high - inner if up else low + inner
    step = 10.0 ** np.floor(np.log10(high - low)) / 2
    rounded = float((np.floor if up else np.ceil)(value / step + (1e-6 if up else -1e-6)) * step)
    return rounded + 0.0 if low <= rounded <= high else value


def _segment(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="zero" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _finite_parts(x: Array, values: Array) -> list[list[tuple[float, float]]]:
    """Splits a line into its finite parts."""
    parts: list[list[tuple[float, float]]] = [[]]
    for position, value in zip(x.tolist(), values.tolist(), strict=True):
        if np.isfinite(value):
            parts[-1].append((position, value))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def round_ticks(low: float, high: float) -> list[float]:
    """Returns three to six round numbers within a range, at equal distances of 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(high - low))
    steps = [factor * size for factor in (5.0, 2.0, 1.0, 0.5, 0.2, 0.1)]
    step = next(step for step in steps if math.floor(high / step) - math.ceil(low / step) >= 2)
    # Rounding removes the error of the product, which would be shown.
    return [
        round(number * step, 12 - math.floor(math.log10(step)))
        for number in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]
