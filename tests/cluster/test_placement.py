"""The simulation of placements, compared with queueing theory and with the known hit rate of such caches."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tools.simulate_placement import Cluster, at_random, by_digest, by_digest_unless_busy, simulate


def test_waiting_times_are_those_of_the_theory() -> None:
    """One replica without compiling is an M/M/1 queue, whose time to an answer is exponential."""
    cluster = Cluster(replicas=1, programs=1, run_s=0.02, compile_s=0.0, load=0.5, requests=100_000)
    found = simulate(cluster, at_random)
    mean_s = 0.02 / (1 - 0.5)
    assert found.hit_rate == 1
    assert found.busy == pytest.approx(0.5, rel=0.05)
    assert found.p50_s == pytest.approx(mean_s * math.log(2), rel=0.05)
    assert found.p99_s == pytest.approx(mean_s * math.log(100), rel=0.1)


@pytest.mark.parametrize("zipf", [0.7, 1.0, 1.3])
def test_hit_rates_are_those_of_caches_of_recent_programs(zipf: float) -> None:
    """Che's approximation of the hit rate of an LRU cache (Che et al. 2002, equations 1 and 3)."""
    cluster = Cluster(replicas=4, programs=1000, zipf=zipf, cached=100, load=0.01, requests=60_000)
    popularity = np.arange(1, 1001) ** -zipf
    popularity /= popularity.sum()
    low, high = 0.0, 1e9
    for _ in range(200):
        time = (low + high) / 2
        is_full = np.sum(-np.expm1(-popularity * time)) > cluster.cached
        low, high = (low, time) if is_full else (time, high)
    wanted = float(np.sum(popularity * -np.expm1(-popularity * low)))
    assert simulate(cluster, at_random).hit_rate == pytest.approx(wanted, abs=0.01)


def test_placement_by_digest_keeps_every_program_in_one_cache() -> None:
    cluster = Cluster(replicas=8, programs=400, cached=100, load=0.05, requests=20_000)
    assert simulate(cluster, at_random).hit_rate < 0.9
    assert simulate(cluster, by_digest).hit_rate > 0.99
    assert simulate(cluster, by_digest_unless_busy(2)).hit_rate > 0.98


def test_a_popular_program_spreads_over_replicas_that_are_free() -> None:
    cluster = Cluster(replicas=8, programs=400, zipf=1.3, cached=100, compile_s=0.05, load=0.5, requests=20_000)
    fixed, bounded = simulate(cluster, by_digest), simulate(cluster, by_digest_unless_busy(2))
    assert bounded.p99_s < fixed.p99_s / 4
    assert bounded.largest_share < fixed.largest_share / 1.2
