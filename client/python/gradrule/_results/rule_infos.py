"""Holds what a server reports about rules and presets, and the results of sampling a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from gradrule._builder.array_html import tensors_table
from gradrule._builder.names import counted
from gradrule._builder.notebook_text import html_block, html_line, html_table, names_text, short_digest, short_repr
from gradrule._builder.rules import Rule
from gradrule._results.call_results import array
from gradrule.common.tensor_codec import Array
from gradrule.v1 import rule_pb2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradrule import Client

RuleKind: TypeAlias = Literal["user", "builtin", "op"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SampleResult:
    """Holds the values that a rule computed for sample values.

    Attributes:
        gradients: By `dx`, `dx1`, …: an array of the shape of that input; None if it is not connected.
        outputs: Outputs of the op, by name; empty if the op did not run.
    """

    gradients: Mapping[str, Array | None]
    outputs: Mapping[str, Array]

    def __repr__(self) -> str:
        return short_repr(
            f"<SampleResult gradients: {names_text(self.gradients)}; outputs: {names_text(self.outputs)}>"
        )

    def _repr_html_(self) -> str:
        tensors: list[tuple[str, str, Any]] = [("output", name, value) for name, value in self.outputs.items()]
        tensors += [("gradient", name, value) for name, value in self.gradients.items()]
        return html_block(tensors_table("Sample of a rule", tensors))

    def plot(self, name: str | None = None, *, ax: Axes | None = None) -> Figure:
        """Draws outputs and gradients, see `gradrule.viz.plot_tensors`.

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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ParamInfo:
    """Describes a param of a rule or preset.

    Attributes:
        name: Name of the param.
        default: A number or an array; None: each use must give a value.
        description: Meaning of the param.
        range: Conditions on the value, such as `> 0, integer`.
    """

    name: str
    default: Any
    description: str
    range: str

    def __repr__(self) -> str:
        return short_repr(f"<ParamInfo {self.name}={self.default!r} {self.range}>")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PresetInfo:
    """Describes a preset, which is a named list of overrides.

    Attributes:
        name: Name of the preset.
        description: What the preset does.
        reference: Its paper.
        overrides: One line for each override.
        params: Params of its rules.
    """

    name: str
    description: str
    reference: str
    overrides: tuple[str, ...]
    params: tuple[ParamInfo, ...]

    def __repr__(self) -> str:
        return short_repr(f"<PresetInfo {self.name!r}: {counted(len(self.overrides), 'override')}>")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RuleInfo:
    """Describes a registered rule.

    Attributes:
        name: Name of the rule.
        kind: `op`, `builtin` or `user`.
        expression: The rule's expression; None for OP rules and for rules that are graphs.
        graph: Bytes of the rule's GraphDef; None for other rules.
        params: Defaults by name; None: each use must give a value.
        description: What the rule is for.
        op_types: Op types that the rule is meant for; empty: any.
        reference: Its paper.
        digest: SHA-256 of the definition, in hex.
        per_sample: Whether the rule treats each example of a batch alone; None: unknown.
        aliases: Other names of the rule.
        formula: What the rule computes, in mathematical notation.
        family: Group of similar rules.
        true_gradient: Whether the rule is the true gradient of the ops in `op_types`.
        hides_builtin: Whether a builtin has the same name; it is then available as `builtin/NAME`.
        param_infos: Descriptions of the params.
        create_time: Seconds since 1970; None for rules that the server brings.
        gradient: The rule for the gradient of this rule; None if it has none.
    """

    name: str
    kind: RuleKind
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

    def __repr__(self) -> str:
        return short_repr(f"<RuleInfo {self.name!r} ({self.kind}): {self.formula or self.expression or ''}>")

    def _repr_html_(self) -> str:
        source = self.formula or self.expression or ("a graph" if self.graph is not None else "TensorFlow's own")
        facts: list[tuple[str, object]] = [
            ("dx", source),
            ("description", self.description),
            ("for ops", ", ".join(self.op_types) or "any"),
            ("source", self.reference),
        ]
        params = [
            (item.name, "required" if item.default is None else item.default, item.range, item.description)
            for item in self.param_infos
        ]
        return html_block(
            html_table(f"Rule {self.name}", ("", ""), [fact for fact in facts if fact[1]]),
            html_table("Params", ("param", "default", "range", "meaning"), params),
            html_line(
                self.kind,
                self.family.replace("_", " "),
                "true gradient" if self.true_gradient else "",
                f"digest {short_digest(self.digest)}" if self.digest else "",
                "plot(client) draws the curve",
            ),
        )

    def plot(self, client: Client, *, ax: Axes | None = None, **options: Any) -> Axes:
        """Draws the rule's curve, see `gradrule.viz.plot_rule`.

        Args:
            client: The synchronous client of the server that runs the rule.
            ax: Axes to draw into.
            **options: Further arguments of `plot_rule`: `op_type`, `params`, `interval`, …

        Raises:
            UnsupportedError: The rule is no function of one number, or Matplotlib is not installed.
            GradruleError: As in `client.sample_rule`.
        """
        import gradrule as gr

        return gr.viz.plot_rule(client, self, ax=ax, **options)


def sample_result(response: rule_pb2.SampleRuleResponse) -> SampleResult:
    """Decodes the answer of SampleRule."""
    return SampleResult(
        {item.name: array(item.value.inline_tensor) if item.HasField("value") else None for item in response.gradients},
        {item.name: array(item.value.inline_tensor) for item in response.outputs},
    )


def rule_info(rule: rule_pb2.Rule) -> RuleInfo:
    """Decodes a rule."""
    definition = rule.definition
    form = definition.WhichOneof("form")
    return RuleInfo(
        name=rule.name.removeprefix("rules/"),
        kind=cast(RuleKind, rule_pb2.RuleKind.Name(rule.kind).removeprefix("RULE_KIND_").lower()),
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
    """Decodes a preset."""
    params = tuple(map(_param_info, preset.params))
    return PresetInfo(preset.name, preset.description, preset.reference, tuple(preset.overrides), params)


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
