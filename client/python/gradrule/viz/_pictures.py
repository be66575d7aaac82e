"""Defines figures and axes without pyplot's global state, which notebooks show as the value of a cell."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that notebooks show once, and that is freed when nothing refers to it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # The canvas of a new figure draws nothing.
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        return _png(self)


class PictureAxes(Axes):
    """Axes of a `Picture`; notebooks show the figure."""

    def _repr_png_(self) -> bytes:
        figure = self.get_figure(root=True)
        assert figure is not None
        return _png(figure)


def _png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
