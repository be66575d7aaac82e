"""Workers that PyTorch and PyMC fork: their calls are refused at once.

In processes of their own, because JAX, which other tests import, does not survive forks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

_DATA_LOADER = """
import sys
import torch
import gradrule as gr
import gradrule.torch

with gr.connect(sys.argv[1]) as client:
    remote = gradrule.torch.remote(client.program(sys.argv[2]))
    x, w = torch.ones(4, 3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    remote(x, w)
    try:
        list(torch.utils.data.DataLoader([x], num_workers=1, collate_fn=lambda rows: remote(rows[0], w)))
    except gr.GradruleError as refusal:
        print(refusal)
"""

_PYMC = """
import sys
import numpy as np
import pymc
import gradrule as gr
import gradrule.pytensor

with gr.connect(sys.argv[1]) as client, pymc.Model():
    remote = gradrule.pytensor.remote(client.program(sys.argv[2]))
    w = pymc.Normal("w", shape=(3, 2))
    pymc.Potential("likelihood", remote(x=np.ones((4, 3)), w=w)["z"])
    try:
        pymc.sample(5, tune=5, chains=2, cores=2, mp_ctx="fork", progressbar=False)
    except Exception as refusal:
        print(refusal)
"""


@pytest.mark.parametrize("script", [_DATA_LOADER, _PYMC], ids=["DataLoader", "PyMC"])
def test_calls_of_forked_workers_are_refused(smooth: Any, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, smooth._client.target, smooth.name],
        env=os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "UNSUPPORTED: this process was forked" in done.stdout
    assert "'forkserver'" in done.stdout
