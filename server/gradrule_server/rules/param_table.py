"""Resolves the params of a program's bound rules: defaults, values of overrides, and values of a call."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import Finding, GradruleError, did_you_mean
from gradrule_server.policy import NodeLimits, tensor_fault
from gradrule_server.rules.params import Param


class Setting(NamedTuple):
    """The value of a param of a bound rule; `rule` is the index of the rule."""

    rule: int
    name: str
    value: rule_pb2.ParamValue


@dataclass(frozen=True, slots=True)
class BoundParams:
    """The declared params of a bound rule; `name` is the name of the rule, `label` the label of the override."""

    name: str
    label: str
    params: Sequence[Param] = ()

    @property
    def declared(self) -> dict[str, Param]:
        """Returns the params by name."""
        return {param.name: param for param in self.params}


@dataclass(slots=True)
class ParamTable:
    """Sets and returns the params of a program's bound rules.

    Attributes:
        bounds: Limits for tensors.
        rules: The bound rules; other attributes refer to them by index.
        settings: The values that do not depend on a call, by index of the rule and name of the param.
        default_labels: Labels of overrides whose rule is `default`, which has no params.
    """

    bounds: NodeLimits
    rules: list[BoundParams] = field(default_factory=list)
    settings: dict[tuple[int, str], rule_pb2.ParamValue] = field(default_factory=dict)
    default_labels: set[str] = field(default_factory=set)

    def call_settings(
        self, params: Mapping[str, Mapping[str, rule_pb2.ParamValue]], used: Container[int]
    ) -> list[Setting]:
        """Returns the params of one call for the rules in `used`; values of the call replace values of the overrides.

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
                f"rule {bound.name!r} of override {bound.label!r} needs param {param.name!r}: it has no default",
                field="params",
            )
            for index, bound in enumerate(self.rules)
            if index in used
            for param in bound.params
            if (index, param.name) not in settings
        ]
        if missing:
            raise GradruleError(missing)
        return [Setting(rule, name, value) for (rule, name), value in settings.items() if rule in used]

    def set(
        self,
        settings: dict[tuple[int, str], rule_pb2.ParamValue],
        index: int,
        values: Mapping[str, rule_pb2.ParamValue],
        field: str,
    ) -> list[Finding]:
        """Sets params of one bound rule; returns findings for invalid ones.

        Args:
            settings: The values, which are updated.
            index: Index of the bound rule.
            values: New values by name of the param.
            field: The field of the request that holds the values.
        """
        bound = self.rules[index]
        declared = bound.declared
        findings: list[Finding] = []
        for name, value in values.items():
            if name not in declared:
                findings.append(
                    Finding(
                        errors_pb2.ERROR_REASON_UNKNOWN_PARAM,
                        f"rule {bound.name!r} has no param {name!r}.{did_you_mean(name, declared)} "
                        f"Params: {', '.join(declared) or 'none'}",
                        field=f"{field}.{name}",
                    )
                )
                continue
            # Check the size first, because a few bytes can declare a tensor of any size.
            fault = tensor_fault(value.tensor, self.bounds) if value.WhichOneof("value") == "tensor" else None
            if fault:
                message = f"param {name!r} {fault[1]}"
                findings.append(Finding(errors_pb2.ERROR_REASON_INVALID_PARAM, message, field=f"{field}.{name}"))
                continue
            try:
                declared[name].check(value, f"{field}.{name}")
            except GradruleError as cause:
                findings += cause.findings
            else:
                settings[index, name] = value
        return findings

    def _set_by_label(
        self,
        settings: dict[tuple[int, str], rule_pb2.ParamValue],
        label: str,
        values: Mapping[str, rule_pb2.ParamValue],
    ) -> list[Finding]:
        indices = [index for index, bound in enumerate(self.rules) if bound.label == label]
        where = f"params[{label!r}]"
        if not indices:
            if label in self.default_labels:
                message = f"params name the label {label!r}, whose rule is 'default', which has no params"
            else:
                message = _unknown_label(label, {bound.label for bound in self.rules})
            return [Finding(errors_pb2.ERROR_REASON_UNKNOWN_PARAM, message, field=where)]
        # Overrides may share a label; set the value for each of their rules that has the param.
        declared = {index: self.rules[index].declared for index in indices}
        findings: list[Finding] = []
        for name, value in values.items():
            meant = [index for index in indices if name in declared[index]] or indices[:1]
            for index in meant:
                findings += self.set(settings, index, {name: value}, where)
        return findings


def _unknown_label(label: str, known: Iterable[str]) -> str:
    labels = sorted(known)
    return (
        f"params name the label {label!r}, which no override has.{did_you_mean(label, labels)} "
        f"Labels: {', '.join(map(repr, labels)) or 'none'}"
    )
