"""Processes that convert bodies end with the request that they work for, and with the gateway."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess

import pytest

from gradrule_gateway import converters as converters_module
from gradrule_gateway.converters import Converters
from tests.waiting import wait_for_condition


@pytest.fixture
async def converters(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Converters]:
    """Returns converters with one process."""
    monkeypatch.setattr(converters_module, "_PROCESSES", 1)
    found = Converters()
    yield found
    found.stop()


async def start(converters: Converters) -> tuple[asyncio.Task[None], BaseProcess]:
    """Starts a conversion that would take an hour; returns it and its process."""
    before = set(multiprocessing.active_children())
    pid = await converters._in_process(os.getpid)
    (process,) = (each for each in multiprocessing.active_children() if each.pid == pid and each not in before)
    running = asyncio.ensure_future(converters._in_process(time.sleep, 3600))
    await wait_for_condition(lambda: converters._busy)
    return running, process


async def test_a_cancelled_conversion_ends_its_process_and_frees_its_place(converters: Converters) -> None:
    running, process = await start(converters)
    waiting = asyncio.ensure_future(converters._in_process(os.getpid))
    running.cancel()
    assert await asyncio.wait_for(waiting, 60) != process.pid
    await wait_for_condition(lambda: process.exitcode is not None)


async def test_stopping_ends_processes_that_convert(converters: Converters) -> None:
    running, process = await start(converters)
    converters.stop()
    await wait_for_condition(lambda: process.exitcode is not None)
    await asyncio.gather(running, return_exceptions=True)


async def test_a_process_that_keeps_much_memory_is_replaced(
    converters: Converters, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await converters._in_process(os.getpid)
    assert await converters._in_process(os.getpid) == first
    monkeypatch.setattr(converters_module, "_MAX_KEPT_BYTES", 1 << 20)
    assert await converters._in_process(os.getpid) == first
    assert await converters._in_process(os.getpid) != first
