"""Builds the tree of boxes from scopes and leaves; removes needless levels and splits large scopes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gradrule._picture.reading import ROOT, Structure

# A scope with more children than this is split into groups, so that no opened scope is too large to read.
MAX_CHILDREN = 24
# Groups in groups, at most; deeper ones are split into equal parts, because names may share any number of words.
_MAX_GROUP_DEPTH = 6
_WORDS = re.compile(r"[^_\W]+")


@dataclass(slots=True)
class Tree:
    """Holds the tree of boxes; box 0 is the whole graph.

    Attributes:
        parents: Parent of each box.
        labels: Label of each box.
        leaf: Index of the leaf of each box; -1 for scopes.
        children: Children of each box.
        box_of: Box of each leaf.
        groups: Boxes that are not scopes of the graph but parts of a large scope.
    """

    parents: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    leaf: list[int] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)
    box_of: list[int] = field(default_factory=list)
    groups: set[int] = field(default_factory=set)

    def add(self, parent: int, label: str, leaf: int = -1) -> int:
        """Adds a box; `set_children` makes it a child of its parent."""
        self.parents.append(parent)
        self.labels.append(label)
        self.leaf.append(leaf)
        self.children.append([])
        return len(self.parents) - 1

    def set_children(self, box: int, children: list[int]) -> None:
        """Sets the children of a box."""
        self.children[box] = children
        for child in children:
            self.parents[child] = box

    def from_root(self) -> Iterator[int]:
        """Yields all boxes, outer ones first."""
        pending = [ROOT]
        while pending:
            box = pending.pop()
            yield box
            pending += reversed(self.children[box])


def build_tree(structure: Structure) -> Tree:
    """Builds the tree of a structure, with children in the order of the data flow."""
    tree = Tree()
    for parent, label in structure.scopes:
        tree.add(parent, label)
    for index, leaf in enumerate(structure.leaves):
        box = tree.add(leaf.scope, leaf.label, index)
        tree.box_of.append(box)
        tree.children[leaf.scope].append(box)
    for scope in range(len(structure.scopes) - 1, ROOT, -1):
        tree.children[structure.scopes[scope][0]].append(scope)
    _merge_single_children(tree, len(structure.scopes))
    _sort(tree, _data_flow_order(structure))
    for box in list(tree.from_root()):
        _group(tree, box, 0)
    return tree


def _merge_single_children(tree: Tree, scopes: int) -> None:
    """Merges a scope with its only child (`a` with only `b` becomes `a/b`) and removes empty scopes."""
    for scope in range(scopes - 1, -1, -1):
        children = []
        for child in tree.children[scope]:
            while tree.leaf[child] < 0 and len(tree.children[child]) == 1:
                only = tree.children[child].pop()
                tree.labels[only] = f"{tree.labels[child]}/{tree.labels[only]}"
                child = only
            if tree.leaf[child] >= 0 or tree.children[child]:
                children.append(child)
        tree.set_children(scope, children)


def _data_flow_order(structure: Structure) -> list[int]:
    """Returns a position for each leaf, after and close to its inputs; constants are just before their first use."""
    inputs: list[list[int]] = [[] for _ in structure.leaves]
    used = bytearray(len(inputs))
    for wire in structure.wires:
        inputs[wire.target].append(wire.source)
        used[wire.source] = 1
    position: dict[int, int] = {}
    seen = bytearray(len(inputs))
    for root in sorted(range(len(inputs)), key=used.__getitem__):
        pending = [] if seen[root] else [(root, iter(inputs[root]))]
        seen[root] = 1
        while pending:
            leaf, rest = pending[-1]
            source = next((each for each in rest if not seen[each]), None)
            if source is None:
                position[leaf] = len(position)
                pending.pop()
            else:
                seen[source] = 1
                pending.append((source, iter(inputs[source])))
    return [position[leaf] for leaf in range(len(inputs))]


def _sort(tree: Tree, flow: list[int]) -> None:
    """Sorts children by the mean position of their leaves."""
    total, count = [0.0] * len(tree.parents), [0] * len(tree.parents)
    for box in reversed(list(tree.from_root())):
        if tree.leaf[box] >= 0:
            total[box], count[box] = float(flow[tree.leaf[box]]), 1
        for child in tree.children[box]:
            total[box] += total[child]
            count[box] += count[child]
    for children in tree.children:
        children.sort(key=lambda box: total[box] / max(count[box], 1))


def _group(tree: Tree, box: int, depth: int) -> None:
    """Splits the children of a large box into groups of neighbours in the data flow, and large groups again."""
    members = tree.children[box]
    if len(members) <= MAX_CHILDREN:
        return
    parts = _parts(tree, members, depth)
    children = [part[0] if len(part) == 1 else tree.add(box, label) for part, label in _labelled(tree, box, parts)]
    for child, part in zip(children, parts, strict=True):
        if len(part) > 1:
            tree.set_children(child, part)
            tree.groups.add(child)
            _group(tree, child, depth + 1)
    tree.set_children(box, children)


def _parts(tree: Tree, members: list[int], depth: int) -> list[list[int]]:
    """Splits boxes where the first words of their names change; into equal parts if names do not help."""
    words = [_WORDS.findall(tree.labels[box].split("/")[0]) for box in members]
    parts = [[box] for box in members]
    for count in range(1, max(map(len, words), default=0) + 1) if depth < _MAX_GROUP_DEPTH else ():
        parts = _segments(members, [tuple(each[:count]) for each in words])
        if len(parts) > 1:
            break
    if 1 < len(parts) <= MAX_CHILDREN:
        return parts
    if len(parts) == 1:
        parts = [[box] for box in members]
    count = min(MAX_CHILDREN, -(-len(parts) // MAX_CHILDREN))
    count = max(count, 2)
    cuts = [len(parts) * number // count for number in range(count + 1)]
    return [[box for part in parts[start:end] for box in part] for start, end in itertools.pairwise(cuts)]


def _segments(members: list[int], keys: list[tuple[str, ...]]) -> list[list[int]]:
    """Cuts a sequence so that equal keys are in one segment."""
    last = {key: index for index, key in enumerate(keys)}
    segments: list[list[int]] = []
    end = -1
    for index, (box, key) in enumerate(zip(members, keys, strict=True)):
        if index > end:
            segments.append([])
        end = max(end, last[key])
        segments[-1].append(box)
    return segments


def _labelled(tree: Tree, box: int, parts: list[list[int]]) -> list[tuple[list[int], str]]:
    """Returns each group with its label: the words that its names share, if no group beside or around has them."""
    labels = [_shared_words(tree, part) for part in parts]
    around = tree.labels[box] if box in tree.groups else ""
    return [
        (part, label if label and label != around and labels.count(label) == 1 else _range_label(tree, part))
        for part, label in zip(parts, labels, strict=True)
    ]


def _shared_words(tree: Tree, part: list[int]) -> str:
    """Returns the words that all names of a group start with; empty if there are none."""
    first = _end_name(tree, part[0], 0)
    words = [_WORDS.findall(tree.labels[box].split("/")[0]) for box in part]
    shared = 0
    for column in zip(*words, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    ends = [match.end() for match in _WORDS.finditer(first)]
    if not 0 < shared <= len(ends):
        return ""
    label = first[: ends[shared - 1]]
    return label if all(tree.labels[box].startswith(label) for box in part) else ""


def _range_label(tree: Tree, part: list[int]) -> str:
    """Returns the first and last name of a group."""
    return f"{_end_name(tree, part[0], 0)} … {_end_name(tree, part[-1], -1)}"


def _end_name(tree: Tree, box: int, which: int) -> str:
    """Returns the first or last name in a box's label, from which the label of its group is made."""
    return tree.labels[box].split(" … ")[which]
