"""Lists the RPCs of a server, and what proxies and replicas tell each other about one call."""

from __future__ import annotations

from dataclasses import dataclass

from gradrule.v1 import admin_pb2, blob_pb2, evaluate_pb2, program_pb2, rule_pb2, session_pb2

TIMEOUT = "gradrule-timeout-s"
"""Metadata from the proxy to the replica: seconds until the deadline of the call."""
REQUEST_ID = "request_id"
"""Metadata, by Ray Serve's name: identifies the call in the proxy."""
PROGRAM = "session_id"
"""Metadata, by Ray Serve's name, that the router reads: identifies the program of a request.

Not `multiplexed_model_id`: a router that does not choose replicas by it keeps every request that has one in memory.
"""
SET_BY_PROXY = frozenset({TIMEOUT, REQUEST_ID, PROGRAM, "multiplexed_model_id"})
"""Metadata that the proxy does not accept from clients."""
FOR_PROXY = SET_BY_PROXY | {"application"}
"""Metadata for the proxy and the replica, which they do not pass to the server."""
EVALUATE = "/gradrule.v1.GradientService/Evaluate"
STREAM_EVALUATE = "/gradrule.v1.GradientService/StreamEvaluate"
RUN_SESSION = "/gradrule.v1.SessionService/RunSession"


@dataclass(frozen=True)
class Rpc:
    """One RPC. path: `/package.Service/Method`."""

    path: str
    has_request_stream: bool = False
    has_response_stream: bool = False

    @property
    def service(self) -> str:
        return self.path.split("/")[1]

    @property
    def method(self) -> str:
        """The method of the deployment that Ray Serve calls: the last part of the path, which is unique."""
        return self.path.split("/")[2]


@dataclass(frozen=True)
class Ending:
    """How a call ended, as the server said.

    Args:
        code: Name of the gRPC status code.
        details: Text of the status.
        trailers: Trailing metadata; of a failed call they have its typed error.
        message: Response of a unary call that succeeded.
    """

    code: str
    details: str
    trailers: tuple[tuple[str, str | bytes], ...]
    message: bytes | None = None


RPCS = (
    *(
        Rpc(f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
        for file in (admin_pb2, blob_pb2, evaluate_pb2, program_pb2, rule_pb2, session_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ),
    Rpc("/grpc.health.v1.Health/Check"),
    Rpc("/grpc.health.v1.Health/Watch", has_response_stream=True),
)
"""All RPCs of a server, without reflection, which Ray Serve's proxies have themselves."""
