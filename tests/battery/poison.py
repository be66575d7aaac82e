"""Requests for graphs that kill, hang or fill an engine, with a healthy client beside them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import numpy as np

from gradrule import _tensors
from gradrule.v1 import evaluate_pb2
from tests.battery import judging
from tests.battery.judging import Judgement
from tests.battery.known import Healthy, HealthyClient
from tests.battery.processes import engines, working
from tests.service import raw
from tests.service.corpus import Bad
from tests.service.servers import RunningServer

EVALUATE = "/gradrule.v1.GradientService/Evaluate"
_CALM_S = 60.0
_REST_S = 0.6
_LOOKS = 9
_copies = itertools.count()


def request(bad: Bad) -> bytes:
    """Asks for `y` of a graph; each time of another one, by a node that nothing needs, so that no verdict is kept."""
    graph = bad.build()
    graph.node.add(name=f"copy-{next(_copies)}", op="NoOp")
    feeds = {name: _tensors.to_message(np.asarray(value)) for name, value in bad.feeds.items()}
    return raw.request(graph.SerializeToString(), feeds).SerializeToString()


async def ask(channel: grpc.aio.Channel, data: bytes, deadline_s: float) -> Judgement:
    """What becomes of one Evaluate."""
    try:
        answer: bytes = await channel.unary_unary(EVALUATE)(data, timeout=deadline_s)
    except grpc.RpcError as failure:
        return judging.of_failure(failure)
    return judging.of_answer(evaluate_pb2.EvaluateResponse, answer)


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
    """The server's engines once there are so many, spares included, and none is still starting; or after a minute."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + _CALM_S
    while True:
        found = engines(server.process.pid)
        busy = Counter[int]()
        for _ in range(_LOOKS):
            await asyncio.sleep(_REST_S / _LOOKS)
            busy.update(working(found))
        if (len(found) >= count and max(busy.values(), default=0) <= _LOOKS // 3) or loop.time() > ends_at:
            return found
