"""Runs callers that share all names: nodes, functions, variables, `shared_name`, rules, labels, handles and sessions.

Target: no leaks: every number that a caller gets is computed from its own numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import gradrule as gr
from gradrule_server.identity.token_file import add_token, new_token
from tests.battery.equal_names import LABEL, PROGRAM, RULE, Caller, difference, graph
from tests.battery.figures import Clock, Figures, Findings, Scale
from tests.battery.serving import data_folder, served
from tests.service.servers import RunningServer

TARGET = "0 leaks"
LONG = 100_000
CALLERS = 24
DEADLINE_S = 60.0
# Errors that any caller of a busy server may get; the caller then tries something else.
_BUSY = {"OVERLOADED", "ENGINE_UNAVAILABLE"}


def run(scale: Scale) -> Figures:
    """Runs 10⁵ interleavings at full scale, of callers that are separate tenants."""
    with with_tenants(scale, CALLERS) as (server, tokens):
        return asyncio.run(interleave(server.target, scale, scale.count(LONG), tokens))


@contextlib.contextmanager
def with_tenants(scale: Scale, count: int) -> Iterator[tuple[RunningServer, list[str]]]:
    """Starts a server with tokens for that many tenants."""
    file = data_folder(scale, "tokens").with_suffix(".tokens")
    file.parent.mkdir(parents=True, exist_ok=True)
    made = [new_token(f"tenant-{number}", is_admin=False, expires=None) for number in range(count)]
    for _, token in made:
        add_token(file, token)
    with served(scale, "interleavings", tokens=file) as server:
        yield server, [text for text, _ in made]


@dataclass
class SharedState:
    """Holds what the callers share while they run."""

    count: int
    clock: Clock
    findings: Findings = field(default_factory=Findings)
    done: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return self.done >= self.count or self.clock.is_over


async def interleave(target: str, scale: Scale, count: int, tokens: Sequence[str] = ()) -> Figures:
    """Runs that many requests of concurrent callers. `tokens`: of tenants, one per caller."""
    share = SharedState(count, scale.clock())
    callers = [Caller(number, token) for number, token in enumerate(tokens or [None] * CALLERS)]
    await asyncio.gather(*(_run_caller(target, caller, scale.seed, share) for caller in callers))
    if share.done >= count:
        for fault in never_answered(share.kinds, bool(tokens)):
            share.findings.add(fault)
    return Figures(
        target=TARGET,
        cases=share.done,
        failures=share.findings.count,
        met=not share.findings.count and (share.done >= count or share.clock.ends_at is not None),
        details={"callers": len(callers), "tenants": len(tokens), "kinds": dict(share.kinds), "busy": dict(share.busy)},
        findings=share.findings.lines,
    )


def never_answered(kinds: Counter[str], of_tenants: bool) -> list[str]:
    """Returns kinds of requests that were always refused, and so tested nothing."""
    return [f"{name}: never answered" for name in _kinds(of_tenants) if not kinds[name]]


def _kinds(of_tenants: bool) -> list[str]:
    return [name for name in KINDS if of_tenants or name not in _OWN_NAMES]


async def _run_caller(target: str, caller: Caller, seed: int, share: SharedState) -> None:
    """Runs one caller with its own connection."""
    chance = Random(f"{seed}/{caller.number}")
    client = gr.aio.connect(target, token=caller.token, timeout=DEADLINE_S)
    try:
        while not share.is_over:
            kind = chance.choice(_kinds(caller.token is not None))
            try:
                checks = await KINDS[kind](client, caller, chance)
            except gr.errors.GradruleError as failure:
                if failure.reason in _BUSY:
                    share.busy[failure.reason] += 1
                    await asyncio.sleep(failure.retry_delay or 0.1)
                else:
                    share.done += 1
                    share.findings.add(f"caller {caller.number}, {kind}: {failure}")
                continue
            except LookupError as failure:
                share.done += 1
                share.findings.add(f"caller {caller.number}, {kind}: an answer to something else: {failure}")
                continue
            share.done += len(checks)
            share.kinds[kind] += len(checks)
            for what, got, wanted in checks:
                fault = difference(f"{kind}, {what}", caller, got, wanted, CALLERS)
                if fault:
                    share.findings.add(fault)
    finally:
        await client.close()


Check = tuple[str, Any, float]
"""What, what came, what had to come."""


async def _inline(client: Any, caller: Caller, chance: Random) -> list[Check]:
    x = float(chance.randrange(1, 100))
    result = await client.evaluate(
        graph(caller), feeds={"x": [x]}, fetches=["y"], ys=["y"], xs=["x"], overrides=_overrides(caller)
    )
    return [
        ("output", result.outputs["y"], caller.output(x)),
        ("gradient", result.gradients["x"], caller.gradient()),
    ]


async def _param(client: Any, caller: Caller, chance: Random) -> list[Check]:
    """Params are inputs of the compiled program: callers may share a program, but not values."""
    rule = gr.Rule("slope * dy", params=["slope"])
    result = await client.evaluate(
        graph(caller),
        feeds={"x": [2.0]},
        ys=["y"],
        xs=["x"],
        overrides=[gr.Override(rule, op_type="Identity", label=LABEL, params={"slope": -1.0})],
        params={LABEL: {"slope": caller.slope}},
    )
    return [("gradient", result.gradients["x"], caller.gradient())]


async def _fed_variable(client: Any, caller: Caller, chance: Random) -> list[Check]:
    weight = caller.weight * chance.randrange(2, 9)
    result = await client.evaluate(graph(caller), feeds={"x": [1.0], "w": weight}, fetches=["y"])
    return [("output with a fed variable", result.outputs["y"], caller.output(1.0, weight))]


async def _assigned(client: Any, caller: Caller, chance: Random) -> list[Check]:
    """Values that a graph assigns apply to this call alone."""
    result = await client.evaluate(graph(caller), fetches=["w/After", "w/Read"])
    return [
        ("variable after", result.outputs["w/After"], caller.weight + 1),
        ("variable before", result.outputs["w/Read"], caller.weight),
    ]


async def _program(client: Any, caller: Caller, chance: Random) -> list[Check]:
    program = await client.compile(
        graph(caller), fetches=["y"], ys=["y"], xs=["x"], overrides=_overrides(caller), name=f"own-{caller.number}"
    )
    checks = []
    async for result in program.map([{"x": [value]} for value in (1.0, 2.0, 3.0)]):
        checks.append(("gradient of a program", result.gradients["x"], caller.gradient()))
    return checks


async def _handle(client: Any, caller: Caller, chance: Random) -> list[Check]:
    """Handles have the same names on every stream."""
    program = await client.compile(
        graph(caller), fetches=["y"], ys=["y"], xs=["x"], overrides=_overrides(caller), name=f"own-{caller.number}"
    )
    checks: list[Check] = []
    async with await program.forward({"x": [1.0]}) as handle:
        for _ in range(chance.randrange(1, 4)):
            grad_y = float(chance.randrange(1, 50))
            found = await handle.vjp({"y": [grad_y]})
            checks.append(("gradient of a handle", found["x"], caller.gradient(grad_y)))
            await asyncio.sleep(0)
    return checks


async def _session(client: Any, caller: Caller, chance: Random) -> list[Check]:
    """Variables of all sessions have the same names."""
    checks: list[Check] = []
    async with client.session(graph(caller), overrides=_overrides(caller), variables={"w": caller.weight}) as session:
        weight = caller.weight
        for _ in range(chance.randrange(1, 5)):
            if chance.random() < 0.5:
                result = await session.evaluate({"x": [1.0]}, fetches=["y", "w/After"])
                checks.append(("output of a session", result.outputs["y"], caller.output(1.0, weight)))
                weight += 1
            else:
                weight = caller.weight * chance.randrange(2, 7)
                await session.assign({"w": weight})
            checks.append(("variable of a session", (await session.read("w"))["w"], weight))
    return checks


async def _registered(client: Any, caller: Caller, chance: Random) -> list[Check]:
    """Each tenant registers its own rule and program under one name."""
    await client.create_rule(RULE, caller.expression)
    program = await client.compile(
        graph(caller), fetches=["y"], ys=["y"], xs=["x"], overrides={"Identity": RULE}, name=PROGRAM
    )
    result = await program.evaluate({"x": [1.0]})
    again = await (await client.program(PROGRAM)).evaluate({"x": [1.0]})
    return [
        ("gradient under a registered rule", result.gradients["x"], caller.gradient()),
        ("gradient of a program found by name", again.gradients["x"], caller.gradient()),
    ]


def _overrides(caller: Caller) -> dict[str, gr.Rule]:
    return {"Identity": gr.Rule(caller.expression)}


KINDS: dict[str, Callable[[Any, Caller, Random], Awaitable[list[Check]]]] = {
    "inline": _inline,
    "param": _param,
    "fed variable": _fed_variable,
    "assigned": _assigned,
    "program": _program,
    "handle": _handle,
    "session": _session,
    "registered": _registered,
}
_OWN_NAMES = {"registered"}
