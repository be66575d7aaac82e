"""Limits how much of a resource one tenant, or all tenants together, may use."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error


class Quota:
    """Counts how much of one resource is used and refuses what exceeds the limit. Safe to use from several threads.

    Args:
        limit: The largest amount that may be in use.
        what: The resource as a plural noun, for error messages: `bytes of sessions`.
        setting: The flag that sets the limit: `--max-sessions`.
        within: The server's quota for all tenants; every amount counts towards that quota too.
        used: Amount in use at the start. `within` is expected to include it already.
        reason: Reason of the error that a refusal raises.
    """

    def __init__(
        self,
        limit: int,
        what: str,
        setting: str,
        *,
        within: Quota | None = None,
        used: int = 0,
        reason: errors_pb2.ErrorReason.ValueType = errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
    ) -> None:
        self.limit = limit
        self.setting = setting
        self._what = what
        self._within = within
        self._used = used
        self._reason = reason
        self._lock = threading.Lock()

    @classmethod
    def unlimited(cls) -> Quota:
        """Returns a quota that counts and never refuses."""
        return cls(sys.maxsize, "", "")

    @property
    def used(self) -> int:
        """The amount in use."""
        return self._used

    @property
    def available(self) -> int:
        """The amount that can still be reserved; never less than 0."""
        own = max(0, self.limit - self._used)
        return own if self._within is None else min(own, self._within.available)

    @property
    def limiting_setting(self) -> str:
        """The flag of the limit that determines `available`: this quota's or that of the quota around it."""
        within = self._within
        if within is None or self.limit - self._used < within.available:
            return self.setting
        return within.limiting_setting

    def set_used(self, amount: int) -> None:
        """Replaces the amount in use, which was counted again; the quota around this one does not change."""
        with self._lock:
            self._used = amount

    def count(self, used: int, used_by_all: int, amount: int) -> None:
        """Adds an amount, which may be negative, to amounts in use that a database counts.

        Args:
            used: What was in use before.
            used_by_all: What was in use before within the quota around this one.
            amount: What is added.

        Raises:
            GradruleError: As `reserve`.
        """
        counted = [(self, used)] if self._within is None else [(self._within, used_by_all), (self, used)]
        for quota, before in counted:
            quota.set_used(before)
            if amount > 0 and before + amount > quota.limit:
                raise error(quota._reason, quota._refusal(amount, before))
        for quota, before in counted:
            quota.set_used(before + amount)

    def reserve(self, amount: int = 1) -> None:
        """Counts an amount as used.

        Raises:
            GradruleError: QUOTA_EXCEEDED, or this quota's own reason, if the amount exceeds the limit. Nothing is
                counted then.
        """
        # Ask the server's quota first: if both are full, the error must name the server's limit.
        if self._within is not None:
            self._within.reserve(amount)
        with self._lock:
            fits = self._used + amount <= self.limit
            self._used += amount if fits else 0
        if not fits:
            if self._within is not None:
                self._within.release(amount)
            raise error(self._reason, self._refusal(amount, self._used))

    @contextlib.contextmanager
    def reserved(self, amount: int = 1) -> Iterator[None]:
        """Reserves an amount, and releases it if the body of the `with` statement fails. Raises what `reserve` does."""
        self.reserve(amount)
        try:
            yield
        except BaseException:
            self.release(amount)
            raise

    def release(self, amount: int = 1) -> None:
        """Counts an amount as no longer used."""
        self.adjust(-amount)

    def adjust(self, amount: int) -> None:
        """Adds an amount, which may be negative, without checking the limit: it is in use already."""
        with self._lock:
            self._used += amount
        if self._within is not None:
            self._within.adjust(amount)

    def _refusal(self, amount: int, used: int) -> str:
        scope = "all tenants together may have" if self._within is None else "one tenant may have"
        requested = f" and {amount} more are requested" if amount > 1 else ""
        return (
            f"{used} {self._what} are in use{requested}; {scope} at most {self.limit}. Free some of them, or "
            f"raise the server's {self.setting}"
        )
