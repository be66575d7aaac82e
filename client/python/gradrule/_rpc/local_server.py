"""Starts and stops a server in a separate process."""

from __future__ import annotations

import importlib.util
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gradrule.errors import GradruleError, InvalidParamError, UnavailableError

_READY = "gradrule: listening on "
_START_S = 120.0
_STOP_S = 30.0
_STDERR_LINES = 20
# Exit code of the server for unknown or invalid settings.
_WRONG_SETTINGS = 2


class LocalServer:
    """Runs a server in a process. Its data is in a temporary folder unless the settings name another folder.

    Args:
        settings: Flags of `gradrule serve`, with `_` for `-`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Starts the server and returns its address when an engine is ready.

        Raises:
            InvalidParamError: The server refuses a setting.
            UnavailableError: The server is not installed, or did not start.
        """
        missing = [name for name in ("gradrule_server", "tensorflow") if importlib.util.find_spec(name) is None]
        if missing:
            raise UnavailableError(
                f"a local server needs {' and '.join(missing)}, which is not installed: "
                "pip install 'gradrule[server]', or connect to a remote server"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="gradrule-", ignore_cleanup_errors=True)
        log = Path(self._folder.name) / "stderr"
        command = [sys.executable, "-m", "gradrule_server", "serve", *self._flags()]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self._process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(self._process.stdout, lines), daemon=True).start()
        return self._await_address(lines, log)

    def stop(self) -> None:
        """Stops the server with SIGTERM, after 30 seconds with SIGKILL, and removes the temporary folder."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _flags(self) -> list[str]:
        assert self._folder is not None
        settings = {"port": 0, "data_dir": Path(self._folder.name) / "data", **self._settings}
        flags = []
        for name, value in settings.items():
            flag = name.replace("_", "-")
            flags += (
                [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
            )
        return flags

    def _await_address(self, lines: queue.SimpleQueue[str | None], log: Path) -> str:
        while True:
            try:
                line = lines.get(timeout=_START_S)
            except queue.Empty:
                raise self._failure(f"the server was not ready within {_START_S:g} seconds", log) from None
            if line is None:
                assert self._process is not None
                code = self._process.wait()
                if code == _WRONG_SETTINGS:
                    raise self._failure(
                        "the server refuses these settings (its flag --data-dir is data_dir here)",
                        log,
                        InvalidParamError,
                    )
                raise self._failure(f"the server ended with exit code {code} before it was ready", log)
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()

    def _failure(self, what: str, log: Path, kind: type[GradruleError] = UnavailableError) -> GradruleError:
        tail = log.read_text(errors="replace").splitlines()[-_STDERR_LINES:]
        self.stop()
        return kind("\n".join([what + (", saying:" if tail else ""), *tail]))


def _read_lines(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Reads all lines, so that a full pipe never blocks the server; None marks the end."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
