"""Who answers for a request: what it did to its engine is told to them, whoever still waits for it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from gradrule_server.link.faults import EngineLost


class Account(Protocol):
    """What is held to account for a request. `suspect`: the same for requests that are held to account together."""

    @property
    def suspect(self) -> Hashable: ...

    def took(self, seconds: float) -> None:
        """The engine has done it, and was at it for so long."""
        ...

    def overran(self, seconds: float) -> None:
        """It ended its engine: its deadline had passed, and it had gone on for so long in all."""
        ...

    def lost(self, cause: EngineLost) -> None:
        """Its engine ended while it ran, and nobody waits for it any more."""
        ...
