"""Arranges boxes in rows: layers by longest path, bends for long edges, fewer crossings by the barycentre method.

Python's layout libraries have other licences or need binaries, and must run again for each folding state. This module
computes rows once per scope; they are valid for all folding states of the inner scopes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# Maximum number of boxes in a row; a larger layer gets several rows.
_MAX_ROW_BOXES = 10
# Maximum number of rows in which an edge has a bend; this limits the number of bends per box.
MAX_BEND_ROWS = 16
_SWEEP_COUNT = 5

# A box (>= 0), or a bend (< 0): a position in a row that edges of a box pass.
Item = int


def leaving_bend(box: int) -> Item:
    """Returns the bend of the edges that leave a box downwards."""
    return -2 * box - 1


def entering_bend(box: int) -> Item:
    """Returns the bend of the edges that enter a box from outside of its scope."""
    return -2 * box - 2


def item_box(item: Item) -> int:
    """Returns the box of an item: itself, or the box that a bend belongs to."""
    return item if item >= 0 else (-item - 1) // 2


def compute_rows(
    boxes: Sequence[int],
    edges: Iterable[tuple[int, int]],
    entered: Collection[int] = (),
    left: Collection[int] = (),
) -> list[list[Item]]:
    """Computes the rows of a scope in time linear in the numbers of boxes and edges, apart from sorting.

    Args:
        boxes: Boxes of the scope, roughly in the order of the data flow.
        edges: Pairs of source and target; edges that close a cycle are ignored.
        entered: Boxes with edges from outside of the scope.
        left: Boxes with edges to the outside of the scope.

    Returns:
        The rows from top to bottom, with boxes and bends.
    """
    after: dict[int, list[int]] = {box: [] for box in boxes}
    for source, target in edges:
        after[source].append(target)
    positions = _depth_first_positions(boxes, after)
    forward = {box: [other for other in after[box] if positions[other] > positions[box]] for box in boxes}
    layer = _layer_numbers(sorted(boxes, key=positions.__getitem__), forward)
    grid = _Grid(_split_layers(boxes, layer, positions))
    for box in boxes:
        grid.add_edges(box, forward[box], enters=box in entered, leaves=box in left)
    for sweep in range(_SWEEP_COUNT):
        grid.sweep(down=sweep % 2 == 0)
    return grid.rows


def _depth_first_positions(boxes: Sequence[int], after: dict[int, list[int]]) -> dict[int, int]:
    """Returns the position of each box in depth-first order; an edge to an earlier position closes a cycle."""
    finished: list[int] = []
    seen: set[int] = set()
    for root in reversed(boxes):
        pending = [(root, iter(after[root]))] if root not in seen else []
        seen.add(root)
        while pending:
            box, rest = pending[-1]
            follower = next((other for other in rest if other not in seen), None)
            if follower is None:
                finished.append(box)
                pending.pop()
            else:
                seen.add(follower)
                pending.append((follower, iter(after[follower])))
    return {box: index for index, box in enumerate(reversed(finished))}


def _layer_numbers(ordered: Sequence[int], forward: dict[int, list[int]]) -> dict[int, int]:
    layer = dict.fromkeys(ordered, 0)
    has_input: set[int] = set()
    for box in ordered:
        for follower in forward[box]:
            layer[follower] = max(layer[follower], layer[box] + 1)
            has_input.add(follower)
    last = max(layer.values(), default=0)
    for box in ordered:
        if box not in has_input:
            # Put a constant above its first user, and a box without edges at the end.
            layer[box] = min((layer[other] for other in forward[box]), default=last + 2) - 1
    return layer


def _split_layers(boxes: Sequence[int], layer: dict[int, int], positions: dict[int, int]) -> list[list[int]]:
    layers: dict[int, list[int]] = {}
    for box in sorted(boxes, key=positions.__getitem__):
        layers.setdefault(layer[box], []).append(box)
    rows = []
    for number in sorted(layers):
        members = layers[number]
        count = -(-len(members) // _MAX_ROW_BOXES)
        cuts = [len(members) * cut // count for cut in range(count + 1)]
        rows += [members[start:end] for start, end in itertools.pairwise(cuts)]
    return rows


@dataclass(slots=True, init=False)
class _Grid:
    """Holds rows of items, and for each item the connected items in the rows above and below."""

    rows: list[list[Item]]
    row_of: dict[int, int]
    above: dict[tuple[int, Item], list[Item]]
    below: dict[tuple[int, Item], list[Item]]

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = [list(row) for row in rows]
        self.row_of = {box: number for number, row in enumerate(rows) for box in row}
        self.above, self.below = {}, {}

    def add_edges(self, box: int, followers: Sequence[int], *, enters: bool, leaves: bool) -> None:
        """Adds bends for the edges from a box to its followers, and for edges across the scope's border."""
        start = self.row_of[box]
        ends = [self.row_of[other] for other in followers]
        last = len(self.rows) if leaves else max(ends, default=0)
        bent = max(min(last - 1, start + MAX_BEND_ROWS), start)
        for number in range(start + 1, bent + 1):
            self.rows[number].append(leaving_bend(box))
            self._connect(number, self._upper_item(box, number), leaving_bend(box))
        for other, end in zip(followers, ends, strict=True):
            if end - 1 <= bent:
                self._connect(end, self._upper_item(box, end), other)
        for number in range(max(start - MAX_BEND_ROWS, 0), start) if enters else ():
            self.rows[number].append(entering_bend(box))
            self._connect(number + 1, entering_bend(box), box if number + 1 == start else entering_bend(box))

    def _upper_item(self, box: int, number: int) -> Item:
        return box if number == self.row_of[box] + 1 else leaving_bend(box)

    def _connect(self, number: int, upper: Item, lower: Item) -> None:
        self.above.setdefault((number, lower), []).append(upper)
        self.below.setdefault((number - 1, upper), []).append(lower)

    def sweep(self, *, down: bool) -> None:
        """Sorts each row by the mean position of the connected items in the row above or below."""
        connections, step = (self.above, -1) if down else (self.below, 1)
        numbers = range(1, len(self.rows)) if down else range(len(self.rows) - 2, -1, -1)
        for number in numbers:
            other = self.rows[number + step]
            positions = {item: index / len(other) for index, item in enumerate(other)}
            row = self.rows[number]
            targets = {}
            for index, item in enumerate(row):
                connected = connections.get((number, item))
                targets[item] = (
                    sum(positions[each] for each in connected) / len(connected) if connected else index / len(row)
                )
            row.sort(key=targets.__getitem__)
