"""Draws curves and norms into PNG, SVG and PDF files with Matplotlib.

Figures are made without pyplot, so that no display and no global state are needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule.cli.output import missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gradrule.cli.rules.curves import Curve
    from gradrule.common.tensor_codec import Array

_DPI = 120
_STYLES: dict[str, dict[str, Any]] = {
    "forward": {"color": "0.55", "linewidth": 1.4},
    "gradient": {"color": "C0", "linewidth": 2.0},
    "opposite": {"color": "C3", "linewidth": 1.4, "linestyle": "--"},
}
_SUFFIXES = (".png", ".svg", ".pdf")


def picture(text: str) -> Path:
    """Returns the path of a picture file; serves as an argparse type."""
    path = Path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(f"a picture's name ends with {', '.join(_SUFFIXES)}, got {text!r}")
    return path


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure; width and height in inches. Raises `CommandError` without Matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise missing_extra("`matplotlib`, which draws pictures, is not installed", "demo") from None
    return Figure(figsize=(width, height), layout="constrained")


def draw_curve(curve: Curve, path: Path) -> None:
    """Draws an op and its gradient over one axis into a file."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    axes.axhline(0, color="0.8", linewidth=0.8)
    axes.axvline(0, color="0.8", linewidth=0.8)
    for line in curve.lines:
        axes.plot(curve.x, finite(line.values), label=line.label, **_STYLES[line.role])
    axes.set(title=curve.title, xlabel="\n".join([curve.axis, *curve.notes]))
    axes.legend()
    figure.savefig(path, dpi=_DPI)


def draw_norms(
    tensors: Sequence[str],
    xs: Sequence[str],
    norms: dict[str, dict[str, float]],
    first_tensors: dict[str, str],
    path: Path,
) -> None:
    """Draws the norms of each label into a file: a line from the ys to the xs, and single points for the xs.

    Args:
        tensors: Names of the tensors on the path, from the ys to the xs.
        xs: Names of the xs.
        norms: Norms by label and tensor.
        first_tensors: The first tensor that differs from the reference, by label; it is marked with a ring.
        path: The file, .png, .svg or .pdf.
    """
    places = {tensor: place for place, tensor in enumerate([*tensors, *xs])}
    shown = [value for by_tensor in norms.values() for value in by_tensor.values() if np.isfinite(value)]
    figure = new_figure(max(6.0, 1.5 + 0.45 * len(places)), 5)
    axes = figure.subplots()
    for order, (label, by_tensor) in enumerate(norms.items()):
        # Earlier lines are wider, so that lines on top of each other stay visible.
        style: dict[str, Any] = {"color": f"C{order}", "linewidth": max(1.0, 5.0 - order), "alpha": 0.8}
        style |= {"marker": "o", "markersize": max(3.0, 8.0 - order)}
        axes.plot(range(len(tensors)), [by_tensor.get(name, np.nan) for name in tensors], label=label, **style)
        style["linestyle"] = "none"
        axes.plot([places[name] for name in xs], [by_tensor.get(name, np.nan) for name in xs], **style)
        if label in first_tensors:
            ring: dict[str, Any] = {"marker": "o", "markersize": 14, "fillstyle": "none", "color": f"C{order}"}
            axes.plot([places[first_tensors[label]]], [by_tensor.get(first_tensors[label], np.nan)], **ring)
    axes.axvline(len(tensors) - 0.5, color="0.8")
    _set_norm_scale(axes, shown)
    axes.set_xticks(range(len(places)), list(places), rotation=60, ha="right", fontsize=8)
    axes.set(ylabel="norm of the upstream gradient", title="from the ys to the xs; ring: first tensor that differs")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=_DPI)


def _set_norm_scale(axes: Any, values: Sequence[float]) -> None:
    """Makes the axis logarithmic; zeros, which mean that nothing came back, are shown at a 0 below all other values."""
    least = min((value for value in values if value), default=1.0)
    if 0.0 not in values:
        axes.set_yscale("log")
        return
    decade = 10.0 ** np.floor(np.log10(least))
    axes.set_yscale("symlog", linthresh=decade, linscale=0.5)
    axes.set_ylim(bottom=-decade / 4)
    axes.axhline(0, color="0.5", linewidth=0.8)


def finite(values: Array) -> Array:
    """Returns the values with NaN for infinities, which a curve shows as a gap."""
    return np.where(np.isfinite(values), values, np.nan)
