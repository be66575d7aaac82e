"""Draws tensors of results: small vectors as bars, images and matrices as heat maps, all others as histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule._builder.names import counted
from gradrule._results.call_results import Explanation, Result, Sparse
from gradrule._results.rule_infos import SampleResult
from gradrule.errors import InvalidParamError, UnknownTensorError
from gradrule.viz import _figures as figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradrule.common.tensor_codec import Array

_MAX_PANELS = 12
_MAX_BARS = 64
_MAX_CELLS = 4096
_BINS = 50
# Ratio of the highest bar to the middle one from which the axis is logarithmic.
_STEEP = 50


def tensors_of(result: Result | SampleResult | Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays by title: outputs, then gradients; gradients of groups as `group/x`."""
    if isinstance(result, Mapping):
        return _flat(result)
    found = {f"output {name}": value for name, value in result.outputs.items()}
    what = "" if isinstance(result, SampleResult) else "gradient of "
    return found | {f"{what}{name}": value for name, value in _flat(result.gradients).items()}


def draw_tensors(tensors: Mapping[str, Any], name: str | None, ax: Axes | None) -> Figure:
    """Draws one panel for each tensor, see `gradrule.viz.plot_tensors`."""
    if name is not None:
        wanted = {title: value for title, value in tensors.items() if name in (title, title.split(" ")[-1])}
        if not wanted:
            raise UnknownTensorError(f"there is no tensor {name!r}; there are: {', '.join(tensors) or 'none'}")
        tensors = wanted
    if ax is not None:
        if len(tensors) != 1:
            raise InvalidParamError(f"ax takes one tensor, and there are {len(tensors)}: choose one with name=…")
        ((title, value),) = tensors.items()
        _draw(ax, title, value)
        return figures.figure_of(ax)
    shown = dict(list(tensors.items())[:_MAX_PANELS])
    across = min(len(shown), 3) or 1
    down = max(math.ceil(len(shown) / across), 1)
    figure = figures.new_figure(3.8 * across + 0.6, 2.9 * down + 0.3)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for panel, (title, value) in zip(grid, shown.items(), strict=False):
        _draw(panel, title, value)
    for empty in grid[len(shown) :]:
        empty.set_axis_off()
    if len(shown) < len(tensors):
        figure.suptitle(f"the first {len(shown)} of {len(tensors)} tensors", fontsize=10)
    return figure


def draw_explanation(ax: Axes, explanation: Explanation) -> None:
    """Draws how many nodes each rule got, as bars: on the path, and off it."""
    counts: dict[str, list[int]] = {}
    for item in explanation.overrides:
        bars = counts.setdefault(item.rule, [0, 0])
        bars[item.status != "active"] += 1
    if explanation.default_gradient_nodes:
        counts.setdefault("default", [0, 0])[0] += len(explanation.default_gradient_nodes)
    rules = sorted(counts, key=lambda rule: (rule == "default", -sum(counts[rule])))
    active, others = ([counts[rule][place] for rule in rules] for place in (0, 1))
    ax.barh(rules, active, color=figures.BLUE, label="on the path: the rule is used")
    if any(others):
        ax.barh(rules, others, left=active, color=figures.ORANGE, hatch="//", label="off the path")
    for place, rule in enumerate(rules):
        ax.annotate(
            str(sum(counts[rule])), (sum(counts[rule]), place), xytext=(3, 0), textcoords="offset points", va="center"
        )
    title = (
        "Nodes by rule"
        if not explanation.findings
        else f"{counted(len(explanation.findings), 'finding')}: no rule is used"
    )
    ax.set(title=title, xlabel="number of nodes", ylabel="rule")
    ax.invert_yaxis()
    ax.margins(x=0.12)
    figures.set_integer_ticks(ax.xaxis)
    figures.set_style(ax)
    if any(others):
        ax.legend(frameon=False)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= (
            {f"{name}/{inner}": one for inner, one in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return found


def _draw(ax: Axes, title: str, value: Array | Sparse | None) -> None:
    if value is None:
        _draw_text(ax, title, "no gradient")
        return
    array = np.asarray(value.values if isinstance(value, Sparse) else value)
    sizes = value.dense_shape.tolist() if isinstance(value, Sparse) else list(array.shape)
    kind = f"{array.dtype.name}{', sparse' if isinstance(value, Sparse) else ''} {sizes}"
    ax.set_title(f"{title}\n{kind}", fontsize=10)
    if array.dtype.kind in "OSU" or not array.size:
        _draw_text(ax, ax.get_title(), "no numbers" if array.size else "empty")
        return
    numbers = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
    measure = "absolute value" if array.dtype.kind == "c" else "value"
    # Axes of size 1 change nothing in the picture.
    numbers = numbers.squeeze()
    if not numbers.ndim:
        _draw_text(ax, ax.get_title(), f"{numbers.item():.6g}")
    elif numbers.ndim == 1 and numbers.size <= _MAX_BARS:
        _draw_bars(ax, numbers, measure)
    elif numbers.ndim == 2 and numbers.size <= _MAX_CELLS and min(numbers.shape) > 1:
        _draw_matrix(ax, numbers, measure)
    else:
        _draw_histogram(ax, numbers.ravel(), measure)


def _draw_text(ax: Axes, title: str, text: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, fontsize=14, color="0.3")


def _draw_bars(ax: Axes, numbers: Array, measure: str) -> None:
    colors = [figures.BLUE if number >= 0 else figures.VERMILION for number in numbers]
    ax.bar(range(len(numbers)), figures.finite(numbers), color=colors)
    ax.axhline(0, color="0.5", linewidth=0.8)
    ax.set(xlabel="index", ylabel=measure)
    figures.set_integer_ticks(ax.xaxis)
    figures.set_style(ax)


def _draw_matrix(ax: Axes, numbers: Array, measure: str) -> None:
    limit = float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0)) or 1.0
    drawn = ax.imshow(numbers, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    figures.figure_of(ax).colorbar(drawn, ax=ax, label=measure)
    ax.set(xlabel="index along axis 1", ylabel="index along axis 0")
    for axis in (ax.xaxis, ax.yaxis):
        figures.set_integer_ticks(axis)


def _draw_histogram(ax: Axes, numbers: Array, measure: str) -> None:
    finite = numbers[np.isfinite(numbers)]
    counts, edges = np.histogram(finite, bins=_BINS)
    ax.stairs(counts, edges, fill=True, color=figures.BLUE)
    # A spike, often at 0, would hide all other values.
    is_steep = finite.size > 0 and float(np.max(counts)) > _STEEP * float(np.median(counts[counts > 0]))
    if is_steep:
        ax.set_yscale("symlog", linthresh=1)
    ax.set(xlabel=measure, ylabel=f"number of elements{', logarithmic' if is_steep else ''}")
    ax.margins(x=0.01)
    lines = [f"mean {finite.mean():.3g}, standard deviation {finite.std():.3g}"] if finite.size else []
    zeros = float(np.mean(numbers == 0))
    lines += [f"{zeros:.1%} are exactly 0"] if zeros else []
    lines += [f"{numbers.size - finite.size} are NaN or infinite"] if finite.size < numbers.size else []
    figures.set_caption(ax, [", ".join(lines)] if lines else [])
    figures.set_style(ax)
