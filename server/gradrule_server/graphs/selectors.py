"""Selectors: which nodes an override means, one condition after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradrule import _opdefs
from gradrule._dtypes import name_of
from gradrule.v1 import override_pb2
from gradrule_server.errors import did_you_mean
from gradrule_server.graphs.findings import Finding, Findings, Reason, near_name, quote
from gradrule_server.graphs.globs import MAX_PATTERN, NameTest, name_test, regex_test
from gradrule_server.graphs.groups import BIAS, GROUPS, STEP, SUM, op_types_of
from gradrule_server.graphs.ir import Body, Node
from gradrule_server.graphs.library import Library

DEFAULT_RULE = "default"
OWN_GRADIENT = -1

# Groups that ask for more than an op type.
_PLACED = frozenset({STEP, BIAS, SUM})
_LOCAL = frozenset({"op_type", "node", "scope", "node_regex"})
_ALONE = frozenset({"region", "region_name"})
_MAX_PATTERN = 32
_SHOWN_REGIONS = 12


@dataclass(frozen=True, slots=True)
class OverrideSpec:
    """One override: which nodes, which rule (-1: `default`). `index`: its place in the request.

    `is_preset`: it is part of a preset, and comes after what nodes themselves say. `every_order`: it holds in every
    differentiation, not only in the first.
    """

    selector: override_pb2.Selector
    rule_index: int = OWN_GRADIENT
    rule_name: str = DEFAULT_RULE
    label: str = ""
    optional: bool = False
    index: int = 0
    is_preset: bool = False
    every_order: bool = False

    @property
    def made_op_types(self) -> frozenset[str]:
        """Op types of nodes made by gradients that it means too: it holds in every order and asks for nothing else."""
        asked = [field.name for field, _ in self.selector.ListFields()]
        word = self.selector.op_type
        return op_types_of(word) if self.every_order and asked == ["op_type"] and word not in _PLACED else frozenset()

    @property
    def field(self) -> str:
        """Where the request says it."""
        return f"overrides[{self.index}]"


@dataclass(slots=True, eq=False)
class Place:
    """A node of the expanded graph, as selectors see it.

    `name`: its public name. `function`: where in the uploaded graph it lies. `live`: whether gradients are asked node
    by node here. `label`: of the override that took it; `around`: of one that took a call around it as a whole;
    `by_rank`: of one that takes it if it has the right rank.
    """

    name: str
    function: str
    body: Body
    index: int
    live: bool
    label: str | None = None
    around: str | None = None
    by_rank: str = ""

    @property
    def node(self) -> Node:
        return self.body.nodes[self.index]

    @property
    def input_types(self) -> list[int]:
        """Element types of its inputs; 0 where not known."""
        found = []
        for producer, output in self.node.inputs:
            outputs = self.body.nodes[producer].outputs
            found.append(outputs[output] if outputs else 0)
        return found


@dataclass(slots=True, eq=False)
class Chooser:
    """A selector made ready. It decides by what the node itself tells; position, pattern, region and depends_on need
    the whole graph."""

    spec: OverrideSpec
    words: tuple[str, ...]
    op_types: frozenset[str] | None
    prefix: str
    names: tuple[NameTest, ...]
    taken: int = 0
    # Something is wrong with it that has been noted already.
    faulty: bool = False
    shadowed_by: dict[str, int] = field(default_factory=dict)

    @property
    def is_region(self) -> bool:
        """Whether it means a region, given by its border or by name."""
        return self.spec.selector.HasField("region") or bool(self.spec.selector.region_name)

    @property
    def takes_calls(self) -> bool:
        """Whether calls as a whole are asked: only names and op types are known of them before they are inlined."""
        return all(entry.name in _LOCAL for entry, _ in self.spec.selector.ListFields())

    def fits_name(self, name: str) -> bool:
        """Whether the public name is meant."""
        return name.startswith(self.prefix) and all(test(name) for test in self.names)

    def fits_call(self, op_type: str, name: str) -> bool:
        """Whether a call as a whole is meant."""
        return self.takes_calls and (self.op_types is None or op_type in self.op_types) and self.fits_name(name)

    def fits(self, place: Place) -> bool:
        """Whether name, op type, element type and attributes are meant."""
        node, selector = place.node, self.spec.selector
        if self.op_types is not None and node.op_type not in self.op_types:
            return False
        if selector.dtype and (not node.outputs or node.outputs[0] != selector.dtype):
            return False
        if not self.fits_name(place.name):
            return False
        return all(name in node.attrs and node.attrs[name] == value for name, value in selector.attrs.items())


def choosers(specs: Sequence[OverrideSpec], library: Library, findings: Findings) -> list[Chooser]:
    """The selectors made ready; what is wrong with them is noted."""
    made = []
    for spec in specs:
        before = len(findings.all)
        chooser = _chooser(spec, library, findings)
        if chooser is not None and len(findings.all) == before:
            made.append(chooser)
    return made


def _chooser(spec: OverrideSpec, library: Library, findings: Findings) -> Chooser | None:
    selector = spec.selector

    def invalid(message: str) -> None:
        findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, f"Override {quote(spec.label)}: {message}", field=spec.field)

    given = {entry.name for entry, _ in selector.ListFields()}
    if not given:
        message = "The override selects nothing: give at least one of op_type, node and scope ('**' is every node)."
        findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, field=spec.field)
        return None
    if given & _ALONE and len(given) > 1:
        region = min(given & _ALONE)
        invalid(f"a region is selected by itself, without {', '.join(sorted(given - {region}))}.")
    if "region" in given and not (selector.region.inputs and selector.region.outputs):
        invalid("a region has at least one input and one output.")
    if {"pattern", "op_type"} <= given:
        invalid("op_type cannot be given with pattern, which names op types itself.")
    if "position" in given and not _is_place(selector.position):
        invalid("position is empty: say nearest_xs, nearest_ys or a number.")
    words = tuple(selector.pattern) or ((STEP, "Cast") if selector.op_type == STEP else (selector.op_type,))
    if len(words) > _MAX_PATTERN or not all(selector.pattern):
        invalid(f"a pattern has 1 to {_MAX_PATTERN} words, none of them empty.")
        return None
    if "rank" in given and len(words) > 1:
        invalid("rank cannot be given with a pattern.")
    words = tuple(word for word in words if word)
    for word in words:
        _check_word(word, spec, library, findings)
    names: list[NameTest] = []
    for text, make in ((selector.node, name_test), (selector.node_regex, regex_test)):
        if len(text) > MAX_PATTERN:
            invalid(f"its node pattern is longer than {MAX_PATTERN} characters.")
        elif text:
            try:
                names.append(make(text))
            except ValueError as cause:
                invalid(f"node_regex {quote(text)} is no regular expression (RE2): {cause}.")
    prefix = selector.scope.rstrip("/") + "/" if selector.scope else ""
    op_types = op_types_of(words[-1]) if words else None
    return Chooser(spec, words, op_types, prefix, tuple(names))


def _is_place(position: override_pb2.Position) -> bool:
    place = position.WhichOneof("place")
    nearest = (override_pb2.POSITION_NEAREST_XS, override_pb2.POSITION_NEAREST_YS)
    return place == "index" or (place == "nearest" and position.nearest in nearest)


def _check_word(word: str, spec: OverrideSpec, library: Library, findings: Findings) -> None:
    if word.startswith("@"):
        if word not in GROUPS:
            message = (
                f"there is no group {quote(word)}.{did_you_mean(word, GROUPS)} Groups: {', '.join(sorted(GROUPS))}"
            )
        elif word == STEP and spec.selector.pattern:
            message = "'@step' is a pattern itself: give it as op_type."
        else:
            return
        findings.add(
            Reason.ERROR_REASON_UNKNOWN_OP_TYPE if word not in GROUPS else Reason.ERROR_REASON_INVALID_OVERRIDE,
            f"Override {quote(spec.label)}: {message}",
            field=spec.field,
        )
    elif library.find_op(word) is None:
        hint = _opdefs.suggest(word, library.names())
        message = f"Override {quote(spec.label)} is for op type {quote(word)}, which does not exist.{hint}"
        findings.add(Reason.ERROR_REASON_UNKNOWN_OP_TYPE, message, field=spec.field)


@dataclass(frozen=True, slots=True)
class Seen:
    """A node that selectors were asked about: for saying what there is where nothing matched."""

    op_type: str
    name: str


def unmatched(chooser: Chooser, seen: Sequence[Seen], regions: Sequence[str]) -> Finding:
    """UNMATCHED_OVERRIDE: which condition fails, and what there is instead. `regions`: names of those in the graph."""
    spec = chooser.spec
    if chooser.shadowed_by:
        count = sum(chooser.shadowed_by.values())
        nodes = f"all {count} nodes that it matches are" if count > 1 else "the only node that it matches is"
        by = ", ".join(quote(label) for label in chooser.shadowed_by)
        message = f"Override {quote(spec.label)} takes no node: {nodes} taken by an earlier override ({by})."
    elif spec.selector.region_name:
        message = f"Override {quote(spec.label)}: {_no_region(spec.selector.region_name, regions)}"
    else:
        message = f"Override {quote(spec.label)} matches no node of the graph: {_missing(chooser, seen)}"
    return Finding(Reason.ERROR_REASON_UNMATCHED_OVERRIDE, message, field=spec.field)


def _no_region(name: str, regions: Sequence[str]) -> str:
    known = ", ".join(map(quote, regions[:_SHOWN_REGIONS])) or "none: no function in it has a gradient of its own"
    more = f" and {len(regions) - _SHOWN_REGIONS} more" if len(regions) > _SHOWN_REGIONS else ""
    return f"the graph brings no region {quote(name)} along.{did_you_mean(name, regions)} Its regions: {known}{more}."


def _missing(chooser: Chooser, seen: Sequence[Seen]) -> str:
    selector = chooser.spec.selector
    op_types = sorted({item.op_type for item in seen})
    for word in chooser.words:
        if not op_types_of(word) & set(op_types):
            members = f" ({', '.join(sorted(op_types_of(word)))})" if word.startswith("@") else ""
            return f"there is no {word}{members}.{did_you_mean(word, op_types)}"
    wanted = chooser.op_types
    names = [item.name for item in seen if wanted is None or item.op_type in wanted]
    kind = f"of op type {chooser.words[-1]} " if chooser.words else ""
    if selector.scope and not any(name.startswith(chooser.prefix) for name in names):
        scopes = sorted({name[:slash] for name in names for slash in _slashes(name)})
        return f"no node {kind}has a name that starts with {quote(chooser.prefix)}.{near_name(selector.scope, scopes)}"
    if selector.node and not any(chooser.names[0](name) for name in names):
        return f"no node {kind}is named {quote(selector.node)}.{near_name(selector.node, names)}"
    if not any(chooser.fits_name(name) for name in names):
        if selector.node_regex:
            return f"no node {kind}has a name that {quote(selector.node_regex)} matches as a whole."
        return "the graph has no nodes." if not names else f"no node {kind}has such a name."
    reasons = []
    if len(chooser.words) > 1:
        reasons.append(
            f"no chain {' → '.join(chooser.words)} in which each takes the output of the one before and is alone in "
            f"doing so"
        )
    if selector.dtype:
        reasons.append(f"the first output {name_of(selector.dtype)}")
    if selector.attrs:
        reasons.append(f"these attributes: {', '.join(sorted(selector.attrs))}")
    if selector.depends_on:
        reasons.append(f"dependence on {', '.join(map(quote, selector.depends_on))}")
    if selector.HasField("position"):
        reasons.append("this place on the path from xs to ys")
    if not reasons:
        return f"no node {kind}is one: what an add is depends on which of its sides depend on the xs."
    return f"no node {kind}with such a name has {' and '.join(reasons)}."


def _slashes(name: str) -> list[int]:
    return [position for position, character in enumerate(name) if character == "/"]
