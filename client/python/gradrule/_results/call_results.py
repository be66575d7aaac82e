"""Holds the results of calls: outputs, gradients, resolved overrides, timings and explanations."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from gradrule._builder.array_html import tensors_table
from gradrule._builder.names import ByName, bare, counted
from gradrule._builder.notebook_text import (
    html_block,
    html_line,
    html_table,
    names_text,
    short_digest,
    short_repr,
)
from gradrule._builder.specs import TensorSpec
from gradrule._results import tables
from gradrule._results.answers import Answer, AnswerReader, GradientKind, labeller, labels
from gradrule.common.tensor_codec import Array, to_numpy
from gradrule.errors import Detail, InvalidTensorError, error_for_reason, reason_name
from gradrule.v1 import evaluate_pb2, override_pb2, program_pb2, tensor_pb2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

V = TypeVar("V")

# Bytes of a graph, and characters of its picture, that a notebook shows without being asked.
_MAX_DRAWN_GRAPH = 200_000
_MAX_PICTURE = 150_000

OverrideStatus: TypeAlias = Literal["active", "off_path", "not_differentiable"]
Groups: TypeAlias = "Mapping[str, list[str]] | None"
"""Names of xs by group; None: no groups."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sparse:
    """Holds a gradient that is nonzero only in some slices along axis 0. Slices with the same index are added.

    Attributes:
        values: The slices, of shape (n, …) and the element type of x.
        indices: Index of each slice along axis 0, integers of shape (n).
        dense_shape: Shape of x, integers of shape (rank).
    """

    values: Array
    indices: Array
    dense_shape: Array

    def __repr__(self) -> str:
        sizes = [int(size) for size in self.dense_shape]
        return short_repr(f"<Sparse {self.values.dtype} of shape {sizes}: {counted(len(self.indices), 'slice')}>")

    def to_dense(self) -> Array:
        """Returns the whole gradient, of shape `dense_shape`."""
        dense: Array = np.zeros(tuple(int(size) for size in self.dense_shape), self.values.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Returns `to_dense()` for NumPy's functions."""
        if copy is False:
            raise ValueError("a sparse gradient becomes an array only as a copy")
        dense = self.to_dense()
        return dense if dtype is None else dense.astype(dtype, copy=False)


@dataclass(frozen=True, slots=True, repr=False)
class Resolution:
    """Names the rule that a node got.

    Attributes:
        node: Name of the node; `call/inner` for a node of a function.
        op_type: Op type of the node.
        rule: Name of the rule, `default`, or `inline` for a rule in the request.
        label: Label of the override; `no_gradient` if the request's option of that name chose the rule.
        status: `active`, `off_path` or `not_differentiable`.
        function: Function that contains the node, or empty.
        nodes: All nodes of a pattern or region; empty for a single node.
        qualified_name: The node's name with the branch behind each loop and conditional, such as `cond[then]/inner`. As
            the `node` of an override it selects this node alone. Equal to `node` outside of loops and branches.
    """

    node: str
    op_type: str
    rule: str
    label: str
    status: OverrideStatus
    function: str = ""
    nodes: tuple[str, ...] = ()
    qualified_name: str = ""

    def __post_init__(self) -> None:
        # Frozen dataclasses refuse the plain assignment.
        object.__setattr__(self, "qualified_name", self.qualified_name or self.node)

    def __repr__(self) -> str:
        return short_repr(f"<Resolution {self.node!r} ({self.op_type}): {self.rule}, {self.status}>")


@dataclass(frozen=True, slots=True)
class Timings:
    """Holds the durations of a call's stages.

    Attributes:
        queue: Seconds that the call waited for an engine.
        compile: Seconds of preparing the program; about 0 if an engine had it.
        run: Seconds of running it.
    """

    queue: float
    compile: float
    run: float


@dataclass(frozen=True, slots=True, repr=False)
class Digests:
    """Holds SHA-256 digests in hex.

    Attributes:
        graph: Digest of the graph's bytes.
        program: Digest of the program.
    """

    graph: str
    program: str

    def __repr__(self) -> str:
        return f"<Digests graph {self.graph[:12]}…, program {self.program[:12]}…>"


@dataclass(frozen=True, slots=True)
class ProgramDetails:
    """Holds the facts about a program that its answers leave out, because CompileProgram already returned them.

    None: the fact is in the answer. aliases: names of tensors in the result.
    """

    aliases: Mapping[str, str] | None = None
    overrides: Sequence[Resolution] | None = None
    default_gradient_nodes: Sequence[str] | None = None
    rewritten: Sequence[str] | None = None
    draws_random: bool | None = None


class Result:
    """Holds the result of an evaluation. Each part is read from the answer at its first use.

    Attributes:
        outputs: Arrays by fetch, each in the shape and element type of its tensor.
        gradients: By x (by group and x, if xs were given in groups): an array of the shape and element type of x, a
            `Sparse`, or None if there is no gradient.
        gradient_kinds: By x: `dense`, `sparse`, or the reason for None: `unconnected` or `not_differentiable`.
        overrides: The rule of each overridden node.
        default_gradient_nodes: Nodes on the path without an override; they keep TensorFlow's gradient.
        rewritten: Nodes that rewrites replaced.
        notes: Hints that the request may not compute what is wanted; `evaluate` warns of them. Empty for a program.
        repeatable: Whether calls with equal feeds give equal outputs. False if the program draws random numbers.
        timings: Durations in seconds.
        device: Device that ran the program.
        batch_size: Number of examples that the server ran together with this call's; 0: the call ran alone.
        jit: Whether XLA computed the result.
        digests: Digests of graph and program.
    """

    def __init__(self, answer: Answer, details: ProgramDetails, groups: Groups = None) -> None:
        self._answer = answer
        self._details = details
        self._groups = groups

    @cached_property
    def outputs(self) -> Mapping[str, Array]:
        found = {name: place.array(self._answer) for name, place in self._answer.layout.outputs.items()}
        return ByName(found, self._details.aliases)

    @cached_property
    def gradients(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for x, place in self._answer.layout.gradients.items():
            tensors = [tensor.array(self._answer) for tensor in place.tensors]
            found[x] = Sparse(*tensors) if place.kind == "sparse" else tensors[0] if tensors else None
        return regrouped(ByName(found, self._details.aliases), self._groups)

    @cached_property
    def gradient_kinds(self) -> Mapping[str, GradientKind]:
        return ByName(self._answer.layout.kinds, self._details.aliases)

    @cached_property
    def overrides(self) -> list[Resolution]:
        overrides = self._details.overrides
        return resolutions(self._answer.rest.overrides) if overrides is None else list(overrides)

    @cached_property
    def default_gradient_nodes(self) -> list[str]:
        nodes = self._details.default_gradient_nodes
        return list(self._answer.rest.default_gradient_nodes if nodes is None else nodes)

    @cached_property
    def rewritten(self) -> list[str]:
        return list(self._answer.rest.rewritten if self._details.rewritten is None else self._details.rewritten)

    @cached_property
    def notes(self) -> list[str]:
        return list(self._answer.rest.notes)

    @property
    def repeatable(self) -> bool:
        drawn = self._details.draws_random
        return not (self._answer.rest.draws_random if drawn is None else drawn)

    @cached_property
    def timings(self) -> Timings:
        return timings(self._answer.rest.timings)

    @cached_property
    def device(self) -> str:
        return self._answer.rest.device

    @cached_property
    def batch_size(self) -> int:
        return self._answer.rest.batch_size

    @cached_property
    def jit(self) -> bool:
        return self._answer.rest.jit

    @cached_property
    def digests(self) -> Digests:
        return Digests(self._answer.rest.digests.graph, self._answer.rest.digests.program)

    def __repr__(self) -> str:
        counts = f"{counted(len(self.overrides), 'override')}, {self.device or 'device unknown'}"
        return short_repr(
            f"<Result outputs: {names_text(self.outputs)}; gradients: {names_text(self.gradients)}; {counts}>"
        )

    def _repr_html_(self) -> str:
        tensors = [("output", name, value) for name, value in self.outputs.items()]
        tensors += [("gradient", name, value) for name, value in self.gradients.items()]
        digests = self.digests
        facts = [
            self.device,
            f"run {self.timings.run * 1e3:.3g} ms",
            "compiled by XLA" if self.jit else "",
            digests.program and f"program {short_digest(digests.program)}",
            digests.graph and f"graph {short_digest(digests.graph)}",
        ]
        return html_block(
            tensors_table("Result", tensors),
            html_line(*facts),
            *(html_line(f"Note: {note}", kind="bad") for note in self.notes),
            tables.resolutions_table(self.overrides),
            tables.default_nodes_line(self.default_gradient_nodes),
        )

    def plot(self, name: str | None = None, *, ax: Axes | None = None) -> Figure:
        """Draws the outputs and gradients, see `gradrule.viz.plot_tensors`.

        Args:
            name: Draw this tensor only.
            ax: Axes to draw one tensor into.

        Returns:
            The figure.

        Raises:
            UnknownTensorError: There is no output or gradient `name`.
            InvalidParamError: `ax` is given for several tensors.
            UnsupportedError: Matplotlib is not installed.
        """
        import gradrule as gr

        return gr.viz.plot_tensors(self, name, ax=ax)


def with_outputs(result: Result, outputs: Mapping[str, Array]) -> Result:
    """Returns a result of which only the outputs differ. The arrays are not copied."""
    found = Result(result._answer, result._details, result._groups)
    found.outputs = outputs
    return found


def gradients_by_x(
    messages: Iterable[evaluate_pb2.Gradient], aliases: Mapping[str, str] | None = None
) -> ByName[Array | Sparse | None]:
    """Decodes gradients by x; None for an x without a gradient. aliases: names of tensors in the result."""
    given = labels(aliases)
    found: ByName[Array | Sparse | None] = ByName(aliases=aliases)
    for gradient in messages:
        x = given.get(bare(gradient.x), gradient.x)
        match gradient.WhichOneof("value"):
            case "dense":
                found[x] = array(gradient.dense)
            case "sparse":
                found[x] = sparse(gradient.sparse)
            case _:
                found[x] = None
    return found


def regrouped(values: ByName[V], groups: Groups) -> ByName[Any]:
    """Returns the values by x; with groups, by group and x."""
    if groups is None:
        return values
    return ByName({group: values.part(names) for group, names in groups.items()})


def timings(message: evaluate_pb2.Timings) -> Timings:
    """Converts durations to seconds."""
    return Timings(*(part.ToNanoseconds() / 1e9 for part in (message.queue, message.compile, message.run)))


def result(data: bytes, groups: Groups = None, aliases: Mapping[str, str] | None = None) -> Result:
    """Decodes the bytes of an answer of Evaluate. aliases: names of tensors in the result."""
    return Result(AnswerReader(labeller(aliases)).read(data), ProgramDetails(aliases), groups)


def resolutions(messages: Iterable[override_pb2.Resolution]) -> list[Resolution]:
    """Decodes resolutions, in order."""
    return [
        Resolution(
            message.node,
            message.op_type,
            message.rule,
            message.label,
            _override_status(message.status),
            message.function,
            tuple(message.nodes),
            message.qualified_name,
        )
        for message in messages
    ]


def _override_status(status: override_pb2.ResolutionStatus.ValueType) -> OverrideStatus:
    # A newer server may send a status that the type does not list.
    return cast(OverrideStatus, override_pb2.ResolutionStatus.Name(status).removeprefix("RESOLUTION_STATUS_").lower())


def specs(messages: Iterable[tensor_pb2.TensorSpec], aliases: Mapping[str, str] | None = None) -> ByName[TensorSpec]:
    """Decodes specs of tensors, by alias or name."""
    given = labels(aliases)
    return ByName({given.get(bare(item.name), item.name): TensorSpec.from_message(item) for item in messages}, aliases)


def array(message: tensor_pb2.Tensor) -> Array:
    """Decodes a tensor to a writable array. Raises `InvalidTensorError`."""
    try:
        return to_numpy(message, writable=True)
    except ValueError as cause:
        raise InvalidTensorError(f"the server's answer: {cause}") from None


def sparse(message: tensor_pb2.SparseTensor) -> Sparse:
    """Decodes a sparse gradient."""
    return Sparse(array(message.values), array(message.indices), array(message.dense_shape))


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Describes what a program would do, without running it.

    Attributes:
        overrides: The rule of each overridden node.
        default_gradient_nodes: Nodes on the path without an override; they keep TensorFlow's gradient.
        findings: All problems of the request; if there are any, the other attributes are empty.
        inputs: Specs of the placeholders to feed, by alias or name.
        outputs: Specs of the fetches, by the names given.
        ys: Specs of the ys, by the names given.
        xs: Specs of the xs, by the names given.
        rewritten: Nodes that rewrites replaced.
        notes: Hints that the request may not compute what is wanted.
        graph: Bytes of the explained GraphDef.
    """

    overrides: list[Resolution]
    default_gradient_nodes: list[str]
    findings: list[Detail]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    ys: Mapping[str, TensorSpec]
    xs: Mapping[str, TensorSpec]
    rewritten: list[str]
    notes: list[str] = field(default_factory=list)
    graph: bytes = field(default=b"", repr=False)

    def __repr__(self) -> str:
        problems = counted(len(self.findings), "finding") if self.findings else "no findings"
        return short_repr(
            f"<Explanation ys: {names_text(self.ys)}; xs: {names_text(self.xs)}; "
            f"{counted(len(self.overrides), 'override')}, {problems}>"
        )

    def _repr_html_(self) -> str:
        if self.findings:
            rows = [(item.reason, item.node, item.message) for item in self.findings]
            return html_block(html_table("Findings: this request would fail", ("reason", "node", "message"), rows))
        kinds = {"input": self.inputs, "output": self.outputs, "y": self.ys, "x": self.xs}
        return html_block(
            tables.specs_table("Explanation", kinds),
            *(html_line(f"Note: {note}", kind="bad") for note in self.notes),
            tables.resolutions_table(self.overrides),
            tables.default_nodes_line(self.default_gradient_nodes),
            self._picture_html(),
        )

    def _picture_html(self) -> str:
        """Returns the picture of a small graph, folded away; those of large graphs would fill the notebook's file."""
        if not self.graph or len(self.graph) > _MAX_DRAWN_GRAPH:
            return html_line("svg() and html() draw the graph" if self.graph else "")
        data = base64.b64encode(self.svg().encode()).decode()
        if len(data) > _MAX_PICTURE:
            return html_line("svg() and html() draw the graph")
        return (
            f'<details><summary>graph</summary><img alt="the graph" src="data:image/svg+xml;base64,{data}"></details>'
        )

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draws how many nodes each rule got, see `gradrule.viz.plot_explanation`; `svg` and `html` draw the graph.

        Args:
            ax: Axes to draw into.

        Raises:
            UnsupportedError: Matplotlib is not installed.
        """
        import gradrule as gr

        return gr.viz.plot_explanation(self, ax=ax)

    def svg(self) -> str:
        """Returns an SVG picture of the graph: folded by scope, nodes coloured by rule, with the path from xs to ys."""
        from gradrule import _picture

        return _picture.draw_svg(self, self.graph)

    def html(self) -> str:
        """Returns the picture as an HTML page in one file, in which scopes fold and nodes can be searched."""
        from gradrule import _picture

        return _picture.draw_html(self, self.graph)

    def raise_for_findings(self) -> None:
        """Raises the error that `evaluate` or `compile` would raise, if there is one."""
        if self.findings:
            first = self.findings[0]
            raise error_for_reason(first.reason, first.message, details=self.findings)


def explanation(
    response: program_pb2.CompileProgramResponse, aliases: Mapping[str, str] | None = None, graph: bytes = b""
) -> Explanation:
    """Decodes the answer of CompileProgram with validate_only.

    aliases: names of tensors in the result. graph: bytes of the explained graph.
    """
    program = response.program
    return Explanation(
        overrides=resolutions(program.overrides),
        default_gradient_nodes=list(program.default_gradient_nodes),
        findings=[Detail(reason_name(item.reason), item.message, item.node, item.field) for item in response.findings],
        inputs=specs(program.inputs, aliases),
        outputs=specs(program.outputs, aliases),
        ys=specs(program.ys, aliases),
        xs=specs(program.xs, aliases),
        rewritten=list(program.rewritten),
        notes=list(program.notes),
        graph=graph,
    )
