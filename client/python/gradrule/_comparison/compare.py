"""Compares the gradients of one graph under several override maps.

The comparison is a generator that yields calls and receives their answers, so that both clients can run it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gradrule._builder.graph import Graph
from gradrule._builder.graph_sources import GraphLike, graph_bytes
from gradrule._builder.names import ByName, bare, counted, split
from gradrule._builder.notebook_text import html_block, html_line, html_table, names_text, short_repr
from gradrule._builder.overrides import Overrides
from gradrule._comparison import numeric_gradients
from gradrule._comparison.numeric_gradients import FiniteDifferences
from gradrule._comparison.sweep import grad_ys_sent_once, sent_once
from gradrule._messages import rpc_calls
from gradrule._messages.call_arguments import Feeds, GradYs, Names, ProgramArguments, names_of
from gradrule._messages.request_messages import Source, sent_graph
from gradrule._results.call_results import Explanation, Resolution, Result, Sparse
from gradrule.common.dtypes import dtype_name, without_ref
from gradrule.common.tensor_codec import Array
from gradrule.errors import (
    GradruleError,
    InvalidDerivativeError,
    InvalidOverrideError,
    NoGradientError,
    error_for_reason,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEFAULT = "default"
FINITE_DIFFERENCES = "finite_differences"
Plan: TypeAlias = "Generator[rpc_calls.Call[Any], Any, Comparison]"
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MAX_TENSORS = 512
# Relative difference from which two gradients count as different; rounding in float32 is far below it.
_MIN_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True, repr=False)
class ComparedRow:
    """Describes the upstream gradient of one tensor under one label.

    Attributes:
        tensor: name of the tensor.
        op_type: op type of the node that computes it.
        is_x: whether the tensor is one of the xs.
        label: label of the override map, `default` or `finite_differences`.
        norm: Euclidean norm of the gradient; None without a gradient.
        difference: norm of the difference from the reference, relative to the reference's norm; infinite if that norm
            is zero; None for the reference itself.
        from_finite_differences: the same, relative to the finite differences; only for xs.
    """

    tensor: str
    op_type: str
    is_x: bool
    label: str
    norm: float | None
    difference: float | None
    from_finite_differences: float | None

    def __repr__(self) -> str:
        return short_repr(f"<ComparedRow {self.label} {self.tensor!r}: norm {self.norm}, difference {self.difference}>")


@dataclass(frozen=True, slots=True, repr=False)
class FirstDifference:
    """Names the first tensor, from the ys to the xs, whose gradient differs from the reference's.

    Attributes:
        tensor: the tensor whose upstream gradient differs.
        op_type: op type of the node that computes it.
        difference: relative to the norm of the reference's gradient.
        rules: the active overrides of the nodes that consume the tensor; they cause the difference.
    """

    tensor: str
    op_type: str
    difference: float
    rules: tuple[Resolution, ...]

    def __repr__(self) -> str:
        return short_repr(f"<FirstDifference {self.tensor!r} ({self.op_type}): {self.difference:.6g}>")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """Holds the gradients of one graph under several override maps.

    Attributes:
        labels: in order; `default` first if the graph has a gradient without overrides, `finite_differences` last.
        reference: the label that differences refer to: `default`, else the first label; None without labels.
        gradients: float64 arrays of the shape of x, by label, then by x; None if y does not depend on x.
        rows: for each label, the tensors on the path from the ys to the xs, then the xs.
        first_differences: by label; None if no gradient differs from the reference's.
        overrides: the rule of each overridden node, by label.
        finite_differences: None if they were not requested or could not be computed.
        notes: what was left out, and why.
    """

    labels: tuple[str, ...]
    reference: str | None
    gradients: Mapping[str, Mapping[str, Array | None]]
    rows: tuple[ComparedRow, ...]
    first_differences: Mapping[str, FirstDifference | None]
    overrides: Mapping[str, list[Resolution]]
    finite_differences: FiniteDifferences | None
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return short_repr(f"<Comparison of {names_text(self.labels)}: {counted(len(self.rows), 'row')}>")

    def _repr_html_(self) -> str:
        cells = {(row.tensor, row.label): _norm_text(row) for row in self.rows}
        tensors = dict.fromkeys(("x" if row.is_x else "", row.tensor, row.op_type) for row in self.rows)
        rows = [(*tensor, *(cells.get((tensor[1], label)) for label in self.labels)) for tensor in tensors]
        firsts = [
            f"{label}: differs from {self.reference} first at {first.tensor}" if first else f"{label}: same gradients"
            for label, first in self.first_differences.items()
        ]
        return html_block(
            html_table("Norms of upstream gradients", ("", "tensor", "op type", *self.labels), rows),
            html_line(f"in brackets: distance from {self.reference}, relative to its norm" if self.reference else ""),
            *map(html_line, [*firsts, *self.notes]),
        )

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draws the norms of the gradients under each label, see `gradrule.viz.plot_comparison`.

        Args:
            ax: Axes to draw into.

        Raises:
            UnsupportedError: Matplotlib is not installed.
        """
        import gradrule as gr

        return gr.viz.plot_comparison(self, ax=ax)

    def table(self) -> list[dict[str, object]]:
        """Returns the rows as dicts, for data frames and CSV writers."""
        return [asdict(row) for row in self.rows]

    def norms(self, label: str) -> dict[str, float | None]:
        """Returns the Euclidean norm of each tensor's gradient, from the ys to the xs.

        Args:
            label: One of `labels`.
        """
        return {row.tensor: row.norm for row in self.rows if row.label == label}


