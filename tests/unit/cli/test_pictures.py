"""Axes of drawn pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from gradrule.cli import figures
from gradrule.cli.demo import pictures
from gradrule.cli.demo.training import TrainingResult
from gradrule.cli.output import PlainScreen
from gradrule.cli.rules.curve_drawing import print_curve, round_ticks
from gradrule.cli.rules.curves import Curve, Line


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (-0.072, 1.08, [0, 0.5, 1]),
        (-1000.0, 3.0, [-1000, -500, 0]),
        (1e-9, 3e-9, [1e-9, 2e-9, 3e-9]),
        (-5.2, -5.1, [-5.2, -5.15, -5.1]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == ticks


def test_a_curve_in_the_terminal_has_round_ticks(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.linspace(-3, 3, 61)
    print_curve(PlainScreen(), Curve("Tanh", "x", x, (Line("y", np.tanh(x), "forward"),), ()), height=9)
    labels = [line.split("┤")[0].strip() for line in capsys.readouterr().out.splitlines() if "┤" in line]
    assert labels == ["1", "0", "-1"]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: found.append(figure))
    return found


def test_norms_of_zero_are_drawn_below_all_others(saved: list[Figure]) -> None:
    norms = {"default": {"a": 1.0, "b": 0.01, "x": 0.001}, "cut": {"a": 1.0, "b": 0.0, "x": 0.0}}
    figures.draw_norms(["a", "b"], ["x"], norms, {"cut": "b"}, Path("norms.png"))
    (axes,) = saved[0].axes
    assert axes.get_yscale() == "symlog"
    drawn = [value for line in axes.lines for value in np.asarray(line.get_ydata(), float)]
    assert drawn.count(0.0) >= 3
    assert axes.get_ylim()[0] < 0
    figures.draw_norms(["a", "b"], ["x"], {"default": norms["default"]}, {}, Path("norms.png"))
    assert saved[1].axes[0].get_yscale() == "log"


def test_pictures_of_the_demo_name_their_axes(saved: list[Figure]) -> None:
    run = TrainingResult(losses=[1.0, 0.5] * 20, accuracies=[(0, 0.1), (40, 0.9)])
    pictures.learning_curves({"rule": run}, Path("curves.png"))
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in saved[0].axes)
    values = np.linspace(-1, 3, 128).reshape(2, 64)
    pictures.saliency({"digit": values, "gradient": values}, np.array([3, 5]), Path("saliency.png"))
    *_, bar = saved[1].axes
    assert bar.get_ylabel() == "gradient / its largest"
