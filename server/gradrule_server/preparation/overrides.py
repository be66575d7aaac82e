"""Reads a request's override list: binds rules and params, and prepares selectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2, graph_pb2, override_pb2
from gradrule_server.errors import Finding, GradruleError, did_you_mean
from gradrule_server.graphs import DEFAULT_RULE, OWN_GRADIENT, OverrideSpec
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import NodeLimits, check_parsed_size
from gradrule_server.preparation.references import ResolvedRule, RuleLookup
from gradrule_server.rules import RuleContent
from gradrule_server.rules.catalogue.presets import PRESETS
from gradrule_server.rules.params import ParamTable

INLINE_RULE = "inline"
# Reading stops after this number of findings: an invalid override of two bytes gives a finding of hundreds of bytes.
_MAX_FINDINGS = 500


@dataclass(slots=True)
class OverrideTable:
    """The overrides of a program with their bound rules and params.

    The index of a bound rule is its position in `bound`, which has a rule for each override. `bounds` are the limits
    for rules and params.
    """

    bounds: NodeLimits
    specs: list[OverrideSpec] = field(default_factory=list)
    bound: list[ResolvedRule] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    params: ParamTable = field(init=False)

    def __post_init__(self) -> None:
        self.params = ParamTable(self.bounds)

    def bind(self, rule: ResolvedRule, label: str, *, is_default_label: bool = False) -> int:
        """Adds a rule for an override and returns its index. `is_default_label`: the caller chose no label.

        Defaults are stored as settings, so that programs that differ only in param values share one compiled form.
        """
        index = len(self.bound)
        self.bound.append(rule)
        declared = () if rule.content is None else rule.content.params
        self.params.bind(rule.name, label, declared, is_default_label=is_default_label)
        return index

    def add(self, spec: OverrideSpec) -> None:
        """Adds an override; its rule must be bound before."""
        self.specs.append(spec)
        if spec.rule_index == OWN_GRADIENT:
            self.params.message.default_labels.append(spec.label)

    def add_embedded_rule(self, label: str) -> int:
        """Adds an embedded rule and returns its index; `set_embedded_contents` sets its content later."""
        return self.bind(ResolvedRule(label, None, embedded=True), label)

    def set_embedded_contents(self, rules: Mapping[int, bytes]) -> None:
        """Sets the content of embedded rules, by index."""
        contents: dict[bytes, RuleContent] = {}
        for index, graph_bytes in rules.items():
            label = self.bound[index].name
            try:
                if graph_bytes not in contents:
                    check_parsed_size(graph_bytes, graph_pb2.Graph, self.bounds, field="graph")
                    contents[graph_bytes] = RuleContent(graph_bytes=graph_bytes, embedded=True)
            except GradruleError as cause:
                findings = [
                    Finding(item.reason, f"rule {label!r}, which is embedded in the graph: {item.message}", item.node)
                    for item in cause.findings
                ]
                raise GradruleError(findings) from cause
            self.bound[index] = ResolvedRule(label, contents[graph_bytes], embedded=True)

    def check_rules(self) -> list[Finding]:
        """Returns findings for nodes of the bound rules' graphs that may not run; checks each rule once."""
        contents = {id(rule.content): rule for rule in self.bound if rule.content is not None}
        return [
            Finding(item.reason, f"rule {rule.name!r}: {item.message}", item.node, item.field)
            for rule in contents.values()
            for item in (rule.content.check_nodes(self.bounds) if rule.content is not None else ())
        ]

    def rule_messages(self) -> list[link_pb2.BoundRule]:
        """Returns the messages of the bound rules for the engine."""
        return [_message(rule) for rule in self.bound]


def _message(rule: ResolvedRule) -> link_pb2.BoundRule:
    if rule.content is None:
        return link_pb2.BoundRule(name=rule.name, op_gradient=rule.name)
    if rule.content.embedded:
        return link_pb2.BoundRule(name=rule.name, brought=rule.content.graph_bytes or b"")
    if rule.content.code is not None:
        return link_pb2.BoundRule(name=rule.name, code=rule.content.code)
    return link_pb2.BoundRule(name=rule.name, definition=rule.content.to_definition())


def rule_names(overrides: Iterable[override_pb2.GradientOverride]) -> list[str]:
    """Returns the names of all rules in the overrides, each once, in order."""
    names: dict[str, None] = {}
    for override in overrides:
        choice = override.WhichOneof("choice")
        if choice == "rule":
            names[override.rule] = None
        elif choice == "preset" and override.preset.name in PRESETS:
            names.update(dict.fromkeys(entry.rule for entry in PRESETS[override.preset.name].overrides))
    return [name for name in names if name not in ("", DEFAULT_RULE)]


