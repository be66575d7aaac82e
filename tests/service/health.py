"""Reads the health status of a server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.service.servers import RunningServer
from tests.waiting import wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GRADIENTS = "gradrule.v1.GradientService"
_SERVING_WITHIN_S = 60.0


def health(target: str, service: str) -> int | None:
    """Returns the health status of a service; None if the server is not reachable."""
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            status: int = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.UNAVAILABLE:
                return None
            raise
    return status


def wait_for_another_engine(running: RunningServer, engine: int) -> None:
    """Waits until another engine than `engine` serves."""
    running.wait_for_engine(other_than=engine)
    wait_until(lambda: True if health(running.target, GRADIENTS) == SERVING else None, "another engine")


@dataclass
class HealthRecord:
    """Records the health of `GRADIENTS` over time. statuses: without repetitions; None: no answer."""

    statuses: list[int | None] = field(default_factory=list)
    first_answer_s: float = 0.0
    """When something answered first, by the monotonic clock; 0 before."""

    def faults(self) -> list[str]:
        """Returns errors in the statuses of a start; right is: no answer, then NOT_SERVING, then SERVING."""
        found = [status for status in self.statuses if status is not None]
        return [] if found == [NOT_SERVING, SERVING] else [f"health was {self.statuses} during the start"]


@contextlib.contextmanager
def recorded_health(target: str) -> Iterator[HealthRecord]:
    """Polls the health in a thread until it is SERVING; the block must start the server."""
    record, ended = HealthRecord(), threading.Event()

    def ask() -> None:
        while not ended.wait(0.02):
            status = health(target, GRADIENTS)
            if status is not None and not record.first_answer_s:
                record.first_answer_s = time.monotonic()
            if record.statuses[-1:] != [status]:
                record.statuses.append(status)
            if status == SERVING:
                return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield record
        asking.join(_SERVING_WITHIN_S)
    finally:
        ended.set()
        asking.join()
