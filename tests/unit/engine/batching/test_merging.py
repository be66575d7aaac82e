"""Tests which programs may declare batching, and that merged calls get the answers of single calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule_server.engine.arguments import CallArguments
from gradrule_server.engine.batching import (
    COMPARED_RUNS,
    BatchedCall,
    MergedRuns,
    count_examples,
    group_key_for,
    is_close,
    padded_size,
    run_together,
)
from gradrule_server.engine.build import build
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.errors import GradruleError
from gradrule_server.link.messages import CallShape
from tests.unit.engine.batching.programs import MIXING, REFUSED, SOUND, Case, perceptron
from tests.unit.engine.building import prepared


def built_of(case: Case) -> tuple[BuiltProgram, MergedRuns, list[np.ndarray]]:
    """Returns the program, which declares batching, and the values of its params."""
    batching = program_pb2.Batching(axis=0)
    program = prepared(case.graph(), case.overrides, batching=batching, **case.derivative)
    values = {(item.rule, item.name): item.value.number for item in program.table.params.call_settings({}, range(1000))}
    built = build(program.request)
    assert built.merged_runs is not None
    params = [np.array(values[item.rule, item.name], np.float64) for item in built.params]
    return built, built.merged_runs, params


def calls_of(
    case: Case, built: BuiltProgram, runs: MergedRuns, params: Sequence[np.ndarray], sizes: Sequence[int]
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
        examples, group_key = count_examples(built, runs, arguments), group_key_for(built, runs, arguments)
        calls.append(BatchedCall(number, 0, 0, CallArguments(arguments), examples, group_key))
    return calls


@pytest.mark.parametrize("name", SOUND)
def test_merged_calls_get_the_answers_of_single_calls(name: str) -> None:
    case = SOUND[name]
    built, runs, params = built_of(case)
    calls = calls_of(case, built, runs, params, (1, 3, 1))
    assert [call.examples for call in calls] == [1, 3, 1]
    assert len({call.group_key for call in calls}) == 1
    together = run_together(built, runs, calls, 6)
    alone = [built.run(call.arguments) for call in calls]
    for ours, theirs in zip(alone, together, strict=True):
        assert all(is_close(a, b, 256, 0.01) for a, b in zip(ours, theirs, strict=True))
    for _ in range(COMPARED_RUNS):
        assert not runs.are_equal
        runs.compare(built, calls, alone)
    assert runs.are_equal, runs.refusal


@pytest.mark.parametrize("name", MIXING)
def test_comparison_with_single_runs_detects_mixing(name: str) -> None:
    case = MIXING[name]
    built, runs, params = built_of(case)
    calls = calls_of(case, built, runs, params, (1, 1))
    runs.compare(built, calls, [built.run(call.arguments) for call in calls])
    assert case.why in runs.refusal
    for _ in range(COMPARED_RUNS):
        runs.compare(built, calls[:1], [built.run(calls[0].arguments)])
    assert not runs.are_equal


@pytest.mark.parametrize("name", ["batch norm by hand", "reversed", "cumulative"])
def test_comparison_with_other_values_detects_mixing_of_equal_calls(name: str) -> None:
    """Gives the merged results of equal calls as their single ones, so that only rows of other values differ."""
    case = MIXING[name]
    built, runs, params = built_of(case)
    (call,) = calls_of(case, built, runs, params, (2,))
    runs.compare(built, [call, call], run_together(built, runs, [call, call], padded_size(5, 8)))
    assert "differs when calls run together" in runs.refusal


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_declarations_are_refused_when_compiled(name: str) -> None:
    case = REFUSED[name]
    with pytest.raises(GradruleError) as caught:
        built_of(case)
    (finding,) = caught.value.findings
    assert (finding.reason, finding.field) == (errors_pb2.ERROR_REASON_UNSUPPORTED, "spec.batching")
    assert case.why in finding.message


def test_all_reasons_against_batching_are_reported_at_once() -> None:
    case = Case(REFUSED["random"].make, overrides={"AddV2": "dy / sum(dy)"})
    with pytest.raises(GradruleError) as caught:
        built_of(case)
    assert [finding.message.split(";")[0] for finding in caught.value.findings] == [
        "batching: the graph draws random numbers, which depend on the size of a run",
        "batching: the rule 'inline' is not per sample: it combines examples along axis 0",
    ]


def test_xla_and_batching_together_are_refused() -> None:
    batching = program_pb2.Batching(axis=0)
    with pytest.raises(GradruleError, match="XLA compiles each size of a run"):
        prepared(SOUND["perceptron"].graph(), batching=batching, jit=program_pb2.JIT_ON)


@pytest.mark.parametrize("axis", [1, -1])
def test_other_axes_are_refused(axis: int) -> None:
    with pytest.raises(GradruleError, match="only axis 0") as caught:
        prepared(SOUND["perceptron"].graph(), batching=program_pb2.Batching(axis=axis))
    assert caught.value.findings[0].field == "spec.batching.axis"


@pytest.mark.parametrize(
    ("batching", "call"),
    [
        (None, CallShape()),
        (program_pb2.Batching(allowed=True), CallShape()),
        (program_pb2.Batching(axis=0, allowed=False), CallShape()),
        (program_pb2.Batching(axis=0), CallShape(split=True)),
        (program_pb2.Batching(axis=0), CallShape(derivative=evaluate_pb2.DERIVATIVE_JACOBIAN)),
        (program_pb2.Batching(axis=0), CallShape(grad_ys=frozenset({"y"}), stacked_grad_ys=True)),
    ],
)
def test_calls_without_a_declaration_that_covers_them_are_not_batched(
    batching: program_pb2.Batching | None, call: CallShape
) -> None:
    derivative = {"vjp": program_pb2.Vjp(ys=["y"], xs=["x"])}
    graph = Case(perceptron).graph()
    assert not prepared(graph, None, call, batching=batching, **derivative).request.batched


def test_declaration_is_part_of_the_digest() -> None:
    graph = SOUND["perceptron"].graph()
    assert prepared(graph).reply.key != prepared(graph, batching=program_pb2.Batching(axis=0)).reply.key


def test_calls_run_together_only_if_shared_inputs_and_shapes_are_equal() -> None:
    built, runs, _ = built_of(SOUND["temperature"])

    def group_key(t: float, rows: int = 1) -> object:
        return group_key_for(built, runs, [np.ones([rows, 4]), np.array(t, np.float32)])

    assert group_key(1.0) == group_key(1.0, rows=3)
    assert group_key(1.0) != group_key(1.0 + 2**-23)
    assert group_key(0.0) != group_key(-0.0)


def test_calls_with_inconsistent_example_counts_run_alone() -> None:
    built, runs, _ = built_of(SOUND["broadcasting"])
    assert count_examples(built, runs, [np.ones([3, 4]), np.ones([1, 1])]) == 0
    assert count_examples(built, runs, [np.ones([3, 4]), np.ones([3, 1])]) == 3
    assert count_examples(built, runs, [np.ones([0, 4]), np.ones([0, 1])]) == 0


def test_call_with_tensor_param_runs_alone() -> None:
    built, runs, params = built_of(SOUND["straight through"])
    assert count_examples(built, runs, [np.ones([2, 4]), *params]) == 2
    assert count_examples(built, runs, [np.ones([2, 4]), np.ones([2, 1])]) == 0


def test_padded_sizes_are_few_and_close_to_the_request() -> None:
    sizes = {padded_size(count, 64) for count in range(1, 65)}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    assert all(count <= padded_size(count, 64) <= 1.5 * count for count in range(2, 65))
    assert padded_size(70, 64) == 70
    assert padded_size(33, 40) == 40


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_floats_are_compared_in_units_of_the_largest(dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    finfo: Any = ml_dtypes.finfo  # Has no types.
    eps = float(finfo(kind).eps)
    one = np.array([1.0, 0.0, np.inf, -np.inf, np.nan]).astype(kind)
    for shift, equal in ((0, True), (3, True), (5, False)):
        other = one.copy()
        other[1] = shift * eps
        assert is_close(one, other, 4, 0) is equal
    for number in (2, 3, 4):
        other = one.copy()
        other[number] = 1
        assert not is_close(one, other, 4, 0) and not is_close(other, one, 4, 0)
    assert is_close(np.array([0.0]), np.array([1e-17]), 4, 1.0)
    assert not is_close(np.array([0.0]), np.array([1e-17]), 4, 0)


def test_other_types_are_compared_exactly() -> None:
    assert not is_close(np.array([2**40]), np.array([2**40 + 1]), 1024, 1.0)
    assert not is_close(np.array([b"a"], object), np.array([b"b"], object), 1024, 1.0)
    assert is_close(np.array([b"a"], object), np.array([b"a"], object), 0, 0)
    assert not is_close(np.zeros(2), np.zeros((2, 1)), 4, 1)
    assert not is_close(np.zeros(2), np.zeros(2, np.float32), 4, 1)
