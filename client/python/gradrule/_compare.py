"""One graph under several override maps: what the gradients are, and where they part.

The comparison is a plan: a generator that yields calls and is sent their answers, so that both clients can run it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gradrule import _calls, _differences
from gradrule._comparison import DEFAULT, FINITE_DIFFERENCES, ComparedRow, Comparison, FirstDifference
from gradrule._differences import FiniteDifferences
from gradrule._dtypes import base, name_of
from gradrule._graph import Graph
from gradrule._names import bare, split
from gradrule._overrides import Overrides
from gradrule._requests import Feeds, GradYs, Names, Words, names_of
from gradrule._results import ByName, Explanation, Resolution, Result, Sparse
from gradrule._sources import GraphLike, graph_bytes
from gradrule._tensors import Array
from gradrule.errors import GradruleError, InvalidDerivativeError, InvalidOverrideError, NoGradientError, of_reason

Plan: TypeAlias = "Generator[_calls.Call[Any], Any, Comparison]"

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MOST_TENSORS = 512
# Two upstream gradients of one tensor are told apart from here on; what rules compute in float32 agrees far better.
_PARTS_AT = 1e-4


@dataclass
class _Run:
    """One override map: its upstream gradients by tensor, and which node got which rule."""

    label: str
    overrides: Overrides | None
    path: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    resolutions: list[Resolution] = field(default_factory=list)
    gradients: dict[str, Array | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Question:
    graph: GraphLike
    read: Graph
    feeds: Feeds | None
    ys: list[str]
    xs: list[str]
    grad_ys: GradYs | None
    rewrites: Sequence[str]

    def words(self, overrides: Overrides | None, more_xs: Sequence[str] = ()) -> Words:
        return Words(
            ys=self.ys,
            xs=[*self.xs, *more_xs],
            grad_ys=self.grad_ys,
            overrides=overrides,
            rewrites=self.rewrites,
        )


def plan(
    graph: GraphLike,
    feeds: Feeds | None,
    ys: Names,
    xs: Names,
    overrides: Mapping[str, Overrides | None],
    grad_ys: GradYs | None,
    finite_differences: bool,
    rewrites: Sequence[str],
) -> Plan:
    """The calls of a comparison. Raises what the calls raise, the label of the override map in the message."""
    _check_labels(overrides)
    read = graph if isinstance(graph, Graph) else Graph.from_bytes(graph_bytes(graph))
    question = _Question(graph, read, feeds, names_of(ys, graph), names_of(xs, graph), grad_ys, rewrites)
    if not (question.ys and question.xs):
        raise InvalidDerivativeError("a comparison differentiates: give ys and xs")
    notes: list[str] = []
    runs: list[_Run] = []
    for label, chosen in {DEFAULT: None, **overrides}.items():
        run = _Run(label, chosen)
        explained: Explanation = yield _calls.explain(graph, feeds, None, question.words(chosen))
        try:
            _read(run, explained, label)
        except NoGradientError as refusal:
            if label != DEFAULT:
                raise
            notes.append(f"there is no default to compare with: {refusal.message}")
        else:
            runs.append(run)
    tensors = _tensors_of_interest(question, runs, notes)
    for run in runs:
        yield from _gradients(question, run, tensors, notes)
    measured = None
    if finite_differences:
        measured = yield from _differences.measure(graph, read, feeds, question.ys, question.xs, grad_ys, notes)
    return _comparison(question, runs, tensors, measured, notes)


def _check_labels(overrides: Mapping[str, Overrides | None]) -> None:
    if not isinstance(overrides, Mapping):
        raise InvalidOverrideError(
            f"compare takes a dict of label to overrides, such as {{'ste': {{'Sign': 'ste_sign'}}}}, not {overrides!r}"
        )
    for label in overrides:
        if not isinstance(label, str) or label in (DEFAULT, FINITE_DIFFERENCES):
            raise InvalidOverrideError(
                f"{label!r} is no label; {DEFAULT!r} and {FINITE_DIFFERENCES!r} are always there"
            )


def _read(run: _Run, explained: Explanation, label: str) -> None:
    """Which nodes of the top level are on the path, and which of them lie within a pattern or a region."""
    if explained.findings:
        first = explained.findings[0]
        raise of_reason(first.reason, f"overrides[{label!r}]: {first.message}", details=explained.findings)
    run.resolutions = explained.overrides
    run.path.update(explained.default_gradient_nodes)
    for item in explained.overrides:
        if item.status == "active":
            run.path.update(item.nodes or (item.node,))
            run.hidden.update(set(item.nodes) - {item.node})
    run.hidden.update(explained.rewritten)


def _tensors_of_interest(question: _Question, runs: Sequence[_Run], notes: list[str]) -> list[str]:
    """Floating outputs of the nodes on some path, from the ys to the xs; the xs are not among them."""
    asked = {f"{node}:{index}" for node, index in map(split, question.xs)}
    wanted = set[str]().union(*(run.path for run in runs))
    found = [
        handle.name
        for node in reversed(_in_order(question.read))
        if node in wanted
        for handle in question.read.outputs_of(node)
        if name_of(base(handle.number)) in _FLOATS and handle.name not in asked
    ]
    if len(found) > _MOST_TENSORS:
        notes.append(f"of {len(found)} tensors on the path the {_MOST_TENSORS} nearest to the ys are compared")
    return found[:_MOST_TENSORS]


def _in_order(graph: Graph) -> list[str]:
    """Names of the nodes, producers before consumers; nodes of a cycle are left out."""
    nodes = graph.find()
    takers: dict[str, list[str]] = {node.name: [] for node in nodes}
    waits: dict[str, int] = {}
    for node in nodes:
        producers = {split(name)[0] for name in node.inputs if not name.startswith("^")} & takers.keys()
        waits[node.name] = len(producers)
        for producer in producers:
            takers[producer].append(node.name)
    order = [name for name, count in waits.items() if not count]
    for name in order:
        for taker in takers[name]:
            waits[taker] -= 1
            if not waits[taker]:
                order.append(taker)
    return order


def _gradients(
    question: _Question, run: _Run, tensors: Sequence[str], notes: list[str]
) -> Generator[_calls.Call[Any], Any, None]:
    """One evaluation; a second one without the tensors between where these would change what is computed."""
    between = [name for name in tensors if split(name)[0] in run.path - run.hidden]
    result: Result | None = None
    if between:
        try:
            result = yield _evaluate(question, run, between)
        except GradruleError as refusal:
            notes.append(f"{run.label}: only the gradients of the xs can be compared: {refusal.message}")
        if result is not None and _active(result.overrides) != _active(run.resolutions):
            notes.append(
                f"{run.label}: only the gradients of the xs can be compared: overrides depend on what is asked"
            )
            result = None
    if result is None:
        try:
            result = yield _evaluate(question, run, [])
        except GradruleError as refusal:
            raise of_reason(
                refusal.reason, f"overrides[{run.label!r}]: {refusal.message}", details=refusal.details
            ) from None
    run.gradients = {name: _dense(value) for name, value in result.gradients.items()}


def _evaluate(question: _Question, run: _Run, between: Sequence[str]) -> _calls.Call[Result]:
    return _calls.evaluate(question.graph, question.feeds, None, question.words(run.overrides, between))


def _active(resolutions: Sequence[Resolution]) -> set[tuple[str, str, str]]:
    return {(item.node, item.rule, item.label) for item in resolutions if item.status == "active"}


def _dense(value: Array | Sparse | None) -> Array | None:
    """In float64, in which norms of float16 do not overflow."""
    if value is None:
        return None
    dense = value.to_dense() if isinstance(value, Sparse) else value
    return np.asarray(dense, np.float64)


def _comparison(
    question: _Question,
    runs: Sequence[_Run],
    tensors: Sequence[str],
    measured: FiniteDifferences | None,
    notes: Sequence[str],
) -> Comparison:
    # Without a default the first map is what the others are compared with.
    reference = runs[0] if runs else None
    rows: list[ComparedRow] = []
    first_differences: dict[str, FirstDifference | None] = {}
    kept = [name for name in tensors if any(run.gradients.get(name) is not None for run in runs)]
    for run in runs:
        first: FirstDifference | None = None
        for name in [*kept, *question.xs]:
            gradient = run.gradients.get(name)
            node = question.read.node(split(name)[0])
            standard = None if reference is None else reference.gradients.get(name)
            # Tensors inside a pattern or a region were not asked for, and differ in nothing.
            is_asked = name in run.gradients and reference is not None and name in reference.gradients
            difference = _difference(gradient, standard) if is_asked else None
            is_x = name in question.xs
            rows.append(
                ComparedRow(
                    tensor=bare(name),
                    op_type=node.op_type,
                    is_x=is_x,
                    label=run.label,
                    norm=None if gradient is None else _norm(gradient),
                    difference=None if run is reference else difference,
                    from_finite_differences=measured.distance(name, gradient) if is_x and measured else None,
                )
            )
            if first is None and run is not reference and difference is not None and difference > _PARTS_AT:
                first = FirstDifference(bare(name), node.op_type, difference, _rules_behind(question.read, run, name))
        if run is not reference:
            first_differences[run.label] = first
    if measured is not None:
        rows += [
            ComparedRow(bare(x), question.read.node(split(x)[0]).op_type, True, FINITE_DIFFERENCES, norm, None, None)
            for x, norm in measured.norms.items()
        ]
    return Comparison(
        labels=tuple([run.label for run in runs] + ([FINITE_DIFFERENCES] if measured else [])),
        reference=reference.label if reference else None,
        gradients={run.label: ByName({x: run.gradients.get(x) for x in question.xs}) for run in runs},
        rows=tuple(rows),
        first_differences=first_differences,
        overrides={run.label: run.resolutions for run in runs},
        finite_differences=measured,
        notes=tuple(dict.fromkeys(notes)),
    )


def _norm(gradient: Array) -> float:
    return float(np.linalg.norm(gradient.ravel()))


def _difference(gradient: Array | None, standard: Array | None) -> float | None:
    """Relative to the norm of the standard; infinite where that is zero or only one of the two is there."""
    if gradient is None and standard is None:
        return None
    if gradient is None or standard is None or gradient.shape != standard.shape:
        return float("inf")
    return _differences.relative(gradient, standard)


def _rules_behind(graph: Graph, run: _Run, tensor: str) -> tuple[Resolution, ...]:
    """The rules of the nodes that take the tensor: what made the difference."""
    takers = {node.name for node in graph.find() if any(_is_tensor(name, tensor) for name in node.inputs)}
    return tuple(item for item in run.resolutions if item.status == "active" and takers & {item.node, *item.nodes})


def _is_tensor(name: str, tensor: str) -> bool:
    return split(name) == split(tensor)
