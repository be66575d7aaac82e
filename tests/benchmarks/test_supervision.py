"""The measure of what supervision costs runs and tells what it should; no figure is judged here."""

from __future__ import annotations

import json
import math

import pytest

from tests.benchmarks import supervision


@pytest.mark.slow
def test_both_servers_are_measured() -> None:
    found = json.loads(json.dumps(supervision.summary(supervision.measure(2, 5)), allow_nan=False))
    assert [row["work"] for row in found["rows"]] == [
        "tiny program by name, p50, raw bytes",
        "tiny program by name, p50, Python client",
    ]
    for row in found["rows"]:
        assert all(row[key] > 0 and math.isfinite(row[key]) for key in ("gradrule", "peer_value", "ratio"))
