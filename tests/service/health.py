"""What a server says of its health."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.service.servers import RunningServer, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GRADIENTS = "gradrule.v1.GradientService"


def health(target: str, service: str) -> int | None:
    """What the server says of a service; None where it is not reached."""
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
    """Until an engine other than this one serves."""
    running.wait_for_engine(other_than=engine)
    wait_until(lambda: True if health(running.target, GRADIENTS) == SERVING else None, "another engine", 60)
