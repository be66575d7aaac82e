"""Computes and draws the demo's two PNG files: learning curves and saliency maps.

Guided backpropagation (Springenberg et al., "Striving for Simplicity", 2015) also sets the gradient to zero where it is
negative, at every ReLU. Figures are made without pyplot, which needs global state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from gradrule.cli.demo.data import CLASSES, SIDE, Digits
from gradrule.cli.demo.networks import Network
from gradrule.cli.demo.training import TrainingResult
from gradrule.common.tensor_codec import Array

if TYPE_CHECKING:
    from gradrule import Client

GUIDED = {"Relu": "guided_relu"}
_DPI = 120
_SMOOTH = 15


def one_of_each(digits: Digits) -> Array:
    """Returns the index of the first test digit of each class."""
    return np.array([np.flatnonzero(digits.test_labels == label)[0] for label in range(CLASSES)])


def gradients(client: Client, network: Network, weights: dict[str, Array], x: Array, labels: Array) -> list[Array]:
    """Returns gradients of the labels' logits with respect to x, shape (n, 64): TensorFlow's, then guided."""
    found = []
    feeds: dict[Any, Any] = {"x": x, "labels": labels, **weights}
    for overrides in (None, GUIDED):
        program = client.compile(network.graph, ys=["score"], xs=["x"], overrides=overrides)
        found.append(np.asarray(program.evaluate(feeds).gradients["x"]))
    return found


def learning_curves(runs: Mapping[str, TrainingResult], path: Path) -> None:
    """Plots test accuracy and training loss by step, one line per run."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, run in runs.items():
        steps, accuracies = zip(*run.accuracies, strict=True)
        left.plot(steps, accuracies, marker="o", markersize=3, label=label)
        window = min(_SMOOTH, len(run.losses))
        smooth = np.convolve(run.losses, np.ones(window) / window, mode="valid")
        right.plot(np.arange(window, len(run.losses) + 1), smooth, label=label)
    left.set(title="accuracy on test digits", xlabel="step", ylabel="share of correct digits", ylim=(0, 1))
    right.set(title="training loss", xlabel="step", ylabel=f"cross entropy, mean of {_SMOOTH} steps", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=_DPI)


def saliency(rows: Mapping[str, Array], labels: Array, path: Path) -> None:
    """Draws a column for each digit and a row for each named array of shape (n, 64).

    The first row is drawn as digits, grey; the others as gradients: red for positive, blue for negative,
    each divided by its largest value.
    """
    count = len(labels)
    figure = Figure(figsize=(1.2 * count + 2, 1.3 * len(rows) + 0.4), layout="constrained")
    figure.suptitle("Gradient of the digit's score by each pixel")
    grid = figure.subplots(len(rows), count, squeeze=False)
    for row, (title, values) in enumerate(rows.items()):
        for column, flat in enumerate(values):
            axes = grid[row][column]
            image = flat.reshape(SIDE, SIDE)
            if row == 0:
                axes.imshow(image, cmap="gray")
                axes.set_title(str(labels[column]))
            else:
                largest = float(np.abs(image).max()) or 1.0
                drawn = axes.imshow(image / largest, cmap="RdBu_r", vmin=-1, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
        grid[row][0].set_ylabel(title)
    if len(rows) > 1:
        bar = figure.colorbar(drawn, ax=grid, ticks=[-1, 0, 1], pad=0.01, shrink=0.6)
        bar.set_label("gradient / its largest")
    figure.savefig(path, dpi=_DPI)
