"""Makes Matplotlib figures in one style, with colours that colour-blind people can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from gradrule.common.tensor_codec import Array

DPI = 120
"""Dots per inch of written files."""
BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#767676",
)  # fmt: skip
"""Colours of Okabe and Ito, Color Universal Design, 2008, and a grey."""
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY)
MARKERS = "os^Dvp*"


def require_matplotlib() -> None:
    """Raises `UnsupportedError` if Matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401  # checks that it is installed
    except ModuleNotFoundError:
        raise UnsupportedError(
            "pictures need Matplotlib, which is not installed: pip install 'gradrule[plot]'"
        ) from None


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, without display and global state; sizes in inches."""
    require_matplotlib()
    from gradrule.viz._pictures import Picture

    return Picture(figsize=(width, height), layout="constrained")


def axes_or_new(ax: Axes | None, width: float, height: float) -> Axes:
    """Returns the caller's axes, or those of a new figure; sizes in inches."""
    if ax is not None:
        return ax
    figure = new_figure(width, height)
    from gradrule.viz._pictures import PictureAxes

    return figure.add_subplot(axes_class=PictureAxes)


def figure_of(ax: Axes) -> Figure:
    """Returns the figure that contains the axes."""
    found: Any = ax.get_figure(root=True)
    figure: Figure = found
    return figure


def color_of(number: int) -> str:
    """Returns the colour of the series with this number; colours repeat after seven."""
    return PALETTE[number % len(PALETTE)]


def set_style(ax: Axes, *, grid: bool = True) -> None:
    """Removes the frame's upper and right line and adds a light grid behind the data."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_axisbelow(True)
    if grid:
        ax.grid(alpha=0.25, linewidth=0.6)


def set_integer_ticks(axis: Axis) -> None:
    """Puts the ticks of an axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def set_caption(ax: Axes, lines: Sequence[str]) -> None:
    """Adds lines of small grey text under the label of the horizontal axis."""
    if lines:
        label = ax.get_xlabel()
        ax.set_xlabel("\n".join([label, *lines] if label else lines))


def finite(values: Array) -> Array:
    """Returns the values with NaN for infinities, which a line shows as a gap."""
    return np.where(np.isfinite(values), values, np.nan)
