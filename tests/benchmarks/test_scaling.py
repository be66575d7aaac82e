"""The measurement of scaling runs and tells what it should. No figure is judged here."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gradrule.v1.graph_pb2 import Graph
from tests.benchmarks import scaling, scaling_work


def test_the_exponent_is_that_of_the_growth() -> None:
    sizes = [1_000, 10_000, 100_000]
    assert scaling.exponent(sizes, [3.0, 30.0, 300.0]) == pytest.approx(1.0)
    assert scaling.exponent(sizes, [1e-6 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert scaling.exponent(sizes, [1.0, None, 100.0]) == pytest.approx(1.0)
    assert scaling.exponent(sizes, [1.0, None, None]) is None


@pytest.mark.parametrize("kind", scaling_work.KINDS)
@pytest.mark.parametrize("nodes", [200, 2_000])
def test_graphs_have_the_size_they_should(kind: str, nodes: int) -> None:
    graph = Graph.FromString(scaling_work.graph_bytes(kind, nodes))
    found = len(graph.node)
    if kind == "functions":
        (function,) = graph.library.function
        assert not any(node.op == "Sign" for node in graph.node)
        found = (found - 2) * len(function.node_def)
    assert 0.8 * nodes < found < 1.3 * nodes


def test_every_part_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes, kinds = [100, 400], list(scaling.KINDS)
    rows = scaling.rows_of(scaling.measure(sizes, kinds, 120.0), sizes, kinds)
    assert [(row.kind, row.part) for row in rows] == [(kind, part) for kind in kinds for part in scaling.PARTS]
    for row in rows:
        assert all(value is not None and value > 0 for value in row.seconds), row
        assert row.exponent is not None
        assert np.isfinite(row.exponent)
    by_part = {row.part: row for row in rows if row.kind == "mlp"}
    both = by_part["compile (both)"].seconds[0]
    parts = [by_part[part].seconds[0] for part in list(scaling.PARTS)[:2]]
    assert both == pytest.approx(sum(part for part in parts if part is not None))
    text = scaling.document(rows, sizes, 1.0)
    assert "the limit of 1.15 is" in text
    assert text.count("\n## ") == len(kinds)
    json.dumps([row.as_json() for row in rows], allow_nan=False)
