"""Limits the sessions of a tenant: their number, the bytes of their variables and optimizers, and their idle time."""

from __future__ import annotations

import secrets

from gradrule_server.policy import Limits
from gradrule_server.programs.service import ProgramService
from gradrule_server.quotas import Quota
from gradrule_server.registry.blobs import BlobStore


class SessionManager:
    """Limits the number and bytes of a tenant's sessions, and how long they may be idle. Belongs to one asyncio loop.

    idle_s: Seconds; 0: no limit.
    """

    def __init__(
        self,
        program_service: ProgramService,
        blobs: BlobStore,
        limits: Limits,
        *,
        quota: Quota,
        bytes_quota: Quota,
        idle_s: float = 0.0,
    ) -> None:
        self.program_service = program_service
        self.blobs = blobs
        self.limits = limits
        self.idle_s = idle_s
        self._quota = quota
        self._bytes_quota = bytes_quota
        self._bytes: dict[str, int] = {}

    def open(self) -> str:
        """Adds a session and returns its name. Raises QUOTA_EXCEEDED if there are too many."""
        self._quota.reserve()
        # Engines find sessions of all tenants by these names, so no tenant may guess one.
        name = f"s{secrets.token_hex(8)}"
        self._bytes[name] = 0
        return name

    def available_bytes(self, name: str) -> int:
        """Returns the most bytes that a session may have, which its engine checks.

        Sessions that grow at the same moment may together exceed the quota, since each gets all that is free.
        """
        return self._bytes_quota.available + self._bytes.get(name, 0)

    @property
    def limiting_setting(self) -> str:
        """The flag of the setting that limits `available_bytes`."""
        return self._bytes_quota.limiting_setting

    def set_bytes(self, name: str, size: int) -> None:
        """Sets the size of a session."""
        if name in self._bytes:
            self._bytes_quota.adjust(size - self._bytes[name])
            self._bytes[name] = size

    def close(self, name: str) -> None:
        """Removes a session."""
        if name in self._bytes:
            self.set_bytes(name, 0)
            del self._bytes[name]
            self._quota.release()
