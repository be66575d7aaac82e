"""Which node gets which rule: selectors, in order, first match wins; then the node's own `_gradient_op_type`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradrule import _opdefs
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.errors import GradruleError, did_you_mean
from gradrule_server.graphs.findings import Finding, Findings, Reason, near_name, quote
from gradrule_server.graphs.ir import DIFFERENTIABLE, Node, is_call
from gradrule_server.graphs.library import Library

DEFAULT_RULE = "default"
OWN_GRADIENT = -1
FOREIGN_GRADIENT = -2
GRADIENT_ATTR = "_gradient_op_type"

_FOREIGN = re.compile(r"CustomGradient-\d+")
# TensorFlow's own note on calls for which it had a gradient function at hand: it means the call's own gradient.
_CALL_NOTE = re.compile(r"(Stateful)?PartitionedCall-\d+")
_MAGIC = re.compile(r"[*?]")
_MAX_GLOB = 1000


@dataclass(frozen=True, slots=True)
class OverrideSpec:
    """One override: which nodes (empty: any), which rule (-1: `default`). `index`: its place in the request."""

    op_type: str = ""
    node: str = ""
    scope: str = ""
    rule_index: int = OWN_GRADIENT
    rule_name: str = DEFAULT_RULE
    label: str = ""
    optional: bool = False
    index: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """What a node's `_gradrule_mark` counts: index of the rule (-1 `default`, -2 foreign), public name of the node."""

    rule: int
    node: str
    foreign: str = ""


@dataclass(slots=True)
class Match:
    """A node that an override took.

    `mark` is None where no gradient can pass: the node is pruned, or inside a call that an override took as a whole.
    `override`: the spec's `index`, -1 for the node's own attribute. `function`: where in the uploaded graph the node
    lies. `differentiable`: whether its types have gradients.
    """

    rule: int
    node: str
    op_type: str
    function: str
    rule_name: str
    label: str
    override: int
    differentiable: bool
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """A node that names a gradient of another process, and that no override took."""

    node: str
    name: str


@dataclass(slots=True)
class _Selector:
    spec: OverrideSpec
    prefix: str
    pattern: re.Pattern[str] | None
    exact: str
    taken: int = 0


@dataclass(slots=True)
class Resolver:
    """Decides node by node. `known_rule`: index of the rule of a name, for an op type; UNKNOWN_RULE if there is none."""

    specs: Sequence[OverrideSpec]
    known_rule: Callable[[str, str], int]
    differentiates: bool
    findings: Findings
    _selectors: list[_Selector] = field(default_factory=list)
    _by_op: dict[str, list[_Selector]] = field(default_factory=dict)
    _rules: dict[tuple[str, str], int | GradruleError] = field(default_factory=dict)
    _seen: list[tuple[str, str, str]] = field(default_factory=list)
    _unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for spec in self.specs:
            is_glob = bool(_MAGIC.search(spec.node))
            if len(spec.node) > _MAX_GLOB:
                message = f"Override {quote(spec.label)}: its node pattern is longer than {_MAX_GLOB} characters."
                self.findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, field=_field(spec))
                continue
            prefix = spec.scope.rstrip("/") + "/" if spec.scope else ""
            pattern = compile_glob(spec.node) if is_glob else None
            self._selectors.append(_Selector(spec, prefix, pattern, "" if is_glob else spec.node))

    def resolve(self, node: Node, name: str, types: Sequence[int], function: str) -> Match | Foreign | None:
        """Which rule the node gets; `name`: its public name, `types`: of its inputs."""
        candidates = self._by_op.get(node.op)
        if candidates is None:
            candidates = [s for s in self._selectors if s.spec.op_type in ("", node.op)]
            self._by_op[node.op] = candidates
        for selector in candidates:
            if _holds(selector, name):
                selector.taken += 1
                spec = selector.spec
                self._note(node, name, spec.label)
                return _match(node, name, types, function, spec.rule_index, spec.rule_name, spec.label, spec.index)
        self._note(node, name, "")
        value = node.attrs.get(GRADIENT_ATTR)
        return self._own_wish(node, name, types, function, value) if value is not None else None

    def unmatched(self) -> list[Finding]:
        """UNMATCHED_OVERRIDE for every override that took no node and is not optional."""
        return [self._unmatched(s) for s in self._selectors if not s.taken and not s.spec.optional]

    def _note(self, node: Node, name: str, taken_by: str) -> None:
        if self._selectors:
            self._seen.append((node.op, name, taken_by))

    def _own_wish(
        self, node: Node, name: str, types: Sequence[int], function: str, value: AttrValue
    ) -> Match | Foreign | None:
        wish = value.s.decode(errors="replace")
        if not wish or (is_call(node) and _CALL_NOTE.fullmatch(wish)):
            return None
        if (wish, node.op) not in self._rules:
            self._rules[wish, node.op] = self._rule(wish, node.op)
        rule = self._rules[wish, node.op]
        if not isinstance(rule, GradruleError):
            return _match(node, name, types, function, rule, wish, node.op, -1)
        if _FOREIGN.fullmatch(wish):
            return Foreign(name, wish)
        if self.differentiates and wish not in self._unknown:
            self._unknown.add(wish)
            message = f"Node {quote(name)} wants the rule {quote(wish)} ({GRADIENT_ATTR}): {rule.message}"
            self.findings.add(Reason.ERROR_REASON_UNKNOWN_RULE, message, name)
        return None

    def _rule(self, wish: str, op_type: str) -> int | GradruleError:
        if wish == DEFAULT_RULE:
            return OWN_GRADIENT
        try:
            return self.known_rule(wish, op_type)
        except GradruleError as cause:
            return cause

    def _unmatched(self, selector: _Selector) -> Finding:
        spec = selector.spec
        shadowing: dict[str, int] = {}
        for op_type, name, taken_by in self._seen:
            if spec.op_type in ("", op_type) and _holds(selector, name):
                shadowing[taken_by] = shadowing.get(taken_by, 0) + 1
        if shadowing:
            count = sum(shadowing.values())
            nodes = f"all {count} nodes that it matches are" if count > 1 else "the only node that it matches is"
            by = ", ".join(quote(label) for label in shadowing)
            message = f"Override {quote(spec.label)} takes no node: {nodes} taken by an earlier override ({by})."
        else:
            message = f"Override {quote(spec.label)} matches no node of the graph: {self._missing(selector)}"
        return Finding(Reason.ERROR_REASON_UNMATCHED_OVERRIDE, message, field=_field(spec))

    def _missing(self, selector: _Selector) -> str:
        """Which condition fails, and what there is instead."""
        spec = selector.spec
        op_types = sorted({op_type for op_type, _, _ in self._seen})
        if spec.op_type and spec.op_type not in op_types:
            return f"there is no {spec.op_type}.{did_you_mean(spec.op_type, op_types)}"
        names = [name for op_type, name, _ in self._seen if spec.op_type in ("", op_type)]
        kind = f"of op type {spec.op_type} " if spec.op_type else ""
        if spec.scope and not any(name.startswith(selector.prefix) for name in names):
            scopes = sorted({name[:slash] for name in names for slash in _slashes(name)})
            return f"no node {kind}has a name that starts with {quote(selector.prefix)}.{near_name(spec.scope, scopes)}"
        if spec.node:
            return f"no node {kind}is named {quote(spec.node)}.{near_name(spec.node, names)}"
        return "the graph has no nodes."


