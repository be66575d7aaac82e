"""Computes positions of boxes and routes of edges of the SVG file, for a set of open scopes.

The page's layout comes from a library. Python has none that is kept up, needs no binary and knows nested scopes.
Rows are computed once per scope. A box is centred below its sources as far as its neighbours in the row permit.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gradrule._picture import text
from gradrule._picture.layers import Item, compute_rows, entering_bend, item_box, leaving_bend
from gradrule._picture.reading import ROOT
from gradrule._picture.view import Badge, Edge, View

GAP, ROW_GAP, PAD, HEAD, BEND = 20.0, 40.0, 16.0, 28.0, 10.0
LABEL_SIZE, TEXT_SIZE = 13.0, 12.0
LEAF_HEIGHT, BADGE_HEIGHT = 44, 22
MARK_WIDTH = 20
_PILL_WIDTH = 18
# A picture has at most about this number of boxes. Larger graphs are drawn folded, and without constants.
MAX_BOXES = 60

Point = tuple[float, float]


@dataclass(slots=True)
class Rows:
    """Holds a view with the rows of its scopes. Lists have one entry per box.

    Attributes:
        view: The view.
        widths: Widths in pixels of leaves and folded scopes.
        heights: Heights in pixels of leaves and folded scopes.
        rows: Rows of each scope, with its children and bends.
        row: Row that contains the box.
        before: Siblings with edges to a box, by box.
    """

    view: View
    widths: list[float]
    heights: list[float]
    rows: list[list[list[Item]]]
    row: list[int]
    before: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Rect:
    """Holds left, top, width and height in pixels."""

    x: float
    y: float
    w: float
    h: float


@dataclass(frozen=True, slots=True)
class Route:
    """Describes an edge between two visible boxes.

    Attributes:
        source: Box where the edge starts.
        target: Box where it ends.
        on_path: Whether a gradient passes it.
        points: Its route; empty if it leads upwards.
        tensor: Element type and shape if they are known and the edge is one tensor.
        label: Middle of the base line of its text; None if it leads upwards.
    """

    source: int
    target: int
    on_path: bool
    points: list[Point]
    tensor: str
    label: Point | None


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


def without_constants(view: View) -> View:
    """Returns the view without the boxes that only constants and variables determine.

    A scope with one other box is replaced by that box, under the scope's label.
    """
    constant = [" constant" in classes for classes in view.classes]
    children, parents, labels = [list(group) for group in view.children], list(view.parents), list(view.labels)
    for scope in sorted((box for box, group in enumerate(children) if group), key=lambda box: -view.depths[box]):
        kept = []
        for child in children[scope]:
            if view.children[child] and len(children[child]) == 1:
                only = children[child][0]
                if not _has_request_name(view, only):
                    labels[only] = labels[child]
                child = only
            if not constant[child]:
                parents[child] = scope
                kept.append(child)
        children[scope] = kept
    edges = [edge for edge in view.edges if not constant[edge.source] and not constant[edge.target]]
    depths = list(view.depths)
    order = [ROOT]
    for scope in order:
        for child in children[scope]:
            depths[child] = depths[scope] + 1
            order.append(child)
    # Empty the scopes that are not drawn any more.
    drawn = set(order)
    children = [group if box in drawn else [] for box, group in enumerate(children)]
    return replace(view, children=children, parents=parents, depths=depths, labels=labels, edges=edges)


def _has_request_name(view: View, box: int) -> bool:
    words = view.classes[box].split()
    return "x" in words or "y" in words


def initially_open(view: View) -> list[int]:
    """Returns the scopes to open, outer and interesting scopes first, until `MAX_BOXES` boxes are visible."""
    opened, count = [], len(view.children[ROOT])
    pending: list[tuple[int, int, int]] = []

    def offer(children: Collection[int]) -> None:
        for child in children:
            if view.children[child]:
                heapq.heappush(pending, (view.depths[child], -view.interest[child], child))

    offer(view.children[ROOT])
    while pending:
        _, _, box = heapq.heappop(pending)
        if count - 1 + len(view.children[box]) <= MAX_BOXES:
            count += len(view.children[box]) - 1
            opened.append(box)
            offer(view.children[box])
    return opened


def arrange(view: View) -> Rows:
    """Computes sizes of boxes, and the rows of all scopes from the edges between their children."""
    size = len(view.parents)
    heights = [LEAF_HEIGHT + BADGE_HEIGHT * bool(badges) + 0.0 for badges in view.badges]
    widths = [round(_box_width(view, box)) + 0.0 for box in range(size)]
    found = Rows(view, widths, heights, [[] for _ in range(size)], [0] * size, {})
    edges: dict[int, dict[tuple[int, int], None]] = {}
    entered: set[int] = set()
    left: set[int] = set()
    for edge in view.edges:
        scope, upper, lower = _common_scope(view, edge.source, edge.target)
        edges.setdefault(scope, {})[upper, lower] = None
        for box, outer, crossing in ((edge.source, upper, left), (edge.target, lower, entered)):
            while box != outer and box not in crossing:
                crossing.add(box)
                box = view.parents[box]
    for pairs in edges.values():
        for upper, lower in pairs:
            found.before.setdefault(lower, []).append(upper)
    for scope, children in enumerate(view.children):
        found.rows[scope] = compute_rows(children, edges.get(scope, ()), entered, left)
        for number, row in enumerate(found.rows[scope]):
            for item in row:
                if item >= 0:
                    found.row[item] = number
    return found


def badge_width(badge: Badge) -> float:
    """Returns the width of a badge in pixels."""
    return text.width(badge.text, TEXT_SIZE) + 10


def _box_width(view: View, box: int) -> float:
    classes = view.classes[box].split()
    pills = _PILL_WIDTH * sum(word in classes for word in ("x", "y", "wrong"))
    mark = MARK_WIDTH * (view.rule[box] >= 0)
    first = text.width(view.labels[box], LABEL_SIZE) + pills + mark
    badges = sum(badge_width(badge) + 4 for badge in view.badges[box]) + 14 * view.more[box]
    return max(first, text.width(view.subtitles[box], TEXT_SIZE) + mark, badges, 30.0) + 20


def _common_scope(view: View, source: int, target: int) -> tuple[int, int, int]:
    """Returns the innermost scope that holds both boxes, and its two children that hold one each."""
    a, b = source, target
    while view.parents[a] != view.parents[b]:
        if view.depths[a] >= view.depths[b]:
            a = view.parents[a]
        else:
            b = view.parents[b]
    return view.parents[a], a, b


def place(arranged: Rows, opened: Collection[int]) -> Positions:
    """Computes the positions of all boxes in open scopes. The root is always open."""
    view = arranged.view
    order = [ROOT]
    for box in order:
        order += [child for child in view.children[box] if child in opened]
    layouts: dict[int, _ScopeLayout] = {}
    for box in reversed(order):
        layouts[box] = _scope_layout(arranged, box, layouts)
    positions = Positions()
    positions.rects[ROOT] = Rect(0.0, 0.0, layouts[ROOT].w, layouts[ROOT].h)
    for box in order:
        layout, at = layouts[box], positions.rects[box]
        positions.bands[box] = [(at.y + top, at.y + bottom) for top, bottom in layout.bands]
        for number, row in enumerate(arranged.rows[box]):
            top = positions.bands[box][number][0]
            for item, left in zip(row, layout.lefts[number], strict=True):
                w, h = _size(arranged, item, layouts)
                if item < 0:
                    positions.bends[box, number, item] = at.x + left + w / 2
                else:
                    positions.rects[item] = Rect(at.x + left, top, w, h)
    return positions


def _size(arranged: Rows, item: Item, layouts: Mapping[int, _ScopeLayout]) -> tuple[float, float]:
    if item < 0:
        return BEND, 0.0
    layout = layouts.get(item)
    return (arranged.widths[item], arranged.heights[item]) if layout is None else (layout.w, layout.h)


def _scope_layout(arranged: Rows, box: int, layouts: Mapping[int, _ScopeLayout]) -> _ScopeLayout:
    # Middles of the items that edges come from: by box for the box or its latest bend, by bend for entering edges.
    middles: dict[Item, float] = {}
    lefts, bands = [], []
    y = PAD if box == ROOT else HEAD
    for row in arranged.rows[box]:
        sizes = [_size(arranged, item, layouts) for item in row]
        targets = [_target_middle(arranged, item, middles) for item in row]
        xs = _left_positions([w for w, _ in sizes], targets)
        height = max(h for _, h in sizes)
        for item, x, (w, _) in zip(row, xs, sizes, strict=True):
            middles[_source_key(item)] = x + w / 2
        lefts.append(xs)
        bands.append((y, y + height))
        y += height + ROW_GAP
    left = min((x for xs in lefts for x in xs), default=0.0)
    right = 0.0
    for row, xs in zip(arranged.rows[box], lefts, strict=True):
        for item, x in zip(row, xs, strict=True):
            right = max(right, x - left + _size(arranged, item, layouts)[0])
    right = max(right, arranged.widths[box] - 2 * PAD)
    moved = [[x - left + PAD for x in xs] for xs in lefts]
    return _ScopeLayout(right + 2 * PAD, y - ROW_GAP + PAD, moved, bands)


def _source_key(item: Item) -> Item:
    return item if item == entering_bend(item_box(item)) else item_box(item)


def _target_middle(arranged: Rows, item: Item, middles: Mapping[Item, float]) -> float | None:
    """Returns the mean middle of an item's sources; for a bend, the middle of its edge in the rows above."""
    sources = [_source_key(item)] if item < 0 else [*arranged.before.get(item, ()), entering_bend(item)]
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


