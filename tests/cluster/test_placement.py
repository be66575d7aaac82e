"""The simulation of placements, compared with queueing theory and with the known hit rate of such caches."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tools.simulate_placement import (
    Cluster,
    at_random,
    by_digest,
    by_digest_unless_busy,
    first_replica,
    simulate,
)


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


@pytest.mark.parametrize(("load", "is_overloaded"), [(0.8, False), (1.2, True)])
def test_a_queue_that_keeps_growing_is_overloaded(load: float, is_overloaded: bool) -> None:
    cluster = Cluster(replicas=1, programs=1, compile_s=0.0, load=load, requests=40_000)
    assert simulate(cluster, at_random).is_overloaded is is_overloaded


def test_full_caches_leave_no_queue() -> None:
    """All programs are compiled before requests are counted, and that takes no time."""
    cluster = Cluster(replicas=1, programs=20, zipf=0.0, cached=20, compile_s=100.0, load=0.5, requests=40_000)
    found = simulate(cluster, at_random)
    assert found.hit_rate == 1
    assert found.p99_s == pytest.approx(0.04 * math.log(100), rel=0.15)


def test_placement_by_digest_is_one_queue_for_each_replica() -> None:
    """Replicas with fixed shares of the requests are M/M/1 queues; the time to an answer is a mixture of theirs."""
    cluster = Cluster(requests=100_000)
    popularity = np.arange(1, cluster.programs + 1) ** -cluster.zipf
    shares = np.zeros(cluster.replicas)
    for program, share in enumerate(popularity / popularity.sum()):
        shares[first_replica(program, cluster.replicas)] += share
    rates = (1 - shares * cluster.replicas * cluster.load) / cluster.run_s
    times = np.arange(0.0, 1.0, 0.0005)
    slower = np.exp(-np.outer(times, rates)) @ shares
    found = simulate(cluster, by_digest)
    assert found.p50_s == pytest.approx(times[np.argmax(slower < 0.5)], rel=0.05)
    assert found.p99_s == pytest.approx(times[np.argmax(slower < 0.01)], rel=0.2)


def test_placement_by_digest_keeps_every_program_in_one_cache() -> None:
    cluster = Cluster(replicas=8, programs=400, cached=100, load=0.05, requests=20_000)
    assert simulate(cluster, at_random).hit_rate < 0.9
    assert simulate(cluster, by_digest).hit_rate > 0.99
    assert simulate(cluster, by_digest_unless_busy(replica_bound=2)).hit_rate > 0.98


def test_a_popular_program_spreads_over_replicas_that_are_free() -> None:
    cluster = Cluster(replicas=8, programs=400, zipf=1.3, cached=100, compile_s=0.05, load=0.5, requests=20_000)
    fixed, bounded = simulate(cluster, by_digest), simulate(cluster, by_digest_unless_busy(replica_bound=2))
    assert bounded.p99_s < fixed.p99_s / 4
    assert bounded.largest_share < fixed.largest_share / 1.2


def test_counting_calls_of_the_same_program_serves_one_program_and_many() -> None:
    one = Cluster(replicas=4, programs=1, load=0.7, requests=20_000)
    many = Cluster(load=0.5, requests=60_000)
    small, large = by_digest_unless_busy(replica_bound=2), by_digest_unless_busy(replica_bound=8)
    counted = by_digest_unless_busy(program_bound=2, replica_bound=8)
    assert simulate(one, counted).p99_s == simulate(one, small).p99_s < simulate(one, large).p99_s / 1.1
    assert simulate(many, counted).p99_s < simulate(many, small).p99_s / 2
