"""Draws gradients of images as heat maps over the images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from gradrule.errors import InvalidParamError, InvalidTensorError
from gradrule.viz import _figures as figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from gradrule.common.tensor_codec import Array

Channels: TypeAlias = Literal["last", "first", "none"]
_COLORS = {True: "RdBu_r", False: "viridis"}
# Opacity of zeros: with signs, zeros are white, without signs dark.
_LEAST_ALPHA = {True: 0.15, False: 0.0}


def heat_map(gradient: Array, *, channels: Channels = "last", signed: bool = True) -> Array:
    """Reduces gradients of images to one number for each pixel.

    Args:
        gradient: Floating-point numbers of shape (height, width, channels) or (n, height, width, channels); with
            `channels="first"` the channels are before the height, with `channels="none"` there are none.
        channels: Where the axis of the channels is.
        signed: Sum the channels. If False: take the largest absolute value of the channels, as in Simonyan et al.,
            "Deep Inside Convolutional Networks", 2014, section 3.1.

    Returns:
        float64 array of shape (n, height, width); n is 1 for a single image.

    Raises:
        InvalidTensorError: The array is no image or batch of images, or is not real.
    """
    found = _batch(gradient, channels, "gradient")
    return np.asarray(found.sum(axis=-1) if signed else np.abs(found).max(axis=-1, initial=0.0))


def draw_saliency(
    image: Array,
    gradient: Array,
    *,
    signed: bool = True,
    channels: Channels = "last",
    percentile: float = 99.0,
    titles: Sequence[str] | str = (),
    label: str = "gradient",
    beside: bool = True,
    columns: int = 4,
    ax: Axes | None = None,
) -> Figure:
    """Draws the images and the heat maps of their gradients, see `gradrule.viz.saliency`."""
    images, maps = _batch(image, channels, "image"), heat_map(gradient, channels=channels, signed=signed)
    if images.shape[:3] != maps.shape:
        raise InvalidTensorError(
            f"image and gradient have one shape, not {list(np.shape(image))} and {list(np.shape(gradient))}"
        )
    if not 0 < percentile <= 100:
        raise InvalidParamError(f"percentile is greater than 0 and at most 100, not {percentile:g}")
    names = [titles] * len(images) if isinstance(titles, str) else list(titles)
    if names and len(names) != len(images):
        raise InvalidParamError(f"{len(images)} images take {len(images)} titles, not {len(names)}")
    names = names or [""] * len(images)
    if ax is not None:
        if len(images) != 1:
            raise InvalidParamError(f"ax takes one image, not {len(images)}; without ax a new figure shows all")
        _draw_over(ax, images[0], maps[0], signed, percentile, names[0], label)
        return figures.figure_of(ax)
    if columns < 1:
        raise InvalidParamError(f"columns is at least 1, not {columns}")
    across = min(columns, max(len(images), 1))
    down = max(-(-len(images) // across), 1)
    aspect = images.shape[1] / max(images.shape[2], 1)
    panels = 2 if beside else 1
    figure = figures.new_figure(across * (2.6 * panels + 0.9), down * (2.6 * min(max(aspect, 0.3), 2.0) + 0.5))
    grid = figure.subplots(down, across * panels, squeeze=False)
    for number, (one, heat, name) in enumerate(zip(images, maps, names, strict=True)):
        row, column = divmod(number, across)
        cells = grid[row][column * panels : (column + 1) * panels]
        if beside:
            _draw_image(cells[0], one)
            cells[0].set_title(name)
        _draw_over(cells[-1], one, heat, signed, percentile, label if beside else name, label)
    for empty in grid.ravel()[len(images) * panels :]:
        empty.set_axis_off()
    return figure


def limit_of(heat: Array, percentile: float) -> float:
    """Returns the value at the end of the colour scale: a percentile of the sizes of the finite values, above 0."""
    sizes = np.abs(heat[np.isfinite(heat)])
    if not sizes.size:
        return 1.0
    return float(np.percentile(sizes, percentile)) or float(sizes.max()) or 1.0


def _draw_over(ax: Axes, image: Array, heat: Array, signed: bool, percentile: float, title: str, label: str) -> None:
    """Draws a heat map over the image in grey; small values let the image show through."""
    limit = limit_of(heat, percentile)
    scale = draw_heat(ax, image, heat, signed, limit)
    _without_ticks(ax, title)
    is_clipped = bool((np.abs(heat[np.isfinite(heat)]) > limit).any())
    extend = ("both" if signed else "max") if is_clipped else "neither"
    bar = figures.figure_of(ax).colorbar(scale, ax=ax, fraction=0.046, pad=0.03, extend=extend)
    what = f"{label} by the pixel" if signed else f"size of the {label}"
    notes = [f"cut at {percentile:g} %"] if is_clipped else []
    missing = int(heat.size - np.isfinite(heat).sum())
    if missing:
        notes.append(f"{missing} of {heat.size} pixels not finite: hatched")
    bar.set_label("\n".join([what, *(f"({note})" for note in notes)]), fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.ax.ticklabel_format(axis="y", scilimits=(-2, 3))


def draw_heat(ax: Axes, image: Array, heat: Array, signed: bool, limit: float) -> ScalarMappable:
    """Draws a heat map over an image in pale grey; returns its colours for a colour bar.

    Args:
        ax: Axes to draw into.
        image: Shape (height, width, channels).
        heat: Shape (height, width). Pixels that are not finite are hatched.
        signed: Whether the colours are symmetric about 0.
        limit: Value at the end of the colours.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    norm = Normalize(-limit if signed else 0.0, limit)
    drawn = np.where(np.isfinite(heat), heat, 0.0)
    least = _LEAST_ALPHA[signed]
    alpha = least + (1 - least) * np.clip(np.abs(drawn) / limit, 0, 1)
    # The image is paler than the heat map, whose colours have to be read off the bar.
    ax.imshow(_as_grey(image) * 0.6 + 0.4, cmap="gray", vmin=0, vmax=1)
    ax.imshow(drawn, cmap=_COLORS[signed], norm=norm, alpha=alpha, interpolation="nearest")
    if not np.isfinite(heat).all():
        _hatch(ax, ~np.isfinite(heat))
    return ScalarMappable(norm, _COLORS[signed])


