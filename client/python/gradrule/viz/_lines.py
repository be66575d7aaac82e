"""Draws curves of rules, checks of rules and comparisons of override maps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule._builder.rules import EXPRESSION
from gradrule._comparison.compare import Comparison
from gradrule.viz import _figures as figures
from gradrule.viz._checking import Report, Slopes
from gradrule.viz._curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES: dict[str, dict[str, Any]] = {
    "forward": {"color": figures.GREY, "linewidth": 1.6, "linestyle": (0, (1, 1.2))},
    "gradient": {"color": figures.BLUE, "linewidth": 2.2},
    "opposite": {"color": figures.VERMILION, "linewidth": 1.6, "linestyle": "--"},
}
# Characters in a line.
_WRAPPED = 90
_TITLE_WRAPPED = 60


def draw_curve(ax: Axes, curve: Curve) -> None:
    """Draws an op and its gradient over one axis."""
    _draw_zero_lines(ax)
    for line in curve.lines:
        ax.plot(curve.x, figures.finite(line.values), label=line.label, **_STYLES[line.role])
    roles = {line.role for line in curve.lines}
    what = "output of the op, and gradient dx" if "forward" in roles else "gradient dx"
    title = "\n".join(textwrap.wrap(curve.title, _TITLE_WRAPPED))
    ax.set(title=title, xlabel="upstream gradient dy" if curve.axis == "dy" else "input x", ylabel=what)
    figures.set_caption(ax, _wrapped(curve.notes))
    ax.margins(x=0.01)
    figures.set_style(ax)
    if len(curve.lines) > 1 or curve.axis == "x":
        ax.legend(frameon=False)


def draw_check(ax: Axes, report: Report, slopes: Slopes) -> None:
    """Draws the gradient of a rule over the finite differences of the function that it was compared with."""
    _draw_zero_lines(ax)
    label = f"finite differences of {(report.of or '').removeprefix(EXPRESSION)}"
    ax.plot(slopes.x, figures.finite(slopes.expected), label=label, color=figures.ORANGE, linewidth=5, alpha=0.7)
    ax.plot(slopes.x, figures.finite(slopes.rule), label=f"rule {report.rule}", color=figures.BLUE, linewidth=1.6)
    for number, kink in enumerate(report.kinks):
        what = "jump" if kink.is_jump else "kink"
        ax.axvline(kink.x, color=figures.GREY, linewidth=1, linestyle=":", label="kinks and jumps" * (number == 0))
        if np.isfinite(kink.rule):
            ax.plot([kink.x], [kink.rule], "o", color=figures.BLUE, fillstyle="none", gid=f"{what} {kink.x:g}")
    first = report.claims[0]
    wrong = [claim for claim in report.claims if not claim.holds]
    if wrong and wrong[0] is first and first.at is not None:
        style: dict[str, Any] = {"color": figures.VERMILION, "linewidth": 1.4, "linestyle": "--"}
        ax.axvline(first.at, label=f"largest difference: x = {first.at:.4g}", **style)
    verdict = f"WRONG for {', '.join(claim.name for claim in wrong)}" if wrong else "holds"
    function = (report.of or "").removeprefix(EXPRESSION)
    title = f"{report.rule} as the gradient of {function}: {verdict}, largest difference {first.largest:.1e}"
    ax.set(
        title="\n".join(textwrap.wrap(title, _TITLE_WRAPPED)),
        xlabel="input x",
        ylabel="gradient dx for dy = 1",
    )
    figures.set_caption(ax, _wrapped(report.notes))
    figures.set_style(ax)
    ax.margins(x=0.01)
    ax.legend(frameon=False)


def draw_comparison(ax: Axes, found: Comparison) -> None:
    """Draws the norms of each label: a line from the ys to the xs, and single points for the xs."""
    tensors, xs = (list(dict.fromkeys(row.tensor for row in found.rows if row.is_x == is_x)) for is_x in (False, True))
    places = [*tensors, *xs]
    shown: list[float] = []
    for order, label in enumerate(found.labels):
        norms = {tensor: np.nan if norm is None else norm for tensor, norm in found.norms(label).items()}
        shown += [value for value in norms.values() if np.isfinite(value)]
        # Earlier lines are wider, so that lines on top of each other stay visible.
        color, width = figures.color_of(order), max(1.2, 5.0 - 1.2 * order)
        style: dict[str, Any] = {"color": color, "marker": figures.MARKERS[order % len(figures.MARKERS)]}
        style |= {"markersize": max(4.0, 9.0 - 1.5 * order), "alpha": 0.85, "clip_on": False}
        values = [norms.get(name, np.nan) for name in places]
        count = len(tensors)
        ax.plot(range(count), values[:count], linewidth=width, label=label if count else None, **style)
        ax.plot(range(count, len(places)), values[count:], linestyle="none", label=None if count else label, **style)
        first = found.first_differences.get(label)
        if first is not None and np.isfinite(norms.get(first.tensor, np.nan)):
            ring: dict[str, Any] = {"markersize": 17, "fillstyle": "none", "color": color, "clip_on": False}
            ax.plot([places.index(first.tensor)], [norms[first.tensor]], marker="o", **ring)
    if tensors:
        ax.axvline(len(tensors) - 0.5, color="0.6", linewidth=0.8)
    _set_norm_scale(ax, shown)
    ax.set_xticks(range(len(places)), [_shortened(name) for name in places], rotation=40, ha="right", fontsize=8)
    ax.set_xlim(-0.5, len(places) - 0.5)
    title = "Norms of upstream gradients, from the ys to the xs"
    ring_text = "ring: the first tensor that differs" if any(found.first_differences.values()) else ""
    ax.set_title("\n".join([title, *([ring_text] if ring_text else [])]), fontsize=11)
    ax.set(xlabel="tensor on the path, then each x" if tensors else "x", ylabel="Euclidean norm of the gradient")
    figures.set_style(ax)
    ax.legend(frameon=False, title="override map", loc="upper left", bbox_to_anchor=(1.01, 1))


def comparison_size(found: Comparison) -> tuple[float, float]:
    """Returns width and height in inches that suit the number of tensors."""
    return min(max(6.0, 2.0 + 0.45 * len({row.tensor for row in found.rows})), 24.0), 5.0


def _set_norm_scale(ax: Axes, values: Sequence[float]) -> None:
    """Makes the axis logarithmic; zeros, which mean that nothing came back, are shown at a 0 below all other values."""
    above = [value for value in values if value]
    if len(above) == len(values):
        ax.set_yscale("log")
        return
    decade = 10.0 ** np.floor(np.log10(min(above, default=1.0)))
    ax.set_yscale("symlog", linthresh=decade, linscale=0.5)
    ax.set_ylim(-decade / 4, 1.5 * max(above, default=1.0))
    ax.axhspan(-decade / 4, decade / 4, color=figures.GREY, alpha=0.15, linewidth=0)
    powers: Any = ax.yaxis.get_major_formatter()
    ax.yaxis.set_major_formatter(lambda value, place: powers(value, place) if value else "exactly 0")


def _draw_zero_lines(ax: Axes) -> None:
    ax.axhline(0, color="0.75", linewidth=0.8, zorder=0)
    ax.axvline(0, color="0.75", linewidth=0.8, zorder=0)


def _wrapped(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in textwrap.wrap(note, _WRAPPED)]


def _shortened(name: str) -> str:
    """Returns the end of a long name, which differs from its neighbours'."""
    return name if len(name) <= 32 else f"…{name[-31:]}"
