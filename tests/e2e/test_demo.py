"""The demo runs in full and shows what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from tests.samples import size

_EPOCHS = size(8, 20)


def test_rule_learns_where_tensorflows_gradient_cannot(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gradrule.cli",
            "demo",
            "--out",
            str(tmp_path / "out"),
            "--seed",
            "1",
            "--device",
            "cpu",
            "--epochs",
            str(_EPOCHS),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    told = json.loads(last)

    assert told["accuracy_rule"] >= 0.93
    # Zero gradients change no weight: the accuracy stays that of guessing among ten classes.
    assert told["accuracy_default"] < 0.3
    assert told["accuracy_relu"] >= 0.9
    assert told["steps_per_second"] > 0
    assert told["steps"] == 2 * _EPOCHS * 21
    assert told["device"] == "CPU:0"
    table = "\n".join(lines)
    assert f"{told['accuracy_default']:.3f}" in table
    assert f"{told['accuracy_rule']:.3f}" in table

    for name in ("learning_curves", "saliency"):
        path = Path(told[name])
        assert path.parent == tmp_path / "out"
        picture = imread(path)
        height, width, channels = picture.shape
        assert height > 200
        assert width > 400
        assert channels in (3, 4)
        assert len(np.unique(picture.reshape(-1, channels), axis=0)) > 20
