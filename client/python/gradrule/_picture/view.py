"""Defines the content of a picture as plain lists, for the SVG file and, as JSON, for the page."""

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
        seconds: Second line of text.
        widths: Widths in pixels of leaves and folded scopes.
        heights: Heights in pixels of leaves and folded scopes.
        classes: CSS classes: `leaf` or `scope`, `path`, `x`, `y`, `wrong`, `rule`, `off_path`, `not_differentiable`.
        rule: Index into `legend`; -1 for none.
        badges: Badges of folded scopes.
        more: Whether a scope has more badges than it shows.
        rows: Rows of each scope, with its children and bends.
        row: Row that contains the box.
        before: Siblings with edges to a box, by box.
        wires: Boxes of source and target leaf, and whether the edge is on the path from xs to ys.
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
