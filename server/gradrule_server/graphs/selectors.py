"""Validates selectors of overrides and compiles them for matching."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import re2

from gradrule.common import op_definitions
from gradrule.v1 import override_pb2
from gradrule_server.errors import Findings, Reason, did_you_mean, quote
from gradrule_server.graphs.ir import Body, Node, Ref
from gradrule_server.graphs.library import Library
from gradrule_server.policy.op_tables import TRAITS, ops_with

MAX_PATTERN = 1000
"""Characters of a glob or regular expression."""

_MAGIC = re.compile(r"[*?]")
_GLOB_PARTS = re.compile(r"\*{2,}|\*|\?")
_GLOB_MEANS = {"?": "[^/]", "*": "[^/]*"}
ANY_TEXT = "(?s:.*)"

STEP = "@step"
BIAS = "@bias"
SUM = "@sum"

LAYER_KINDS = ("@activation", "@batch_norm", "@convolution", "@dense", "@linear", "@normalization")

GROUPS: Mapping[str, frozenset[str]] = {word: ops_with(word) for word in TRAITS if word.startswith("@")}

PLAIN_ADDS = ops_with("plain_add")

DEFAULT_RULE = "default"
OWN_GRADIENT = -1

# Groups that need more than the op type: whether an add is a sum or a bias depends on the xs, and whether a comparison
# is a step depends on the next op.
_PATH_DEPENDENT = frozenset({STEP, BIAS, SUM})
_LOCAL = frozenset({"op_type", "node", "nodes", "scope", "node_regex"})
_ALONE = frozenset({"region", "region_name"})
# Conditions that name op types, of which an override has one at most.
_OP_TYPES = frozenset({"op_type", "pattern", "layer"})
_MAX_PATTERN = 32
# In regular expressions a bracket of a name is escaped.
_BRACKET = r"\["
_BRANCH = re.compile(r"\[[^\[\]/]*\]")
_ANY_BRANCH = r"(?:\[[^\[\]/]*\])?"
_MAX_GLOBS = 1000


@dataclass(frozen=True, slots=True)
class OverrideSpec:
    """One override.

    Attributes:
        selector: The selector.
        rule_index: Index of the rule; -1: `default`.
        rule_name: Name of the rule.
        label: Label of the override.
        optional: Whether it is valid if it matches no node.
        index: Its position in the request.
        part_of_graph: Whether it is valid that earlier overrides take all of its nodes.
        is_preset: Whether it is part of a preset, so that attributes of nodes take precedence.
        every_order: Whether it applies to gradients of gradients too.
        is_for_all_layers: Whether its preset must have a rule for every op with parameters on the path.
    """

    selector: override_pb2.Selector
    rule_index: int = OWN_GRADIENT
    rule_name: str = DEFAULT_RULE
    label: str = ""
    optional: bool = False
    index: int = 0
    is_preset: bool = False
    every_order: bool = False
    is_for_all_layers: bool = False
    part_of_graph: bool = False

    @property
    def made_op_types(self) -> frozenset[str]:
        """Op types of the nodes, among those that gradients create, that it selects.

        Only overrides for every order that select by op type alone select such nodes.
        """
        conditions = [field.name for field, _ in self.selector.ListFields()]
        word = self.selector.op_type
        return (
            op_types_of(word)
            if self.every_order and conditions == ["op_type"] and word not in _PATH_DEPENDENT
            else frozenset()
        )

    @property
    def field(self) -> str:
        """The request field of this override."""
        return f"overrides[{self.index}]"


@dataclass(slots=True, eq=False)
class InlinedCall:
    """A call whose nodes were copied into the body that contains the call.

    Attributes:
        node: The call in the uploaded graph.
        may_match: Whether an override selects it, or an attribute names its gradient.
        arguments: With `may_match`: a node that takes the call's arguments, until `detach` is called.
        inputs: With `may_match`, after `detach`: the arguments.
        results: With `may_match`: the nodes that pass its results on.
    """

    node: Node
    may_match: bool
    arguments: Node | None = None
    inputs: Sequence[Ref] = ()
    results: list[Node] = field(default_factory=list)

    def detach(self) -> None:
        """Reads the arguments from the node that took them, so that they have no other consumers than before.

        Until then, every change of the graph changes the inputs of that node too.
        """
        if self.arguments is not None:
            self.inputs, self.arguments.inputs = tuple(self.arguments.inputs), ()


@dataclass(slots=True, eq=False)
class CandidateNode:
    """A node or call of the expanded graph that overrides can match.

    Attributes:
        name: Public name.
        qualified_name: Public name with the branch behind each loop and branch: `fork[then]/inner`.
        function: The function of the uploaded graph that contains it; empty: the top level.
        body: The body of the copy that contains it.
        index: Its index in the body; -1 for a call.
        around: The innermost call that contains it; None: no call does.
        call: The call, if this stands for a call.
        label: Label of the override assigned to it; None: no override is assigned.
        by_rank: Label of the override that matches if the node has the override's rank.
    """

    name: str
    qualified_name: str
    function: str
    body: Body
    index: int
    around: CandidateNode | None = None
    call: InlinedCall | None = None
    label: str | None = None
    by_rank: str = ""

    @property
    def node(self) -> Node:
        """The node; for a call: the node in the uploaded graph."""
        return self.body.nodes[self.index] if self.call is None else self.call.node

    @property
    def calls_around(self) -> Iterator[CandidateNode]:
        """The calls that contain it, from inside to outside."""
        call = self.around
        while call is not None:
            yield call
            call = call.around

    @property
    def marked_nodes(self) -> Sequence[Node]:
        """The nodes that carry a match of the candidate: the node, or those that pass a call's results on."""
        return [self.node] if self.call is None else self.call.results

    def resolution(self, rule: str, label: str) -> override_pb2.Resolution:
        """Returns the message that says which rule the node has, by the name of the rule and the override's label."""
        return override_pb2.Resolution(
            node=self.name,
            qualified_name="" if self.qualified_name == self.name else self.qualified_name,
            op_type=self.node.op_type,
            rule=rule,
            label=label,
            function=self.function,
        )

    @property
    def input_types(self) -> list[int]:
        """Element types of the node's inputs; 0: unknown."""
        found = []
        for producer, output in self.node.inputs if self.call is None else self.call.inputs:
            outputs = self.body.nodes[producer].outputs
            found.append(outputs[output] if outputs else 0)
        return found


