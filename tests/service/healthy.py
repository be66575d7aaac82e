"""Runs a client that sends valid requests all the time, and counts what it gets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import gradrule as gr
from tests.service.graph_defs import sign_graph

_PAUSE_S = 0.02
_TIMEOUT_S = 60.0


class HealthyTraffic:
    """Counts right answers and collects errors."""

    def __init__(self) -> None:
        self.answers = 0
        self.errors: list[BaseException] = []

    def ask(self, client: Any, program: Any) -> None:
        """Evaluates a compiled program and an inline one in turn."""
        x = np.float32([self.answers - 3, 2.5])
        if self.answers % 2:
            r = program.evaluate({"x": x}, timeout=_TIMEOUT_S)
        else:
            r = client.evaluate(sign_graph(), feeds={"x": x}, fetches=["y"], timeout=_TIMEOUT_S)
        assert r.outputs["y"].tolist() == np.sign(x).tolist()
        self.answers += 1


@contextlib.contextmanager
def healthy_client(target: str) -> Iterator[HealthyTraffic]:
    """Sends requests while the block runs; asserts that none failed and at least one was answered."""
    found = HealthyTraffic()
    stop = threading.Event()
    with gr.connect(target) as client:
        program = client.compile(sign_graph(), fetches=["y"])
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
            # Answers after the end of the block do not count.
            beside = found.answers - before
        finally:
            stop.set()
            thread.join()
        found.ask(client, program)
    assert not found.errors, found.errors[:3]
    assert beside, "nothing was answered beside it"
