"""Collects the facts about each leaf: its rule, whether it is on the path from ys to xs, and its errors.

The path is computed from the graph's structure. If the server reports the nodes whose gradient it computed, all other
nodes are off the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradrule._builder.names import bare, split
from gradrule._picture.reading import Structure

if TYPE_CHECKING:
    from gradrule._builder.specs import TensorSpec
    from gradrule._results.call_results import Explanation, Resolution

ACTIVE = "active"


@dataclass(slots=True)
class Fact:
    """Describes one leaf.

    Attributes:
        rule: Index into `Facts.rules`; None without an override.
        label: Label of the override; empty without an override.
        status: Status of the override; empty without an override.
        on_path: Whether the leaf is on the path from xs to ys.
        is_x: Whether the leaf is one of the xs.
        is_y: Whether the leaf is one of the ys.
        rewritten: Whether a rewrite changed the leaf.
        wrong: Error messages about the leaf.
    """

    rule: int | None = None
    label: str = ""
    status: str = ""
    on_path: bool = False
    is_x: bool = False
    is_y: bool = False
    rewritten: bool = False
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Facts:
    """Describes all leaves.

    Attributes:
        leaves: One entry for each leaf of the structure, in the same order.
        path: 1 for each vertex on the path from xs to ys, else 0.
        rules: Texts of the rules, in order of first use.
        ys: Names of the ys.
        xs: Names of the xs.
        wrong: All error messages.
        notes: Facts that the picture cannot show.
        names: Names of the request for leaves that the graph names differently.
    """

    leaves: list[Fact]
    path: bytearray
    rules: list[str]
    ys: list[str]
    xs: list[str]
    wrong: list[str]
    notes: list[str]
    names: dict[int, str]


def collect_facts(structure: Structure, explanation: Explanation) -> Facts:
    """Combines a graph's structure with its explanation. Nodes that the structure lacks become notes."""
    facts = [Fact() for _ in structure.leaves]
    leaves_by_name: dict[str, list[int]] = {}
    for index, leaf in enumerate(structure.leaves):
        leaves_by_name.setdefault(leaf.name, []).append(index)
    notes = [
        f"{name} is not expanded: its functions are nested too deeply or are too many" for name in structure.unexpanded
    ]
    groups = explanation.ys, explanation.xs
    ys, xs = ([spec.name for spec in group.values()] for group in groups)
    for tensors, role in ((xs, "is_x"), (ys, "is_y")):
        for name in tensors:
            place = structure.top.get(split(name)[0])
            if place is None:
                notes.append(f"{name} is not in the picture")
            else:
                setattr(facts[place], role, True)
    rules: dict[str, int] = {}
    requested: set[int] = set()
    certain = {
        found[0] for name in explanation.default_gradient_nodes if len(found := leaves_by_name.get(name, [])) == 1
    }
    for item in explanation.overrides:
        rule = rules.setdefault(rule_text(item), len(rules))
        found = [
            index
            for name in item.nodes or (item.node,)
            for index in _leaves_named(structure, leaves_by_name, name, item.function)
        ]
        for index in found:
            facts[index].rule, facts[index].label, facts[index].status = rule, item.label, item.status
        if item.status == ACTIVE:
            requested.update(found)
            certain.update(() if item.nodes else found)
        if not found:
            notes.append(f"{item.node} ({item.status.replace('_', ' ')}, {rule_text(item)}) is not in the picture")
    requested.update(_leaves_inside(structure, [index for index in requested if structure.leaves[index].calls]))
    reported = {index for name in explanation.default_gradient_nodes for index in leaves_by_name.get(name, ())}
    rewritten = {index for name in explanation.rewritten for index in leaves_by_name.get(name, ())}
    for index in rewritten:
        facts[index].rewritten = True
    for finding in explanation.findings:
        for index in leaves_by_name.get(finding.node, ()):
            facts[index].wrong.append(finding.message)
    path = _path(structure, xs, ys)
    _mark_path(structure, facts, path, requested | reported | rewritten, certain)
    wrong = [f"{finding.reason}: {finding.message}" for finding in explanation.findings]
    shown_ys, shown_xs = map(_shown, groups)
    names = _request_names(structure, explanation)
    return Facts(facts, path, list(rules), shown_ys, shown_xs, wrong, notes, names)


