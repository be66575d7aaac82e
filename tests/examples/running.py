"""Runs the scripts of examples/ in the test's process, with the tests' server."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot
from matplotlib.image import imread

import gradrule as gr

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_example(name: str, client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs a script in a folder, which fails if a figure that it states is not reached; returns its variables."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(gr, "local", lambda: client)
    matplotlib.use("Agg")
    try:
        found = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    finally:
        pyplot.close("all")
    assert_picture(folder / "out/examples" / f"{name}.png")
    return found


def assert_picture(path: Path) -> None:
    """Checks that a picture exists and is not empty."""
    picture = imread(path)
    assert min(picture.shape[:2]) > 300
    assert len({tuple(pixel) for pixel in picture.reshape(-1, picture.shape[-1])[::50].tolist()}) > 5
