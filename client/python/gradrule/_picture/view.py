"""Computes the content of a picture as plain lists, for the SVG file and, as JSON, for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradrule._builder.names import counted, split
from gradrule._picture import text
from gradrule._picture.facts import ACTIVE, Fact, Facts
from gradrule._picture.reading import ROOT, Structure
from gradrule._picture.tensors import constant_leaves, input_lines
from gradrule._picture.tree import Tree, build_tree

_MAX_LABEL = 34
_MAX_BADGES = 4
_MAX_INPUTS = 8
_MAX_HEADING = 160
_MAX_MESSAGES = 8


@dataclass(frozen=True, slots=True)
class Badge:
    """Counts the nodes of a folded scope that got a rule."""

    rule: int
    text: str


@dataclass(frozen=True, slots=True)
class LegendRow:
    """Describes a rule: its mark, its name, and the counts of its nodes by status."""

    mark: str
    name: str
    counts: str


@dataclass(frozen=True, slots=True)
class Detail:
    """Describes a node on the page. `lines`: facts as `name: value`."""

    name: str
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Edge:
    """Describes the tensors that one leaf passes to another.

    Attributes:
        source: Box of the leaf that produces the tensors.
        target: Box of the leaf that uses them.
        on_path: Whether one of them is on the path from xs to ys.
        tensor: Element type and shape, as far as they are known; empty if the tensors differ.
    """

    source: int
    target: int
    on_path: bool
    tensor: str


@dataclass(slots=True)
class View:
    """Holds the content of a picture. Most lists have one entry per box; box 0 is the whole graph.

    Attributes:
        parents: Parent of each box.
        depths: Number of enclosing boxes.
        children: Children of each box.
        labels: First line of text.
        titles: Full names.
        subtitles: Second line of text.
        classes: CSS classes: `leaf` or `scope`, `path`, `x`, `y`, `wrong`, `rule`, `constant`, `off_path`,
            `not_differentiable`.
        rule: Index into `legend`; -1 for none.
        badges: Badges of folded scopes.
        more: Whether a scope has more badges than it shows.
        interest: Number of nodes with rules and of nodes on the path inside a box.
        edges: Edges between leaves.
        details: Facts about leaves, by box.
        legend: One row per rule.
        heading: Pairs of the pill that a line explains (or empty) and the line.
    """

    parents: list[int]
    depths: list[int]
    children: list[list[int]]
    labels: list[str]
    titles: list[str]
    subtitles: list[str]
    classes: list[str]
    rule: list[int]
    badges: list[list[Badge]]
    more: list[bool]
    interest: list[int]
    edges: list[Edge]
    details: dict[int, Detail]
    legend: list[LegendRow]
    heading: list[tuple[str, str]]


def common_scope(view: View, source: int, target: int) -> tuple[int, int, int]:
    """Returns the innermost scope that holds both boxes, and its two children that hold one each."""
    a, b = source, target
    while view.parents[a] != view.parents[b]:
        if view.depths[a] >= view.depths[b]:
            a = view.parents[a]
        else:
            b = view.parents[b]
    return view.parents[a], a, b


def build_view(structure: Structure, facts: Facts, tensors: Mapping[tuple[int, int], str]) -> View:
    """Makes the view from a graph's structure, the facts about its leaves, and the texts of its tensors."""
    tree = build_tree(structure)
    size = len(tree.parents)
    order = list(tree.from_root())
    depths = [0] * size
    for box in order[1:]:
        depths[box] = depths[tree.parents[box]] + 1
    marks = [rule_mark(number) for number in range(len(facts.rules))]
    view = View(
        parents=tree.parents,
        depths=depths,
        children=tree.children,
        labels=[text.shortened(text.clean(label), _MAX_LABEL) for label in _labels(tree, facts)],
        titles=_titles(tree, structure, order),
        subtitles=[""] * size,
        classes=[""] * size,
        rule=[-1] * size,
        badges=[[] for _ in range(size)],
        more=[False] * size,
        interest=[0] * size,
        edges=_edges(structure, facts, tensors, tree),
        details=_details(structure, facts, tensors, tree),
        legend=[
            LegendRow(marks[number], text.clean(name), _counts(facts, number))
            for number, name in enumerate(facts.rules)
        ],
        heading=_heading(structure, facts),
    )
    _fill_boxes(view, tree, structure, facts, marks, order)
    return view


