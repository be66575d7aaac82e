"""How much of something there may be: for one tenant, within what the server has for all."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error


class Allowance:
    """So much of one thing. Safe to use from several threads.

    limit: the most; what: the thing, in the plural; setting: its flag. `within`: an allowance of the server's for all
    tenants, from which this one takes too. `used`: what is there already, which `within` has counted.
    """

    def __init__(
        self,
        limit: int,
        what: str,
        setting: str,
        *,
        within: Allowance | None = None,
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
    def without_end(cls) -> Allowance:
        """One that only counts."""
        return cls(sys.maxsize, "", "")

    @property
    def used(self) -> int:
        """What is taken by now."""
        return self._used

    @property
    def left(self) -> int:
        """What can still be taken; never less than 0."""
        own = max(0, self.limit - self._used)
        return own if self._within is None else min(own, self._within.left)

    @property
    def tightest(self) -> str:
        """Flag of the setting that bounds `left`."""
        within = self._within
        return self.setting if within is None or self.limit - self._used < within.left else within.tightest

    def begin(self, used: int) -> None:
        """So much is there already, which the allowance around this one has counted."""
        with self._lock:
            self._used += used

    def take(self, amount: int = 1) -> None:
        """Counts in. QUOTA_EXCEEDED (or the allowance's own reason) where that is too much; nothing is counted then."""
        # Where both are full, the server's bound is the one to name.
        if self._within is not None:
            self._within.take(amount)
        with self._lock:
            fits = self._used + amount <= self.limit
            self._used += amount if fits else 0
        if not fits:
            if self._within is not None:
                self._within.give_back(amount)
            raise error(self._reason, self._refusal(amount))

    @contextlib.contextmanager
    def taken(self, amount: int = 1) -> Iterator[None]:
        """Counts in, and out again where what is done within fails; QUOTA_EXCEEDED as `take`."""
        self.take(amount)
        try:
            yield
        except BaseException:
            self.give_back(amount)
            raise

    def give_back(self, amount: int = 1) -> None:
        """Counts out."""
        self.adjust(-amount)

    def adjust(self, amount: int) -> None:
        """Counts what is there whether it may be or not: more, or less where the amount is negative."""
        with self._lock:
            self._used += amount
        if self._within is not None:
            self._within.adjust(amount)

    def _refusal(self, amount: int) -> str:
        whose = "the server keeps for all callers" if self._within is None else "one tenant may have"
        wanted = f", and {amount} more are asked for" if amount > 1 else ""
        return (
            f"there are {self._used} {self._what}{wanted}; {whose} at most {self.limit}. Give up some, or raise "
            f"the server's {self.setting}"
        )
