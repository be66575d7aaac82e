"""A client that asks good things all the time, and what it got."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import gradrule as gr
from tests.service.refusals import sign

_PAUSE_S = 0.02
_TIMEOUT_S = 60.0


class Healthy:
    """How many answers it got, all of which were right, and every error."""

    def __init__(self) -> None:
        self.answers = 0
        self.errors: list[BaseException] = []

    def ask(self, client: Any, program: Any) -> None:
        """By turns a program of the server's, and one that the call brings along."""
        x = np.float32([self.answers - 3, 2.5])
        if self.answers % 2:
            r = program.evaluate({"x": x}, timeout=_TIMEOUT_S)
        else:
            r = client.evaluate(sign(), feeds={"x": x}, fetches=["y"], timeout=_TIMEOUT_S)
        assert r.outputs["y"].tolist() == np.sign(x).tolist()
        self.answers += 1


@contextlib.contextmanager
def healthy_client(target: str) -> Iterator[Healthy]:
    """Asks while the block runs; at its end nothing may have gone wrong, and something must have been answered."""
    found = Healthy()
    stop = threading.Event()
    with gr.connect(target) as client:
        program = client.compile(sign(), fetches=["y"])
        found.ask(client, program)
        found.ask(client, program)

        def keep_asking() -> None:
            while not stop.is_set():
                try:
                    found.ask(client, program)
                except Exception as caught:
                    found.errors.append(caught)
                time.sleep(_PAUSE_S)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        before = found.answers
        try:
            yield found
            # What is answered only once the block is over is not counted.
            beside = found.answers - before
        finally:
            stop.set()
            thread.join()
        found.ask(client, program)
    assert not found.errors, found.errors[:3]
    assert beside, "nothing was answered beside it"
