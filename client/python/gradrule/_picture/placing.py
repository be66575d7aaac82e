"""Computes the positions of boxes and the routes of edges for a set of open scopes, like `layout.js`.

The rows are known. A box is centred below its sources as far as its neighbours in the row permit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gradrule._picture.layers import Item, box_of, entering, leaving
from gradrule._picture.reading import ROOT
from gradrule._picture.view import View, meeting

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
class Placed:
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
class _Inside:
    """Holds the layout of a scope's content in pixels, relative to the scope's upper left corner."""

    w: float
    h: float
    lefts: list[list[float]]
    bands: list[tuple[float, float]]


def place(view: View, opened: Collection[int]) -> Placed:
    """Computes the positions of all boxes in open scopes. The root is always open."""
    order = [ROOT]
    for box in order:
        order += [child for child in view.children[box] if child in opened]
    insides: dict[int, _Inside] = {}
    for box in reversed(order):
        insides[box] = _inside(view, box, insides)
    placed = Placed()
    placed.rects[ROOT] = Rect(0.0, 0.0, insides[ROOT].w, insides[ROOT].h)
    for box in order:
        inside, at = insides[box], placed.rects[box]
        placed.bands[box] = [(at.y + top, at.y + bottom) for top, bottom in inside.bands]
        for number, row in enumerate(view.rows[box]):
            top = placed.bands[box][number][0]
            for item, left in zip(row, inside.lefts[number], strict=True):
                w, h = _size(view, item, insides)
                if item < 0:
                    placed.bends[box, number, item] = at.x + left + w / 2
                else:
                    placed.rects[item] = Rect(at.x + left, top, w, h)
    return placed


def _size(view: View, item: Item, insides: Mapping[int, _Inside]) -> tuple[float, float]:
    if item < 0:
        return BEND, 0.0
    inside = insides.get(item)
    return (float(view.widths[item]), float(view.heights[item])) if inside is None else (inside.w, inside.h)


def _inside(view: View, box: int, insides: Mapping[int, _Inside]) -> _Inside:
    # Middles of the items that edges come from: by box for the box or its latest bend, by bend for entering edges.
    middles: dict[Item, float] = {}
    lefts, bands = [], []
    y = PAD if box == ROOT else HEAD
    for row in view.rows[box]:
        sizes = [_size(view, item, insides) for item in row]
        wishes = [_wish(view, item, middles) for item in row]
        xs = _packed([w for w, _ in sizes], wishes)
        height = max(h for _, h in sizes)
        for item, x, (w, _) in zip(row, xs, sizes, strict=True):
            middles[_end(item)] = x + w / 2
        lefts.append(xs)
        bands.append((y, y + height))
        y += height + ROW_GAP
    left = min((x for xs in lefts for x in xs), default=0.0)
    right = 0.0
    for row, xs in zip(view.rows[box], lefts, strict=True):
        for item, x in zip(row, xs, strict=True):
            right = max(right, x - left + _size(view, item, insides)[0])
    right = max(right, view.widths[box] - 2 * PAD)
    moved = [[x - left + PAD for x in xs] for xs in lefts]
    return _Inside(right + 2 * PAD, y - ROW_GAP + PAD, moved, bands)


def _end(item: Item) -> Item:
    return item if item == entering(box_of(item)) else box_of(item)


def _wish(view: View, item: Item, middles: Mapping[Item, float]) -> float | None:
    """Returns the mean middle of an item's sources; for a bend, the middle of its edge in the rows above."""
    sources = [_end(item)] if item < 0 else [*view.before.get(item, ()), entering(item)]
    known = [middles[source] for source in sources if source in middles]
    return sum(known) / len(known) if known else None


def _packed(widths: list[float], wishes: list[float | None]) -> list[float]:
    """Returns left positions of a row: in order, without overlap, near `wishes`; None follows its neighbour."""
    plain, x = [], 0.0
    for w in widths:
        plain.append(x)
        x += w + GAP
    shifts = [None if wish is None else wish - w / 2 - at for wish, w, at in zip(wishes, widths, plain, strict=True)]
    shift = next((each for each in shifts if each is not None), -(x - GAP) / 2)
    lefts, end = [], None
    for at, w, each in zip(plain, widths, shifts, strict=True):
        shift = shift if each is None else each
        left = at + shift if end is None else max(at + shift, end + GAP)
        lefts.append(left)
        end = left + w
    off = [wish - w / 2 - left for wish, w, left in zip(wishes, widths, lefts, strict=True) if wish is not None]
    moved = sum(off) / len(off) if off else 0.0
    return [left + moved for left in lefts]


def routes(view: View, placed: Placed) -> list[Route]:
    """Returns the edges between visible boxes, each pair once; edges off the path first."""
    shown: dict[int, int] = {}
    found: dict[tuple[int, int], bool] = {}
    for source, target, on_path in view.wires:
        pair = _shown(view, placed, shown, source), _shown(view, placed, shown, target)
        if pair[0] != pair[1]:
            found[pair] = found.get(pair, False) or on_path
    drawn = [Route(*pair, on_path, _way(view, placed, *pair)) for pair, on_path in found.items()]
    return sorted(drawn, key=lambda route: route.on_path)


def _shown(view: View, placed: Placed, shown: dict[int, int], leaf: int) -> int:
    """Returns the innermost visible box that holds a leaf."""
    box = shown.get(leaf)
    if box is None:
        box = leaf
        while box not in placed.rects:
            box = view.parents[box]
        shown[leaf] = box
    return box


def _way(view: View, placed: Placed, source: int, target: int) -> list[Point]:
    _, upper, lower = meeting(view, source, target)
    if view.row[upper] >= view.row[lower]:
        return []
    a, b = placed.rects[source], placed.rects[target]
    points = [(a.x + a.w / 2, a.y + a.h)]

    def down(scope: int, item: Item, start: int, end: int) -> None:
        for number in range(start, end):
            middle = placed.bends.get((scope, number, item))
            if middle is not None:
                top, bottom = placed.bands[scope][number]
                points.extend([(middle, top), (middle, bottom)])

    for box in _between(view, source, upper):
        parent = view.parents[box]
        bands = placed.bands[parent]
        points.append((points[-1][0], bands[view.row[box]][1]))
        down(parent, leaving(box), view.row[box] + 1, view.row[lower] if box == upper else len(bands))
    for box in reversed(_between(view, target, lower)):
        if box != lower:
            down(view.parents[box], entering(box), 0, view.row[box])
    points.append((b.x + b.w / 2, b.y))
    return points


def _between(view: View, box: int, outer: int) -> list[int]:
    """Returns the boxes from an inner one to an enclosing one."""
    boxes = [box]
    while boxes[-1] != outer:
        boxes.append(view.parents[boxes[-1]])
    return boxes
