"""What notebooks show of results: names, dtypes, shapes, values, histograms, short digests; small for large results."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import gradrule as gr
from gradrule._builder.array_html import histogram_svg, tensors_table
from gradrule._builder.names import ByName
from gradrule._builder.notebook_text import html_block
from gradrule._results.rule_infos import SampleResult

RNG = np.random.default_rng(0)


def cells(html: str) -> list[list[str]]:
    """Returns the texts of a table's cells, row by row, without the pictures."""
    root = ElementTree.fromstring(re.sub(r"<(td colspan)=(\d+)>", r'<\1="\2">', html))
    return [[(cell.text or "") for cell in row] for row in root.iter("tr")]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.float32(2.5), ["float32", "[]", "2.5", ""]),
        (np.array([[1.0, -2.0]]), ["float64", "[1, 2]", "1, -2", ""]),
        (np.arange(10, dtype=np.int64), ["int64", "[10]", "0 … 9", ""]),
        (np.array([1.0] * 8 + [np.nan, np.inf]), ["float64", "[10]", "1 … 1, 2 NaN or infinite", ""]),
        (np.full(9, np.nan), ["float64", "[9]", "9 NaN or infinite", ""]),
        (np.array([3 + 4j] * 9), ["complex128", "[9]", "absolute 5 … 5", ""]),
        (np.zeros((0, 3), np.float16), ["float16", "[0, 3]", "empty", ""]),
        (np.array([b"text"], object), ["string", "[1]", "b'text'", ""]),
        (np.array([True, False]), ["bool", "[2]", "True, False", ""]),
        (gr.Sparse(np.ones((3, 2)), np.arange(3), np.array([100, 2])), ["float64", "[100, 2]", "3 slices: 1 … 1", ""]),
        (None, ["", "", "no gradient", ""]),
    ],
)
def test_values_are_described(value: Any, wanted: list[str]) -> None:
    (_, row) = cells(tensors_table("", [("output", "y", value)]))
    assert row == ["output", "y", *wanted]


def test_histogram_has_the_numbers_of_values() -> None:
    values = np.repeat([0.0, 1.0], [100, 25])
    svg = ElementTree.fromstring(histogram_svg(values))
    assert svg.find("title") is not None
    bars = [(float(bar.get("x", "")), float(bar.get("height", ""))) for bar in svg.iter("rect")]
    width, height = float(svg.get("width", "")), float(svg.get("height", ""))
    # Heights are roots, so that few values far from the others stay visible.
    assert bars == [(0.0, height), (pytest.approx(width * 23 / 24), height / 2)]
    assert histogram_svg(np.ones(50)) == "" and histogram_svg(np.arange(15.0)) == ""


def test_groups_are_flat() -> None:
    rows = cells(tensors_table("", [("gradient", "a", {"x": np.float32(1), "y": None})]))
    assert [row[1] for row in rows[1:]] == ["a/x", "a/y"]


def test_large_results_stay_small() -> None:
    large = {f"layer/{number}": RNG.normal(size=(1000, 300)) for number in range(3)}
    html = SampleResult(large, {})._repr_html_()
    assert len(html) < 10_000 and "≈ " in html
    many = SampleResult({f"dx{number}": np.arange(30.0) for number in range(1000)}, {})._repr_html_()
    assert "… 950 more rows" in many and len(many) < 120_000


def test_gradients_are_a_table_and_other_mappings_are_not() -> None:
    assert "float64" in (ByName({"x": np.ones(3)})._repr_html_() or "")
    assert ByName({"x": "text"})._repr_html_() is None
    assert ByName({})._repr_html_() is None


def test_colours_of_text_come_from_the_notebook() -> None:
    style = html_block().split("<style>")[1].split("</style>")[0]
    colours = re.findall(r"(?<![-\w])color:([^;}]+)", style)
    assert set(colours) == {"inherit"}
    assert "background:transparent" in style
    # Every rule is limited to gradrule's own block.
    assert all(
        part.strip().startswith(".gradrule") for part in re.findall(r"([^{}]+)\{", style) for part in part.split(",")
    )


def test_rule_info_shows_formula_params_and_a_short_digest() -> None:
    param = gr.ParamInfo("alpha", 2.0, "steepness", "> 0")
    info = gr.RuleInfo(
        "atan", "builtin", "dy * x", None, {"alpha": 2.0}, "the slope", ("Sign",), "Fang 2021", "a" * 64, True, (),
        "dy * alpha", "surrogate", False, False, (param,),
    )  # fmt: skip
    html = info._repr_html_()
    for text in ("Rule atan", "dy * alpha", "Fang 2021", "steepness", "&gt; 0", "aaaaaaaaaaaa…", "surrogate"):
        assert text in html
    assert "a" * 13 not in html
