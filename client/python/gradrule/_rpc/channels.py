"""Address, channel options, metadata and health check of a server."""

from __future__ import annotations

import json
import re
from typing import Any

# Only UNAVAILABLE is retried: with other codes the server has answered.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # How long the answer to an HTTP/2 PING may take; keepalive_timeout_ms applies to TCP alone.
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.use_local_subchannel_pool", 1),
]

_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|passthrough):")

# Written by hand because grpc.health.v1 needs a package of stubs: a request is one string, an answer one enum.
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_SERVICE = b"gradrule.v1.GradientService"
HEALTH_REQUEST = b"\x0a" + bytes([len(_SERVICE)]) + _SERVICE
HEALTH_SERVING = b"\x08\x01"


def address(target: str) -> str:
    """Returns `dns:///host:port` for `host:port`; a target with a scheme of gRPC unchanged."""
    return target if _SCHEME.match(target) else f"dns:///{target}"


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)
