"""The bench runs and tells what it should. No figure is judged here: `make bench` shows those against their bars."""

from __future__ import annotations

import json
import math

import pytest

from tests.benchmarks import bench
from tests.benchmarks.measure import Row, Samples, latencies, rates

TINY = bench.Counts(2, 3, 8, 1, 2**16, 2, 50, 2, budget_s=30.0)


def test_every_row_is_measured_against_real_peers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench.measure(TINY)
    bench.show(rows)
    table = capsys.readouterr().out
    summary = json.loads(json.dumps(bench.summary(rows, 1.0), allow_nan=False))

    assert [(row["work"], row["peer"]) for row in summary["rows"]] == [
        ("tiny program by name, p50, raw bytes", "bare echo (sync server)"),
        ("tiny program by name, p50, raw bytes", "bare echo (aio server)"),
        ("tiny program by name, p50, Python client", 'Session("grpc://…")'),
        ("requests per second, 32 in flight, raw bytes", "bare echo (sync server)"),
        ("requests per second, 32 in flight, raw bytes", "bare echo (aio server)"),
        ("requests per second, 32 in flight, Python client", 'Session("grpc://…")'),
        ("0.0625 MiB in, as much gradient out, raw bytes", "bare echo (sync server)"),
        ("0.0625 MiB in, as much gradient out, raw bytes", "bare echo (aio server)"),
        ("0.0625 MiB in, as much gradient out, Python client", 'Session("grpc://…")'),
        ("second inline Evaluate, 50 nodes, all run, raw bytes", "by program name"),
        ("second inline Evaluate, 50 nodes, all run, Python client", "by program name"),
        ("second inline Evaluate, 50 nodes, a handful run, raw bytes", "by program name"),
        ("second inline Evaluate, 50 nodes, a handful run, Python client", "by program name"),
        ("tiny program by name, p50, raw bytes", "without supervision"),
        ("tiny program by name, p50, Python client", "without supervision"),
        ("override with ste_sign, 1 Mi numbers, in process", "tf.custom_gradient by hand"),
        ("override with fast_sigmoid, 1 Mi numbers, in process", "tf.custom_gradient by hand"),
    ]
    for row in summary["rows"]:
        assert row["work"] in table
        assert all(row[key] > 0 and math.isfinite(row[key]) for key in ("gradrule", "peer_value", "ratio"))
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        if row["bar"] is None:
            assert row["met"] is None
            continue
        assert row["met"] is (row["ratio"] >= row["bar"] if row["bar_is"] == "at least" else row["ratio"] <= row["bar"])
    assert summary["bars_met"] + summary["bars_missed"] == sum(row.bar is not None for row in rows)


def test_the_ratio_is_taken_within_rounds() -> None:
    # The machine is ten times slower in the second round; the ratio of 2 must not notice.
    row = Row("w", "p", "µs", Samples((2.0, 20.0, 2.0)), Samples((1.0, 10.0, 1.0)), bar=1.6)
    assert row.ratio == 2.0
    assert row.met is False
    assert Row("w", "p", "1/s", row.ours, row.theirs, bar=1.6, more_is_better=True).met is True


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    found = latencies(contenders, rounds=3, calls=2, warm_up=1, budget_s=60.0)
    assert calls == ["a", "b", *"aabb", *"bbaa", *"aabb"]
    assert {name: len(samples.per_round) for name, samples in found.items()} == {"a": 3, "b": 3}


def test_a_budget_that_is_spent_ends_the_rounds() -> None:
    found = rates({"a": lambda count: None}, rounds=100, calls=4, budget_s=0.0)
    assert len(found["a"].per_round) == 1