def _labels(tree: Tree, facts: Facts) -> list[str]:
    """Returns the labels of boxes; the xs and ys are called as in the request."""
    labels = list(tree.labels)
    for leaf, name in facts.names.items():
        labels[tree.box_of[leaf]] = name
    return labels


def _edges(structure: Structure, facts: Facts, tensors: Mapping[tuple[int, int], str], tree: Tree) -> list[Edge]:
    passed: dict[tuple[int, int], set[str]] = {}
    for target in structure.top.values():
        for name in structure.leaves[target].node.input:
            node, output = split(name)
            source = structure.top.get(node)
            if source is not None:
                passed.setdefault((source, target), set()).add(tensors.get((source, output), ""))
    found: dict[tuple[int, int], bool] = {}
    for wire in structure.wires:
        pair = wire.source, wire.target
        on_path = wire.head is not None and bool(facts.path[wire.tail] and facts.path[wire.head])
        found[pair] = found.get(pair, False) or on_path
    edges = []
    for (source, target), on_path in found.items():
        texts = passed.get((source, target), ())
        known = next(iter(texts)) if len(texts) == 1 else ""
        edges.append(Edge(tree.box_of[source], tree.box_of[target], on_path, text.clean(known)))
    return edges


def rule_mark(number: int) -> str:
    """Returns a rule's mark (A, B, …, Z, A1, B1, …), which distinguishes rules without colours."""
    return f"{chr(ord('A') + number % 26)}{number // 26 or ''}"


def _titles(tree: Tree, structure: Structure, order: Sequence[int]) -> list[str]:
    """Returns the full names of boxes; the label of a group is not part of its children's names."""
    titles, outer = [""] * len(tree.parents), [""] * len(tree.parents)
    for box in order[1:]:
        around = outer[tree.parents[box]]
        whole = f"{around}/{tree.labels[box]}" if around else tree.labels[box]
        outer[box] = around if box in tree.groups else whole
        titles[box] = structure.leaves[tree.leaf[box]].name if tree.leaf[box] >= 0 else whole
    return [text.clean(title) for title in titles]


def _heading(structure: Structure, facts: Facts) -> list[tuple[str, str]]:
    lines = [("", counted(len(structure.leaves), "node"))]
    for pill, names in (("y", facts.ys), ("x", facts.xs)):
        if names:
            lines.append((pill, f"{pill}s: {text.shortened(text.clean(', '.join(names)), _MAX_HEADING)}"))
    for pill, messages in (("wrong", facts.wrong), ("", facts.notes)):
        lines += [(pill, text.shortened(text.clean(line), _MAX_HEADING)) for line in messages[:_MAX_MESSAGES]]
        lines += [("", f"… {len(messages) - _MAX_MESSAGES} more")] if len(messages) > _MAX_MESSAGES else []
    return lines


def _counts(facts: Facts, rule: int) -> str:
    counts = Counter(fact.status for fact in facts.leaves if fact.rule == rule)
    return ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.most_common())


def _details(
    structure: Structure, facts: Facts, tensors: Mapping[tuple[int, int], str], tree: Tree
) -> dict[int, Detail]:
    found = {}
    for index, leaf in enumerate(structure.leaves):
        fact = facts.leaves[index]
        lines = [f"op: {leaf.node.op}"]
        if leaf.function:
            lines.append(f"in function: {leaf.function}")
        lines += _rule_lines(fact, facts.rules)
        if fact.rewritten:
            lines.append("rewritten: yes")
        lines += [f"wrong: {text.shortened(message, 300)}" for message in fact.wrong[:3]]
        lines += input_lines(structure, index, tensors, facts.names, _MAX_INPUTS)
        output = tensors.get((index, 0), "")
        lines += [f"output: {output}"] if output else []
        lines = [text.shortened(text.clean(line), 400) for line in lines]
        found[tree.box_of[index]] = Detail(text.clean(leaf.name), lines + text.attrs(leaf.node))
    return found


