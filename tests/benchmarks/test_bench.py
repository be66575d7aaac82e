"""The bench runs and tells what it should. No figure is judged here: `make bench` shows those against their bars."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import (
    bench,
    guard,
    maps_work,
    profiling,
    rows_maps,
    rows_peers,
    rows_server,
    rows_sessions,
    rows_tiny,
    work,
)
from tests.benchmarks.context import DEFAULT, PEERS, PEERS_PYTHON, Bench
from tests.benchmarks.measure import Failed, Row, Samples, Skipped, Table, in_turns
from tests.benchmarks.peers import PeerFailed
from tests.benchmarks.usage import tree, usage

SMALL = replace(
    DEFAULT,
    rounds=2,
    tiny_calls=3,
    rate_calls=40,
    large_calls=1,
    large_bytes=2**16,
    huge_bytes=2**17,
    inline_calls=2,
    inline_nodes=50,
    rule_calls=2,
    compute_size=8,
    compile_nodes=(50, 200),
    programs=4,
    requests=(4, 12),
    examples=70,
    batched_network=(4, 3, 8),
    fairness_s=1.0,
    starts=1,
    map_rounds=1,
    maps=2,
    map_programs=6,
    profile_calls=4,
    profile_s=0.1,
    budget_s=60.0,
)


@pytest.mark.timeout(600)
def test_rows_are_measured_against_real_peers(capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["tiny", "shared-memory", "batching", "compute", "rules"]
    lines = bench.measure(groups, SMALL)
    bench.show(lines)
    table = capsys.readouterr().out
    summary = json.loads(json.dumps(bench.summary(lines, 1.0), allow_nan=False))

    assert [row["group"] for row in summary["rows"] if row["work"].startswith("all rows of")] == []
    assert list(dict.fromkeys(row["group"] for row in summary["rows"])) == groups
    rows: list[dict[str, Any]] = [line.as_json() for line in lines if isinstance(line, Row)]
    for row in rows:
        assert str(row["work"]) in table
        assert all(math.isfinite(row[key]) and row[key] for key in ("gradrule", "peer_value", "ratio")), row
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert (row["bar"] is None) == (row["met"] is None)
    assert summary["bars_met"] + summary["bars_missed"] == sum(row["bar"] is not None for row in rows)
    assert all(line.reason for line in lines if isinstance(line, Skipped))
    assert summary["failed"] == 0


@pytest.mark.timeout(600)
def test_rows_of_sessions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [pair for pair in rows_sessions.PAIRS if pair.model != "resnet50"]
    monkeypatch.setattr(rows_sessions, "PAIRS", quick)
    lines = bench.measure(["sessions"], SMALL)
    assert [line.reason for line in lines if isinstance(line, Failed)] == []
    assert all(isinstance(line, Row) and math.isfinite(line.ratio) for line in lines)
    assert len(lines) == 2 * len(quick)


@pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="`make bench` installs the peers in .venv-bench")
def test_peers_are_measured() -> None:
    rows = [line for line in bench.measure(["peers"], SMALL) if isinstance(line, Row)]
    assert {row.peer for row in rows} == set(PEERS)


# `perf report` reads the symbols of all of TensorFlow.
@pytest.mark.timeout(900)
def test_a_profile_tells_processes_and_layers() -> None:
    tables = [line for line in bench.measure(["profile"], SMALL) if isinstance(line, Table)]
    by_process, by_layer = tables[:2]
    parts = {(row[0], row[1]) for row in by_process.cells}
    assert {("raw bytes, unary", part) for part in ("client", "front end", "engine")} <= parts
    assert by_layer.cells[-1][:1] == ["all"]
    assert json.dumps([table.as_json() for table in tables])


def test_the_cheapest_round_is_taken_for_each_process() -> None:
    from tests.benchmarks.context import Sample
    from tests.benchmarks.usage import Usage

    samples = [Sample(1.0, 1.0, {"client": Usage(5), "engine": Usage(1)}), Sample(1.0, 1.0, {"client": Usage(3)})]
    assert profiling.cheapest(samples) == {"client": Usage(3), "engine": Usage(0)}


def test_processor_time_of_a_process_is_its_own() -> None:
    pid = os.getpid()
    assert pid in tree(pid)
    before = usage(pid)
    sum(range(2_000_000))
    assert (usage(pid) - before).cpu_ns > 1e6


def test_a_group_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(bench: Bench) -> list[Row]:
        raise RuntimeError("no such peer")

    row = Row("rate", "w", "p", "µs", Samples((1.0,)), Samples((1.0,)))
    monkeypatch.setitem(bench.GROUPS, "tiny", fails)
    monkeypatch.setitem(bench.GROUPS, "rate", lambda bench: [row])
    lines = bench.measure(["tiny", "rate"], SMALL)
    assert lines[1:] == [row]
    assert bench.summary(lines, 1.0)["failed"] == 1


def test_rows_are_chosen_by_group() -> None:
    assert bench.chosen("large,tiny") == ["tiny", "large"]
    assert set(bench.chosen("")) == set(bench.GROUPS) - set(bench.ON_REQUEST)
    assert bench.chosen("maps") == [name for name in bench.GROUPS if name.startswith("maps/")]
    assert bench.chosen("maps/resnet50") == ["maps/resnet50"]
    with pytest.raises(argparse.ArgumentTypeError, match="there are no rows smal; there are tiny"):
        bench.chosen("smal")


@pytest.mark.parametrize("name", maps_work.NETWORKS)
def test_the_maps_of_a_network_differ(name: str) -> None:
    made = [
        b"".join(override.message().SerializeToString(deterministic=True) for override in overrides)
        for overrides in itertools.islice(maps_work.maps(name), DEFAULT.maps)
    ]
    assert len(set(made)) == DEFAULT.maps


def test_new_programs_are_counted() -> None:
    with Bench(SMALL) as own:
        growth, front_end, refused = rows_maps.many_programs(own)
    assert isinstance(growth, Row)
    assert isinstance(front_end, Row)
    assert isinstance(refused, Row)
    assert growth.theirs.median > 10
    assert front_end.ours.median > 0
    assert (refused.ours.median, refused.theirs.median) == (0, SMALL.map_programs)


def test_the_page_names_each_group() -> None:
    page = (bench.ROOT / "docs/reference/benchmarks.md").read_text()
    assert [name for name in bench.GROUPS if f"`{name}`" not in page] == []


def test_an_attack_that_does_not_begin_fails_its_row() -> None:
    with pytest.raises(RuntimeError, match="'nothing' did not begin"):
        rows_server._beside("nothing", "localhost:1", "", "", 0.1)


def test_the_ratio_is_taken_within_rounds() -> None:
    # The machine is ten times slower in the second round; the ratio of 2 must not notice.
    row = Row("g", "w", "p", "µs", Samples((2.0, 20.0, 2.0)), Samples((1.0, 10.0, 1.0)), bar=1.6)
    assert row.ratio == 2.0
    assert row.met is False
    assert replace(row, more_is_better=True).met is True
    assert replace(row, most=2.0).met is True


def test_contenders_take_turns() -> None:
    calls: list[str] = []

    def call(name: str) -> float:
        calls.append(name)
        return 1.0

    found = in_turns({name: functools.partial(call, name) for name in "ab"}, rounds=3)
    assert calls == [*"ab", *"ba", *"ab"]
    assert {name: len(samples.per_round) for name, samples in found.items()} == {"a": 3, "b": 3}


def test_a_budget_that_is_spent_ends_the_rounds() -> None:
    assert len(in_turns({"a": lambda: 1.0}, rounds=100, budget_s=0.0)["a"].per_round) == 1


def test_a_ratio_that_is_a_fifth_worse_than_recorded_is_told() -> None:
    recorded = {"a": 2.0, "b": 2.0}
    assert guard.worse({"a": 2.2, "b": 2.0}, recorded) == []
    assert [line[:1] for line in guard.worse({"a": 2.4, "b": 1.0, "c": 1.0}, recorded)] == ["a", "c"]


def test_works_have_names_for_other_processes() -> None:
    for name in ("tiny", "large:8", "chain:20", "aside:20", "compute:4:3", "recurrent:4:3", "perceptron:4"):
        assert work.named(name).feeds
    with pytest.raises(ValueError, match="'huge'"):
        work.named("huge")
    assert work.layers(50, 1).graph.to_bytes() != work.layers(50, 2).graph.to_bytes()


def test_shared_memory_says_why_it_is_skipped() -> None:
    with Bench(SMALL) as own:
        for line in rows_tiny.shared_memory(own):
            assert isinstance(line, Row) or (isinstance(line, Skipped) and line.reason)


def test_a_driver_of_gradrules_own_that_fails_is_no_peer_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(own: Bench, peer: str) -> Iterator[list[Row]]:
        yield [Row("peers", "w", peer, "µs", Samples((1.0,)), Samples((1.0,)))]
        raise PeerFailed("client" if peer == "umbridge" else peer, "ended")

    monkeypatch.setattr(rows_peers, "_against", fails)
    monkeypatch.setattr(rows_peers, "PEERS_PYTHON", Path(__file__))
    kinds = [type(line) for line in rows_peers.peers(Bench(SMALL))]
    assert kinds == [Row, Skipped, Row, Failed, Row, Skipped]
