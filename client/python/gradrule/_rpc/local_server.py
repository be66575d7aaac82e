"""Starts and stops a server in a separate process."""

from __future__ import annotations

import importlib.util
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any

from gradrule._rpc import server_supervisor
from gradrule.errors import GradruleError, InvalidParamError, UnavailableError

_READY = "gradrule: listening on "
_START_S = 120.0
_STDERR_LINES = 20
# Exit code of the server for unknown or invalid settings.
_WRONG_SETTINGS = 2


class LocalServer:
    """Runs a server that ends with this process. Its data is in a temporary folder unless the settings name another.

    A supervisor process starts the server, stops it when this process ends in any way, and removes the folder. The
    supervisor is in a session of its own, so Ctrl-C in a terminal interrupts this process only.

    Args:
        settings: Flags of `gradrule serve`, with `_` for `-`.
        log_to_stderr: Write the server's log to stderr of this process; otherwise it is shown only if the start fails.
        kills_children: This process kills its child processes when it ends, as workers of Ray do. Then the supervisor
            is a child of another one, so that it can stop the server and remove the folder.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, log_to_stderr: bool = False, kills_children: bool = False
    ) -> None:
        self._settings = dict(settings)
        self._log_to_stderr = log_to_stderr
        self._kills_children = kills_children
        self._pid = os.getpid()
        self._supervisor: subprocess.Popen[str] | None = None

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
        stop_s = server_supervisor.STOP_S
        supervisor = _supervise(self._pid, stop_s)
        if self._kills_children:
            supervisor = [*_supervise(self._pid, 2 * stop_s), *_supervise(0, stop_s)]
        server = [sys.executable, "-m", "gradrule_server", "serve", *self._flags()]
        # The file has no name, so nothing remains of it.
        with tempfile.TemporaryFile() as log:
            self._supervisor = subprocess.Popen(
                supervisor + server,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if self._log_to_stderr else log,
                text=True,
                start_new_session=True,
            )
            assert self._supervisor.stdout is not None
            lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            threading.Thread(target=_read_lines, args=(self._supervisor.stdout, lines), daemon=True).start()
            try:
                return self._await_address(lines, log)
            except BaseException:
                self.stop()
                raise

    def wait(self) -> int:
        """Returns the exit code of the server once it has ended. Only while it runs."""
        assert self._supervisor is not None
        return self._supervisor.wait()

    def stop(self) -> None:
        """Stops the server with SIGTERM, after 30 seconds with SIGKILL, and removes the temporary folder.

        Does nothing in a process that was forked from the one that started the server.
        """
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None and self._pid == os.getpid():
            supervisor.terminate()
            supervisor.wait()

    def _flags(self) -> list[str]:
        settings = {"port": 0, **self._settings}
        flags = []
        for name, value in settings.items():
            flag = name.replace("_", "-")
            flags += (
                [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
            )
        return flags

    def _await_address(self, lines: queue.SimpleQueue[str | None], log: IO[bytes]) -> str:
        assert self._supervisor is not None
        while True:
            try:
                line = lines.get(timeout=_START_S)
            except queue.Empty:
                raise _failure(f"the server was not ready within {_START_S:g} seconds", log) from None
            if line is None:
                code = self._supervisor.wait()
                if code == _WRONG_SETTINGS:
                    what = "the server refuses these settings (its flag --data-dir is data_dir here)"
                    raise _failure(what, log, InvalidParamError)
                raise _failure(f"the server ended with exit code {code} before it was ready", log)
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()


def _supervise(parent: int, stop_s: float) -> list[str]:
    """Returns the start of a command that runs the rest under a supervisor."""
    # Without the folder of the script and the user's site packages, the supervisor imports nothing but Python.
    return [sys.executable, "-I", "-S", server_supervisor.__file__, str(parent), str(stop_s)]


def _failure(what: str, log: IO[bytes], kind: type[GradruleError] = UnavailableError) -> GradruleError:
    log.seek(0)
    tail = log.read().decode(errors="replace").splitlines()[-_STDERR_LINES:]
    return kind("\n".join([what + (", saying:" if tail else ""), *tail]))


def _read_lines(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Reads all lines, so that a full pipe never blocks the server; None marks the end."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
