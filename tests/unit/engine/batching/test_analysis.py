"""Tests which programs may be batched, and that batched calls get the answers of single calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gradrule_server.engine.batching.analysis import Layout, Refusal, analyse
from gradrule_server.engine.batching.merging import (
    BatchedCall,
    BatchingProof,
    count_examples,
    group_key_for,
    padded_size,
    run_on_arrays,
    run_together,
)
from gradrule_server.engine.build import build
from gradrule_server.engine.comparison import is_close
from gradrule_server.engine.program import BuiltProgram
from tests.unit.engine.batching.programs import PROVEN, REFUSED, Case
from tests.unit.engine.building import prepared


def built_of(case: Case) -> tuple[BuiltProgram, list[np.ndarray]]:
    """Returns the program and the values of its params."""
    program = prepared(case.graph(), case.overrides, **case.derivative)
    values = {(item.rule, item.name): item.value.number for item in program.table.params.call_settings({}, range(1000))}
    built = build(program.request)
    return built, [np.array(values[item.rule, item.name], np.float64) for item in built.params]


def calls_of(
    case: Case, built: BuiltProgram, params: Sequence[np.ndarray], layout: Layout, sizes: Sequence[int]
) -> list[BatchedCall]:
    rng = np.random.default_rng(1)
    shared = {name: rng.normal(size=shape).astype(np.float32) for name, shape in case.shared.items()}
    calls = []
    for number, size in enumerate(sizes):
        given = [
            shared[item.name] if item.name in shared else rng.normal(size=(size, *case.shapes[item.name]))
            for item in (*built.inputs, *built.directions)
        ]
        arguments = [*(np.asarray(value, np.float32) for value in given), *params]
        calls.append(
            BatchedCall(
                number,
                0,
                0,
                arguments,
                count_examples(built, layout, arguments),
                group_key_for(built, layout, arguments),
            )
        )
    return calls


@pytest.mark.parametrize("name", PROVEN)
def test_batched_answers_equal_those_of_single_calls(name: str) -> None:
    case = PROVEN[name]
    built, params = built_of(case)
    layout = analyse(built)
    assert isinstance(layout, Layout), layout
    calls = calls_of(case, built, params, layout, (1, 3, 1))
    assert [call.examples for call in calls] == [1, 3, 1]
    assert len({call.group_key for call in calls}) == 1
    together = run_together(built, layout, calls, 6)
    alone = [run_on_arrays(built, call.arguments) for call in calls]
    for ours, theirs in zip(alone, together, strict=True):
        assert all(is_close(a, b, 256, 0.01) for a, b in zip(ours, theirs, strict=True))
    proof = BatchingProof(layout=layout)
    proof.attempt(built, layout, calls, alone)
    assert proof.is_proven, proof.refusal


@pytest.mark.parametrize("name", REFUSED)
def test_programs_that_mix_examples_are_refused(name: str) -> None:
    built, _ = built_of(REFUSED[name])
    found = analyse(built)
    assert isinstance(found, Refusal), found
    assert REFUSED[name].why in found.reason


@pytest.mark.parametrize(
    "name", ["batch norm by hand", "reversed", "number of elements", "cumulative", "hidden mean loss"]
)
def test_trial_detects_mixing_that_analysis_misses(name: str) -> None:
    """Tries a wrong layout. The calls are equal, so only rows with other values show the mixing."""
    case = REFUSED[name]
    built, params = built_of(case)
    wrong = Layout((True,) + (False,) * len(params), (1,) * len(built.function.outputs))
    (call,) = calls_of(case, built, params, wrong, (2,))
    proof = BatchingProof(layout=wrong)
    proof.attempt(built, wrong, [call, call], [run_on_arrays(built, call.arguments)] * 2)
    assert not proof.is_proven
    assert "is another when calls run together" in proof.refusal


def test_calls_run_together_only_if_shared_inputs_and_shapes_are_equal() -> None:
    case = PROVEN["temperature"]
    built, _ = built_of(case)
    layout = analyse(built)
    assert isinstance(layout, Layout)

    def group_key(t: float, rows: int = 1) -> object:
        arguments = [np.ones([rows, 4]), np.array(t, np.float32)]
        return group_key_for(built, layout, arguments)

    assert group_key(1.0) == group_key(1.0, rows=3)
    assert group_key(1.0) != group_key(1.0 + 2**-23)
    assert group_key(0.0) != group_key(-0.0)


def test_calls_with_inconsistent_example_counts_run_alone() -> None:
    case = PROVEN["broadcasting"]
    built, _ = built_of(case)
    layout = analyse(built)
    assert isinstance(layout, Layout)
    assert count_examples(built, layout, [np.ones([3, 4]), np.ones([1, 1])]) == 0
    assert count_examples(built, layout, [np.ones([3, 4]), np.ones([3, 1])]) == 3
    assert count_examples(built, layout, [np.ones([0, 4]), np.ones([0, 1])]) == 0


def test_call_with_tensor_param_runs_alone() -> None:
    case = PROVEN["straight through"]
    built, params = built_of(case)
    layout = analyse(built)
    assert isinstance(layout, Layout)
    assert count_examples(built, layout, [np.ones([2, 4]), *params]) == 2
    assert count_examples(built, layout, [np.ones([2, 4]), np.ones([2, 1])]) == 0


def test_padded_sizes_are_few_and_close_to_the_request() -> None:
    sizes = {padded_size(count, 64) for count in range(1, 65)}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    assert all(count <= padded_size(count, 64) <= 1.5 * count for count in range(2, 65))
    assert padded_size(70, 64) == 70
    assert padded_size(33, 40) == 40