@dataclass(slots=True, eq=False)
class OverrideMatcher:
    """A compiled selector. `SelectorIndex` evaluates all matchers of a program together.

    Attributes:
        spec: The override.
        words: The words of its pattern, or its op type.
        op_types: Op types of the selected node, or of the last node of a chain; None: any.
        prefix: Prefix of public names, from `scope`.
        exact: Public names, from `node` or `nodes`.
        globs: RE2 expressions for the public name, from `node` or `nodes`.
        qualified: RE2 expressions for the qualified name, from names and globs with a branch in `node` or `nodes`. If
            there are exact names, globs or these, the node must match one of them.
        qualified_scope: RE2 expression for the qualified name, from a `scope` with a branch; empty: none.
        regex: RE2 expression for the public name, from `node_regex`; empty: none.
        qualified_regex: RE2 expression for the qualified name, from a `node_regex` with a branch; empty: none.
        match_count: Number of matches.
        faulty: Whether a finding about the override was added.
        shadowed_by: If it matched no node: the number of its nodes that earlier overrides matched, by label.
    """

    spec: OverrideSpec
    words: tuple[str, ...]
    op_types: frozenset[str] | None
    prefix: str
    exact: frozenset[str]
    globs: tuple[str, ...]
    qualified: tuple[str, ...]
    qualified_scope: str
    regex: str
    qualified_regex: str
    match_count: int = 0
    faulty: bool = False
    shadowed_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_region(self) -> bool:
        """Whether it selects a region, by tensors or by name."""
        return self.spec.selector.HasField("region") or bool(self.spec.selector.region_name)

    @property
    def accepts_calls(self) -> bool:
        """Whether it can match whole calls, which have only a name and an op type before inlining."""
        return all(entry.name in _LOCAL for entry, _ in self.spec.selector.ListFields())

    @property
    def pattern_count(self) -> int:
        """Number of patterns that each node's name is matched against; at least 1."""
        return max(1, len(self.globs) + len(self.qualified) + bool(self.qualified_scope))

    @property
    def names_branches(self) -> bool:
        """Whether one of its conditions on names names a branch."""
        return bool(self.qualified or self.qualified_scope or self.qualified_regex)

    @property
    def is_chain(self) -> bool:
        """Whether it selects chains of nodes."""
        return len(self.words) > 1

    @property
    def layer(self) -> str:
        """The kind of layers that it selects; empty: none."""
        return self.spec.selector.layer


