"""Runs the fork server of engines: `python -m gradrule_server.engine --fd N`.

Imports TensorFlow once, then forks one engine for each request on the socket `fd`: a fork takes milliseconds, an import
seconds. A request holds the engine's flags and descriptors. `gradrule_server.link.fork_server` sends the requests.

TensorFlow imports Keras, and Keras imports optional libraries if they are installed. Engines use none of them, and
some fail in the sandbox (matplotlib needs a writable folder), so they are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from gradrule_server.link import fork_server
from gradrule_server.link.operating_system import set_process_name

# Shown by `ps` and `top`; the kernel keeps 15 characters.
_FORK_SERVER_NAME, _ENGINE_NAME = "gradrule-forker", "gradrule-engine"

_UNUSED_LIBRARIES = frozenset(
    {"IPython", "PIL", "h5py", "jax", "matplotlib", "pandas", "pydot", "scipy", "sklearn", "torch"}
)
_KERAS = "keras.src"

_RunEngine = Callable[[Sequence[str], int, Sequence[int]], int]


def main() -> int:
    """Serves fork requests until the front end closes the socket."""
    parser = argparse.ArgumentParser(prog="gradrule-fork-server")
    parser.add_argument("--fd", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args().fd)
    set_process_name(_FORK_SERVER_NAME)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="engine: %(levelname)s %(name)s: %(message)s")
    # The front end decides when an engine ends, after its running calls. A terminal's Ctrl-C and the SIGTERM of some
    # supervisors reach all processes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # TensorFlow's import fails if it finds no writable folder for temporary files.
    tempfile.tempdir = os.devnull
    with without_unused_libraries():
        from gradrule_server.engine.process import run_engine
    _check_single_thread()
    # Imported objects are never garbage. The collector does not write to frozen objects, so engines share their pages.
    gc.collect()
    gc.freeze()
    while True:
        request = fork_server.receive_request(control)
        if request is None:
            return 0
        try:
            pid = _fork_engine(request, control, run_engine)
        except OSError as cause:
            fork_server.send_failure(control, cause)
        else:
            fork_server.send_pid(control, pid)
        finally:
            request.close()


@contextlib.contextmanager
def without_unused_libraries() -> Iterator[None]:
    """Refuses imports of libraries that engines do not use: Keras within the context, the others from now on.

    Only the optimizers of sessions need Keras. They import it with their first step.
    """
    # Python refuses to import a module whose entry is None.
    sys.modules.update(dict.fromkeys((*_UNUSED_LIBRARIES, _KERAS)))  # type: ignore[arg-type]
    try:
        yield
    finally:
        del sys.modules[_KERAS]


def _check_single_thread() -> None:
    """Raises `RuntimeError` if an import started a thread: a lock that it holds during a fork is never released."""
    count = len(os.listdir("/proc/self/task"))
    if count != 1:
        raise RuntimeError(f"importing TensorFlow started {count - 1} threads; only one thread can fork engines")


def _fork_engine(request: fork_server.ForkRequest, control: socket.socket, run: _RunEngine) -> int:
    """Forks an engine whose parent is the front end, which waits for its exit code; returns its pid.

    An intermediate process forks the engine and ends at once. The kernel then makes the front end the engine's parent
    (`PR_SET_CHILD_SUBREAPER`).
    """
    reading, writing = os.pipe()
    try:
        intermediate = os.fork()
        if intermediate == 0:
            _fork_again(request, control, (reading, writing), run)
        os.close(writing)
        writing = -1
        os.waitpid(intermediate, 0)
        answer = os.read(reading, 64)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    pid = int(answer or b"0")
    if pid <= 0:
        raise OSError(-pid, os.strerror(-pid)) if pid else OSError("the intermediate process ended")
    return pid


def _fork_again(
    request: fork_server.ForkRequest, control: socket.socket, pipe: tuple[int, int], run: _RunEngine
) -> NoReturn:
    """Forks the engine, writes its pid or the negative error number to the pipe, and ends."""
    reading, writing = pipe
    try:
        pid = os.fork()
    except OSError as cause:
        os.write(writing, str(-(cause.errno or 1)).encode())
        os._exit(1)
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    control.close()
    code = 1
    try:
        set_process_name(_ENGINE_NAME)
        os.dup2(request.stderr, sys.stderr.fileno())
        os.close(request.stderr)
        code = run(request.flags, request.link, request.arenas)
    except BaseException:
        traceback.print_exc()
    # A regular end would wait for threads inside TensorFlow, or crash.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
