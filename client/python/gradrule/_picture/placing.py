"""Computes positions of boxes and routes of edges for a set of open scopes; `layout.js` does the same on the page.

The rows are known. A box is centred below its sources as far as its neighbours in the row permit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gradrule._picture.layers import Item, entering_bend, item_box, leaving_bend
from gradrule._picture.reading import ROOT
from gradrule._picture.view import View, common_scope

GAP, ROW_GAP, PAD, HEAD, BEND = 18.0, 34.0, 14.0, 24.0, 8.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    """Holds left, top, width and height in pixels."""

    x: float
    y: float
    w: float
    h: float


@dataclass(frozen=True, slots=True)
class Route:
    """Describes an edge between two visible boxes. `points`: its route; empty if it leads upwards."""

    source: int
    target: int
    on_path: bool
    points: list[Point]


@dataclass(slots=True)
class Positions:
    """Holds positions in pixels.

    Attributes:
        rects: Rectangles of the visible boxes, outer boxes first.
        bands: Top and bottom of each row, by open scope.
        bends: Horizontal middle of each bend, by (scope, row, item).
    """

    rects: dict[int, Rect] = field(default_factory=dict)
    bands: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    bends: dict[tuple[int, int, Item], float] = field(default_factory=dict)


@dataclass(slots=True)
class _ScopeLayout:
    """Holds the layout of a scope's content in pixels, relative to the scope's upper left corner."""

    w: float
    h: float
    lefts: list[list[float]]
    bands: list[tuple[float, float]]


def place(view: View, opened: Collection[int]) -> Positions:
    """Computes the positions of all boxes in open scopes. The root is always open."""
    order = [ROOT]
    for box in order:
        order += [child for child in view.children[box] if child in opened]
    layouts: dict[int, _ScopeLayout] = {}
    for box in reversed(order):
        layouts[box] = _scope_layout(view, box, layouts)
    positions = Positions()
    positions.rects[ROOT] = Rect(0.0, 0.0, layouts[ROOT].w, layouts[ROOT].h)
    for box in order:
        layout, at = layouts[box], positions.rects[box]
        positions.bands[box] = [(at.y + top, at.y + bottom) for top, bottom in layout.bands]
        for number, row in enumerate(view.rows[box]):
            top = positions.bands[box][number][0]
            for item, left in zip(row, layout.lefts[number], strict=True):
                w, h = _size(view, item, layouts)
                if item < 0:
                    positions.bends[box, number, item] = at.x + left + w / 2
                else:
                    positions.rects[item] = Rect(at.x + left, top, w, h)
    return positions


def _size(view: View, item: Item, layouts: Mapping[int, _ScopeLayout]) -> tuple[float, float]:
    if item < 0:
        return BEND, 0.0
    layout = layouts.get(item)
    return (float(view.widths[item]), float(view.heights[item])) if layout is None else (layout.w, layout.h)


def _scope_layout(view: View, box: int, layouts: Mapping[int, _ScopeLayout]) -> _ScopeLayout:
    # Middles of the items that edges come from: by box for the box or its latest bend, by bend for entering edges.
    middles: dict[Item, float] = {}
    lefts, bands = [], []
    y = PAD if box == ROOT else HEAD
    for row in view.rows[box]:
        sizes = [_size(view, item, layouts) for item in row]
        targets = [_target_middle(view, item, middles) for item in row]
        xs = _left_positions([w for w, _ in sizes], targets)
        height = max(h for _, h in sizes)
        for item, x, (w, _) in zip(row, xs, sizes, strict=True):
            middles[_source_key(item)] = x + w / 2
        lefts.append(xs)
        bands.append((y, y + height))
        y += height + ROW_GAP
    left = min((x for xs in lefts for x in xs), default=0.0)
    right = 0.0
    for row, xs in zip(view.rows[box], lefts, strict=True):
        for item, x in zip(row, xs, strict=True):
            right = max(right, x - left + _size(view, item, layouts)[0])
    right = max(right, view.widths[box] - 2 * PAD)
    moved = [[x - left + PAD for x in xs] for xs in lefts]
    return _ScopeLayout(right + 2 * PAD, y - ROW_GAP + PAD, moved, bands)


def _source_key(item: Item) -> Item:
    return item if item == entering_bend(item_box(item)) else item_box(item)


def _target_middle(view: View, item: Item, middles: Mapping[Item, float]) -> float | None:
    """Returns the mean middle of an item's sources; for a bend, the middle of its edge in the rows above."""
    sources = [_source_key(item)] if item < 0 else [*view.before.get(item, ()), entering_bend(item)]
    known = [middles[source] for source in sources if source in middles]
    return sum(known) / len(known) if known else None


