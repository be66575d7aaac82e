"""How the clients reach a server: address, channel options, metadata, health."""

from __future__ import annotations

import json
import re
from typing import Any

# Only UNAVAILABLE is tried again: every call that got through has an answer of its own.
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
    # How long the answer to a PING may take; the one above is TCP's alone.
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.use_local_subchannel_pool", 1),
]

_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|passthrough):")

# grpc.health.v1 is one string there and one enum back, so its stubs are not needed.
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_SERVICE = b"gradrule.v1.GradientService"
HEALTH_REQUEST = b"\x0a" + bytes([len(_SERVICE)]) + _SERVICE
HEALTH_SERVING = b"\x08\x01"


def address(target: str) -> str:
    """`host:port` → `dns:///host:port`; a target with a scheme of gRPC's stays."""
    return target if _SCHEME.match(target) else f"dns:///{target}"


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of every call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)