def read_overrides(
    overrides: Sequence[override_pb2.GradientOverride], lookup: RuleLookup, bounds: NodeLimits
) -> OverrideTable:
    """Resolves the rule and params of each override; the result's `findings` list all errors."""
    table = OverrideTable(bounds)
    # Read equal inline rules of several overrides once.
    inline: dict[bytes, RuleContent] = {}
    for index, override in enumerate(overrides):
        if len(table.findings) >= _MAX_FINDINGS:
            break
        where = f"overrides[{index}]"
        if override.WhichOneof("choice") == "preset":
            _add_preset(table, override, index, lookup)
            continue
        try:
            rule = _read_rule(override, lookup, bounds, inline, where)
        except GradruleError as cause:
            table.findings += [
                Finding(item.reason, item.message, item.node, f"{where}.rule") for item in cause.findings
            ]
            continue
        label = override.label or _default_label(override.selector)
        bound = _bind(table, rule, label, is_default_label=not override.label)
        if rule is None and override.params:
            table.findings.append(
                Finding(
                    errors_pb2.ERROR_REASON_UNKNOWN_PARAM, "the rule 'default' has no params", field=f"{where}.params"
                )
            )
        elif rule is not None:
            table.findings += table.params.set(table.params.settings, bound, override.params, f"{where}.params")
        table.add(
            OverrideSpec(
                override.selector,
                bound,
                DEFAULT_RULE if rule is None else rule.name,
                label,
                override.optional,
                index,
                every_order=_applies_to_every_order(override),
                part_of_graph=override.part_of_graph,
            )
        )
    return table


def _add_preset(table: OverrideTable, override: override_pb2.GradientOverride, index: int, lookup: RuleLookup) -> None:
    """Adds the overrides of a preset; sets its params for each of its rules that declares them."""
    choice, where = override.preset, f"overrides[{index}]"
    if choice.name not in PRESETS:
        known = sorted(preset.name for preset in PRESETS)
        message = f"there is no preset {choice.name!r}.{did_you_mean(choice.name, known)} Presets: {', '.join(known)}"
        table.findings.append(Finding(errors_pb2.ERROR_REASON_UNKNOWN_RULE, message, field=f"{where}.preset.name"))
        return
    if override.HasField("selector"):
        message = "a preset has its own selectors: omit the selector"
        table.findings.append(Finding(errors_pb2.ERROR_REASON_INVALID_OVERRIDE, message, field=f"{where}.selector"))
    if override.params:
        message = "params of a preset must be in the field `preset.params`"
        table.findings.append(Finding(errors_pb2.ERROR_REASON_UNKNOWN_PARAM, message, field=f"{where}.params"))
    preset = PRESETS[choice.name]
    label = override.label or choice.name
    declared: dict[str, list[int]] = {}
    for entry in preset.overrides:
        rule = None if entry.rule == DEFAULT_RULE else lookup.resolve(entry.rule)
        bound = _bind(table, rule, label)
        name = DEFAULT_RULE
        if rule is not None:
            name = rule.name
            table.findings += table.params.set(table.params.settings, bound, entry.params, f"{where}.preset")
            for param in table.params.message.rules[bound].params:
                declared.setdefault(param.name, []).append(bound)
        table.add(
            OverrideSpec(
                entry.selector,
                bound,
                name,
                label,
                override.optional,
                index,
                is_preset=True,
                every_order=_applies_to_every_order(override),
                is_for_all_layers=preset.is_for_all_layers,
            )
        )
    for name, value in choice.params.items():
        if name not in declared:
            message = (
                f"preset {choice.name!r} has no param {name!r}.{did_you_mean(name, declared)} "
                f"Params: {', '.join(sorted(declared)) or 'none'}"
            )
            table.findings.append(
                Finding(errors_pb2.ERROR_REASON_UNKNOWN_PARAM, message, field=f"{where}.preset.params.{name}")
            )
        for bound in declared.get(name, ()):
            table.findings += table.params.set(table.params.settings, bound, {name: value}, f"{where}.preset.params")


def _applies_to_every_order(override: override_pb2.GradientOverride) -> bool:
    return override.order == override_pb2.OVERRIDE_ORDER_ALL


def _bind(table: OverrideTable, rule: ResolvedRule | None, label: str, *, is_default_label: bool = False) -> int:
    return OWN_GRADIENT if rule is None else table.bind(rule, label, is_default_label=is_default_label)


def _default_label(selector: override_pb2.Selector) -> str:
    return (
        selector.op_type
        or selector.node
        or selector.scope
        or selector.node_regex
        or "+".join(selector.pattern)
        or selector.layer
        or selector.region_name
        or next(iter((*selector.region.outputs, *selector.nodes)), "")
    )


def _read_rule(
    override: override_pb2.GradientOverride,
    lookup: RuleLookup,
    bounds: NodeLimits,
    inline: dict[bytes, RuleContent],
    where: str,
) -> ResolvedRule | None:
    """Returns the rule of an override; None for `default`.

    `inline`: the inline rules read so far, by their bytes; a new inline rule is added.
    """
    choice = override.WhichOneof("choice")
    if choice == "definition":
        key = override.definition.SerializeToString(deterministic=True)
        if key not in inline:
            inline[key] = RuleContent.from_definition(override.definition, bounds)
        return ResolvedRule(INLINE_RULE, inline[key])
    if choice is None or not override.rule:
        raise GradruleError(
            [
                Finding(
                    errors_pb2.ERROR_REASON_INVALID_OVERRIDE,
                    f"{where} names no rule; 'default' is the op's own gradient",
                )
            ]
        )
    return None if override.rule == DEFAULT_RULE else lookup.resolve(override.rule)