def _left_positions(widths: list[float], targets: list[float | None]) -> list[float]:
    """Returns left positions of a row: in order, without overlap, near `targets`; None follows its neighbour."""
    plain, x = [], 0.0
    for w in widths:
        plain.append(x)
        x += w + GAP
    shifts = [
        None if target is None else target - w / 2 - at for target, w, at in zip(targets, widths, plain, strict=True)
    ]
    shift = next((each for each in shifts if each is not None), -(x - GAP) / 2)
    lefts, end = [], None
    for at, w, each in zip(plain, widths, shifts, strict=True):
        shift = shift if each is None else each
        left = at + shift if end is None else max(at + shift, end + GAP)
        lefts.append(left)
        end = left + w
    off = [target - w / 2 - left for target, w, left in zip(targets, widths, lefts, strict=True) if target is not None]
    moved = sum(off) / len(off) if off else 0.0
    return [left + moved for left in lefts]


def routes(view: View, positions: Positions) -> list[Route]:
    """Returns the edges between visible boxes, each pair once; edges off the path first."""
    visible: dict[int, int] = {}
    found: dict[tuple[int, int], bool] = {}
    for source, target, on_path in view.edges:
        pair = _visible_box(view, positions, visible, source), _visible_box(view, positions, visible, target)
        if pair[0] != pair[1]:
            found[pair] = found.get(pair, False) or on_path
    drawn = [Route(*pair, on_path, _route_points(view, positions, *pair)) for pair, on_path in found.items()]
    return sorted(drawn, key=lambda route: route.on_path)


def _visible_box(view: View, positions: Positions, visible: dict[int, int], leaf: int) -> int:
    """Returns the innermost visible box that holds a leaf."""
    box = visible.get(leaf)
    if box is None:
        box = leaf
        while box not in positions.rects:
            box = view.parents[box]
        visible[leaf] = box
    return box


def _route_points(view: View, positions: Positions, source: int, target: int) -> list[Point]:
    _, upper, lower = common_scope(view, source, target)
    if view.row[upper] >= view.row[lower]:
        return []
    a, b = positions.rects[source], positions.rects[target]
    points = [(a.x + a.w / 2, a.y + a.h)]

    def down(scope: int, item: Item, start: int, end: int) -> None:
        for number in range(start, end):
            middle = positions.bends.get((scope, number, item))
            if middle is not None:
                top, bottom = positions.bands[scope][number]
                points.extend([(middle, top), (middle, bottom)])

    for box in _enclosing_boxes(view, source, upper):
        parent = view.parents[box]
        bands = positions.bands[parent]
        points.append((points[-1][0], bands[view.row[box]][1]))
        down(parent, leaving_bend(box), view.row[box] + 1, view.row[lower] if box == upper else len(bands))
    for box in reversed(_enclosing_boxes(view, target, lower)):
        if box != lower:
            down(view.parents[box], entering_bend(box), 0, view.row[box])
    points.append((b.x + b.w / 2, b.y))
    return points


def _enclosing_boxes(view: View, box: int, outer: int) -> list[int]:
    """Returns the boxes from an inner one to an enclosing one."""
    boxes = [box]
    while boxes[-1] != outer:
        boxes.append(view.parents[boxes[-1]])
    return boxes
