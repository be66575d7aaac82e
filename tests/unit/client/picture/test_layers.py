"""Tests the rows of boxes: properties that hold for every graph, and rows of examples."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gradrule._picture.layers import compute_rows, entering_bend, item_box, leaving_bend
from gradrule._picture.placing import arrange, initially_open, place
from gradrule._picture.reading import ROOT
from tests.unit.client.picture.made import explained, large_explained, nested, view

# The first example includes imports and caches, and machines that run tests in parallel are slow: no deadline.
no_deadline = settings(deadline=None)

EDGES = st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=90)


def at(rows: list[list[int]]) -> dict[int, int]:
    return {box: number for number, row in enumerate(rows) for box in row if box >= 0}


@no_deadline
@given(EDGES, st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29)))
def test_every_box_is_in_one_row_and_rows_are_short(
    edges: list[tuple[int, int]], entered: set[int], left: set[int]
) -> None:
    edges = [(a, b) for a, b in edges if a != b]
    rows = compute_rows(range(30), edges, entered, left)
    boxes = [item for row in rows for item in row if item >= 0]
    assert sorted(boxes) == list(range(30))
    assert all(0 < sum(item >= 0 for item in row) <= 10 for row in rows)
    assert all(len(set(row)) == len(row) for row in rows)


@no_deadline
@given(EDGES)
def test_edges_lead_down_without_cycles(edges: list[tuple[int, int]]) -> None:
    edges = [(min(pair), max(pair)) for pair in edges if pair[0] != pair[1]]
    rows = at(compute_rows(range(30), edges))
    assert all(rows[a] < rows[b] for a, b in edges)


@no_deadline
@given(EDGES)
def test_long_edges_have_a_bend_in_each_row_on_their_way(edges: list[tuple[int, int]]) -> None:
    edges = [(min(pair), max(pair)) for pair in edges if pair[0] != pair[1]]
    rows = compute_rows(range(30), edges)
    where = at(rows)
    for a, b in edges:
        assert all(leaving_bend(a) in rows[number] for number in range(where[a] + 1, min(where[b], where[a] + 17)))


def test_edges_from_and_to_the_outside_have_bends() -> None:
    rows = compute_rows([1, 2, 3], [(1, 2), (2, 3)], entered={3}, left={1})
    assert [sorted(row) for row in rows] == [
        sorted([1, entering_bend(3)]),
        sorted([2, entering_bend(3), leaving_bend(1)]),
        sorted([3, leaving_bend(1)]),
    ]


@no_deadline
@given(st.integers(0, 10**6))
def test_bends_know_their_box(box: int) -> None:
    assert item_box(entering_bend(box)) == item_box(leaving_bend(box)) == item_box(box) == box
    assert len({entering_bend(box), leaving_bend(box), entering_bend(box + 1), leaving_bend(box + 1)}) == 4


def test_crossings_are_reduced() -> None:
    # Two strands whose boxes come in turns: untangled, each strand keeps its side.
    rows = compute_rows(range(8), [(0, 3), (1, 2), (2, 5), (3, 4), (4, 7), (5, 6)])
    sides = [row.index(box) for row, box in zip(rows, (0, 3, 4, 7), strict=True)]
    assert len(set(sides)) == 1


def test_a_constant_is_next_to_its_user() -> None:
    rows = at(compute_rows(range(5), [(0, 1), (1, 2), (2, 3), (4, 3)]))
    assert rows[4] == rows[2]


def test_cycles_of_any_size_end() -> None:
    edges = [(a, (a + 1) % 20_000) for a in range(20_000)]
    rows = at(compute_rows(range(20_000), edges))
    assert sum(rows[a] < rows[b] for a, b in edges) == 19_999


def test_boxes_do_not_overlap_and_are_inside_their_scope() -> None:
    for drawn in (view(explained(nested())), view(large_explained(1000))):
        scopes = [box for box, children in enumerate(drawn.children) if children]
        for opened in (set(scopes), set(initially_open(drawn)), set()):
            positions = place(arrange(drawn), opened)
            for scope in positions.bands:
                outer = positions.rects[scope]
                inner = [positions.rects[child] for child in drawn.children[scope]]
                for number, one in enumerate(inner):
                    assert outer.x <= one.x and one.x + one.w <= outer.x + outer.w
                    assert outer.y < one.y + (scope == ROOT) and one.y + one.h <= outer.y + outer.h
                    for other in inner[:number]:
                        beside = one.x + one.w <= other.x or other.x + other.w <= one.x
                        assert beside or one.y + one.h <= other.y or other.y + other.h <= one.y
