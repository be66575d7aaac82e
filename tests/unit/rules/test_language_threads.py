"""Tests that several threads can parse expressions at the same time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from gradrule_server.errors import GradruleError
from gradrule_server.rules.language import source

DEEP = "-" * 3000 + "dy"
GOOD = ("x" + " + dy * x" * 200, "sin(" * 50 + "dy" + ")" * 50)


class Cycle:
    """Garbage whose end runs Python: that is where one thread stops for another in the middle of a tree."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(2000):
            pass


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads change, and garbage is collected, as often as can be."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    # Collect only what the test itself makes: TensorFlow's objects would be looked at each time.
    gc.freeze()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.mark.usefixtures("restless")
def test_several_threads_can_parse_at_once() -> None:
    wrong: list[str] = []

    def read(text: str) -> None:
        for _ in range(120):
            Cycle()
            try:
                source.read(text)
            except GradruleError as refusal:
                if text is not DEEP:
                    wrong.append(str(refusal))
            except Exception as failure:
                wrong.append(repr(failure))

    threads = [threading.Thread(target=read, args=(text,)) for text in (*GOOD, DEEP) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
