"""Tests with random programs that the comparison with single runs accepts those, and only those, that mix no rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import program_pb2
from gradrule_server.engine.batching import COMPARED_RUNS, is_close, run_together
from tests.unit.engine.batching.programs import Case
from tests.unit.engine.batching.test_merging import built_of, calls_of

GRAPHS = 40
_UNARY = ("Tanh", "Relu", "Sigmoid", "Square", "Abs", "Softmax", "Neg", "Identity", "Exp", "Softplus")
_REDUCTIONS = ("Sum", "Mean", "Max")
_WIDTH = 4


class RandomGraph:
    """Adds random ops to a graph. Tensors have rank 2, with columns 4 or 1; some ops mix their rows."""

    def __init__(self, graph: gr.Graph, rng: np.random.Generator) -> None:
        self.graph = graph
        self.rng = rng
        self.tensors: list[Any] = [graph.placeholder("x", "float32", [None, _WIDTH])]
        self.mixes = False

    def any(self) -> Any:
        return self.tensors[self.rng.integers(len(self.tensors))]

    def ints(self, *values: int) -> Any:
        return self.graph.constant(np.array(values, np.int32))

    def add(self) -> None:
        steps: list[tuple[float, Callable[[], Any]]] = [
            (5, self.unary),
            (4, self.binary),
            (2, self.dense),
            (2, self.reduction),
            (1, self.reshaped),
            (1, self.joined),
            (0.8, self.mixed),
        ]
        weights = np.array([weight for weight, _ in steps])
        step = steps[self.rng.choice(len(steps), p=weights / weights.sum())][1]
        self.tensors.append(step())

    def unary(self) -> Any:
        # Not too large, or its exponential is infinite.
        value = self.graph.op_output("Tanh", self.any())
        return self.graph.op_output(str(self.rng.choice(_UNARY)), value)

    def binary(self) -> Any:
        a, b = self.any(), self.any()
        if self.rng.random() < 0.3:
            b = self.graph.constant(self.rng.normal(size=_WIDTH).astype(np.float32))
        return self.graph.op_output(str(self.rng.choice(["AddV2", "Sub", "Mul", "Maximum"])), self.wide(a), b)

    def wide(self, value: Any) -> Any:
        return self.graph.op_output("AddV2", value, self.graph.constant(np.zeros(_WIDTH, np.float32)))

    def dense(self) -> Any:
        weights = self.graph.constant(self.rng.normal(size=(_WIDTH, _WIDTH)).astype(np.float32) / 2)
        return self.graph.matmul(self.wide(self.any()), weights)

    def reduction(self) -> Any:
        op_type = str(self.rng.choice(_REDUCTIONS))
        return self.graph.op_output(op_type, self.any(), self.ints(int(self.rng.choice([1, -1]))), keep_dims=True)

    def reshaped(self) -> Any:
        square = self.graph.reshape(self.wide(self.any()), [-1, 2, 2])
        turned = self.graph.op_output("Transpose", square, self.ints(0, 2, 1))
        return self.graph.reshape(turned, [-1, _WIDTH])

    def joined(self) -> Any:
        both = self.graph.op_output("ConcatV2", [self.wide(self.any()), self.any()], self.graph.constant(np.int32(1)))
        begin, end, strides = self.ints(0, 1), self.ints(0, 1 + _WIDTH), self.ints(1, 1)
        return self.graph.op_output("StridedSlice", both, begin, end, strides, begin_mask=1, end_mask=1)

    def mixed(self) -> Any:
        """Adds an op that mixes rows."""
        self.mixes = True
        value = self.any()
        kind = self.rng.integers(4)
        if kind == 0:
            return self.graph.op_output("Sub", value, self.graph.op_output("Mean", value, self.ints(0), keep_dims=True))
        if kind == 1:
            return self.graph.op_output("ReverseV2", value, self.ints(0))
        if kind == 2:
            return self.graph.op_output("Cumsum", value, self.graph.constant(np.int32(0)))
        return self.graph.op_output(
            "RealDiv", value, self.graph.op_output("Cast", self.graph.op_output("Size", value), DstT="float32")
        )


def case_of(seed: int) -> tuple[Case, bool]:
    """Returns a program, and whether an op of its graph mixes rows."""
    rng = np.random.default_rng(seed)
    graph = gr.Graph()
    random_graph = RandomGraph(graph, rng)
    for _ in range(int(rng.integers(3, 12))):
        random_graph.add()
    graph.op_output("Identity", random_graph.tensors[-1], name="y")
    return Case(lambda g: None, derivative={"vjp": program_pb2.Vjp(ys=["y"], xs=["x"])}, made=graph), random_graph.mixes


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_random_graphs(seed: int) -> None:
    case, mixes = case_of(seed)
    built, runs, params = built_of(case)
    calls = calls_of(case, built, runs, params, (1, 2, 4))
    alone = [built.run(call.arguments) for call in calls]
    for _ in range(COMPARED_RUNS):
        runs.compare(built, calls, alone)
    if not runs.are_equal:
        assert mixes, runs.refusal
        return
    for ours, theirs in zip(alone, run_together(built, runs, calls, 8), strict=True):
        assert all(is_close(a, b, 1024, 0.01) for a, b in zip(ours, theirs, strict=True))


def test_random_graphs_of_both_kinds_occur() -> None:
    """Checks the tests above: programs with and without mixed rows are both frequent."""
    kinds = [case_of(seed)[1] for seed in range(GRAPHS)]
    assert min(kinds.count(True), kinds.count(False)) >= GRAPHS // 4
