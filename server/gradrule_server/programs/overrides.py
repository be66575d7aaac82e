"""From a request's override list to bound rules, selectors and param settings."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2, override_pb2, rule_pb2
from gradrule_server.errors import Finding, GradruleError, did_you_mean
from gradrule_server.graphs import OverrideSpec
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.rule_lookup import ResolvedRule, RuleLookup
from gradrule_server.rules import RuleContent, write_param_value

DEFAULT_RULE = "default"
INLINE_RULE = "inline"
_OWN_GRADIENT = -1


@dataclass(frozen=True, slots=True)
class BoundOverride:
    """A rule as one override uses it."""

    rule: ResolvedRule
    label: str


@dataclass(slots=True)
class OverrideTable:
    """All that a program's overrides come to. A bound rule's index is its place in `bound`."""

    specs: list[OverrideSpec] = field(default_factory=list)
    bound: list[BoundOverride] = field(default_factory=list)
    settings: dict[tuple[int, str], rule_pb2.ParamValue] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def bind(self, rule: ResolvedRule, label: str) -> int:
        """Adds a rule for an override; returns its index.

        Defaults are settings like any others: programs that differ only in values share one compiled form.
        """
        index = len(self.bound)
        self.bound.append(BoundOverride(rule, label))
        for param in rule.content.params if rule.content is not None else ():
            if param.default is not None:
                self.settings[index, param.name] = write_param_value(param.default)
        return index

    def messages(self) -> list[link_pb2.BoundRule]:
        """The bound rules as the engine takes them."""
        return [
            link_pb2.BoundRule(name=bound.rule.name, op_gradient=bound.rule.name)
            if bound.rule.content is None
            else link_pb2.BoundRule(name=bound.rule.name, definition=bound.rule.content.to_definition())
            for bound in self.bound
        ]

    def call_settings(
        self, params: Mapping[str, Mapping[str, rule_pb2.ParamValue]], used: Container[int]
    ) -> list[link_pb2.ParamSetting]:
        """The params of one call for the rules in `used`: the overrides' values, then those by label.

        Raises UNKNOWN_PARAM, MISSING_PARAM, INVALID_PARAM.
        """
        settings = self.settings
        if params:
            settings = dict(settings)
            findings: list[Finding] = []
            for label, values in params.items():
                findings += self._set_by_label(settings, label, values)
            if findings:
                raise GradruleError(findings)
        missing = [
            Finding(
                errors_pb2.ERROR_REASON_MISSING_PARAM,
                f"rule {bound.rule.name!r} of override {bound.label!r} needs param {param.name!r}: it has no default",
                field="params",
            )
            for index, bound in enumerate(self.bound)
            if bound.rule.content is not None and index in used
            for param in bound.rule.content.params
            if (index, param.name) not in settings
        ]
        if missing:
            raise GradruleError(missing)
        return [
            link_pb2.ParamSetting(rule=rule, name=name, value=value)
            for (rule, name), value in settings.items()
            if rule in used
        ]

    def _set_by_label(
        self,
        settings: dict[tuple[int, str], rule_pb2.ParamValue],
        label: str,
        values: Mapping[str, rule_pb2.ParamValue],
    ) -> list[Finding]:
        indices = [index for index, bound in enumerate(self.bound) if bound.label == label]
        if not indices:
            labels = sorted({bound.label for bound in self.bound})
            return [
                Finding(
                    errors_pb2.ERROR_REASON_UNKNOWN_PARAM,
                    f"params name the label {label!r}, which no override has.{did_you_mean(label, labels)} "
                    f"Labels: {', '.join(map(repr, labels)) or 'none'}",
                    field=f"params[{label!r}]",
                )
            ]
        # Overrides may share a label, and a rule that lacks the param is not the one that is meant.
        declared = {index: self._declared(index) for index in indices}
        findings: list[Finding] = []
        for name, value in values.items():
            meant = [index for index in indices if name in declared[index]] or indices[:1]
            for index in meant:
                findings += self.set_params(settings, index, {name: value}, f"params[{label!r}]")
        return findings

    def _declared(self, index: int) -> list[str]:
        content = self.bound[index].rule.content
        return [] if content is None else [param.name for param in content.params]

    def set_params(
        self,
        settings: dict[tuple[int, str], rule_pb2.ParamValue],
        index: int,
        values: Mapping[str, rule_pb2.ParamValue],
        field: str,
    ) -> list[Finding]:
        """Sets params of one bound rule; returns what is wrong with them."""
        rule, declared = self.bound[index].rule, self._declared(index)
        findings: list[Finding] = []
        for name, value in values.items():
            if name not in declared:
                findings.append(
                    Finding(
                        errors_pb2.ERROR_REASON_UNKNOWN_PARAM,
                        f"rule {rule.name!r} has no param {name!r}.{did_you_mean(name, declared)} "
                        f"Params: {', '.join(declared) or 'none'}",
                        field=f"{field}.{name}",
                    )
                )
            elif value.WhichOneof("value") is None:
                findings.append(
                    Finding(
                        errors_pb2.ERROR_REASON_INVALID_PARAM, f"param {name!r} holds no value", field=f"{field}.{name}"
                    )
                )
            else:
                settings[index, name] = value
        return findings


def read_overrides(overrides: Sequence[override_pb2.Override], lookup: RuleLookup) -> OverrideTable:
    """Resolves every override's rule and params; what is wrong is collected in `findings`."""
    table = OverrideTable()
    for index, override in enumerate(overrides):
        selector = override.selector
        label = override.label or selector.op_type or selector.node or selector.scope
        where = f"overrides[{index}]"
        try:
            rule = _rule_of(override, lookup, where)
        except GradruleError as cause:
            table.findings += [
                Finding(item.reason, item.message, item.node, f"{where}.rule") for item in cause.findings
            ]
            continue
        if rule is None:
            rule_index, rule_name = _OWN_GRADIENT, DEFAULT_RULE
            if override.params:
                table.findings.append(
                    Finding(
                        errors_pb2.ERROR_REASON_UNKNOWN_PARAM,
                        "the rule 'default' has no params",
                        field=f"{where}.params",
                    )
                )
        else:
            rule_index, rule_name = table.bind(rule, label), rule.name
            table.findings += table.set_params(table.settings, rule_index, override.params, f"{where}.params")
        table.specs.append(
            OverrideSpec(
                op_type=selector.op_type,
                node=selector.node,
                scope=selector.scope,
                rule_index=rule_index,
                rule_name=rule_name,
                label=label,
                optional=override.optional,
                index=index,
            )
        )
    return table


def _rule_of(override: override_pb2.Override, lookup: RuleLookup, where: str) -> ResolvedRule | None:
    choice = override.WhichOneof("choice")
    if choice == "definition":
        return ResolvedRule(INLINE_RULE, RuleContent.from_definition(override.definition))
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
