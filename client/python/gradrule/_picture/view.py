"""Computes the content of a picture as plain lists, for the SVG file and, as JSON, for the page."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradrule._picture import text
from gradrule._picture.facts import ACTIVE, Fact, Facts
from gradrule._picture.layers import Item, compute_rows
from gradrule._picture.reading import ROOT, Leaf, Structure
from gradrule._picture.tree import MAX_BOXES, Tree, build_tree

_MAX_LABEL = 34
_MARK_WIDTH = 18
_MAX_BADGES = 4
_LEAF_HEIGHT, _BADGE_HEIGHT = 38, 18
_PILL_WIDTH = 16
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
        widths: Widths in pixels of leaves and folded scopes.
        heights: Heights in pixels of leaves and folded scopes.
        classes: CSS classes: `leaf` or `scope`, `path`, `x`, `y`, `wrong`, `rule`, `off_path`, `not_differentiable`.
        rule: Index into `legend`; -1 for none.
        badges: Badges of folded scopes.
        more: Whether a scope has more badges than it shows.
        rows: Rows of each scope, with its children and bends.
        row: Row that contains the box.
        before: Siblings with edges to a box, by box.
        edges: Boxes of source and target leaf, and whether the edge is on the path from xs to ys.
        details: Facts about leaves, by box.
        legend: One row per rule.
        heading: Pairs of the pill that a line explains (or empty) and the line.
        opened: Scopes that are initially open.
    """

    parents: list[int]
    depths: list[int]
    children: list[list[int]]
    labels: list[str]
    titles: list[str]
    subtitles: list[str]
    widths: list[int]
    heights: list[int]
    classes: list[str]
    rule: list[int]
    badges: list[list[Badge]]
    more: list[bool]
    rows: list[list[list[Item]]]
    row: list[int]
    before: dict[int, list[int]]
    edges: list[tuple[int, int, bool]]
    details: dict[int, Detail]
    legend: list[LegendRow]
    heading: list[tuple[str, str]]
    opened: list[int] = field(default_factory=list)


def common_scope(view: View, source: int, target: int) -> tuple[int, int, int]:
    """Returns the innermost scope that holds both boxes, and its two children that hold one each."""
    a, b = source, target
    while view.parents[a] != view.parents[b]:
        if view.depths[a] >= view.depths[b]:
            a = view.parents[a]
        else:
            b = view.parents[b]
    return view.parents[a], a, b


def build_view(structure: Structure, facts: Facts) -> View:
    """Makes the view from a graph's structure and the facts about its leaves."""
    tree = build_tree(structure)
    size = len(tree.parents)
    order = list(tree.from_root())
    depths = [0] * size
    for box in order[1:]:
        depths[box] = depths[tree.parents[box]] + 1
    edges: dict[tuple[int, int], bool] = {}
    for wire in structure.wires:
        pair = tree.box_of[wire.source], tree.box_of[wire.target]
        head = wire.head
        on_path = head is not None and bool(facts.path[wire.tail] and facts.path[head])
        edges[pair] = edges.get(pair, False) or on_path
    marks = [rule_mark(number) for number in range(len(facts.rules))]
    view = View(
        parents=tree.parents,
        depths=depths,
        children=tree.children,
        labels=[text.shortened(text.clean(label), _MAX_LABEL) for label in tree.labels],
        titles=_titles(tree, structure, order),
        subtitles=[""] * size,
        widths=[0] * size,
        heights=[_LEAF_HEIGHT] * size,
        classes=[""] * size,
        rule=[-1] * size,
        badges=[[] for _ in range(size)],
        more=[False] * size,
        rows=[[] for _ in range(size)],
        row=[0] * size,
        before={},
        edges=[(*pair, on_path) for pair, on_path in edges.items()],
        details={
            tree.box_of[index]: _detail(leaf, facts.leaves[index], facts.rules)
            for index, leaf in enumerate(structure.leaves)
        },
        legend=[
            LegendRow(marks[number], text.clean(name), _counts(facts, number))
            for number, name in enumerate(facts.rules)
        ],
        heading=_heading(structure, facts),
    )
    _compute_rows(view)
    interest = _fill_boxes(view, tree, structure, facts, marks, order)
    view.opened = _initially_open(view, interest)
    return view


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
    lines = [("", f"{len(structure.leaves)} nodes")]
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


def _detail(leaf: Leaf, fact: Fact, rules: Sequence[str]) -> Detail:
    lines = [f"op: {text.clean(leaf.node.op)}"]
    if leaf.function:
        lines.append(f"in function: {text.clean(leaf.function)}")
    if fact.rule is not None:
        lines.append(f"rule: {text.clean(rules[fact.rule])}")
        lines.append(f"override: {text.clean(fact.label)}")
        lines.append(f"status: {fact.status.replace('_', ' ')}")
    else:
        lines.append(f"gradient: {'its own' if fact.on_path else 'not computed'}")
    if fact.rewritten:
        lines.append("rewritten: yes")
    lines += [f"wrong: {text.shortened(text.clean(message), 300)}" for message in fact.wrong[:3]]
    return Detail(text.clean(leaf.name), lines + text.attrs(leaf.node))


