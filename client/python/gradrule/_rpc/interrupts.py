"""Keeps a channel of gRPC usable after a signal handler has interrupted one of its calls.

Python runs signal handlers in the main thread, also while gRPC holds its locks there. The locks are conditions of
`threading`: if a handler raises an exception, such as KeyboardInterrupt, at the start of a condition's `__exit__`, the
lock is never released, and the thread of gRPC that delivers all answers waits for ever.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from gradrule.errors import UnsupportedError

R = TypeVar("R")
_REENTRANT = type(threading.RLock())
_NOT_LOCKED = "un-acquired lock"
_guards: weakref.WeakSet[CallGuard] = weakref.WeakSet()


def _forget_threads() -> None:
    for guard in _guards:
        guard.forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


class CallGuard:
    """Runs the functions of one channel. Releases the locks that they leave locked, and refuses nested streams."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.forget_threads()
        # Weak references by id(). No set of them: other threads change it while one goes through it.
        self._locks: dict[int, weakref.ref[threading.Condition]] = {}
        for lock in _locks_of_channel(channel):
            self._add(lock)

        _guards.add(self)

    def forget_threads(self) -> None:
        """Forgets which threads run calls. In a forked process there are none, and new threads may get their ids."""
        self._threads: set[int] = set()
        self._threads_in_grpc: set[int] = set()

    @property
    def is_running(self) -> bool:
        """Whether this thread runs a call of the channel already, which a signal handler or finalizer interrupted."""
        thread = threading.get_ident()
        return thread in self._threads or thread in self._threads_in_grpc

    def require_not_running(self) -> None:
        """Raises `UnsupportedError` if this thread runs a call already.

        Answers of streams come through locks that the interrupted call may hold.
        """
        if self.is_running:
            raise UnsupportedError(
                "a signal handler or finalizer has interrupted a call of this client, which must end first: let the "
                "handler set a variable, and make this call after that one"
            )

    def add_locks_of(self, call: Any) -> None:
        """Releases the locks of a call, too."""
        self._add(getattr(getattr(call, "_state", None), "condition", None))

    def _add(self, lock: Any) -> None:
        # Other locks cannot tell which thread has locked them.
        if isinstance(lock, threading.Condition) and isinstance(getattr(lock, "_lock", None), _REENTRANT):
            key = id(lock)
            self._locks[key] = weakref.ref(lock, lambda _: self._locks.pop(key, None))

    def run(self, function: Callable[..., R], *arguments: Any) -> R:
        """Runs a function of the client that calls gRPC."""
        thread = threading.get_ident()
        if thread in self._threads:
            return function(*arguments)
        try:
            self._threads.add(thread)
            return function(*arguments)
        finally:
            self._threads.discard(thread)

    def call_grpc(self, function: Callable[..., R], *arguments: Any, **named: Any) -> R:
        """Calls a function of gRPC."""
        thread = threading.get_ident()
        if thread in self._threads_in_grpc:
            # The locks belong to the interrupted call.
            return function(*arguments, **named)
        handled = sys.exc_info()[1]
        try:
            self._threads_in_grpc.add(thread)
            return function(*arguments, **named)
        except BaseException as failure:
            # At once: the client takes other locks of gRPC while it handles the exception.
            self._release_locks()
            interrupt = failure.__context__
            if type(failure) is RuntimeError and _NOT_LOCKED in str(failure) and interrupt not in (None, handled):
                # A condition that was interrupted in `wait` cannot be released.
                raise interrupt from None
            raise
        finally:
            self._threads_in_grpc.discard(thread)

    def _release_locks(self) -> None:
        # Python runs signal handlers in the main thread only. Another one may be a thread of gRPC, in which the garbage
        # collector has called a finalizer: its locks are its own.
        if threading.current_thread() is not threading.main_thread():
            return
        for reference in list(self._locks.values()):
            lock: Any = reference()
            while lock is not None and lock._is_owned():
                lock.release()


class GuardedChannel:
    """Makes calls on a channel of gRPC as its guard allows."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.guard = CallGuard(channel)

    def unary_unary(self, method: str) -> Any:
        """Returns a function that makes calls with one request and one answer."""
        return _Callable(self.guard, self._channel.unary_unary(method))

    def stream_unary(self, method: str) -> Any:
        """Returns a function that makes calls with several requests and one answer."""
        return _Callable(self.guard, self._channel.stream_unary(method), is_stream=True)

    def stream_stream(self, method: str) -> Callable[..., GuardedCall]:
        """Returns a function that opens streams."""
        return _Opener(self.guard, self._channel.stream_stream(method))

    def close(self) -> None:
        """Closes the channel and cancels its calls."""
        self.guard.call_grpc(self._channel.close)


class _Callable:
    """Calls a method that has one answer."""

    def __init__(self, guard: CallGuard, method: Any, *, is_stream: bool = False) -> None:
        self._guard = guard
        self._method = method
        self._is_stream = is_stream

    def __call__(self, request: Any, **options: Any) -> Any:
        if self._is_stream:
            self._guard.require_not_running()
        return self._guard.call_grpc(self._method, request, **options)

    def future(self, request: Any, **options: Any) -> GuardedCall:
        self._guard.require_not_running()
        return GuardedCall(self._guard, self._guard.call_grpc(self._method.future, request, **options))


class _Opener:
    """Opens streams of a method."""

    def __init__(self, guard: CallGuard, method: Any) -> None:
        self._guard = guard
        self._method = method

    def __call__(self, messages: Any, **options: Any) -> GuardedCall:
        return GuardedCall(self._guard, self._guard.call_grpc(self._method, messages, **options))


class GuardedCall:
    """A call of gRPC whose answers are read later."""

    def __init__(self, guard: CallGuard, call: Any) -> None:
        self._guard = guard
        self._call = call
        guard.add_locks_of(call)

    def __next__(self) -> Any:
        """Returns the next answer of a stream."""
        return self._guard.call_grpc(next, self._call)

    def result(self) -> Any:
        """Waits for the only answer."""
        return self._guard.call_grpc(self._call.result)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Calls a function with the call of gRPC once it has ended."""
        self._guard.call_grpc(self._call.add_done_callback, function)

    def cancel(self) -> Any:
        """Cancels the call."""
        return self._guard.call_grpc(self._call.cancel)


def _locks_of_channel(channel: grpc.Channel) -> list[threading.Condition]:
    """Returns the locks of a channel; gRPC's extension module has no other access to them."""
    inner = getattr(channel, "_channel", None)
    states = [state for state in gc.get_referents(inner) if type(state).__name__ == "_ChannelState"]
    return [found for found in gc.get_referents(*states) if isinstance(found, threading.Condition)]
