"""The examples of docs/guide/frameworks.md work, and those for PyTorch in docs/guide/models.md."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from tests.e2e.pages import GUIDE, read_example

PAGE = GUIDE / "frameworks.md"


def run(client: Any, *names: str, page: Path = PAGE) -> dict[str, Any]:
    """Runs blocks of a page; returns their variables."""
    found: dict[str, Any] = {"client": client, "gr": gr, "np": np}
    for name in names:
        exec(read_example(page, name), found)
    return found


def test_pytorch(client: Any) -> None:
    found = run(client, "program", "torch")
    assert found["loss"].item() < 1e-9


def test_pytorch_modules(client: Any) -> None:
    found = run(client, "from_torch", page=GUIDE / "models.md")
    assert found["r"].gradients["0.weight"].shape == (8, 3, 3, 3)
    assert found["lrp"].gradients["input"].shape == (4, 3, 16, 16)
    assert found["features"].gradients["2"].shape == (4, 16, 16, 8)


def test_rules_in_pytorch(client: Any) -> None:
    found = run(client, "surrogate", "override")
    np.testing.assert_allclose(found["potential"].grad, [0.25, 4 / 9], rtol=1e-6)
    assert found["relevance"].shape == (1, 3)


def test_jax(client: Any) -> None:
    found = run(client, "program", "jax")
    np.testing.assert_array_equal(np.sign(found["w"]), [1, -1, 1])


def test_scipy(client: Any) -> None:
    found = run(client, "program", "scipy")
    assert found["found"].fun < 1e-8
    assert found["solution"].shape == (64, 3)


@pytest.mark.filterwarnings("ignore:The effect of Potentials:UserWarning")
def test_pymc(client: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(client, "program", "pymc")
    assert found["trace"].posterior["mean"].mean().item() == pytest.approx(2.03, abs=0.3)


def test_tensorflow(client: Any) -> None:
    found = run(client, "program", "tf")
    assert found["gradient"].numpy()[1] > 0