def compile_selectors(specs: Sequence[OverrideSpec], library: Library, findings: Findings) -> list[OverrideMatcher]:
    """Compiles the selectors of overrides; adds findings for invalid selectors and omits them."""
    compiled = []
    for spec in specs:
        problems = [*_condition_problems(spec.selector), *_name_problems(spec.selector)]
        found = [(Reason.ERROR_REASON_INVALID_OVERRIDE, problem) for problem in problems]
        if len(spec.selector.pattern) <= _MAX_PATTERN:
            found += _word_problems(spec.selector, library, findings)
        for reason, problem in found:
            findings.add(reason, f"Override {quote(spec.label)}: {problem}", field=spec.field)
        if not found:
            compiled.append(_compile_selector(spec))
    return compiled


def _compile_selector(spec: OverrideSpec) -> OverrideMatcher:
    """Compiles a valid selector."""
    selector = spec.selector
    words = _words(selector)
    exact, globs, qualified = _names(selector)
    scope, regex = selector.scope.rstrip("/"), selector.node_regex
    in_branch = f"{qualified_glob_regex(scope, is_glob=False)}{_ANY_BRANCH}/{ANY_TEXT}"
    return OverrideMatcher(
        spec,
        words,
        op_types_of(words[-1]) if words else None,
        scope + "/" if selector.scope else "",
        exact,
        tuple(map(glob_regex, globs)),
        tuple(map(qualified_glob_regex, qualified)),
        in_branch if names_branch(scope) else "",
        "" if _BRACKET in regex else regex,
        regex if _BRACKET in regex else "",
    )


def _words(selector: override_pb2.Selector) -> tuple[str, ...]:
    """Returns the words of a pattern, or the op type."""
    if selector.op_type == STEP:
        return STEP, "Cast"
    return tuple(selector.pattern) or ((selector.op_type,) if selector.op_type else ())


def _names(selector: override_pb2.Selector) -> tuple[frozenset[str], Sequence[str], Sequence[str]]:
    """Returns the exact names, the globs, and the names and globs with a branch, of `node` and `nodes`."""
    names = dict.fromkeys((selector.node,) if selector.node else selector.nodes)
    qualified = [name for name in names if names_branch(name)]
    globs = [name for name in names if is_glob(name) and not names_branch(name)]
    return frozenset(names).difference(globs, qualified), globs, qualified


def _condition_problems(selector: override_pb2.Selector) -> Iterator[str]:
    """Yields which conditions of a selector are empty or exclude each other."""
    given = {entry.name for entry, _ in selector.ListFields()}
    if not given:
        yield "it selects nothing: give at least one of op_type, node and scope ('**' is every node)."
    if given & _ALONE and len(given) > 1:
        region = min(given & _ALONE)
        yield f"a region is selected by itself, without {', '.join(sorted(given - {region}))}."
    if "region" in given and not (selector.region.inputs and selector.region.outputs):
        yield "a region has at least one input and one output."
    if {"pattern", "op_type"} <= given:
        yield "op_type cannot be given with pattern, which names op types itself."
    if "layer" in given and len(given & _OP_TYPES) > 1:
        yield "op_type and pattern cannot be given with layer, which selects ops by what they do together."
    if "layer" in given and selector.layer not in LAYER_KINDS:
        hint = did_you_mean(selector.layer, LAYER_KINDS)
        yield f"there is no kind of layer {quote(selector.layer)}.{hint} Kinds: {', '.join(LAYER_KINDS)}."
    if "position" in given and not _is_place(selector.position):
        yield "position is empty: give nearest_xs, nearest_ys or a number."
    if len(selector.pattern) > _MAX_PATTERN or not all(selector.pattern):
        yield f"a pattern has 1 to {_MAX_PATTERN} words, none of them empty."
    if "rank" in given and (len(_words(selector)) > 1 or "layer" in given):
        yield "rank cannot be given with a pattern or a layer."


