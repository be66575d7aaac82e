"""Requests for graphs that kill, hang or fill an engine, with a healthy client beside them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import numpy as np

from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2
from tests.battery import answer_checks
from tests.battery.answer_checks import Judgement, Verdict
from tests.battery.known_answers import Healthy, HealthyClient
from tests.processes import busy_processes, engines
from tests.service import raw
from tests.service.harmful_graphs import HarmfulGraph
from tests.service.servers import RunningServer

EVALUATE = "/gradrule.v1.GradientService/Evaluate"
_CALM_S = 60.0
_REST_S = 0.6
_LOOKS = 9
_copies = itertools.count()


def request(bad: HarmfulGraph) -> bytes:
    """Asks for `y` of a graph; each time of another one, by a node that nothing needs, so that no verdict is kept."""
    graph = bad.build()
    graph.node.add(name=f"copy-{next(_copies)}", op="NoOp")
    feeds = {name: tensor_codec.to_message(np.asarray(value)) for name, value in bad.feeds.items()}
    return raw.request(graph.SerializeToString(), feeds).SerializeToString()


async def ask(channel: grpc.aio.Channel, data: bytes, deadline_s: float | None) -> Judgement:
    """What becomes of one Evaluate. deadline_s: the caller's; None leaves it to the server."""
    try:
        answer: bytes = await channel.unary_unary(EVALUATE)(data, timeout=deadline_s)
    except grpc.RpcError as failure:
        return answer_checks.of_failure(failure)
    return answer_checks.of_answer(evaluate_pb2.EvaluateResponse, answer)


def strange(bad: HarmfulGraph, judged: Judgement, *others: str) -> list[str]:
    """What is wrong with the answer to a bad graph: the server must say its reason, or one of the others."""
    if judged.verdict is Verdict.FAULT:
        return [f"{bad.name}: {judged.what}"]
    if judged.verdict is Verdict.GOOD:
        return [f"{bad.name}: an answer"]
    if judged.is_bare:
        return [f"{bad.name}: the server told nothing: {judged.reason} {judged.what}"]
    if judged.reason not in {bad.told, *others}:
        return [f"{bad.name}: told {judged.reason}, not {bad.told}: {judged.what}"]
    return []


@contextlib.asynccontextmanager
async def beside(target: str, every_s: float = 0.05) -> AsyncIterator[Healthy]:
    """A healthy client at work, what it sees as it sees it; nothing it has asked is open at the end."""
    healthy = HealthyClient(target, every_s)
    asking = asyncio.ensure_future(healthy.run())
    try:
        while not healthy.seen.answered and not asking.done():
            await asyncio.sleep(0.02)
        yield healthy.seen
    finally:
        healthy.stop()
        await asking


def complaints(name: str, seen: Healthy) -> list[str]:
    """What the healthy client suffered; nothing may."""
    found = [f"{name}: the healthy client saw {count} × {reason}" for reason, count in seen.errors.items()]
    return found + [f"{name}: the healthy client got a wrong answer: {fault}" for fault in seen.wrong]


async def calm(server: RunningServer, count: int) -> list[int]:
    """The server's engines once there are so many, spares included, and none is still starting.

    They may be at work after a minute; `TimeoutError` where they are not there.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + _CALM_S
    while True:
        found = engines(server.process.pid)
        busy = Counter[int]()
        for _ in range(_LOOKS):
            await asyncio.sleep(_REST_S / _LOOKS)
            busy.update(busy_processes(found))
        is_late = loop.time() > ends_at
        if is_late and len(found) < count:
            raise TimeoutError(f"{len(found)} engines after {_CALM_S:g} s, not {count}")
        if is_late or (len(found) >= count and max(busy.values(), default=0) <= _LOOKS // 3):
            return found
