"""Holds what a server reports about rules and presets, and the results of sampling a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradrule._builder.rules import Rule
from gradrule._results.call_results import array
from gradrule.common.tensor_codec import Array
from gradrule.v1 import rule_pb2


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
