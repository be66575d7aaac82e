"""Polls conditions until they hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def wait_until(probe: Callable[[], T | None], what: str, timeout_s: float = 120.0) -> T:
    """Polls `probe` and returns its first result that is not None."""
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        found = probe()
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {what} within {timeout_s:g} s")


async def wait_for_condition(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    """Polls `condition` on the event loop until it is true. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
