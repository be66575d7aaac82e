"""Defines the content of a picture as plain lists: the SVG is drawn from them, the page holds them as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradrule._picture.layers import Item


@dataclass(frozen=True, slots=True)
class Badge:
    """Shows how many nodes of a folded scope got a rule."""

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
    """Describes a node on the page. `lines`: more facts, as `name: value`."""

    name: str
    lines: list[str]


@dataclass(slots=True)
class View:
    """Columns by box; box 0 is the whole graph. Sizes are those of boxes that are folded, or leaves.

    classes: words that say how a box looks: `leaf` or `scope`, `path`, `x`, `y`, `wrong`, `rule`, `off_path`,
    `not_differentiable`. rule: index into `legend`, -1 for none. more: are there badges beyond those shown? rows: per
    scope its children, and bends. row: the row that a box stands in. before: the siblings that lead to a box. wires:
    boxes of leaves, and whether on the path. heading: lines, each with the pill that it explains. opened: the scopes
    that are open at first.
    """

    parents: list[int]
    depths: list[int]
    children: list[list[int]]
    labels: list[str]
    titles: list[str]
    seconds: list[str]
    widths: list[int]
    heights: list[int]
    classes: list[str]
    rule: list[int]
    badges: list[list[Badge]]
    more: list[bool]
    rows: list[list[list[Item]]]
    row: list[int]
    before: dict[int, list[int]]
    wires: list[tuple[int, int, bool]]
    details: dict[int, Detail]
    legend: list[LegendRow]
    heading: list[tuple[str, str]]
    opened: list[int] = field(default_factory=list)


def meeting(view: View, source: int, target: int) -> tuple[int, int, int]:
    """Returns the innermost scope that holds both boxes, and its two children that hold one each."""
    a, b = source, target
    while view.parents[a] != view.parents[b]:
        if view.depths[a] >= view.depths[b]:
            a = view.parents[a]
        else:
            b = view.parents[b]
    return view.parents[a], a, b
