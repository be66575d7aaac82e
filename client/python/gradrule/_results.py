"""Answers, decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np

from gradrule._answers import Answer, AnswerReader, labeller, labels
from gradrule._handles import TensorHandle, as_tensor
from gradrule._names import bare, near
from gradrule._rules import Rule
from gradrule._specs import TensorSpec
from gradrule.common.tensor_codec import Array, to_numpy
from gradrule.errors import Detail, InvalidTensorError, of_reason, reason_name
from gradrule.v1 import evaluate_pb2, override_pb2, program_pb2, rule_pb2, tensor_pb2

V = TypeVar("V")

Groups: TypeAlias = "Mapping[str, list[str]] | None"
"""Names of xs by group; None where there are no groups."""


class ByName(dict[str, V]):
    """Values by tensor, under the names as given. Keys may be handles or nodes of one output too, and `y` is `y:0`.

    aliases: further names of tensors; a value is found by any name of its tensor.
    """

    def __init__(self, values: Mapping[str, V] | None = None, aliases: Mapping[str, str] | None = None) -> None:
        super().__init__(values or {})
        self._aliases = dict(aliases or {})

    def part(self, names: Iterable[str]) -> ByName[V]:
        """The values of these names, under them."""
        return ByName({name: self[name] for name in names}, self._aliases)

    def __missing__(self, key: Any) -> V:
        found = self._own_key(key)
        if found is None:
            key = as_tensor(key)
            name = key.name if isinstance(key, TensorHandle) else str(key)
            raise KeyError(f"{name}: there is {', '.join(map(repr, self)) or 'nothing'}.{near(name, self)}")
        return dict.__getitem__(self, found)

    def __contains__(self, key: object) -> bool:
        return self._own_key(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a tensor, or the default."""
        found = self._own_key(key)
        return default if found is None else dict.__getitem__(self, found)

    def _own_key(self, key: object) -> str | None:
        key = as_tensor(key)
        name = key.name if isinstance(key, TensorHandle) else key
        if not isinstance(name, str):
            return None
        candidates = (name, bare(name), f"{bare(name)}:0")
        found = next((candidate for candidate in candidates if dict.__contains__(self, candidate)), None)
        if found is not None or not self._aliases:
            return found
        tensor = self._tensor(name)
        return next((key for key in self if self._tensor(key) == tensor), None)

    def _tensor(self, name: str) -> str:
        return bare(self._aliases.get(name, name))


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """A gradient that is nonzero only in some slices along axis 0. Slices that share an index add up.

    values: (n, …). indices: (n). dense_shape: (rank).
    """

    values: Array
    indices: Array
    dense_shape: Array

    def to_dense(self) -> Array:
        """The whole gradient, of shape `dense_shape`."""
        dense: Array = np.zeros(tuple(int(size) for size in self.dense_shape), self.values.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """`to_dense`, for NumPy's functions."""
        if copy is False:
            raise ValueError("a sparse gradient becomes an array only as a copy")
        dense = self.to_dense()
        return dense if dtype is None else dense.astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class Resolution:
    """Which rule a node got.

    node: nested ones as `call/inner`. rule: its name, `default`, or `inline`. label: the override's.
    status: `active`, `off_path` or `not_differentiable`. function: the function that the node lies in, or empty.
    nodes: all nodes of a pattern or region; empty for a single node. With label `no_gradient` the rule is what the
    policy of that name did.
    """

    node: str
    op_type: str
    rule: str
    label: str
    status: str
    function: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds."""

    queue: float
    compile: float
    run: float


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 in hex, of the graph's bytes and of the program."""

    graph: str
    program: str


class Result:
    """What an evaluation gives. Each part is read from the answer when it is used first.

    outputs: arrays by fetch. gradients: by x (by group and x, where xs were given in groups) an array, a `Sparse`, or
    None where there is none; `gradient_kinds` tells why, by x: `dense`, `sparse`, `unconnected`, `not_differentiable`.
    overrides: which node got which rule. default_gradient_nodes: nodes on the path that no override took; they keep
    TensorFlow's gradient. rewritten: nodes that rewrites replaced. batch_size: examples of all calls that the server
    ran together, this one's included; 0: it ran alone. jit: whether XLA computed it.
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
    def gradient_kinds(self) -> Mapping[str, str]:
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
        names = (
            "outputs",
            "gradients",
            "overrides",
            "default_gradient_nodes",
            "timings",
            "device",
            "digests",
            "rewritten",
        )
        return f"Result({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


@dataclass(frozen=True, slots=True)
class ProgramDetails:
    """What is known of a program before its answers come.

    aliases: names of tensors in the result. The rest was in the answer to CompileProgram, so that later answers
    leave it out; None: it is in the answer.
    """

    aliases: Mapping[str, str] | None = None
    overrides: Sequence[Resolution] | None = None
    default_gradient_nodes: Sequence[str] | None = None
    rewritten: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a program would be, without running it. `findings` lists all that is wrong; then the rest is empty.

    graph: the GraphDef's bytes that were explained.
    """

    overrides: list[Resolution]
    default_gradient_nodes: list[str]
    findings: list[Detail]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    ys: Mapping[str, TensorSpec]
    xs: Mapping[str, TensorSpec]
    rewritten: list[str]
    graph: bytes = field(default=b"", repr=False)

    def svg(self) -> str:
        """The graph as an SVG picture: folded by scope, nodes coloured by rule, the path from xs to ys drawn."""
        from gradrule import _picture

        return _picture.draw_svg(self, self.graph)

    def html(self) -> str:
        """The same as a page in one file, in which scopes fold and nodes can be searched."""
        from gradrule import _picture

        return _picture.draw_html(self, self.graph)

    def raise_for_findings(self) -> None:
        """Raises the error that `evaluate` or `compile` would raise, if there is one."""
        if self.findings:
            first = self.findings[0]
            raise of_reason(first.reason, first.message, details=self.findings)


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """What a rule gives. gradients: by `dx`, `dx1`, …, None where not connected. outputs: the op's, where it ran."""

    gradients: Mapping[str, Array | None]
    outputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True, eq=False)
