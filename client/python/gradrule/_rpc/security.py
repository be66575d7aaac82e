"""Credentials of a connection, and the check that a token is not sent without encryption."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import TypeAlias

import grpc

from gradrule.errors import InvalidParamError

Pem: TypeAlias = "str | os.PathLike[str] | bytes"
"""Path of a PEM file, or its bytes."""

_LOCAL_SCHEMES = ("unix:", "unix-abstract:", "vsock:")
_ADDRESS_SCHEMES = ("dns:", "ipv4:", "ipv6:", "passthrough:")


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
        raise InvalidParamError("a client's certificate and its key go together: give both or none")
    return grpc.ssl_channel_credentials(_content(root), _content(key), _content(certificate))


def check_token(target: str, token: str | None, *, is_encrypted: bool, insecure_token: bool) -> None:
    """Raises `InvalidParamError` if a token is not valid or would be sent to another machine unencrypted."""
    if token is None:
        return
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidParamError("the token is empty, or holds characters that no token has")
    if not is_encrypted and not insecure_token and not is_local(target):
        raise InvalidParamError(
            f"the token would be sent unencrypted to {target!r}: connect with credentials=gradrule.tls(), or say "
            "insecure_token=True where something else encrypts"
        )


def is_local(target: str) -> bool:
    """Whether the name of a target says that it is this machine."""
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
