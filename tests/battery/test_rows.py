"""Runs each row of the battery for a short time. Speed is not tested here: `make battery` measures it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from gradrule_server import policy
from tests.battery import (
    amplification,
    bombs,
    crashes,
    escapes,
    fuzz,
    gateway,
    hangs,
    hostile,
    http2,
    interleavings,
    kills,
    op_table,
    overload,
    restarts,
    rolling,
    soak,
    strangers,
    turns,
)
from tests.battery.bomb_graphs import BOMBS, GROWING
from tests.battery.figures import Figures, Scale
from tests.battery.serving import data_folder, served
from tests.service.harmful_graphs import CRASHES, FAILED_CHECK, HANGS
from tests.service.servers import RunningServer

INTERLEAVINGS = 2_000
KILLS = 10
LARGE_INPUTS = ("150,000 nodes", "1,000,000 dimensions", "a name of 8 MiB", "a gradient of 800 regions")
# Crashes by a failed check, by a signal and by memory; hangs in a loop and in Grappler's constant folding.
KINDS_OF_CRASHES = {FAILED_CHECK.name, "IRFFT", "TensorListReserve"}
KINDS_OF_HANGS = {"While", "StringJoin"}
SOAK_S = 15.0
TURNS_S = 15.0
ATTACK_S = 1.0
BUSY_GONE_S = 2.8
BUSY_P99_S = 15.0
BUSY_READY_S = 90.0


def assert_met(figures: Figures) -> None:
    """Fails with the row's figures."""
    assert figures.met, f"{figures.details}\n" + "\n".join(figures.findings)


@pytest.fixture(scope="module")
def trusting_server(scale: Scale) -> Iterator[RunningServer]:
    """Returns a server that runs any op."""
    with served(scale, "trusting", **hangs.settings()) as running:
        yield running


async def test_op_table(shared_server: RunningServer, scale: Scale) -> None:
    some = Random(scale.seed).sample(list(policy.op_reviews().values()), 160)
    assert_met(await op_table.check(shared_server.target, scale, some))


def test_escapes(scale: Scale) -> None:
    assert_met(escapes.attempt(scale, escapes.CASES[:: len(escapes.CASES) // 6]))


async def test_crashes(trusting_server: RunningServer, scale: Scale) -> None:
    assert_met(await crashes.crash(trusting_server, scale, [bad for bad in CRASHES if bad.name in KINDS_OF_CRASHES], 1))


async def test_hangs(trusting_server: RunningServer, scale: Scale) -> None:
    some = [bad for bad in HANGS if bad.name in KINDS_OF_HANGS]
    assert_met(await hangs.hang(trusting_server, scale, some, 1, gone_s=BUSY_GONE_S))


async def test_bombs(scale: Scale) -> None:
    with served(scale, "bombs", **bombs.settings()) as server:
        assert_met(await bombs.bomb(server, scale, (*BOMBS[:8], GROWING[0]), 1))


@pytest.mark.parametrize("name", LARGE_INPUTS)
async def test_amplification(scale: Scale, name: str) -> None:
    with served(scale, "amplification") as server:
        found = await amplification.measure(server, [name])
    assert found.figures
    assert not found.faults


async def test_interleavings(shared_server: RunningServer, scale: Scale) -> None:
    assert_met(await interleavings.interleave(shared_server.target, scale, INTERLEAVINGS))


async def test_interleavings_of_tenants(scale: Scale) -> None:
    with interleavings.with_tenants(scale, 8) as (server, tokens):
        assert_met(await interleavings.interleave(server.target, scale, INTERLEAVINGS // 2, tokens))


async def test_soak(shared_server: RunningServer, scale: Scale) -> None:
    assert_met(await soak.soak(shared_server, scale, SOAK_S))


async def test_hostile(shared_server: RunningServer, scale: Scale) -> None:
    assert_met(await hostile.run_attacks(shared_server, scale, ATTACK_S, p99_s=BUSY_P99_S))


def test_strangers(scale: Scale) -> None:
    with strangers.two_tenants(scale) as (server, tokens):
        names = ("selections", "tiny fields", "near the limit", "large rules")
        assert_met(strangers.run_attacks(server, tokens, scale, 2.0, names, p99_s=BUSY_P99_S, new_p99_s=BUSY_P99_S))


async def test_turns(scale: Scale) -> None:
    with turns.crowded(scale) as (server, tokens):
        assert_met(await turns.take_turns(server.target, tokens, replace(scale, seconds=TURNS_S).clock()))


async def test_kills(scale: Scale) -> None:
    with served(scale, "kills", **kills.settings()) as server:
        assert_met(await kills.kill(server, scale, KILLS))


def test_restarts(scale: Scale) -> None:
    assert_met(restarts.restart(data_folder(scale, "restarts"), 2, scale.clock(), ready_s=BUSY_READY_S))


def test_rolling(scale: Scale) -> None:
    assert_met(rolling.run(scale))


def test_overload(scale: Scale) -> None:
    figures = overload.run(scale)
    assert figures.details["refused"]
    assert figures.details["goodput_of_peak"] > 0.5
    assert not figures.details["neither"]
    # On any machine a refusal is cheaper than the refused request.
    assert figures.details["refusal_p50_ms"] < 1e3 * overload.WORK_S


def test_http2(scale: Scale) -> None:
    figures = http2.run(replace(scale, seconds=6.0))
    assert figures.cases > 100
    assert_met(figures)


def test_gateway(scale: Scale) -> None:
    with gateway.gateways(scale) as found:
        names = ("silent", "bodies, no credential", "bodies", "numbers", "names", "bombs")
        assert_met(gateway.run_attacks(found, scale, 2.0, names, p99_s=BUSY_P99_S, share=0.2))


def test_fuzz(scale: Scale) -> None:
    figures = fuzz.run(replace(scale, share=10_000 / fuzz.LONG))
    assert figures.cases == 10_000
    assert_met(figures)