class ParamInfo:
    """A param: its default (None: a value must be given), meaning, and range: conditions such as `> 0, integer`."""

    name: str
    default: Any
    description: str
    range: str


@dataclass(frozen=True, slots=True, eq=False)
class PresetInfo:
    """A preset: a named list of overrides, one line each."""

    name: str
    description: str
    reference: str
    overrides: tuple[str, ...]
    params: tuple[ParamInfo, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RuleInfo:
    """A rule of the registry.

    kind: `op`, `builtin` or `user`. expression: None for OP rules and rules that are graphs. params: defaults by name,
    None where a value must be given; `param_infos` tells more. per_sample: None where it is not known. formula: what it
    computes, for people. true_gradient: whether it is the true gradient of the ops in op_types. hides_builtin: whether
    a builtin of the name is now to be had as `builtin/NAME` only. gradient: the rule for its own gradient, if it
    carries one.
    """

    name: str
    kind: str
    expression: str | None
    graph: bytes | None
    params: Mapping[str, Any]
    description: str
    op_types: tuple[str, ...]
    reference: str
    digest: str
    per_sample: bool | None
    aliases: tuple[str, ...]
    formula: str
    family: str
    true_gradient: bool
    hides_builtin: bool
    param_infos: tuple[ParamInfo, ...]
    create_time: float | None = field(default=None)
    gradient: Rule | None = field(default=None)


def gradients_by_x(
    messages: Iterable[evaluate_pb2.Gradient], aliases: Mapping[str, str] | None = None
) -> ByName[Array | Sparse | None]:
    """Gradients; None where there is none. aliases: names of tensors in the result."""
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
    """Values by x; with groups, by group and x."""
    if groups is None:
        return values
    return ByName({group: values.part(names) for group, names in groups.items()})


def timings(message: evaluate_pb2.Timings) -> Timings:
    """Times in seconds."""
    return Timings(*(part.ToNanoseconds() / 1e9 for part in (message.queue, message.compile, message.run)))


def result(data: bytes, groups: Groups = None, aliases: Mapping[str, str] | None = None) -> Result:
    """From the bytes of an answer of Evaluate. aliases: names of tensors in the result."""
    return Result(AnswerReader(labeller(aliases)).read(data), ProgramDetails(aliases), groups)


def explanation(
    response: program_pb2.CompileProgramResponse, aliases: Mapping[str, str] | None = None, graph: bytes = b""
) -> Explanation:
    """From the answer of CompileProgram with validate_only.

    aliases: names of tensors in the result. graph: the bytes that were asked about.
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
        graph=graph,
    )


def sample_result(response: rule_pb2.SampleRuleResponse) -> SampleResult:
    """From the answer of SampleRule."""
    return SampleResult(
        {item.name: array(item.value.inline_tensor) if item.HasField("value") else None for item in response.gradients},
        {item.name: array(item.value.inline_tensor) for item in response.outputs},
    )


def rule_info(rule: rule_pb2.Rule) -> RuleInfo:
    """From a rule's message."""
    definition = rule.definition
    form = definition.WhichOneof("form")
    return RuleInfo(
        name=rule.name.removeprefix("rules/"),
        kind=rule_pb2.RuleKind.Name(rule.kind).removeprefix("RULE_KIND_").lower(),
        expression=definition.expression if form == "expression" else None,
        graph=_graph_bytes(definition.graph) if form == "graph" else None,
        params={param.name: _param_default(param) for param in definition.params},
        description=rule.description,
        op_types=tuple(rule.op_types),
        reference=rule.reference,
        digest=rule.digest,
        per_sample=rule.per_sample if rule.HasField("per_sample") else None,
        aliases=tuple(rule.aliases),
        formula=rule.formula,
        family=rule.family,
        true_gradient=rule.true_gradient,
        hides_builtin=rule.hides_builtin,
        param_infos=tuple(map(_param_info, definition.params)),
        create_time=rule.create_time.ToNanoseconds() / 1e9 if rule.HasField("create_time") else None,
        gradient=_rule(definition.gradient) if definition.HasField("gradient") else None,
    )


def _rule(definition: rule_pb2.RuleDefinition) -> Rule:
    is_graph = definition.WhichOneof("form") == "graph"
    return Rule(
        None if is_graph else definition.expression,
        graph=_graph_bytes(definition.graph) if is_graph else None,
        params={param.name: _param_default(param) for param in definition.params},
        gradient=_rule(definition.gradient) if definition.HasField("gradient") else None,
    )


def preset_info(preset: rule_pb2.Preset) -> PresetInfo:
    """From a preset's message."""
    params = tuple(map(_param_info, preset.params))
    return PresetInfo(preset.name, preset.description, preset.reference, tuple(preset.overrides), params)


def resolutions(messages: Iterable[override_pb2.Resolution]) -> list[Resolution]:
    """From the messages, in their order."""
    return [
        Resolution(
            message.node,
            message.op_type,
            message.rule,
            message.label,
            override_pb2.ResolutionStatus.Name(message.status).removeprefix("RESOLUTION_STATUS_").lower(),
            message.function,
            tuple(message.nodes),
        )
        for message in messages
    ]


def specs(messages: Iterable[tensor_pb2.TensorSpec], aliases: Mapping[str, str] | None = None) -> ByName[TensorSpec]:
    """Specs by alias or name."""
    given = labels(aliases)
    return ByName({given.get(bare(item.name), item.name): TensorSpec.of(item) for item in messages}, aliases)


def array(message: tensor_pb2.Tensor) -> Array:
    """An array that its receiver may change."""
    try:
        return to_numpy(message, writable=True)
    except ValueError as cause:
        raise InvalidTensorError(f"the server's answer: {cause}") from None


def sparse(message: tensor_pb2.SparseTensor) -> Sparse:
    """A sparse gradient."""
    return Sparse(array(message.values), array(message.indices), array(message.dense_shape))


def _graph_bytes(source: rule_pb2.GraphSource) -> bytes:
    if source.WhichOneof("source") == "inline_graph":
        return source.inline_graph.SerializeToString(deterministic=True)
    return source.serialized


def _param_info(param: rule_pb2.RuleParam) -> ParamInfo:
    return ParamInfo(param.name, _param_default(param), param.description, param.range)


def _param_default(param: rule_pb2.RuleParam) -> Any:
    kind = param.default_value.WhichOneof("value")
    if kind == "number":
        return param.default_value.number
    return array(param.default_value.tensor) if kind == "tensor" else None
