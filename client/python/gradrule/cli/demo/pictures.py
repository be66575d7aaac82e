"""Computes and draws the demo's two PNG files: learning curves and saliency maps.

Guided backpropagation (Springenberg et al., "Striving for Simplicity", 2015) also sets the gradient to zero where it is
negative, at every ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule.cli.demo.data import CLASSES, Digits
from gradrule.cli.demo.networks import Network
from gradrule.cli.demo.training import TrainingResult
from gradrule.common.tensor_codec import Array
from gradrule.viz import _figures as figures
from gradrule.viz import _images as images

if TYPE_CHECKING:
    from gradrule import Client

GUIDED = {"Relu": "guided_relu"}
_SMOOTH = 15
_PERCENTILE = 99.5


def one_of_each(digits: Digits) -> Array:
    """Returns the index of the first test digit of each class."""
    return np.array([np.flatnonzero(digits.test_labels == label)[0] for label in range(CLASSES)])


def gradients(client: Client, network: Network, weights: dict[str, Array], x: Array, labels: Array) -> list[Array]:
    """Returns gradients of the labels' logits with respect to x, of its shape: TensorFlow's, then guided."""
    found = []
    feeds: dict[Any, Any] = {"x": x, "labels": labels, **weights}
    for overrides in (None, GUIDED):
        program = client.compile(network.graph, ys=["score"], xs=["x"], overrides=overrides)
        found.append(np.asarray(program.evaluate(feeds).gradients["x"]))
    return found


def learning_curves(runs: Mapping[str, TrainingResult], path: Path) -> None:
    """Plots test accuracy and training loss by step, one line per run."""
    figure = figures.new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    for number, (label, run) in enumerate(runs.items()):
        style: dict[str, Any] = {"color": figures.color_of(1 - number % 2), "label": label, "linewidth": 2}
        steps, accuracies = zip(*run.accuracies, strict=True)
        left.plot(steps, accuracies, marker=figures.MARKERS[number], markersize=4, **style)
        left.annotate(
            f"{accuracies[-1]:.1%}", (steps[-1], accuracies[-1]), xytext=(0, -14), textcoords="offset points",
            ha="right", color=style["color"], fontweight="bold",
        )  # fmt: skip
        window = min(_SMOOTH, len(run.losses))
        smooth = np.convolve(run.losses, np.ones(window) / window, mode="valid")
        right.plot(np.arange(window, len(run.losses) + 1), smooth, **style)
    left.axhline(1 / CLASSES, color=figures.GREY, linewidth=1, linestyle=":", label="guessing")
    left.set(title="Accuracy on test digits", xlabel="training step", ylabel="share of correct digits", ylim=(0, 1.02))
    right.set(title="Training loss", xlabel="training step", ylabel=f"cross entropy, mean of {_SMOOTH} steps")
    right.set_yscale("log")
    figure.suptitle("A network with sign activations and binary weights, trained through the server", fontsize=12)
    for axes in (left, right):
        figures.set_style(axes)
    left.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=figures.DPI)


def saliency(rows: Mapping[str, Array], labels: Array, path: Path) -> None:
    """Draws a column for each image and a row for each named array of shape (n, side * side).

    The first row is the images; the others are gradients, drawn over the images: red for positive, blue for negative.
    Each gradient is divided by its 99.5th percentile, so that digits can be compared.
    """
    count = len(labels)
    figure = figures.new_figure(1.25 * count + 1.6, 1.35 * len(rows) + 0.7)
    figure.suptitle("Which pixels raise the score of the right digit", fontsize=13)
    grid = figure.subplots(len(rows), count, squeeze=False)
    (_, shown), *others = rows.items()
    for row, (title, values) in enumerate(rows.items()):
        for column, flat in enumerate(values):
            axes = grid[row][column]
            side = math.isqrt(flat.size)
            # Dark ink on white paper.
            paper = (1 - shown[column].reshape(side, side, 1)) / 2
            if row == 0:
                axes.imshow(paper, cmap="gray", vmin=0, vmax=1)
                axes.set_title(str(labels[column]))
            else:
                heat = np.asarray(flat, np.float64).reshape(side, side)
                drawn = images.draw_heat(axes, paper, heat / images.limit_of(heat, _PERCENTILE), True, 1.0)
            axes.set_xticks([])
            axes.set_yticks([])
        grid[row][0].set_ylabel(title, fontsize=10)
    if others:
        bar = figure.colorbar(drawn, ax=grid[1:], ticks=[-1, 0, 1], pad=0.01, fraction=0.02, aspect=25)
        bar.set_label(f"gradient / its {_PERCENTILE:g}th percentile", fontsize=9)
    figure.savefig(path, dpi=figures.DPI)
