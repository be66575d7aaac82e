"""What nodes themselves say of their gradient: the name of a rule, or of a gradient that the graph brings along."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.errors import GradruleError
from gradrule_server.graphs.custom_gradients import CustomGradientNode, gradient_index, read_custom_gradient
from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.ir import GRADIENT_ATTR, Body, Node, is_call
from gradrule_server.graphs.resolution_context import ForeignGradient, Match
from gradrule_server.graphs.selectors import DEFAULT_RULE, OWN_GRADIENT

_FOREIGN = re.compile(r"CustomGradient-\d+")
# TensorFlow's own note on calls for which it had a gradient function at hand: it means the call's own gradient.
_CALL_NOTE = re.compile(r"(Stateful)?PartitionedCall-\d+")


@dataclass(eq=False)
class NodeGradients:
    """Answers what a node's own attributes ask for.

    `known_rule`: index of the rule of a name, for an op type; UNKNOWN_RULE if there is none. `bring`: a new index for a
    gradient of the graph's own, under a label. `gradients`: these, by name. `foreign`: names of gradients that the
    graph registers in a form that is no rule.
    """

    known_rule: Callable[[str, str], int]
    add_embedded_rule: Callable[[str], int]
    gradients: Mapping[str, Body]
    foreign: frozenset[str]
    differentiates: bool
    findings: Findings
    # Index by name and label of a gradient of the graph's own.
    brought: dict[tuple[str, str], int] = field(default_factory=dict)
    # Names of those, each once; it grows while these are looked into.
    asked: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _rules: dict[tuple[str, str], int | GradruleError] = field(default_factory=dict)
    _unknown: set[str] = field(default_factory=set)
    _knots: dict[int, CustomGradientNode | None] = field(default_factory=dict)

    def custom_gradient(self, node: Node, name: str) -> CustomGradientNode | None:
        """How the inputs of a knot are laid out; None for other nodes, and after noting what is wrong with it."""
        if id(node) not in self._knots:
            try:
                self._knots[id(node)] = read_custom_gradient(node)
            except ValueError as cause:
                self._knots[id(node)] = None
                message = f"Node {quote(name)} ({node.op}): {cause}."
                self.findings.add(Reason.ERROR_REASON_INVALID_GRAPH, message, name)
        return self._knots[id(node)]

    def match(self, node: Node, name: str, function: str, differentiable: bool) -> Match | None:
        """The rule that the node asks for, if there is one; UNKNOWN_RULE is noted."""
        wish = _wish(node)
        if not wish:
            return None
        custom_gradient = self.custom_gradient(node, name)
        if wish in self.gradients:
            self._check_results(wish, node, name, custom_gradient)
            label = custom_gradient.region if custom_gradient is not None and custom_gradient.region else wish
            rule = self._brought(wish, label)
            outputs = 0 if custom_gradient is None else custom_gradient.outputs
            return Match(
                rule, name, node.op, function, label, label, -1, differentiable, outputs=outputs, every_order=True
            )
        known = self._rule(wish, node.op)
        if isinstance(known, GradruleError):
            if not self._is_foreign(wish) and self.differentiates and wish not in self._unknown:
                self._unknown.add(wish)
                message = f"Node {quote(name)} wants the rule {quote(wish)} ({GRADIENT_ATTR}): {known.message}"
                self.findings.add(Reason.ERROR_REASON_UNKNOWN_RULE, message, name)
            return None
        match = Match(known, name, node.op, function, wish, node.op, -1, differentiable)
        match.tie(custom_gradient)
        return match

    def foreign_at(self, node: Node, name: str) -> ForeignGradient | None:
        """The gradient of another process that the node names, if it does."""
        wish = _wish(node)
        is_foreign = (
            self._is_foreign(wish)
            and wish not in self.gradients
            and isinstance(self._rule(wish, node.op), GradruleError)
        )
        return ForeignGradient(name, wish) if is_foreign else None

    def _is_foreign(self, wish: str) -> bool:
        return wish in self.foreign or _FOREIGN.fullmatch(wish) is not None

    def _brought(self, wish: str, label: str) -> int:
        if (wish, label) not in self.brought:
            self.brought[wish, label] = self.add_embedded_rule(label)
            if wish not in self._seen:
                self._seen.add(wish)
                self.asked.append(wish)
        return self.brought[wish, label]

    def _check_results(self, wish: str, node: Node, name: str, custom_gradient: CustomGradientNode | None) -> None:
        """RULE_ARITY where the gradient gives something for an input that it cannot be for."""
        count = len(node.inputs) if custom_gradient is None else custom_gradient.inputs
        beyond = [result for result in self.gradients[wish].result_names if gradient_index(result) >= count]
        if beyond:
            what = "inputs" if custom_gradient is None else "inputs of its region"
            message = (
                f"Node {quote(name)} ({node.op}): its gradient {quote(wish)} gives {beyond[0]}, but it has {count}"
            )
            message += f" {what}."
            self.findings.add(Reason.ERROR_REASON_RULE_ARITY, message, name)

    def _rule(self, wish: str, op_type: str) -> int | GradruleError:
        if (wish, op_type) not in self._rules:
            try:
                self._rules[wish, op_type] = OWN_GRADIENT if wish == DEFAULT_RULE else self.known_rule(wish, op_type)
            except GradruleError as cause:
                self._rules[wish, op_type] = cause
        return self._rules[wish, op_type]


def _wish(node: Node) -> str:
    value: AttrValue | None = node.attrs.get(GRADIENT_ATTR)
    wish = "" if value is None else value.s.decode(errors="replace")
    return "" if is_call(node) and _CALL_NOTE.fullmatch(wish) else wish
