"""Limits the bytes that the gateway keeps at the same time: bodies, converted messages, answers."""

from __future__ import annotations

from gradrule_gateway.problems import Problem

_RETRY_S = 1.0


class Budget:
    """The bytes that all requests together may keep.

    Args:
        max_bytes: The limit.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0


class Share:
    """The bytes that one request keeps.

    Args:
        budget: The bytes that all requests may keep.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held = 0

    def take(self, size: int) -> None:
        """Counts bytes that are kept from now on. Raises `Problem` if all requests together keep too many."""
        self._held += size
        self._budget.used += size
        if self._held > self._budget.max_bytes:
            raise Problem(
                "MESSAGE_TOO_LARGE",
                f"the request and its answer need more than {self._budget.max_bytes} bytes, which is the gateway's "
                "--max-bytes-in-flight",
            )
        if self._budget.used > self._budget.max_bytes:
            raise Problem(
                "OVERLOADED",
                "the gateway is handling the maximum number of bytes",
                status=503,
                retry_after_s=_RETRY_S,
            )

    def give(self, size: int) -> None:
        """Counts bytes that are no longer kept."""
        self._held -= size
        self._budget.used -= size

    def release(self) -> None:
        """Counts all bytes of the request as no longer kept."""
        self.give(self._held)