def _rule_lines(fact: Fact, rules: Sequence[str]) -> list[str]:
    """Returns which gradient a node has, and why."""
    if fact.rule is None:
        if fact.on_path:
            return ["gradient: its own", "why: on the path from xs to ys; no override matches"]
        return ["gradient: not computed", "why: not on the path from xs to ys"]
    reasons = {
        ACTIVE: "the override is the first that matches, and the node is on the path from xs to ys",
        "off_path": "an override matches, but the node is not on the path from xs to ys",
        "not_differentiable": "an override matches, but the op's tensors are not floating-point numbers",
    }
    return [
        f"rule: {rules[fact.rule]}",
        f"override: {fact.label}",
        f"status: {fact.status.replace('_', ' ')}",
        *([f"why: {reasons[fact.status]}"] if fact.status in reasons else []),
    ]


def _fill_boxes(
    view: View, tree: Tree, structure: Structure, facts: Facts, marks: Sequence[str], order: Sequence[int]
) -> None:
    """Sets the texts, classes and interest of boxes."""
    rules: list[Counter[int]] = [Counter() for _ in tree.parents]
    nodes = [0] * len(tree.parents)
    classes: list[dict[str, None]] = [{} for _ in tree.parents]
    constant = constant_leaves(structure)
    for box in reversed(order):
        index = tree.leaf[box]
        if index >= 0:
            fact = facts.leaves[index]
            classes[box] = dict.fromkeys(_classes(fact))
            if constant[index] and not classes[box] and not fact.rewritten:
                classes[box]["constant"] = None
            rules[box].update(() if fact.rule is None else [fact.rule])
            nodes[box] = 1
            view.interest[box] = 2 * (fact.rule is not None) + fact.on_path
            view.rule[box] = -1 if fact.rule is None else fact.rule
            view.subtitles[box] = _second_line(index, structure, facts)
        else:
            view.subtitles[box] = f"{nodes[box]} nodes"
            if all("constant" in classes[child] for child in tree.children[box]):
                classes[box]["constant"] = None
            for rule, count in sorted(rules[box].items())[:_MAX_BADGES]:
                view.badges[box].append(Badge(rule, f"{marks[rule]}×{count}"))
            view.more[box] = len(rules[box]) > _MAX_BADGES
        view.classes[box] = " ".join(["leaf" if index >= 0 else "scope", *classes[box]])
        if box != ROOT:
            parent = tree.parents[box]
            nodes[parent] += nodes[box]
            view.interest[parent] += view.interest[box]
            rules[parent].update(rules[box])
            classes[parent].update(dict.fromkeys(word for word in classes[box] if word in ("path", "x", "y", "wrong")))


def _classes(fact: Fact) -> list[str]:
    flags = {"path": fact.on_path, "x": fact.is_x, "y": fact.is_y, "wrong": fact.wrong, "rule": fact.rule is not None}
    found = [word for word, flag in flags.items() if flag]
    return found + ([fact.status] if fact.status not in ("", ACTIVE) else [])


def _second_line(index: int, structure: Structure, facts: Facts) -> str:
    leaf, fact = structure.leaves[index], facts.leaves[index]
    op = text.shortened(text.clean(leaf.node.op), _MAX_LABEL)
    if fact.rule is None:
        # A tensor with a name of its own shows the node's name too.
        name = facts.names.get(index, leaf.name)
        is_known = name in (leaf.name, leaf.label) or leaf.name == leaf.node.op
        return op if is_known else text.shortened(text.clean(f"{op} {leaf.name}"), _MAX_LABEL)
    status = "" if fact.status == ACTIVE else f" ({fact.status.replace('_', ' ')})"
    return text.shortened(f"{op} → {text.clean(facts.rules[fact.rule])}", _MAX_LABEL) + status
