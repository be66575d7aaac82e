"""Draws a curve in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradrule.cli.output import Screen, print_styled
from gradrule.viz._curve_svg import round_ticks
from gradrule.viz._curves import Curve, Line

if TYPE_CHECKING:
    from gradrule.common.tensor_codec import Array

_BLANK = 0x2800
# Bits of the dots of a character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
STYLES = {"forward": "bright_black", "gradient": "cyan", "opposite": "red"}
_LABEL_WIDTH = 10


def print_curve(screen: Screen, curve: Curve, width: int = 72, height: int = 16) -> None:
    """Prints the curve with its axes and a legend."""
    columns = min(width, screen.width - _LABEL_WIDTH - 3)
    cells = np.full((height, columns), _BLANK)
    styles = np.full((height, columns), "", dtype=object)
    low, high = _span(curve)
    for line in curve.lines:
        _draw_line(cells, styles, curve.x, line, low, high)
    screen.print(curve.title)
    # In rows of dots, as in `_draw_line`.
    downs = {tick: round((high - tick) / (high - low) * (4 * height - 1)) for tick in round_ticks(low, high)}
    ticks = {down // 4: f"{tick:g}" for tick, down in downs.items()}
    for row in range(height):
        label = ticks.get(row, "").rjust(_LABEL_WIDTH) + (" ┤" if row in ticks else " │")
        dots = ((chr(cell), style) for cell, style in zip(cells[row], styles[row], strict=True))
        print_styled(screen, [(label, ""), *dots])
    left, right = f"{curve.x[0]:g}", f"{curve.x[-1]:g}"
    screen.print(" " * _LABEL_WIDTH + " └" + "─" * columns)
    inner = columns - len(left) - len(right)
    screen.print(" " * (_LABEL_WIDTH + 2) + left + curve.axis.center(inner) + right)
    for line in curve.lines:
        mark = "╌╌" if line.role == "opposite" else "──"
        print_styled(screen, [(" " * (_LABEL_WIDTH + 2), ""), (mark, STYLES[line.role]), (f" {line.label}", "")])
    for note in curve.notes:
        screen.print(" " * (_LABEL_WIDTH + 2) + note)


def _span(curve: Curve) -> tuple[float, float]:
    values = np.concatenate([line.values[np.isfinite(line.values)] for line in curve.lines])
    if not values.size:
        return -1.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = 0.04 * (high - low) or 1.0
    return low - margin, high + margin


def _draw_line(cells: Array, styles: Array, x: Array, line: Line, low: float, high: float) -> None:
    rows, columns = 4 * cells.shape[0], 2 * cells.shape[1]
    across = (x - x[0]) / (x[-1] - x[0]) * (columns - 1)
    down = (high - line.values) / (high - low) * (rows - 1)
    for index in np.flatnonzero(np.isfinite(down)):
        end = index + 1 if index + 1 < len(x) and np.isfinite(down[index + 1]) else index
        steps = int(max(abs(across[end] - across[index]), abs(down[end] - down[index]))) + 2
        for column, row in zip(
            np.rint(np.linspace(across[index], across[end], steps)).astype(int),
            np.rint(np.linspace(down[index], down[end], steps)).astype(int),
            strict=True,
        ):
            # A dashed line skips two of four dots.
            if line.role != "opposite" or column % 4 < 2:
                cells[row // 4, column // 2] |= _DOTS[row % 4][column % 2]
                styles[row // 4, column // 2] = STYLES[line.role]
