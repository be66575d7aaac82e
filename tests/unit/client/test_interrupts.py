"""Tests which exceptions callers get from `CallGuard`, and which locks it releases."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from gradrule._rpc.interrupts import CallGuard


@pytest.fixture
def guard() -> Iterator[CallGuard]:
    with grpc.insecure_channel("localhost:1") as channel:
        yield CallGuard(channel)


def locked_of(guard: CallGuard) -> list[bool]:
    return [lock._is_owned() for reference in guard._locks.values() if (lock := reference())]  # type: ignore[attr-defined]


def test_error_of_grpc_while_another_exception_is_handled_stays(guard: CallGuard) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    try:
        raise KeyError("before")
    except KeyError:
        with pytest.raises(RuntimeError, match="new thread"):
            guard.call_grpc(fail)


def test_interrupt_that_left_a_lock_locked_is_raised_and_the_lock_released(guard: CallGuard) -> None:
    def interrupted() -> None:
        for reference in guard._locks.values():
            lock = reference()
            assert lock is not None
            lock.acquire()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.call_grpc(interrupted)
    assert locked_of(guard) == [False]


def test_interrupt_within_the_wait_for_a_lock_is_raised(guard: CallGuard) -> None:
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.RLock().release()

    with pytest.raises(KeyboardInterrupt):
        guard.call_grpc(interrupted)


def test_locks_of_other_threads_than_the_main_one_stay_locked(guard: CallGuard) -> None:
    """The garbage collector may call a finalizer, which makes calls, in a thread of gRPC that holds them."""
    found: list[bool] = []

    def call() -> None:
        for reference in guard._locks.values():
            lock = reference()
            assert lock is not None
            with lock:
                with pytest.raises(ValueError, match="refused"):
                    guard.call_grpc(int, "refused")
                found.extend(locked_of(guard))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    assert found == [True]
