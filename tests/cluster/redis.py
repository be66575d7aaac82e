"""Starts a Redis server for tests, on a free port of this machine and in a temporary folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import wait_until

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


@contextlib.contextmanager
def running_redis(port: int) -> Iterator[str]:
    """Starts a Redis server and provides its address, `host:port`.

    Args:
        port: A free port.
    """
    program = shutil.which("redis-server")
    assert program is not None, "Redis is not installed; `make redis` installs it"
    with tempfile.TemporaryDirectory(prefix="gradrule-redis-") as folder:
        log = Path(folder, "log")
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--logfile", str(log)]
        process = subprocess.Popen([*command, "--save", "", "--appendonly", "no"])
        try:

            def is_ready() -> bool | None:
                assert process.poll() is None, log.read_text()[-4000:]
                return (log.exists() and "Ready to accept connections" in log.read_text()) or None

            wait_until(is_ready, f"Redis (log: {log})", _START_TIMEOUT_S)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)