def _norm_text(row: ComparedRow) -> str:
    norm = "none" if row.norm is None else f"{row.norm:.4g}"
    return norm if not row.difference or row.norm is None else f"{norm} ({_share_text(row.difference)})"


def _share_text(difference: float) -> str:
    return f"{difference:.2%}" if difference < 10 else "∞" if difference == float("inf") else f"× {difference:.3g}"


@dataclass
class _Run:
    """Collects the results of one override map."""

    label: str
    overrides: Overrides | None
    path: set[str] = field(default_factory=set)
    inside: set[str] = field(default_factory=set)
    resolutions: list[Resolution] = field(default_factory=list)
    gradients: dict[str, Array | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Target:
    """Holds what every call of a comparison shares."""

    source: Source
    read: Graph
    feeds: Feeds | None
    ys: list[str]
    xs: list[str]
    grad_ys: GradYs | None
    rewrites: Sequence[str]

    def arguments(self, overrides: Overrides | None, more_xs: Sequence[str] = ()) -> ProgramArguments:
        return ProgramArguments(
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
    """Yields the calls of a comparison and returns the `Comparison`.

    Raises:
        InvalidDerivativeError: ys or xs are empty.
        InvalidOverrideError: a label is not a string or is reserved.
        GradruleError: a call failed; the message names the label of the override map.
    """
    _check_labels(overrides)
    read = graph if isinstance(graph, Graph) else Graph.from_bytes(graph_bytes(graph))
    source = sent_graph(graph)
    y_names, x_names = names_of(ys, graph), names_of(xs, graph)
    kept = sent_once(feeds, source), grad_ys_sent_once(grad_ys, y_names, source)
    target = _Target(source, read, kept[0], y_names, x_names, kept[1], rewrites)
    if not (target.ys and target.xs):
        raise InvalidDerivativeError("a comparison differentiates: give ys and xs")
    notes: list[str] = []
    runs: list[_Run] = []
    for label, chosen in {DEFAULT: None, **overrides}.items():
        run = _Run(label, chosen)
        explained: Explanation = yield rpc_calls.explain(graph, target.feeds, None, target.arguments(chosen))
        try:
            _read(run, explained, label)
        except NoGradientError as refusal:
            if label != DEFAULT:
                raise
            notes.append(f"there is no default to compare with: {refusal.message}")
        else:
            runs.append(run)
    tensors = _compared_tensors(target, runs, notes)
    for run in runs:
        yield from _gradients(target, run, tensors, notes)
    measured = None
    if finite_differences:
        measured = yield from numeric_gradients.measure(graph, read, feeds, target.ys, target.xs, grad_ys, notes)
    return _comparison(target, runs, tensors, measured, notes)


def _check_labels(overrides: Mapping[str, Overrides | None]) -> None:
    if not isinstance(overrides, Mapping):
        raise InvalidOverrideError(
            f"compare takes a dict of label to overrides, such as {{'ste': {{'Sign': 'ste_sign'}}}}, not {overrides!r}"
        )
    for label in overrides:
        if not isinstance(label, str) or label in (DEFAULT, FINITE_DIFFERENCES):
            raise InvalidOverrideError(f"{label!r} is no label; {DEFAULT!r} and {FINITE_DIFFERENCES!r} are reserved")


def _read(run: _Run, explained: Explanation, label: str) -> None:
    """Stores which top-level nodes are on the path, and which of them are inside a pattern or a region."""
    if explained.findings:
        first = explained.findings[0]
        raise error_for_reason(first.reason, f"overrides[{label!r}]: {first.message}", details=explained.findings)
    run.resolutions = explained.overrides
    run.path.update(explained.default_gradient_nodes)
    for item in explained.overrides:
        if item.status == "active":
            run.path.update(item.nodes or (item.node,))
            run.inside.update(set(item.nodes) - {item.node})
    run.inside.update(explained.rewritten)


def _compared_tensors(target: _Target, runs: Sequence[_Run], notes: list[str]) -> list[str]:
    """Returns the floating-point outputs of the nodes on a path, from the ys to the xs; xs are excluded."""
    xs = {f"{node}:{index}" for node, index in map(split, target.xs)}
    on_path = set[str]().union(*(run.path for run in runs))
    found = [
        handle.name
        for node in reversed(_in_order(target.read))
        if node in on_path
        for handle in target.read.outputs_of(node)
        if dtype_name(without_ref(handle.number)) in _FLOATS and handle.name not in xs
    ]
    if len(found) > _MAX_TENSORS:
        notes.append(f"of {len(found)} tensors on the path the {_MAX_TENSORS} nearest to the ys are compared")
    return found[:_MAX_TENSORS]


def _in_order(graph: Graph) -> list[str]:
    """Returns the names of the nodes, producers before consumers; nodes of a cycle are left out."""
    nodes = graph.find()
    consumers: dict[str, list[str]] = {node.name: [] for node in nodes}
    waits: dict[str, int] = {}
    for node in nodes:
        producers = {split(name)[0] for name in node.inputs if not name.startswith("^")} & consumers.keys()
        waits[node.name] = len(producers)
        for producer in producers:
            consumers[producer].append(node.name)
    order = [name for name, count in waits.items() if not count]
    for name in order:
        for consumer in consumers[name]:
            waits[consumer] -= 1
            if not waits[consumer]:
                order.append(consumer)
    return order


def _gradients(
    target: _Target, run: _Run, tensors: Sequence[str], notes: list[str]
) -> Generator[rpc_calls.Call[Any], Any, None]:
    """Evaluates the gradients; evaluates again without inner tensors if asking for these fails or changes overrides."""
    between = [name for name in tensors if split(name)[0] in run.path - run.inside]
    result: Result | None = None
    if between:
        try:
            result = yield _evaluate(target, run, between)
        except GradruleError as refusal:
            notes.append(f"{run.label}: only the gradients of the xs can be compared: {refusal.message}")
        if result is not None and _active(result.overrides) != _active(run.resolutions):
            notes.append(
                f"{run.label}: only the gradients of the xs can be compared: overrides depend on the requested tensors"
            )
            result = None
    if result is None:
        try:
            result = yield _evaluate(target, run, [])
        except GradruleError as refusal:
            raise error_for_reason(
                refusal.reason, f"overrides[{run.label!r}]: {refusal.message}", details=refusal.details
            ) from None
    run.gradients = {name: _dense(value) for name, value in result.gradients.items()}


def _evaluate(target: _Target, run: _Run, between: Sequence[str]) -> rpc_calls.Call[Result]:
    return rpc_calls.evaluate(target.source, target.feeds, None, target.arguments(run.overrides, between))


def _active(resolutions: Sequence[Resolution]) -> set[tuple[str, str, str]]:
    return {(item.node, item.rule, item.label) for item in resolutions if item.status == "active"}


def _dense(value: Array | Sparse | None) -> Array | None:
    """Returns a dense float64 array; norms of float16 arrays would overflow."""
    if value is None:
        return None
    dense = value.to_dense() if isinstance(value, Sparse) else value
    return np.asarray(dense, np.float64)


def _comparison(
    target: _Target,
    runs: Sequence[_Run],
    tensors: Sequence[str],
    measured: FiniteDifferences | None,
    notes: Sequence[str],
) -> Comparison:
    # The first run is the default; without a default it is the first map.
    reference = runs[0] if runs else None
    rows: list[ComparedRow] = []
    first_differences: dict[str, FirstDifference | None] = {}
    kept = [name for name in tensors if any(run.gradients.get(name) is not None for run in runs)]
    for run in runs:
        first: FirstDifference | None = None
        for name in [*kept, *target.xs]:
            gradient = run.gradients.get(name)
            node = target.read.node(split(name)[0])
            standard = None if reference is None else reference.gradients.get(name)
            # Tensors inside a pattern or a region were not requested and have no gradient to compare.
            is_asked = name in run.gradients and reference is not None and name in reference.gradients
            difference = _difference(gradient, standard) if is_asked else None
            is_x = name in target.xs
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
            if first is None and run is not reference and difference is not None and difference > _MIN_DIFFERENCE:
                first = FirstDifference(
                    bare(name), node.op_type, difference, _rules_of_consumers(target.read, run, name)
                )
        if run is not reference:
            first_differences[run.label] = first
    if measured is not None:
        rows += [
            ComparedRow(bare(x), target.read.node(split(x)[0]).op_type, True, FINITE_DIFFERENCES, norm, None, None)
            for x, norm in measured.norms.items()
        ]
    return Comparison(
        labels=tuple([run.label for run in runs] + ([FINITE_DIFFERENCES] if measured else [])),
        reference=reference.label if reference else None,
        gradients={run.label: ByName({x: run.gradients.get(x) for x in target.xs}) for run in runs},
        rows=tuple(rows),
        first_differences=first_differences,
        overrides={run.label: run.resolutions for run in runs},
        finite_differences=measured,
        notes=tuple(dict.fromkeys(notes)),
    )


def _norm(gradient: Array) -> float:
    return float(np.linalg.norm(gradient.ravel()))


def _difference(gradient: Array | None, standard: Array | None) -> float | None:
    """Returns the difference relative to the standard's norm; infinite if that is zero or one of them is missing."""
    if gradient is None and standard is None:
        return None
    if gradient is None or standard is None or gradient.shape != standard.shape:
        return float("inf")
    return numeric_gradients.relative(gradient, standard)


def _rules_of_consumers(graph: Graph, run: _Run, tensor: str) -> tuple[Resolution, ...]:
    """Returns the active overrides of the nodes that consume the tensor; they cause the difference."""
    consumers = {node.name for node in graph.find() if any(_is_tensor(name, tensor) for name in node.inputs)}
    return tuple(item for item in run.resolutions if item.status == "active" and consumers & {item.node, *item.nodes})


def _is_tensor(name: str, tensor: str) -> bool:
    return split(name) == split(tensor)