def _name_problems(selector: override_pb2.Selector) -> Iterator[str]:
    """Yields what is wrong with the conditions of a selector on names."""
    if selector.node and selector.nodes:
        yield "node cannot be given with nodes: add it to nodes."
    if not all(selector.nodes):
        yield "one of its nodes is an empty name."
    _, globs, qualified = _names(selector)
    if len(globs) + len(qualified) > _MAX_GLOBS:
        yield f"{len(globs) + len(qualified)} of its nodes are globs or name a branch; {_MAX_GLOBS} is the most."
    scope = selector.scope if names_branch(selector.scope) else ""
    if any(len(text) > MAX_PATTERN for text in (*globs, *qualified, scope, selector.node, selector.node_regex)):
        yield f"its node pattern is longer than {MAX_PATTERN} characters."
        return
    try:
        compile_regex(selector.node_regex)
    except ValueError as cause:
        yield f"node_regex {quote(selector.node_regex)} is not a regular expression (RE2): {cause}."


def _word_problems(
    selector: override_pb2.Selector, library: Library, findings: Findings
) -> Iterator[tuple[Reason.ValueType, str]]:
    """Yields the reason and the problem of each word of a selector that is no op type and no group."""
    for word in filter(None, _words(selector)):
        if word.startswith("@") and word not in GROUPS:
            known = ", ".join(sorted(GROUPS))
            problem = f"there is no group {quote(word)}.{did_you_mean(word, GROUPS)} Groups: {known}"
            yield Reason.ERROR_REASON_UNKNOWN_OP_TYPE, problem
        elif word == STEP and selector.pattern:
            problem = "'@step' stands for a pattern of its own: give it as op_type."
            yield Reason.ERROR_REASON_INVALID_OVERRIDE, problem
        elif word not in GROUPS and library.find_op(word) is None:
            hint = findings.suggest(lambda word=word: op_definitions.suggest(word, library.names()))  # type: ignore[misc]
            yield Reason.ERROR_REASON_UNKNOWN_OP_TYPE, f"there is no op type {quote(word)}.{hint}"


def _is_place(position: override_pb2.Position) -> bool:
    place = position.WhichOneof("place")
    nearest = (override_pb2.POSITION_NEAREST_XS, override_pb2.POSITION_NEAREST_YS)
    return place == "index" or (place == "nearest" and position.nearest in nearest)


def op_types_of(word: str) -> frozenset[str]:
    """Returns the op types for a word of a selector: those of the group, or the named one."""
    return GROUPS.get(word) or frozenset({word})


def is_glob(text: str) -> bool:
    """Returns whether a name contains wildcards."""
    return _MAGIC.search(text) is not None


def compile_regex(regex: str) -> re2._Regexp:
    """Compiles an RE2 expression (linear matching time). Raises `ValueError` if it is invalid."""
    try:
        return re2.compile(regex, re2_options())
    except re2.error as cause:
        text = cause.args[0] if cause.args else cause
        raise ValueError(text.decode(errors="replace") if isinstance(text, bytes) else str(text)) from None


def glob_regex(glob: str) -> str:
    """Returns the RE2 expression of a glob: `?` and `*` do not match slashes, `**` does."""
    pieces, start = [], 0
    for part in _GLOB_PARTS.finditer(glob):
        pieces += [re2.escape(glob[start : part.start()]), _GLOB_MEANS.get(part[0], ANY_TEXT)]
        start = part.end()
    return "".join([*pieces, re2.escape(glob[start:])])


def names_branch(text: str) -> bool:
    """Returns whether a name or glob names a branch, as in `fork[then]/inner`."""
    return "[" in text


def without_branches(name: str, kept: Container[int] = ()) -> str:
    """Returns a qualified name without its branches, except those behind the parts at these positions.

    Without `kept`: the public name.
    """
    if not kept:
        return _BRANCH.sub("", name)
    parts = name.split("/")
    return "/".join(part if position in kept else _BRANCH.sub("", part) for position, part in enumerate(parts))


def qualified_glob_regex(name: str, *, is_glob: bool = True) -> str:
    """Returns the RE2 expression for qualified names of a name or glob; parts without a branch match all branches."""
    parts = name.split("/")
    regexes = [glob_regex(part) if is_glob else re2.escape(part) for part in parts]
    return f"{_ANY_BRANCH}/".join(regexes)


def re2_options() -> re2.Options:
    """Returns the options of all RE2 expressions."""
    options = re2.Options()
    options.log_errors = False
    return options
