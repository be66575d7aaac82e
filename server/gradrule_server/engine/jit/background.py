"""Compiles programs with XLA in the background, one at a time, and reports to the front end.

The front end must know what is being compiled: where that ends the engine, its next process does not try it again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import tensorflow as tf

from gradrule_server.engine.jit.choice import JitChoice, ShapeVariant
from gradrule_server.engine.program import BuiltProgram, SessionCall
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.system_calls import lower_priority
from gradrule_server.link.v1 import link_pb2

_log = logging.getLogger(__name__)

_MOST_COMPILED = 32
_MOST_REFUSED = 1024
_Outcome = link_pb2.JitNotice

_NICE = 10


class JitCompiler:
    """Compiles on a thread of its own. Thread-safe.

    after_s: how long calls of a program with the same shapes run before it is compiled; 0: none is.
    """

    def __init__(self, frames: FrameSocket, after_s: float) -> None:
        self._frames = frames
        self.after_s = after_s
        self._work: queue.SimpleQueue[tuple[weakref.ref[JitChoice], ShapeVariant]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._compiled: weakref.WeakSet[object] = weakref.WeakSet()
        self._refused: set[str] = set()

    def allow(self, key: str, built: BuiltProgram) -> None:
        """Allows XLA to compile a program, if it runs in a session: on a CPU and in one part."""
        call = None if built.two_parts is not None else built.call
        if self.after_s and isinstance(call, SessionCall):
            built.jit = JitChoice(key, built.function, call, self)

    def refuse(self, digest: str) -> None:
        """Forbids XLA to compile programs whose keys start with `digest`."""
        with self._lock:
            if len(self._refused) < _MOST_REFUSED:
                self._refused.add(digest)

    def compile(self, choice: JitChoice, variant: ShapeVariant) -> None:
        """Queues the compilation for the shapes of a variant."""
        self._work.put((weakref.ref(choice), variant))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jit", daemon=True)
                self._thread.start()

    def report_chosen(self, choice: JitChoice) -> None:
        """Tells the front end that calls of the program run with XLA."""
        self._report(choice.key, _Outcome.OUTCOME_CHOSEN)

    def report_dropped(self, key: str) -> None:
        """Tells the front end that no call of a program runs with XLA any more."""
        self._report(key, _Outcome.OUTCOME_UNSPECIFIED)

    def report_refused(self, key: str, reason: str) -> None:
        """Tells the front end why calls of a program do not run with XLA."""
        self._report(key, _Outcome.OUTCOME_REFUSED, reason)

    def _run(self) -> None:
        while True:
            found, variant = self._work.get()
            choice = found()
            if choice is not None:
                try:
                    self._compile(choice, variant)
                except Exception as cause:
                    # The thread must go on: other programs are queued.
                    _log.exception("compiling a program with XLA failed; it runs without")
                    # The front end may have closed the socket.
                    with contextlib.suppress(OSError):
                        choice.refuse(type(cause).__name__)
            del choice, variant

    def _compile(self, choice: JitChoice, variant: ShapeVariant) -> None:
        reason = self._refusal(choice)
        if not reason:
            self._report(choice.key, _Outcome.OUTCOME_COMPILING)
            reason = _prepare_in_background(choice, variant)
            self._report(choice.key, _Outcome.OUTCOME_REFUSED if reason else _Outcome.OUTCOME_COMPILED, reason)
        if reason:
            choice.refuse(reason)
        elif (compiled := variant.compiled) is not None:
            # `compiled` is None if a call has failed with XLA in the meantime.
            self._compiled.add(compiled)

    def _refusal(self, choice: JitChoice) -> str:
        if choice.key.partition("/")[0] in self._refused:
            return "an engine ended while it was compiled"
        if len(self._compiled) >= _MOST_COMPILED:
            return f"the engine holds {_MOST_COMPILED} compiled programs"
        return choice.reason

    def _report(self, key: str, outcome: link_pb2.JitNotice.Outcome.ValueType, reason: str = "") -> None:
        notice = link_pb2.JitNotice(key=key, outcome=outcome, reason=reason)
        self._frames.send(Kind.JIT_NOTICE, 0, notice.SerializeToString())


def _prepare_in_background(choice: JitChoice, variant: ShapeVariant) -> str:
    try:
        return _in_background(lambda: choice.prepare(variant))
    except tf.errors.OpError as cause:
        return f"XLA refuses it: {cause.message.splitlines()[0]}"
    except Exception as cause:
        # The program runs without XLA; no call waits for this thread.
        _log.exception("compiling a program with XLA failed; it runs without")
        return type(cause).__name__


def _in_background(work: Callable[[], str]) -> str:
    """Runs a function on a thread of lower priority; returns its result.

    XLA's own threads have the priority of the one that starts them. A thread cannot take its priority back, so it ends.
    """
    found: Future[str] = Future()

    def run() -> None:
        with contextlib.suppress(OSError):
            lower_priority(_NICE)
        try:
            found.set_result(work())
        except Exception as cause:
            found.set_exception(cause)

    thread = threading.Thread(target=run, name="jit-compile", daemon=True)
    thread.start()
    thread.join()
    return found.result()
