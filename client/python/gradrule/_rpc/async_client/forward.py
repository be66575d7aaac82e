"""Defines handles of forward runs that the server keeps, for any number of backward passes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from gradrule._messages.call_arguments import GradYs
from gradrule._messages.forward_calls import LOST, Forward, ForwardBase
from gradrule._messages.rpc_calls import Call
from gradrule._messages.transfer_options import Transfer
from gradrule.errors import GradruleError

R = TypeVar("R")


class AsyncCallRunner(Protocol):
    """Sends calls: a client, or a session."""

    async def _run(self, call: Call[R], timeout: float | None, *, ends_at: float = math.inf) -> R: ...

    def _limit(self, call: Call[Any], timeout: float | None) -> float: ...


class AsyncForwardHandle(ForwardBase):
    """Refers to a forward run that the server keeps. Made by `AsyncProgram.forward` and `AsyncSession.forward`.

    Close it, or use it in an `async with` block. If the server no longer has the run of a program (it expired, or the
    engine or the connection was lost), the next `vjp` repeats the forward pass, unless the program draws random
    numbers. That of a session is not repeated, since the variables may have changed.
    """

    def __init__(
        self,
        runner: AsyncCallRunner,
        forward: Forward,
        ttl: float | None,
        timeout: float | None,
        transfer: Transfer,
    ) -> None:
        super().__init__(forward, ttl, transfer)
        self._runner = runner
        self._timeout = timeout

    async def vjp(
        self,
        grad_ys: GradYs | None = None,
        *,
        stacked_grad_ys: bool = False,
        close: bool = False,
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """Pulls upstream gradients back through the forward run.

        Args:
            grad_ys: As in `AsyncProgram.evaluate`; a y without one gets ones.
            stacked_grad_ys: As in `AsyncProgram.evaluate`.
            close: Release the run once the gradients are computed; saves the request of `close`.
            timeout: Seconds; default: that of `forward`.

        Returns:
            By x an array of x's dtype and shape, a `Sparse`, or None if no y depends on x.

        Raises:
            HandleExpiredError: The server no longer has the run, and it cannot be repeated: it is that of a session,
                the program draws random numbers, or `repeat_if_lost` was False.
            GradruleError: As in `AsyncProgram.evaluate`.
        """
        seconds = self._timeout if timeout is None else timeout
        started_at = time.monotonic()
        request = self._pull_back(grad_ys, stacked=stacked_grad_ys, close=close)
        lost: GradruleError | None = None
        if self._handle:
            try:
                return await self._runner._run(self._pulled_back(request), seconds)
            except LOST as cause:
                lost = cause
        self._forget_lost_run(lost)
        forward = self._forward()
        # Only the forward pass may have to be compiled, so its limit is the longest.
        ends_at = started_at + self._runner._limit(forward, seconds)
        await self._runner._run(forward, seconds, ends_at=ends_at)
        return await self._runner._run(self._pulled_back(request), seconds, ends_at=ends_at)

    async def close(self) -> None:
        """Releases the run on the server. A later `vjp` repeats the forward pass, if it can be repeated."""
        if self._handle:
            try:
                await self._runner._run(self._closing(), self._timeout)
            except LOST:
                # The server has released it already.
                return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run_forward(self, timeout: float | None) -> None:
        await self._runner._run(self._forward(), timeout)
