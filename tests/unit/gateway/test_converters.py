"""Processes that convert bodies end with the request that they work for, and with the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess

import pytest

from gradrule_gateway import converters as converters_module
from gradrule_gateway.converters import Converters
from gradrule_gateway.problems import Problem
from gradrule_gateway.routes import ROUTES
from tests.waiting import wait_for_condition

EVALUATE = next(route for route in ROUTES if route.rpc == "GradientService/Evaluate")


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
    pid = await converters._in_process("", os.getpid)
    (process,) = (each for each in multiprocessing.active_children() if each.pid == pid and each not in before)
    running = asyncio.ensure_future(converters._in_process("", time.sleep, 3600))
    await wait_for_condition(lambda: converters._busy)
    return running, process


async def test_a_cancelled_conversion_ends_its_process_and_frees_its_place(converters: Converters) -> None:
    running, process = await start(converters)
    waiting = asyncio.ensure_future(converters._in_process("", os.getpid))
    running.cancel()
    assert await asyncio.wait_for(waiting, 60) != process.pid
    await wait_for_condition(lambda: process.exitcode is not None)


@pytest.mark.parametrize("item", ['""', "{}", "[]"])
async def test_a_body_of_many_small_parts_is_converted_in_a_process(converters: Converters, item: str) -> None:
    asked = []

    async def in_process(*arguments: object) -> tuple[bytes, list[object]]:
        asked.append(arguments)
        return b"", []

    converters._in_process = in_process  # type: ignore[method-assign, assignment]
    for count in (100, 2500):
        with contextlib.suppress(Problem):
            await converters.decode("", EVALUATE, b'{"spec": {"overrides": [%s]}}' % ",".join([item] * count).encode())
    assert len(asked) == 1


async def test_stopping_ends_processes_that_convert(converters: Converters) -> None:
    running, process = await start(converters)
    converters.stop()
    await wait_for_condition(lambda: process.exitcode is not None)
    await asyncio.gather(running, return_exceptions=True)


async def test_a_process_that_keeps_much_memory_is_replaced(
    converters: Converters, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await converters._in_process("", os.getpid)
    assert await converters._in_process("", os.getpid) == first
    monkeypatch.setattr(converters_module, "_MAX_KEPT_BYTES", 1 << 20)
    assert await converters._in_process("", os.getpid) == first
    assert await converters._in_process("", os.getpid) != first


async def test_one_caller_leaves_processes_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converters_module, "_PROCESSES", 2)
    found = Converters()
    running = [asyncio.ensure_future(found._in_process("a", time.sleep, 3600)) for _ in range(6)]
    await wait_for_condition(lambda: found.slots.waiting == 5)
    assert await asyncio.wait_for(found._in_process("b", os.getpid), 60)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    found.stop()


async def test_a_conversion_has_a_time_limit(converters: Converters, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await converters._in_process("", os.getpid)
    monkeypatch.setattr(converters_module, "_MAX_S", 0.05)
    with pytest.raises(Problem, match="converting the body takes longer"):
        await converters._in_process("", time.sleep, 3600)
    monkeypatch.setattr(converters_module, "_MAX_S", 60.0)
    assert await converters._in_process("", os.getpid) != first


@pytest.mark.parametrize(("number", "is_inline"), [(50, True), (2000, False)])
async def test_bodies_with_many_names_are_not_converted_in_the_event_loop(
    converters: Converters, number: int, is_inline: bool
) -> None:
    body = json.dumps({"feeds": {f"x{index}": 1 for index in range(number)}}).encode()
    assert len(body) < converters_module.MAX_INLINE
    decoded = await converters.decode("", EVALUATE, body)
    assert len(decoded.open) == number
    assert bool(converters._idle) is not is_inline


async def test_stopping_ends_processes_that_start(converters: Converters, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of Python waits for them."""
    monkeypatch.setattr(converters_module, "_PROCESSES", 2)
    before = set(multiprocessing.active_children())
    waiting = asyncio.ensure_future(converters._in_process("", os.getpid))
    await wait_for_condition(lambda: converters._busy)
    started = set(multiprocessing.active_children()) - before
    # The one that is needed and the next one.
    assert len(started) == 2
    converters.stop()
    for process in started:
        await asyncio.to_thread(process.join, 20)
        assert process.exitcode == -signal.SIGKILL
    with pytest.raises(Problem, match="ended"):
        await waiting
