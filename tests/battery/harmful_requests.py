"""Sends requests that crash, hang or fill an engine, beside a healthy client."""

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
from tests.battery.known_answers import HealthyCalls, HealthyClient
from tests.processes import busy_processes, engines
from tests.service import raw
from tests.service.harmful_graphs import HarmfulGraph
from tests.service.servers import RunningServer

EVALUATE = "/gradrule.v1.GradientService/Evaluate"
_REST_LIMIT_S = 60.0
_REST_S = 0.6
_LOOKS = 9
_copies = itertools.count()


def request(bad: HarmfulGraph) -> bytes:
    """Evaluates `y` of a graph; an unused node makes each graph new, so that no quarantine applies."""
    graph = bad.build()
    graph.node.add(name=f"copy-{next(_copies)}", op="NoOp")
    feeds = {name: tensor_codec.to_message(np.asarray(value)) for name, value in bad.feeds.items()}
    return raw.request(graph.SerializeToString(), feeds).SerializeToString()


async def send(channel: grpc.aio.Channel, data: bytes, deadline_s: float | None) -> Judgement:
    """Returns the judgement of one Evaluate. deadline_s: the caller's; None leaves it to the server."""
    try:
        answer: bytes = await channel.unary_unary(EVALUATE)(data, timeout=deadline_s)
    except grpc.RpcError as failure:
        return answer_checks.check_failure(failure)
    return answer_checks.check_answer(evaluate_pb2.EvaluateResponse, answer)


def unexpected(bad: HarmfulGraph, judged: Judgement, *others: str) -> list[str]:
    """Returns what is wrong with the answer: the server must give its reason or one of the others."""
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
async def healthy_client_beside(target: str, every_s: float = 0.05) -> AsyncIterator[HealthyCalls]:
    """Runs a healthy client during the block and yields what it sees; all its requests have ended afterwards."""
    healthy = HealthyClient(target, every_s)
    asking = asyncio.ensure_future(healthy.run())
    try:
        while not healthy.seen.answered and not asking.done():
            await asyncio.sleep(0.02)
        yield healthy.seen
    finally:
        healthy.stop()
        await asking


def complaints(name: str, seen: HealthyCalls) -> list[str]:
    """Returns the failures of the healthy client."""
    found = [f"{name}: the healthy client saw {count} × {reason}" for reason, count in seen.errors.items()]
    return found + [f"{name}: the healthy client got a wrong answer: {fault}" for fault in seen.wrong]


async def wait_for_engines(server: RunningServer, count: int, timeout_s: float = _REST_LIMIT_S) -> list[int]:
    """Waits until the server has that many idle engines, spares included, and returns them.

    They may still be at work after `timeout_s`; raises `TimeoutError` if they do not exist.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    while True:
        found = engines(server.process.pid)
        busy = Counter[int]()
        for _ in range(_LOOKS):
            await asyncio.sleep(_REST_S / _LOOKS)
            busy.update(busy_processes(found))
        is_late = loop.time() > ends_at
        if is_late and len(found) < count:
            raise TimeoutError(f"{len(found)} engines after {timeout_s:g} s, not {count}")
        if is_late or (len(found) >= count and max(busy.values(), default=0) <= _LOOKS // 3):
            return found
