"""Reads the gradient that a node requests by attribute: a rule, an embedded gradient or a foreign gradient."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.errors import Findings, GradruleError, Reason, quote
from gradrule_server.graphs.ir import (
    GRADIENT_ATTR,
    OPTIONAL_ATTR,
    Body,
    CustomGradientNode,
    Node,
    is_call,
    read_custom_gradient,
)
from gradrule_server.graphs.resolution_context import ForeignGradient, Match
from gradrule_server.graphs.selectors import DEFAULT_RULE, OWN_GRADIENT, CandidateNode

_FOREIGN = re.compile(r"CustomGradient-\d+")
# TensorFlow sets such names on calls with a precomputed gradient function; they stand for the call's own gradient.
_CALL_NOTE = re.compile(r"(Stateful)?PartitionedCall-\d+")


@dataclass(eq=False)
class NodeGradients:
    """Finds the gradients that nodes request by attribute.

    Attributes:
        known_rule: Returns the index of a rule, given its name and an op type. Raises UNKNOWN_RULE.
        add_embedded_rule: Adds an embedded gradient under a label and returns its index.
        gradients: The embedded gradients, by name.
        foreign: Names of gradients that the graph registers, but whose functions lack the signature of a rule.
        differentiates: Whether the program computes a derivative.
        findings: Receives the errors.
        embedded_indices: Indices of embedded gradients, by name and label.
        requested: Names of the requested embedded gradients, each once; grows while they are expanded.
    """

    known_rule: Callable[[str, str], int]
    add_embedded_rule: Callable[[str], int]
    gradients: Mapping[str, Body]
    foreign: frozenset[str]
    differentiates: bool
    findings: Findings
    embedded_indices: dict[tuple[str, str], int] = field(default_factory=dict)
    requested: list[str] = field(default_factory=list)
    _known_names: set[str] = field(default_factory=set)
    _rules: dict[tuple[str, str], int | GradruleError] = field(default_factory=dict)
    _unknown: set[str] = field(default_factory=set)
    _custom_gradients: dict[int, CustomGradientNode | None] = field(default_factory=dict)

    @staticmethod
    def names_gradient(node: Node) -> bool:
        """Returns whether an attribute of the node names its gradient."""
        return bool(_read_gradient_name(node))

    def find_custom_gradient(self, node: Node, name: str) -> CustomGradientNode | None:
        """Returns the layout of a custom-gradient node; None for other nodes and after adding a finding."""
        if id(node) not in self._custom_gradients:
            try:
                self._custom_gradients[id(node)] = read_custom_gradient(node)
            except ValueError as cause:
                self._custom_gradients[id(node)] = None
                message = f"Node {quote(name)} ({node.op}): {cause}."
                self.findings.add(Reason.ERROR_REASON_INVALID_GRAPH, message, name)
        return self._custom_gradients[id(node)]

    def find_match(self, candidate: CandidateNode, differentiable: bool) -> Match | None:
        """Returns the match with the rule that the node requests; None if it requests none. May add UNKNOWN_RULE."""
        node, name = candidate.node, candidate.name
        gradient_name = _read_gradient_name(node)
        if not gradient_name:
            return None
        custom_gradient = self.find_custom_gradient(node, name)
        if gradient_name in self.gradients:
            self._check_results(gradient_name, node, name, custom_gradient)
            label = custom_gradient.region if custom_gradient is not None and custom_gradient.region else gradient_name
            rule = self._embedded_index(gradient_name, label)
            outputs = 0 if custom_gradient is None else custom_gradient.outputs
            resolution = candidate.resolution(label, label)
            return Match(rule, resolution, -1, differentiable, outputs=outputs, every_order=True)
        known = self._rule(gradient_name, node.op)
        if isinstance(known, GradruleError):
            if not self._is_foreign(gradient_name) and self.differentiates and gradient_name not in self._unknown:
                self._unknown.add(gradient_name)
                message = (
                    f"Node {quote(name)} requests the rule {quote(gradient_name)} ({GRADIENT_ATTR}): {known.message}"
                )
                self.findings.add(known.reason, message, name)
            return None
        required = OPTIONAL_ATTR not in node.attrs
        resolution = candidate.resolution(gradient_name, node.op)
        match = Match(known, resolution, -1, differentiable, required=required)
        match.set_custom_gradient(custom_gradient)
        return match

    def find_foreign(self, node: Node, name: str) -> ForeignGradient | None:
        """Returns the foreign gradient that the node names; None if it names none."""
        gradient_name = _read_gradient_name(node)
        is_foreign = (
            self._is_foreign(gradient_name)
            and gradient_name not in self.gradients
            and isinstance(self._rule(gradient_name, node.op), GradruleError)
        )
        return ForeignGradient(name, gradient_name) if is_foreign else None

    def _is_foreign(self, gradient_name: str) -> bool:
        return gradient_name in self.foreign or _FOREIGN.fullmatch(gradient_name) is not None

    def _embedded_index(self, gradient_name: str, label: str) -> int:
        if (gradient_name, label) not in self.embedded_indices:
            self.embedded_indices[gradient_name, label] = self.add_embedded_rule(label)
            if gradient_name not in self._known_names:
                self._known_names.add(gradient_name)
                self.requested.append(gradient_name)
        return self.embedded_indices[gradient_name, label]

    def _check_results(
        self, gradient_name: str, node: Node, name: str, custom_gradient: CustomGradientNode | None
    ) -> None:
        """Adds RULE_ARITY if the gradient has a result for an input that does not exist."""
        count = len(node.inputs) if custom_gradient is None else custom_gradient.inputs
        beyond = [result for result in self.gradients[gradient_name].result_names if gradient_index(result) >= count]
        if beyond:
            what = "inputs" if custom_gradient is None else "inputs of its region"
            message = (
                f"Node {quote(name)} ({node.op}): its gradient {quote(gradient_name)} has the result {beyond[0]}, "
            )
            message += f"but it has {count} {what}."
            self.findings.add(Reason.ERROR_REASON_RULE_ARITY, message, name)

    def _rule(self, gradient_name: str, op_type: str) -> int | GradruleError:
        if (gradient_name, op_type) not in self._rules:
            try:
                self._rules[gradient_name, op_type] = (
                    OWN_GRADIENT if gradient_name == DEFAULT_RULE else self.known_rule(gradient_name, op_type)
                )
            except GradruleError as cause:
                self._rules[gradient_name, op_type] = cause
        return self._rules[gradient_name, op_type]


def _read_gradient_name(node: Node) -> str:
    value: AttrValue | None = node.attrs.get(GRADIENT_ATTR)
    gradient_name = "" if value is None else value.s.decode(errors="replace")
    return "" if is_call(node) and _CALL_NOTE.fullmatch(gradient_name) else gradient_name


def gradient_index(result: str) -> int:
    """Returns the index of the input that the result `dx`, `dx1`, … of a rule belongs to."""
    return int(result.removeprefix("dx") or 0)
