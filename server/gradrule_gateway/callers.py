"""Finds out who sends a request, before its body is awaited."""

from __future__ import annotations

import hashlib
import ipaddress
import time
from collections import OrderedDict

from gradrule_gateway.budget import FairSlots
from gradrule_gateway.problems import Problem
from gradrule_gateway.upstream import Metadata, Upstream

# A credential that is revoked meanwhile is refused by the call itself.
_KEEP_S = 30.0
# Each check without a credential that the server refuses is a line in its audit log.
_KEEP_REFUSAL_S = 3600.0
_ENTRIES = 4096
# Checks that run at the same time; one address may have half of them, so that its guesses delay no other address.
_CHECKS = 16
# Checks of one address that wait.
_MAX_WAITING = 128
_NONE = b""
_now = time.monotonic


class Callers:
    """Asks the server whether it accepts a credential, and keeps the answer for half a minute.

    Args:
        upstream: The connection to the server.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._checks = FairSlots(_CHECKS, _MAX_WAITING)
        self._kept: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()

    async def find(self, metadata: Metadata, host: str, timeout_s: float | None) -> str:
        """Returns a name for the caller: of its credential, or its address if the server accepts calls without one.

        Args:
            metadata: The metadata of the caller's calls.
            host: Address of the client.
            timeout_s: Time for the checks, seconds.

        Raises:
            Problem: The server does not accept the credential, or does not answer.
        """
        address = network_of(host)
        credential = [(name, value) for name, value in metadata if name == "authorization"]
        if await self._is_open(address, timeout_s):
            return address
        key = _key(credential[0][1]) if credential else _NONE
        if not self._known(key):
            await self._check(key, credential, address, timeout_s)
        return key.hex()

    async def _is_open(self, address: str, timeout_s: float | None) -> bool:
        """Returns whether the server accepts calls without a credential."""
        known = self._known(_NONE)
        if known is not None:
            return known
        try:
            await self._check(_NONE, (), address, timeout_s)
        except Problem as problem:
            if problem.reason != "UNAUTHENTICATED":
                raise
            self._keep(_NONE, is_accepted=False)
            return False
        return True

    async def _check(self, key: bytes, credential: Metadata, address: str, timeout_s: float | None) -> None:
        async with self._checks.slot(address):
            if not self._known(key):
                await self._upstream.check_credential(credential, timeout_s)
                self._keep(key, is_accepted=True)

    def _known(self, key: bytes) -> bool | None:
        end, is_accepted = self._kept.get(key, (0.0, False))
        return is_accepted if _now() < end else None

    def _keep(self, key: bytes, *, is_accepted: bool) -> None:
        self._kept.pop(key, None)
        self._kept[key] = _now() + (_KEEP_S if is_accepted else _KEEP_REFUSAL_S), is_accepted
        while len(self._kept) > _ENTRIES:
            self._kept.popitem(last=False)


def _key(authorization: str) -> bytes:
    """Returns the same key for all spellings of a credential, so that they are one caller."""
    scheme, _, token = authorization.partition(" ")
    return hashlib.sha256(f"{scheme.lower()} {token.strip(' ')}".encode()).digest()


def network_of(host: str) -> str:
    """Returns the address that limits are counted for: of IPv6, the network that one client may use."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    # A socket for IPv4 and IPv6 reports clients of IPv4 as ::ffff:192.0.2.1, of which all have one network.
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((address, 64), strict=False))