def routes(arranged: Rows, positions: Positions) -> list[Route]:
    """Returns the edges between visible boxes, each pair once; edges off the path first."""
    view = arranged.view
    visible: dict[int, int] = {}
    found: dict[tuple[int, int], list[Edge]] = {}
    for edge in view.edges:
        source, target = (_visible_box(view, positions, visible, box) for box in (edge.source, edge.target))
        if source != target:
            found.setdefault((source, target), []).append(edge)
    drawn = []
    for (source, target), edges in found.items():
        tensors = {edge.tensor for edge in edges if edge.on_path} or {edge.tensor for edge in edges}
        tensor = next(iter(tensors)) if len(tensors) == 1 else ""
        on_path = any(edge.on_path for edge in edges)
        points = _route_points(arranged, positions, source, target)
        label = _label_point(arranged, positions, source, target, points)
        drawn.append(Route(source, target, on_path, points, tensor, label))
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


def _route_points(arranged: Rows, positions: Positions, source: int, target: int) -> list[Point]:
    view = arranged.view
    _, upper, lower = _common_scope(view, source, target)
    if arranged.row[upper] >= arranged.row[lower]:
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
        points.append((points[-1][0], bands[arranged.row[box]][1]))
        down(parent, leaving_bend(box), arranged.row[box] + 1, arranged.row[lower] if box == upper else len(bands))
    for box in reversed(_enclosing_boxes(view, target, lower)):
        if box != lower:
            down(view.parents[box], entering_bend(box), 0, arranged.row[box])
    points.append((b.x + b.w / 2, b.y))
    return points


def _label_point(arranged: Rows, positions: Positions, source: int, target: int, points: list[Point]) -> Point | None:
    """Returns the place of an edge's text: in the gap between rows that it passes first outside of inner scopes."""
    if not points:
        return None
    scope, upper, _ = _common_scope(arranged.view, source, target)
    y = positions.bands[scope][arranged.row[upper]][1]
    before = [x for x, end in points if end <= y]
    after = [x for x, end in points if end > y]
    return (before[-1] + after[0]) / 2, y + ROW_GAP / 2 + 2


def _enclosing_boxes(view: View, box: int, outer: int) -> list[int]:
    """Returns the boxes from an inner one to an enclosing one."""
    boxes = [box]
    while boxes[-1] != outer:
        boxes.append(view.parents[boxes[-1]])
    return boxes
