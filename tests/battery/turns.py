"""Sends calls of more tenants than the server has engines; one compiles without a break, one leaves sessions idle.

Target: no call fails, each of the other tenants is answered about as often, and idle sessions end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gradrule as gr
from gradrule.errors import GradruleError, SessionLostError
from tests.battery.figures import Clock, Figures, Findings, Scale
from tests.battery.serving import data_folder, served
from tests.benchmarks.attacks import make_tokens
from tests.service.servers import RunningServer

TARGET = "0 failed calls; each calling tenant gets at least a quarter of the mean number of answers; idle sessions end"
LONG_S = 120.0
_LEAST_SHARE = 0.25
_CALLING = ("b", "c", "d", "e")
_TENANTS = ("compiling", "idle", *_CALLING)
_ENGINES = 3
_IDLE_S = 2.0
_AT_ONCE = 2
_DEADLINE_S = 60.0


@dataclass
class Outcome:
    """Counts answers by tenant and sessions that ended because they were idle."""

    clock: Clock
    findings: Findings = field(default_factory=Findings)
    answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TENANTS, 0))
    ended_sessions: int = 0


def run(scale: Scale) -> Figures:
    """Runs for two minutes at full scale."""
    with crowded(scale) as (server, tokens):
        return asyncio.run(take_turns(server.target, tokens, scale.clock(LONG_S)))


@contextlib.contextmanager
def crowded(scale: Scale) -> Iterator[tuple[RunningServer, list[str]]]:
    """Starts a server with half as many engines as tenants, and returns the tenants' tokens."""
    file = data_folder(scale, "turns").with_suffix(".tokens")
    file.parent.mkdir(parents=True, exist_ok=True)
    tokens = make_tokens(file, _TENANTS)
    with served(scale, "turns", tokens=file, max_engines=_ENGINES, session_idle_s=_IDLE_S) as server:
        yield server, tokens


async def take_turns(target: str, tokens: Sequence[str], clock: Clock) -> Figures:
    """Lets all tenants call until the clock is over. `tokens`: Those of `crowded`."""
    outcome = Outcome(clock)
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            tenant: await stack.enter_async_context(gr.aio.connect(target, token=token, timeout=_DEADLINE_S))
            for tenant, token in zip(_TENANTS, tokens, strict=True)
        }
        works = [_call(outcome, tenant, clients[tenant]) for tenant in _CALLING for _ in range(_AT_ONCE)]
        works += [_compile(outcome, clients["compiling"], start) for start in range(_AT_ONCE)]
        await asyncio.gather(_leave_sessions(outcome, clients["idle"]), *works)
    return judge(outcome)


def judge(outcome: Outcome) -> Figures:
    """Returns the row's figures."""
    calling = [outcome.answers[tenant] for tenant in _CALLING]
    mean = sum(calling) / len(calling)
    for tenant in _TENANTS:
        if not outcome.answers[tenant]:
            outcome.findings.add(f"tenant {tenant} got no answer")
        elif tenant in _CALLING and outcome.answers[tenant] < _LEAST_SHARE * mean:
            outcome.findings.add(f"tenant {tenant} got {outcome.answers[tenant]} answers, the mean is {mean:.0f}")
    if not outcome.ended_sessions:
        outcome.findings.add("no idle session has ended")
    return Figures(
        target=TARGET,
        cases=sum(outcome.answers.values()),
        failures=outcome.findings.count,
        met=not outcome.findings.count,
        details={**outcome.answers, "ended_sessions": outcome.ended_sessions},
        findings=outcome.findings.lines,
    )


async def _call(outcome: Outcome, tenant: str, client: Any) -> None:
    graph = _scaled(_TENANTS.index(tenant) + 2)
    while not outcome.clock.is_over:
        await _evaluate(outcome, tenant, client, graph, _TENANTS.index(tenant) + 2)


async def _compile(outcome: Outcome, client: Any, start: int) -> None:
    """Sends another graph each time."""
    for factor in itertools.count(start + 1, _AT_ONCE):
        if outcome.clock.is_over:
            return
        await _evaluate(outcome, "compiling", client, _scaled(factor), factor)


async def _evaluate(outcome: Outcome, tenant: str, client: Any, graph: gr.Graph, factor: int) -> None:
    try:
        result = await client.evaluate(graph, feeds={"x": np.float32([3])}, fetches=["y"])
    except GradruleError as failure:
        outcome.findings.add(f"tenant {tenant}: {failure}")
        return
    outcome.answers[tenant] += 1
    if result.outputs["y"].tolist() != [3.0 * factor]:
        outcome.findings.add(f"tenant {tenant}: {result.outputs['y']} instead of {3.0 * factor}")


async def _leave_sessions(outcome: Outcome, client: Any) -> None:
    """Starts one session after the other, and leaves each until it ends."""
    while True:
        try:
            async with client.session(_with_variable()) as session:
                await session.read()
                outcome.answers["idle"] += 1
                await asyncio.sleep(2 * _IDLE_S)
                await session.read()
                outcome.findings.add(f"a session that was idle for {2 * _IDLE_S:g} s goes on")
        except SessionLostError:
            outcome.ended_sessions += 1
        except GradruleError as failure:
            outcome.findings.add(f"tenant idle: {failure}")
        if outcome.clock.is_over:
            return


def _scaled(factor: int) -> gr.Graph:
    graph = gr.Graph()
    graph.op("Mul", graph.placeholder("x", "float32", [None]), graph.constant(np.float32(factor)), name="y")
    return graph


def _with_variable() -> gr.Graph:
    graph = gr.Graph()
    graph.op("Sum", graph.variable("w", np.ones(2, np.float32)), graph.constant([0]), name="loss")
    return graph
