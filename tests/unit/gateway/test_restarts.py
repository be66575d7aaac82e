"""A gateway is started again at once; one that ends again and again after longer and longer pauses."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter

import pytest

from gradrule_server.front import http_gateway
from gradrule_server.front.http_gateway import GatewayError, HttpGateway
from gradrule_server.settings import Settings


def _gateway(ended: Counter[str]) -> HttpGateway:
    return HttpGateway(Settings(http_port=0), 0, ended)


class Enough(Exception):
    """Ends the supervision."""


async def test_a_gateway_is_started_again_once_the_system_lets_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = _gateway(Counter())
    outcomes = iter([OSError(errno.EAGAIN, "no process"), GatewayError("not ready"), Enough()])

    async def wait_for_end() -> int:
        return 1

    async def start_process() -> str:
        raise next(outcomes)

    async def sleep(seconds: float) -> None:
        pass

    monkeypatch.setattr(gateway, "_wait_for_end", wait_for_end)
    monkeypatch.setattr(gateway, "_start_process", start_process)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(Enough):
        await gateway._supervise()


async def test_pauses_grow_until_the_gateway_has_run_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: Counter[str] = Counter()
    gateway = _gateway(ended)
    lifetimes = iter([1.0, 1, 1, 1, 1, 1, 1, 1, 31.0, 1])
    now, pauses = [0.0], []

    async def wait_for_end() -> int:
        try:
            now[0] += next(lifetimes)
        except StopIteration:
            raise Enough from None
        return 1

    async def start_process() -> str:
        return ""

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(gateway, "_wait_for_end", wait_for_end)
    monkeypatch.setattr(gateway, "_start_process", start_process)
    monkeypatch.setattr(http_gateway, "_now", lambda: now[0])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(Enough):
        await gateway._supervise()
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 30, 0, 0.5]
    assert ended == {"crash": 10}
