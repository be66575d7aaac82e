from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradrule as gr
from gradrule.cli import output


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.float32([3, -4]), ["g", "float32", "[2]", "5", "[ 3. -4.]"]),
        (np.array([3, 4], ml_dtypes.bfloat16), ["g", "bfloat16", "[2]", "5", "[3. 4.]"]),
        (np.array(3 + 4j), ["g", "complex128", "[]", "5", "3.+4.j"]),
        (np.int32([[1], [2]]), ["g", "int32", "[2, 1]", "", "[[1]\n [2]]"]),
        (np.array([True]), ["g", "bool", "[1]", "", "[ True]"]),
        (np.array([b"a"], object), ["g", "string", "[1]", "", "[b'a']"]),
        (np.zeros((0, 3), np.float32), ["g", "float32", "[0, 3]", "", "[]"]),
    ],
)
def test_rows_of_arrays(array: Any, expected: list[str]) -> None:
    assert output.array_row("g", array) == expected


def test_large_arrays_are_cut() -> None:
    shown = output.array_row("g", np.arange(10_000, dtype=np.float32))[-1]
    assert "..." in shown
    assert len(shown) < 120


def test_missing_gradients_show_their_kind() -> None:
    assert output.array_row("g", None, "not_differentiable")[-1] == "not differentiable"
    assert output.array_json(None, "unconnected") == {"kind": "unconnected"}
    assert output.array_json(np.float32([1]), "unconnected")["kind"] == "dense"


def test_sparse_gradients_show_their_slices_and_the_norm_of_the_whole() -> None:
    # Index 1 comes twice: its slices add up to 3, so the norm is that of (0, 3, 4).
    sparse = gr.Sparse(np.float32([1, 2, 4]), np.int64([1, 1, 2]), np.int64([3]))
    name, dtype, shape, norm, shown = output.array_row("g", sparse)
    assert (name, dtype, shape, norm) == ("g", "float32, sparse", "[3]", "5")
    assert shown == "slices [1 1 2] of\n[1. 2. 4.]"
    assert output.array_json(sparse) == {
        "kind": "sparse",
        "dtype": "float32",
        "shape": [3],
        "indices": [1, 1, 2],
        "values": [1.0, 2.0, 4.0],
    }


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.float32([1, np.nan, np.inf, -np.inf]), [1.0, "NaN", "Infinity", "-Infinity"]),
        (np.complex64([1 - 2j]), [[1.0, -2.0]]),
        (np.array([b"text", b"\xff"], object), ["text", {"base64": "/w=="}]),
        (np.array([1.5], ml_dtypes.bfloat16), [1.5]),
        (np.array([[True]]), [[True]]),
        (np.uint64([2**64 - 1]), [2**64 - 1]),
    ],
)
def test_values_in_json(array: Any, expected: object, capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json(output.array_json(array))
    assert json.loads(capsys.readouterr().out)["values"] == expected


def test_names_are_not_parsed_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(output.console(), "[bold]t[/bold]", ("name",), [["[red]x[/red] :smile:"]])
    out = capsys.readouterr().out
    assert "[red]x[/red] :smile:" in out
    assert "[bold]t[/bold]" in out


def test_a_plain_table() -> None:
    rows = [["x", "[1. 2.\n 3. 4.]"], ["longer", "\x1b[2Jb"]]
    assert output.plain_table("gradients", ("name", "values"), rows).splitlines() == [
        "gradients",
        "name    values",
        "------  -------",
        "x       [1. 2.",
        "         3. 4.]",
        "longer  [2Jb",
    ]
    assert output.plain_table("", ("", ""), [["kind", "user"]]).splitlines() == ["kind  user"]


def test_cells_contain_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(output.console(), "t", ("name",), [["\x1b[31mred"]])
    assert "\x1b" not in capsys.readouterr().out


def test_shapes() -> None:
    assert output.shape_text(None) == "unknown"
    assert output.shape_text((None, 3)) == "[?, 3]"
