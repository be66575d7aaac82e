"""The processes that gradrule is measured against, each started here and ended by its own process id."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_START_SECONDS = 60.0
_STOP_SECONDS = 5.0


class PeerFailed(Exception):
    """A peer did not start; holds what it wrote."""


@contextmanager
def running(script: str, *arguments: str, gpu: bool = False) -> Iterator[str]:
    """Starts a script of this folder that prints its port; gives `127.0.0.1:port`; ends the process on leaving."""
    devices = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} if gpu else {"CUDA_VISIBLE_DEVICES": "-1"}
    process = subprocess.Popen(
        [sys.executable, str(_HERE / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | devices,
    )
    try:
        yield f"127.0.0.1:{_port(process, script)}"
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _port(process: subprocess.Popen[str], script: str) -> int:
    if process.stdout is None:
        raise PeerFailed(f"{script} has no output to read its port from")
    ends = time.monotonic() + _START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := ends - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            line = process.stdout.readline().strip()
            if line.isdecimal():
                return int(line)
            if not line and process.poll() is not None:
                raise PeerFailed(f"{script} ended with code {process.returncode} before it served")
    raise PeerFailed(f"{script} did not serve within {_START_SECONDS:g} seconds")
