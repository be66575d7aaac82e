"""The scripts of examples/ run as they are written, and reach the figures that they state.

Those that need PyTorch or PyMC are in tests/bridges/test_examples.py, the one for Node in client/node/test.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples.running import EXAMPLES, ROOT, assert_picture, run_example

SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
WITH_BRIDGES = {"explain_torch", "nuts_pymc", "spiking_network"}
AS_A_USER = {"scipy_optimize"}
WITH_KERAS = {"binary_network", "grad_cam", "lrp_resnet", "lrp_variants"}
SHARED = WITH_KERAS | {"domain_adaptation", "quantisation_aware_training"}


def test_each_script_is_tested_and_listed() -> None:
    assert set(SCRIPTS) == SHARED | AS_A_USER | WITH_BRIDGES
    bridges = (ROOT / "tests/bridges/test_examples.py").read_text(encoding="utf-8")
    assert all(f'"{name}"' in bridges for name in WITH_BRIDGES)
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.py\)", listed)) == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_says_what_it_shows(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    docstring = text.split('"""')[1]
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\d", docstring), "no source"
    assert "\nPrints " in docstring
    assert f"out/examples/{name}.png" in docstring
    assert "\nassert " in text, "no figure is checked"
    assert text.count("\n# %%") >= 4, "no cells"
    assert len(text.splitlines()) <= 130


@pytest.mark.parametrize("name", sorted(SHARED))
def test_script_reaches_its_figures(name: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in WITH_KERAS:
        pytest.importorskip("keras")
    run_example(name, client, tmp_path, monkeypatch)


def test_script_runs_as_a_user_starts_it(tmp_path: Path) -> None:
    """With a server of its own, which `gr.local()` starts."""
    script = EXAMPLES / "scipy_optimize.py"
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    energies = [float(number) for number in re.findall(r"energy (-?\d+\.\d+)", done.stdout)]
    # The value of the Cambridge Cluster Database, https://www-wales.ch.cam.ac.uk/CCD.html
    np.testing.assert_allclose(energies, [-44.326801] * 2, atol=1e-5)
    assert_picture(tmp_path / "out/examples/scipy_optimize.png")