def check_specs(specs: Sequence[OverrideSpec], library: Library, findings: Findings) -> None:
    """INVALID_OVERRIDE for a selector without a condition, UNKNOWN_OP_TYPE for an op type that does not exist."""
    for spec in specs:
        if not (spec.op_type or spec.node or spec.scope):
            message = "The override selects nothing: give at least one of op_type, node and scope ('**' is every node)."
            findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, field=_field(spec))
        if spec.op_type and library.find_op(spec.op_type) is None:
            hint = _opdefs.suggest(spec.op_type, library.names())
            message = f"Override {quote(spec.label)} is for op type {quote(spec.op_type)}, which does not exist.{hint}"
            findings.add(Reason.ERROR_REASON_UNKNOWN_OP_TYPE, message, field=_field(spec))


def compile_glob(glob: str) -> re.Pattern[str]:
    """The pattern as a regular expression: `?` and `*` stay within a part between slashes, `**` crosses them.

    What lies between stars is matched as early as it can be and never again (`(?>…)`): later choices cannot help, and
    trying them would take exponential time.
    """
    blocks = re.split(r"\*{2,}", glob)
    head = _block(blocks[0])
    if len(blocks) == 1:
        return re.compile(head, re.DOTALL)
    middle = "".join(f"(?>.*?{_early(block)})" for block in blocks[1:-1] if block)
    return re.compile(f"{_early(blocks[0])}{middle}.*{_block(blocks[-1])}", re.DOTALL)


def _early(block: str) -> str:
    """Matches a block with `*` as early as possible."""
    first, *rest = block.split("*")
    return _literal(first) + "".join(f"(?>[^/]*?{_literal(part)})" for part in rest)


def _block(block: str) -> str:
    """Matches a block up to the end of the name."""
    first, *rest = block.split("*")
    if not rest:
        return _literal(first)
    early = "".join(f"(?>[^/]*?{_literal(part)})" for part in rest[:-1])
    return f"{_literal(first)}{early}[^/]*{_literal(rest[-1])}"


def _literal(text: str) -> str:
    return re.escape(text).replace(r"\?", "[^/]")


def is_differentiable(node: Node, input_types: Sequence[int]) -> bool:
    """Whether gradients can pass through a node: some output, and some input if there are any, is of such a type."""
    takes = not input_types or any(dtype in DIFFERENTIABLE for dtype in input_types)
    return takes and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())


def _match(
    node: Node, name: str, types: Sequence[int], function: str, rule: int, rule_name: str, label: str, override: int
) -> Match:
    return Match(rule, name, node.op, function, rule_name, label, override, is_differentiable(node, types))


def _holds(selector: _Selector, name: str) -> bool:
    if selector.prefix and not name.startswith(selector.prefix):
        return False
    if selector.pattern is not None:
        return selector.pattern.fullmatch(name) is not None
    return not selector.exact or selector.exact == name


def _slashes(name: str) -> list[int]:
    return [position for position, character in enumerate(name) if character == "/"]


def _field(spec: OverrideSpec) -> str:
    return f"overrides[{spec.index}]"
