"""Loads small handwritten digits, and draws larger printed ones; both are split for training and testing.

The images are the test set of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998, https://doi.org/10.24432/C50P49, under CC BY 4.0; unchanged but for the file's format.

The printed digits are drawn from the fonts that Matplotlib contains (DejaVu, STIX, Computer Modern), at random angles,
sizes and places, among random strokes.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradrule.common.tensor_codec import Array

SIDE = 8
PIXELS = SIDE * SIDE
CLASSES = 10
PRINTED_SIDE = 28
_TEST_PART = 0.25
# Images are drawn larger and averaged, which gives smooth edges.
_OVERSAMPLING = 3
_FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmss10",
    "cmtt10",
)  # fmt: skip


@dataclass(frozen=True)
class Digits:
    """Holds images (float32, shape (n, side * side), from -1 for paper to 1 for ink) and labels (int64, shape (n,))."""

    train_x: Array
    train_labels: Array
    test_x: Array
    test_labels: Array


def load(seed: int) -> Digits:
    """Loads all 1,797 digits; the seed selects a quarter of each class for testing."""
    with (importlib.resources.files(__package__) / "digits.npz").open("rb") as file, np.load(file) as stored:
        images = (stored["images"] / 8.0 - 1.0).astype(np.float32)
        labels = stored["labels"].astype(np.int64)
    return _split(images, labels, np.random.default_rng(seed))


def draw_printed(seed: int, count: int = 6000) -> Digits:
    """Draws digits of 28×28 pixels; a quarter of each class is for testing.

    Args:
        seed: Seed of the drawings and of the split.
        count: Number of images.
    """
    from PIL import ImageFont

    rng = np.random.default_rng(seed)
    size = PRINTED_SIDE * _OVERSAMPLING
    fonts = [ImageFont.truetype(path, round(0.75 * size)) for path in _font_paths()]
    labels = np.arange(count) % CLASSES
    images = np.stack([_drawn(str(label), fonts[rng.integers(len(fonts))], size, rng) for label in labels])
    return _split(images.reshape(count, -1), labels.astype(np.int64), rng)


def _font_paths() -> list[str]:
    """Returns the files of Matplotlib's fonts that have digits."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [str(folder / f"{name}.ttf") for name in _FONTS]


def _drawn(text: str, font: Any, size: int, rng: np.random.Generator) -> Array:
    """Draws one digit and a few strokes beside it; float32 of shape (28, 28), from -1 to 1."""
    from PIL import Image, ImageDraw

    picture = Image.new("L", (size, size))
    ImageDraw.Draw(picture).text((size / 2, size / 2), text, fill=255, font=font, anchor="mm")
    angle, scale = rng.uniform(-0.25, 0.25), rng.uniform(0.95, 1.35)
    shear, middle = rng.uniform(-0.2, 0.2), size / 2
    to_x, to_y = middle + rng.uniform(-0.1, 0.1, 2) * size
    # Rows of the matrix from drawn to original positions.
    a, b = scale * np.cos(angle), scale * (np.sin(angle) + shear)
    d, e = -scale * np.sin(angle), scale * np.cos(angle)
    matrix = (a, b, middle - a * to_x - b * to_y, d, e, middle - d * to_x - e * to_y)
    picture = picture.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    strokes = ImageDraw.Draw(picture)
    for _ in range(rng.integers(1, 4)):
        start, way = rng.uniform(0, size, 2), rng.normal(0, 0.18, 2) * size
        strokes.line([*start, *(start + way)], fill=int(rng.integers(110, 220)), width=_OVERSAMPLING)
    small = picture.resize((PRINTED_SIDE, PRINTED_SIDE), Image.Resampling.BOX)
    noise = rng.normal(0, 0.08, (PRINTED_SIDE, PRINTED_SIDE))
    return np.clip(np.asarray(small) / 127.5 - 1 + noise, -1, 1).astype(np.float32)


def _split(images: Array, labels: Array, rng: np.random.Generator) -> Digits:
    is_test = np.zeros(len(labels), bool)
    for label in range(CLASSES):
        members = rng.permutation(np.flatnonzero(labels == label))
        is_test[members[: round(len(members) * _TEST_PART)]] = True
    return Digits(images[~is_test], labels[~is_test], images[is_test], labels[is_test])