def _compute_rows(view: View) -> None:
    """Computes the rows of all scopes from the edges between their children."""
    edges: dict[int, dict[tuple[int, int], None]] = {}
    entered: set[int] = set()
    left: set[int] = set()
    for source, target, _ in view.edges:
        scope, upper, lower = common_scope(view, source, target)
        edges.setdefault(scope, {})[upper, lower] = None
        for box, outer, crossing in ((source, upper, left), (target, lower, entered)):
            while box != outer and box not in crossing:
                crossing.add(box)
                box = view.parents[box]
    for pairs in edges.values():
        for upper, lower in pairs:
            view.before.setdefault(lower, []).append(upper)
    for scope, children in enumerate(view.children):
        view.rows[scope] = compute_rows(children, edges.get(scope, ()), entered, left)
        for number, row in enumerate(view.rows[scope]):
            for item in row:
                if item >= 0:
                    view.row[item] = number


def _fill_boxes(
    view: View, tree: Tree, structure: Structure, facts: Facts, marks: Sequence[str], order: Sequence[int]
) -> list[int]:
    """Sets the texts, classes and sizes of boxes; returns a score of interest for each box."""
    rules: list[Counter[int]] = [Counter() for _ in tree.parents]
    nodes, interest = [0] * len(tree.parents), [0] * len(tree.parents)
    classes: list[dict[str, None]] = [{} for _ in tree.parents]
    for box in reversed(order):
        index = tree.leaf[box]
        if index >= 0:
            fact = facts.leaves[index]
            classes[box] = dict.fromkeys(_classes(fact))
            rules[box].update(() if fact.rule is None else [fact.rule])
            nodes[box], interest[box] = 1, 2 * (fact.rule is not None) + fact.on_path
            view.rule[box] = -1 if fact.rule is None else fact.rule
            view.subtitles[box] = _second_line(structure.leaves[index], fact, facts.rules)
        else:
            view.subtitles[box] = f"{nodes[box]} nodes"
            for rule, count in sorted(rules[box].items())[:_MAX_BADGES]:
                view.badges[box].append(Badge(rule, f"{marks[rule]}×{count}"))
            view.more[box] = len(rules[box]) > _MAX_BADGES
            view.heights[box] += _BADGE_HEIGHT * bool(rules[box])
        view.classes[box] = " ".join(["leaf" if index >= 0 else "scope", *classes[box]])
        view.widths[box] = round(_box_width(view, box))
        if box != ROOT:
            parent = tree.parents[box]
            nodes[parent] += nodes[box]
            interest[parent] += interest[box]
            rules[parent].update(rules[box])
            classes[parent].update(dict.fromkeys(word for word in classes[box] if word in ("path", "x", "y", "wrong")))
    return interest


def _classes(fact: Fact) -> list[str]:
    flags = {"path": fact.on_path, "x": fact.is_x, "y": fact.is_y, "wrong": fact.wrong, "rule": fact.rule is not None}
    found = [word for word, flag in flags.items() if flag]
    return found + ([fact.status] if fact.status not in ("", ACTIVE) else [])


def _second_line(leaf: Leaf, fact: Fact, rules: Sequence[str]) -> str:
    op = text.shortened(text.clean(leaf.node.op), _MAX_LABEL)
    if fact.rule is None:
        return op
    status = "" if fact.status == ACTIVE else f" ({fact.status.replace('_', ' ')})"
    return text.shortened(f"{op} → {text.clean(rules[fact.rule])}", _MAX_LABEL) + status


def _box_width(view: View, box: int) -> float:
    classes = view.classes[box].split()
    pills = _PILL_WIDTH * sum(word in classes for word in ("x", "y", "wrong"))
    first = text.width(view.labels[box]) + pills + _MARK_WIDTH * (view.rule[box] >= 0)
    badges = sum(text.width(badge.text, 10.0) + 14 for badge in view.badges[box]) + 14 * view.more[box]
    return max(first, text.width(view.subtitles[box], 10.0) + _MARK_WIDTH * (view.rule[box] >= 0), badges, 30.0) + 20


def _initially_open(view: View, interest: Sequence[int]) -> list[int]:
    """Returns the scopes to open, outer and interesting scopes first, until `MAX_BOXES` boxes are visible."""
    opened, count = [], len(view.children[ROOT])
    pending: list[tuple[int, int, int]] = []

    def offer(children: Sequence[int]) -> None:
        for child in children:
            if view.children[child]:
                heapq.heappush(pending, (view.depths[child], -interest[child], child))

    offer(view.children[ROOT])
    while pending:
        _, _, box = heapq.heappop(pending)
        if count - 1 + len(view.children[box]) <= MAX_BOXES:
            count += len(view.children[box]) - 1
            opened.append(box)
            offer(view.children[box])
    return opened
