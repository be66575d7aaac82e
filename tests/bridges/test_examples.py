"""The scripts of examples/ that need PyTorch or PyMC run, and reach the figures that they state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.examples.running import run_example


def test_spiking_network(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example("spiking_network", client, tmp_path, monkeypatch)


def test_explain_torch(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example("explain_torch", client, tmp_path, monkeypatch)


def test_nuts(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        # PyMC's first steps overflow, and its own code uses deprecated functions.
        warnings.simplefilter("ignore")
        run_example("nuts_pymc", client, tmp_path, monkeypatch)
