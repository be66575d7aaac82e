"""Defines the address, options and credentials of a connection to a server, and its health check."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from gradrule.errors import InvalidParamError

# Only UNAVAILABLE is retried: other codes mean that the server has answered.
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
        },
        # The client sends the calls of a lost stream again itself.
        {"name": [{"service": "gradrule.v1.GradientService", "method": "StreamEvaluate"}]},
    ],
    # A failure takes a token, an answer returns one; calls are retried while more than half of the tokens are left. A
    # server that goes away fails all its calls at once, and each of them must be retried. 1,000 is the maximum of gRPC.
    "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
}
# gRPC does not retry a request that is larger than its buffer. An upload in many messages is one request.
_RETRY_BUFFER_BYTES = 256 << 20

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.per_rpc_retry_buffer_size", _RETRY_BUFFER_BYTES),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A server that hangs is noticed after at most 28 s, so that a call with a timeout of 30 s reaches another server.
    ("grpc.keepalive_time_ms", 8_000),
    # 0: any number. By default, gRPC sends only two pings in 16 s of a call without messages, then one each minute.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_timeout_ms", 15_000),
    # Timeout of the answer to an HTTP/2 PING, which may wait behind megabytes in the buffers of a slow connection;
    # keepalive_timeout_ms applies to TCP only.
    ("grpc.http2.ping_timeout_ms", 20_000),
    # gRPC's own limit is 120 s: a server that returns after an outage would wait that long for its clients.
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # gRPC's own limit is 30 s: a client whose servers all got new addresses would not find them for that long.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
]

ONE_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG | {"loadBalancingConfig": [{"pick_first": {}}]})),
    *(option for option in OPTIONS if option[0] != "grpc.service_config"),
]
"""Options of a channel that sends all calls to one server of its target, and to another when that one goes away."""

DEFAULT_PORT = 8470
"""Port of targets without a port, and of `gradrule serve`."""
_URL = re.compile(r"(https?|grpcs?)://")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]")
_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|passthrough):")

# Encoded by hand, because the stubs of grpc.health.v1 are another package. A request is one string, an answer one enum.
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_SERVICE = b"gradrule.v1.GradientService"
HEALTH_REQUEST = b"\x0a" + bytes([len(_SERVICE)]) + _SERVICE
HEALTH_SERVING = b"\x08\x01"
Pem: TypeAlias = "str | os.PathLike[str] | bytes"
"""Path of a PEM file, or its bytes."""
_LOCAL_SCHEMES = ("unix:", "unix-abstract:", "vsock:")
_ADDRESS_SCHEMES = ("dns:", "ipv4:", "ipv6:", "passthrough:")


def endpoint(target: str, credentials: grpc.ChannelCredentials | None) -> tuple[str, grpc.ChannelCredentials | None]:
    """Returns the target as `host:port`, and the credentials; `https://` without credentials means TLS.

    Targets with a scheme of gRPC stay the same.

    Raises:
        InvalidParamError: The target is not `host:port`.
    """
    if not isinstance(target, str):
        raise InvalidParamError(f"the target is a text such as 'localhost:{DEFAULT_PORT}', not {target!r}")
    if _SCHEME.match(target):
        return target, credentials
    url = _URL.match(target)
    rest = target if url is None else target[url.end() :].removesuffix("/")
    host, port = rest.rpartition(":")[::2] if _has_port(rest) else (rest, str(DEFAULT_PORT))
    if _is_ipv6(host):
        host = f"[{host}]"
    if not _HOST.fullmatch(host) or not 0 < int(port) < 65536:
        raise InvalidParamError(
            f"the target {target!r} is not host:port with a port from 1 to 65535, such as 'localhost:{DEFAULT_PORT}'; "
            f"without a port, {DEFAULT_PORT} is used"
        )
    if credentials is None and url is not None and url[1] in ("https", "grpcs"):
        credentials = tls()
    return f"{host}:{port}", credentials


def address(target: str) -> str:
    """Returns `dns:///host:port` for `host:port`; a target with a scheme of gRPC unchanged."""
    return target if _SCHEME.match(target) else f"dns:///{target}"


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def tls(root: Pem | None = None, *, certificate: Pem | None = None, key: Pem | None = None) -> grpc.ChannelCredentials:
    """Returns credentials for `connect(credentials=…)`: TLS, with a client certificate if the server asks for one.

    Args:
        root: Path or bytes of a PEM file with the certificates of the authorities to trust; default: gRPC's.
        certificate: Path or bytes of a PEM file with the client's certificate chain.
        key: Path or bytes of a PEM file with the client's private key.

    Raises:
        InvalidParamError: A file cannot be read, or only one of `certificate` and `key` is given.
    """
    if (certificate is None) != (key is None):
        raise InvalidParamError("a client certificate needs its key and the key its certificate: give both or none")
    return grpc.ssl_channel_credentials(_content(root), _content(key), _content(certificate))


def check_token(target: str, token: str | None, *, is_encrypted: bool, insecure_token: bool) -> None:
    """Raises `InvalidParamError` if a token is not valid or would be sent to another machine unencrypted."""
    if token is None:
        return
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidParamError("the token is empty or has characters that tokens must not have")
    if not is_encrypted and not insecure_token and not is_local(target):
        raise InvalidParamError(
            f"the token would be sent unencrypted to {target!r}: connect with credentials=gradrule.tls(), or set "
            "insecure_token=True if the connection is encrypted by other means"
        )


def is_local(target: str) -> bool:
    """Returns whether the name of a target shows that it is this machine."""
    if target.startswith(_LOCAL_SCHEMES):
        return True
    for scheme in _ADDRESS_SCHEMES:
        if target.startswith(scheme):
            # `dns://authority/name` and `dns:name` mean the same.
            target = target.removeprefix(scheme).rpartition("/")[2]
            break
    return all(_is_loopback(address) for address in target.split(","))


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0] if _has_port(address) else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _has_port(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    # Two colons without brackets: an IPv6 address without a port.
    return bool(colon) and port.isdecimal() and (":" not in host or host.endswith("]"))


def _content(given: Pem | None) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    try:
        return Path(given).read_bytes()
    except OSError as cause:
        raise InvalidParamError(f"{os.fspath(given)} cannot be read: {cause.strerror or cause}") from cause
