"""Describes arrays in notebooks: dtype, shape, values or range, and a small histogram."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

import numpy as np

from gradrule._builder.notebook_text import MAX_TABLE_ROWS, Html, html_table

_COLUMNS = ("", "tensor", "dtype", "shape", "values", "")
_MAX_SHOWN = 4
# Larger arrays are described by a part of their elements, so that showing a result takes no noticeable time.
_MAX_READ = 1 << 18
_BINS = 24
_MIN_DRAWN = 16
_WIDTH, _HEIGHT = 96, 18


def tensors_table(caption: str, tensors: Iterable[tuple[str, str, Any]]) -> Html:
    """Returns an HTML table of tensors.

    Args:
        caption: Text above the table.
        tensors: Kind, name and value: an array, a sparse gradient, None, or a mapping of them by name.
    """
    found = [(kind, *leaf) for kind, name, value in tensors for leaf in _leaves(name, value)]
    # Cells of rows that are not shown are not computed.
    shown = [(kind, name, *_cells(value)) for kind, name, value in found[:MAX_TABLE_ROWS]]
    return html_table(caption, _COLUMNS, [*shown, *((kind, name) for kind, name, _ in found[MAX_TABLE_ROWS:])])


def are_tensors(values: Mapping[str, Any]) -> bool:
    """Returns whether a mapping has only tensors, which `tensors_table` can show."""
    return bool(values) and all(_is_tensor(value) for name in values for _, value in _leaves(name, values[name]))


def _is_tensor(value: Any) -> bool:
    return value is None or isinstance(value, np.ndarray) or hasattr(value, "dense_shape")


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for inner, one in value.items():
            yield from _leaves(f"{name}/{inner}", one)
    else:
        yield name, value


def _cells(value: Any) -> tuple[object, ...]:
    if value is None:
        return "", "", "no gradient", ""
    is_sparse = hasattr(value, "dense_shape")
    sizes = [int(size) for size in (value.dense_shape if is_sparse else value.shape)]
    array = np.asarray(value.values if is_sparse else value)
    dtype = "string" if array.dtype.kind in "OSU" else array.dtype.name
    slices = f"{len(value.indices)} slices: " if is_sparse else ""
    text, drawn = _values(array)
    return dtype, str(sizes), slices + text, drawn


def _values(array: Any) -> tuple[str, Html]:
    """Returns a few values or the range of many, and their histogram."""
    if not array.size:
        return "empty", Html("")
    if array.size <= _MAX_SHOWN or array.dtype.kind in "OSU":
        flat = array.ravel()[:_MAX_SHOWN].tolist()
        shown = ", ".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in flat)
        return shown + ", …" * (array.size > _MAX_SHOWN), Html("")
    step = -(-array.size // _MAX_READ)
    part = array.ravel()[::step]
    numbers = np.abs(part) if part.dtype.kind == "c" else part.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    about = "≈ " if step > 1 else ""
    ends = f"{about}{finite.min():.4g} … {finite.max():.4g}" if finite.size else ""
    wrong = numbers.size - finite.size
    notes = [f"{about}{wrong * step} NaN or infinite"] if wrong else []
    size = "absolute " if part.dtype.kind == "c" else ""
    return ", ".join([*([size + ends] if ends else []), *notes]), histogram_svg(finite)


def histogram_svg(values: Any) -> Html:
    """Returns an SVG picture of how often values occur, in the colour of the text; empty for fewer than 16 values."""
    if values.size < _MIN_DRAWN or values.min() == values.max():
        return Html("")
    counts, _ = np.histogram(values, bins=_BINS)
    # Roots: few values far from the others stay visible.
    heights = np.sqrt(counts / counts.max()) * _HEIGHT
    width = _WIDTH / _BINS
    bars = "".join(
        f'<rect x="{place * width:g}" y="{_HEIGHT - height:.1f}" width="{width - 0.6:g}" height="{height:.1f}"/>'
        for place, height in enumerate(heights)
        if height
    )
    title = f"<title>{escape(f'histogram from {values.min():.4g} to {values.max():.4g}')}</title>"
    return Html(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" fill="currentColor" '
        f'opacity=".65" role="img">{title}{bars}</svg>'
    )
