"""Axes of the pictures that commands draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from gradrule.cli.demo import data, pictures
from gradrule.cli.demo.training import TrainingResult
from gradrule.cli.output import PlainScreen
from gradrule.cli.rules.curve_drawing import print_curve
from gradrule.viz._curve_svg import round_ticks
from gradrule.viz._curves import Curve, Line


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


def test_learning_curves_show_the_accuracy_of_each_test(saved: list[Figure]) -> None:
    run = TrainingResult(losses=[1.0, 0.5] * 20, accuracies=[(0, 0.1), (40, 0.9)])
    pictures.learning_curves({"rule": run}, Path("curves.png"))
    left, right = saved[0].axes
    assert all(axes.get_xlabel() and axes.get_ylabel() and axes.get_title() for axes in (left, right))
    (line,) = [line for line in left.lines if line.get_label() == "rule"]
    assert np.asarray(line.get_xydata()).tolist() == [[0, 0.1], [40, 0.9]]
    assert [text.get_text() for text in left.texts] == ["90.0%"]
    (losses,) = right.lines
    assert np.asarray(losses.get_ydata())[0] == pytest.approx(np.mean([1.0, 0.5] * 7 + [1.0]))
    assert np.asarray(losses.get_xdata())[0] == 15


def test_saliency_shows_images_and_scaled_gradients(saved: list[Figure]) -> None:
    values = np.linspace(-1, 1, 128).reshape(2, 64)
    gradients = np.linspace(-4, 2, 128).reshape(2, 64)
    pictures.saliency({"digit": values, "gradient": gradients}, np.array([3, 5]), Path("saliency.png"))
    *panels, bar = saved[0].axes
    assert [panel.get_title() for panel in panels] == ["3", "5", "", ""]
    assert [panel.get_ylabel() for panel in panels] == ["digit", "", "gradient", ""]
    assert bar.get_ylabel() == "gradient / its 99.5th percentile"
    # Ink, which is 1 in the data, is black.
    np.testing.assert_allclose(panels[0].images[0].get_array(), (1 - values[0].reshape(8, 8)) / 2)
    shown = panels[2].images[1].get_array()
    np.testing.assert_allclose(shown, gradients[0].reshape(8, 8) / np.percentile(np.abs(gradients[0]), 99.5))


def test_printed_digits_are_drawn_from_their_seed() -> None:
    digits, again, other = (data.draw_printed(seed, count=40) for seed in (1, 1, 2))
    np.testing.assert_array_equal(digits.train_x, again.train_x)
    assert not np.array_equal(digits.train_x, other.train_x)
    assert digits.train_x.shape == (30, 28 * 28) and digits.test_x.shape == (10, 28 * 28)
    assert digits.train_x.dtype == np.float32
    assert np.unique(digits.test_labels).tolist() == list(range(10))
    everything = np.concatenate([digits.train_x, digits.test_x])
    assert everything.min() >= -1 and everything.max() <= 1
    # Each image has ink, and more paper than ink.
    ink = (everything > 0).mean(axis=1)
    assert ink.min() > 0.02 and ink.max() < 0.5
