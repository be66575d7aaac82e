"""Custom gradients in a saved graph work in a process that never saw the traced functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import gradrule as gr
from tests.unit.client.tracing import interpreter
from tests.unit.client.tracing.test_custom_gradients import SPEC, X, in_loop, local


def test_saved_custom_gradients_work_in_another_process(tmp_path: Path) -> None:
    gr.trace(in_loop, SPEC).save(tmp_path / "graph.pb")
    np.savez(tmp_path / "feeds.npz", x=X)
    files = [str(tmp_path / name) for name in ("graph.pb", "feeds.npz", "answers.npz")]
    subprocess.run([sys.executable, interpreter.__file__, *files, "output", "x"], check=True, timeout=240)
    with np.load(tmp_path / "answers.npz") as answers:
        np.testing.assert_allclose(answers["arr_1"], local(in_loop, X)[1], rtol=1e-5)
