"""A tenant at its worst, in a process of its own, and the calls of another that must not notice.

`python -m tests.benchmarks.attacks ATTACK TARGET SECONDS`, its token in GRADRULE_TOKEN.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import gradrule as gr
from gradrule import aio
from gradrule.errors import GradruleError
from tests.benchmarks import work

ROOT = Path(__file__).resolve().parents[2]
_PAUSE_S = 0.01
_TIMEOUT_S = 30.0

ATTACKING = "attacks"
"""The line that an attacker prints when its calls begin."""

_seeds = itertools.count()

ATTACKS = {
    "wide": "600 tiny calls at a time",
    "large": "8 calls of 60 MiB at a time",
    "endless": "16 loops that never end",
    "selections": "99 overrides on 20,000 nodes, 4 at a time",
}


@dataclass
class Answers:
    """How the calls of the other tenant went."""

    calls: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)


def make_tokens(file: Path, tenants: Sequence[str]) -> list[str]:
    """Writes a file of tokens; returns a token of each tenant."""
    from gradrule_server.identity.token_file import add_token, new_token

    texts = []
    for tenant in tenants:
        text, token = new_token(tenant, is_admin=False, expires=None)
        add_token(file, token)
        texts.append(text)
    return texts


def tiny_calls(target: str, token: str, seconds: float) -> Answers:
    """Makes tiny calls, one after the other, for so long."""
    return program_calls(target, token, seconds, work.tiny())


def program_calls(target: str, token: str, seconds: float, what: work.Work) -> Answers:
    """Makes calls of one program, one after the other, for so long."""
    found, times = Answers(), []
    with gr.connect(target, token=token, timeout=_TIMEOUT_S) as client:
        program = None
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            started = time.perf_counter()
            try:
                program = program or what.compile(client)
                program.evaluate(what.feeds)
            except GradruleError as failure:
                found.failures[str(failure.reason)] += 1
            times.append((time.perf_counter() - started) * 1e3)
            time.sleep(_PAUSE_S)
    return _with_times(found, times)


def new_programs(target: str, token: str, seconds: float) -> Answers:
    """Evaluates programs that the server has not seen, one after the other, for so long."""
    found, times = Answers(), list[float]()
    with gr.connect(target, token=token, timeout=_TIMEOUT_S) as client:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            what = work.layers(50, next(_seeds))
            started = time.perf_counter()
            try:
                what.evaluate(client)
            except GradruleError as failure:
                found.failures[str(failure.reason)] += 1
            times.append((time.perf_counter() - started) * 1e3)
            time.sleep(_PAUSE_S)
    return _with_times(found, times)


def _with_times(found: Answers, times: Sequence[float]) -> Answers:
    ordered = sorted(times)
    found.calls = len(times)
    found.p50_ms, found.p99_ms = (ordered[min(len(times) - 1, len(times) * share // 100)] for share in (50, 99))
    return found


async def _attack(name: str, client: aio.AsyncClient, seconds: float) -> None:
    ends = time.monotonic() + seconds
    width, once = {"wide": _wide, "large": _large, "endless": _endless, "selections": _selections}[name](client)

    async def worker() -> None:
        while time.monotonic() < ends:
            try:
                await once()
            except GradruleError:
                # It is refused, as it should be, and tries again at once.
                await asyncio.sleep(0.001)

    print(ATTACKING, flush=True)
    await asyncio.gather(*(worker() for _ in range(width)))


Attack = tuple[int, Callable[[], Awaitable[object]]]


def _wide(client: aio.AsyncClient) -> Attack:
    return 600, _program_calls(client, work.tiny())


def _large(client: aio.AsyncClient) -> Attack:
    return 8, _program_calls(client, work.large(60 * 2**20 // 4))


def _program_calls(client: aio.AsyncClient, what: work.Work) -> Callable[[], Awaitable[object]]:
    compiled: list[aio.AsyncProgram] = []

    async def once() -> object:
        if not compiled:
            compiled.append(await client.compile(what.graph, ys=what.ys, xs=what.xs, overrides=work.RULE))
        return await compiled[0].evaluate(what.feeds)

    return once


def _endless(client: aio.AsyncClient) -> Attack:
    from tests.service import loop_graphs

    graph = gr.Graph.from_bytes(loop_graphs.endless().SerializeToString())
    return 16, lambda: client.evaluate(graph, {"x": np.float32(loop_graphs.ENDLESS)}, fetches=["y"], timeout=600.0)


def _selections(client: aio.AsyncClient) -> Attack:
    what = work.layers(20_000, 0)
    overrides = [
        gr.Override("ste_sign", node_regex=f".*(a|b)*{number}.*q", op_type="Sign", label=f"o{number}", optional=True)
        for number in range(99)
    ]
    numbers = iter(range(10**9))

    async def once() -> object:
        # A name that is new each time, so that no cache answers.
        graph = work.layers(20_000, next(numbers)).graph
        return await client.compile(graph, ys=what.ys, xs=what.xs, overrides=overrides)

    return 4, once


async def main(name: str, target: str, seconds: float) -> None:
    async with aio.connect(target, token=os.environ["GRADRULE_TOKEN"], timeout=600.0) as client:
        await _attack(name, client, seconds)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
