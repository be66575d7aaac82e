"""The comparison itself: that it sees what it is there to see. The peers are not needed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.peers.cases import Array, Collection, Reference
from tests.peers.compare import as_json, difference, row_of
from tests.peers.runs import to_channels_first, to_channels_last

THEIRS = np.array([1.0, -2.0, 0.0, 1e-3])


def relative(ours: Array, theirs: Array = THEIRS, skipped: Array | None = None, floor: float = 1e-3) -> float:
    return difference({"x": ours}, {"x": theirs}, skipped, floor)[1]


def test_equal_arrays_differ_by_nothing() -> None:
    assert difference({"x": THEIRS.copy()}, {"x": THEIRS}, None, 1e-3) == (0.0, 0.0, "")


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_planted_error_is_seen_wherever_it_is(place: int) -> None:
    ours = THEIRS.copy()
    ours[place] *= 1.001
    assert relative(ours) == pytest.approx(1e-3, rel=0.6)


def test_next_to_zero_the_largest_element_is_the_scale() -> None:
    assert relative(THEIRS + np.array([0, 0, 2e-6, 0])) == pytest.approx(1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_on_one_side_is_infinitely_wrong(value: float) -> None:
    broken = THEIRS.copy()
    broken[2] = value
    assert relative(broken) == np.inf
    assert relative(THEIRS, broken) == np.inf
    assert relative(broken, broken) == 0


def test_what_is_skipped_is_not_compared() -> None:
    ours = THEIRS.copy()
    ours[1] = np.nan
    assert relative(ours, skipped=np.array([False, True, False, False])) == 0


def test_another_shape_is_infinitely_wrong() -> None:
    assert relative(THEIRS[:, np.newaxis]) == np.inf


def test_the_place_is_told() -> None:
    assert (
        difference({"x": THEIRS + np.array([0, 1, 0, 0])}, {"x": THEIRS}, None, 1e-3)[2] == "dx[1] is -1 here, -2 there"
    )


def test_layouts_turn_and_turn_back() -> None:
    images = np.arange(120.0).reshape(2, 3, 4, 5)
    assert to_channels_last(images).shape == (2, 4, 5, 3)
    np.testing.assert_array_equal(to_channels_first(to_channels_last(images)), images)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    collection = Collection({"paper": "1"})
    run = {"kind": "op", "op": "Sign"}
    collection.add("ste", "paper", "sign", "float32", run, {"x": THEIRS}, {"x": THEIRS}, {"clip": 1.0})
    collection.save(tmp_path)
    reference = Reference.load(tmp_path)
    assert reference.cases == collection.cases
    np.testing.assert_array_equal(reference.inputs(reference.cases[0])["x"], THEIRS)
    np.testing.assert_array_equal(reference.references(reference.cases[0])["x"], THEIRS)


@pytest.mark.parametrize(("factor", "status"), [(2.0, "explained"), (1.0, "explained difference is gone")])
def test_an_explained_difference_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, status: str
) -> None:
    collection = Collection({"paper": "1"})
    run = {"kind": "op", "op": "Sign"}
    collection.add("ste", "paper", "sign", "float64", run, {"x": THEIRS}, {"x": THEIRS}, explained="on purpose")
    collection.save(tmp_path)
    reference = Reference.load(tmp_path)
    monkeypatch.setattr("tests.peers.compare.run", lambda *arguments: {"x": THEIRS * factor})
    row = row_of(None, reference, reference.cases[0])
    assert row["status"] == status
    assert "on purpose" in row["note"]


def test_the_results_are_json_with_a_line_per_row() -> None:
    text = as_json([{"rule": "ste", "max_abs_difference": None}, {"rule": "ede", "max_abs_difference": 0.5}])
    assert json.loads(text)["rows"][1] == {"rule": "ede", "max_abs_difference": 0.5}
    assert '\n{"rule": "ede"' in text
