"""Loads handwritten digits, split for training and testing.

The images are the test set of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998, https://doi.org/10.24432/C50P49, under CC BY 4.0; unchanged but for the file's format.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

import numpy as np

from gradrule.common.tensor_codec import Array

SIDE = 8
PIXELS = SIDE * SIDE
CLASSES = 10
_TEST_PART = 0.25


@dataclass(frozen=True)
class Digits:
    """Holds images (float32, shape (n, 64), scaled from 0..16 to -1..1) and labels (int64, shape (n,))."""

    train_x: Array
    train_labels: Array
    test_x: Array
    test_labels: Array


def load(seed: int) -> Digits:
    """Loads all 1,797 digits; the seed selects a quarter of each class for testing."""
    with (importlib.resources.files(__package__) / "digits.npz").open("rb") as file, np.load(file) as stored:
        images = (stored["images"] / 8.0 - 1.0).astype(np.float32)
        labels = stored["labels"].astype(np.int64)
    rng = np.random.default_rng(seed)
    is_test = np.zeros(len(labels), bool)
    for label in range(CLASSES):
        members = rng.permutation(np.flatnonzero(labels == label))
        is_test[members[: round(len(members) * _TEST_PART)]] = True
    return Digits(images[~is_test], labels[~is_test], images[is_test], labels[is_test])