def _hatch(ax: Axes, pixels: Array) -> None:
    """Hatches pixels, given as truth values of shape (height, width)."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    rows = []
    for number, row in enumerate(pixels):
        # Runs of neighbours are one rectangle.
        ends = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]])))
        for left, right in ends.reshape(-1, 2):
            x, y = left - 0.5, number - 0.5
            rows.append(
                Path([(x, y), (x + right - left, y), (x + right - left, y + 1), (x, y + 1), (x, y)], closed=True)
            )
    area = Path.make_compound_path(*rows)
    ax.add_patch(PathPatch(area, facecolor="white", edgecolor="0.3", linewidth=0, hatch="////"))


def _draw_image(ax: Axes, image: Array) -> None:
    shown: Any = _unit(image)
    if shown.shape[-1] in (3, 4):
        ax.imshow(shown)
    else:
        ax.imshow(shown.mean(axis=-1), cmap="gray", vmin=0, vmax=1)
    _without_ticks(ax, "")


def _without_ticks(ax: Axes, title: str) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title(title)


def _unit(image: Array) -> Array:
    """Scales an image to [0, 1]: 8-bit numbers by 255, floating-point numbers in [0, 1] not at all, others by range."""
    finite = np.where(np.isfinite(image), image, 0.0)
    low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    if low >= 0 and high <= 1:
        return finite
    if low >= 0 and high <= 255 and np.array_equal(finite, np.rint(finite)):
        return finite / 255
    low = float(finite.min())
    return (finite - low) / ((high - low) or 1.0)


def _as_grey(image: Array) -> Array:
    shown = _unit(image)
    # Brightness as in ITU-R BT.601.
    is_color = shown.shape[-1] in (3, 4)
    return np.asarray(shown[..., :3] @ np.array([0.299, 0.587, 0.114]) if is_color else shown.mean(axis=-1))


def _batch(value: Array, channels: Channels, what: str) -> Array:
    """Returns float64 numbers of shape (n, height, width, channels). Raises `InvalidTensorError`."""
    if channels not in ("last", "first", "none"):
        raise InvalidParamError(f"channels is 'last', 'first' or 'none', not {channels!r}")
    array = np.asarray(value)
    if array.dtype.kind in "cOSUMm":
        raise InvalidTensorError(f"{what}: an image has real numbers, not {array.dtype}")
    array = array.astype(np.float64)
    rank = 2 if channels == "none" else 3
    if array.ndim == 2:
        array = array[None, :, :, None]
    elif array.ndim not in (rank, rank + 1):
        raise InvalidTensorError(
            f"{what}: expected (height, width) or, with channels={channels!r}, {_shapes(channels)}; "
            f"got {list(array.shape)}"
        )
    else:
        array = array[..., None] if channels == "none" else array
        array = array if array.ndim == 4 else array[None]
        array = np.moveaxis(array, 1, -1) if channels == "first" else array
    if what == "image" and array.shape[-1] not in (1, 3, 4):
        raise InvalidTensorError(
            f"image: {array.shape[-1]} channels in {list(np.shape(value))}; an image has 1, 3 or 4. "
            f"channels='first' and channels='none' name other layouts"
        )
    return array


def _shapes(channels: Channels) -> str:
    image = {"last": "height, width, channels", "first": "channels, height, width", "none": "height, width"}[channels]
    return f"({image}) or (n, {image})"