def _shown(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Returns the names of the request, each with the tensor's own name if it differs."""
    return [name if bare(name) == bare(spec.name) else f"{name} ({spec.name})" for name, spec in specs.items()]


def _request_names(structure: Structure, explanation: Explanation) -> dict[int, str]:
    """Returns the names that the request gives to first outputs of nodes, by leaf."""
    found: dict[int, str] = {}
    for group in (explanation.outputs, explanation.inputs, explanation.xs, explanation.ys):
        for name, spec in group.items():
            node, output = split(spec.name)
            place = structure.top.get(node)
            if place is not None and not output and bare(name) != bare(spec.name):
                found[place] = name
    return found


def rule_text(item: Resolution) -> str:
    """Returns a rule's name; inline rules have none and are distinguished by the override's label."""
    if item.label == "no_gradient":
        return f"no gradient: {item.rule}"
    return f"{item.rule} ({item.label})" if item.rule == "inline" and item.label else item.rule


def _leaves_named(structure: Structure, leaves_by_name: dict[str, list[int]], name: str, function: str) -> list[int]:
    """Returns the leaves with a name; a loop's condition and body may have one each, in different functions."""
    found = leaves_by_name.get(name, [])
    exact = [index for index in found if structure.leaves[index].function == function]
    return exact or found


def _leaves_inside(structure: Structure, calls: Iterable[int]) -> list[int]:
    """Returns the leaves inside calls that have a rule as a whole; the server does not compute their gradients."""
    outer = {structure.leaves[index].name for index in calls}
    found = []
    for index, leaf in enumerate(structure.leaves) if outer else ():
        name = leaf.name
        while name and name not in outer:
            name = name.rpartition("/")[0]
        if name:
            found.append(index)
    return found


def _path(structure: Structure, xs: Iterable[str], ys: Iterable[str]) -> bytearray:
    """Returns a flag per vertex: whether a y depends on it and it depends on an x."""
    after: list[list[int]] = [[] for _ in structure.dependencies]
    for vertex, sources in enumerate(structure.dependencies):
        for source in sources:
            after[source].append(vertex)
    reached, needed = (
        _reachable([found for name in names if (found := structure.vertex_of(name)) is not None], edges)
        for names, edges in ((xs, after), (ys, structure.dependencies))
    )
    return bytearray(map(int.__and__, reached, needed))


def _reachable(seeds: list[int], edges: list[list[int]]) -> bytearray:
    seen = bytearray(len(edges))
    pending = list(seeds)
    for vertex in seeds:
        seen[vertex] = 1
    while pending:
        for vertex in edges[pending.pop()]:
            if not seen[vertex]:
                seen[vertex] = 1
                pending.append(vertex)
    return seen


def _mark_path(structure: Structure, facts: list[Fact], path: bytearray, reported: set[int], certain: set[int]) -> None:
    """Marks the leaves on the path.

    Args:
        structure: The graph's structure.
        facts: Facts about the leaves, which are changed.
        path: Flag per vertex, which is changed.
        reported: Leaves that the server may have reported; if empty, only the structure determines the path.
        certain: Leaves that are on the path independently of the structure, because gradients also pass resources.
    """
    for (call, _), vertex in structure.outputs.items():
        facts[call].on_path |= bool(path[vertex])
    for index, leaf in enumerate(structure.leaves):
        fact = facts[index]
        if not leaf.calls:
            path[leaf.vertex] &= not reported or index in reported or fact.is_x or fact.is_y
            fact.on_path = bool(path[leaf.vertex])
        fact.on_path |= index in certain
