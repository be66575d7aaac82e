"""Tests the table of op traits."""

from __future__ import annotations

from importlib import resources

import pytest

from gradrule_server.policy import op_reviews
from gradrule_server.policy.op_tables import TRAITS, TRAITS_FILE, input_numbers, ops_with, trait_values

_ROWS = [
    line.split("\t")
    for line in resources.files("gradrule_server.policy").joinpath(TRAITS_FILE).read_text("utf-8").splitlines()[1:]
]


def test_rows_are_sorted_and_name_reviewed_ops_once() -> None:
    names = [row[0] for row in _ROWS]
    assert names == sorted(set(names))
    assert set(names) <= op_reviews().keys()


def test_every_trait_has_a_meaning_and_an_op() -> None:
    used = {item.partition("=")[0] for _, traits in _ROWS for item in traits.split()}
    assert used == TRAITS.keys()


def test_traits_of_a_row_are_sorted_and_occur_once() -> None:
    for op, traits in _ROWS:
        names = [item.partition("=")[0] for item in traits.split()]
        assert names and len(set(names)) == len(names), op
        assert traits == " ".join(sorted(traits.split())), op


def test_values_are_of_the_kind_that_the_trait_takes() -> None:
    valued = {"bodies", "linear_operands", "moves_elements", "permutes", "view", "xla"}
    assert {trait for trait in TRAITS if any(trait_values(trait).values())} == valued
    assert set(trait_values("xla").values()) == {"", "floats"}
    assert set(trait_values("view").values()) == {"0", "1", "each"}
    assert input_numbers("linear_operands")["Conv2DBackpropInput"] == (2, 1)


def test_groups_and_control_flow_agree() -> None:
    assert ops_with("@linear") == ops_with("@convolution") | ops_with("@dense")
    assert ops_with("loop") | ops_with("branch") == ops_with("bodies")
    assert ops_with("tells_shape") < ops_with("reads_shape")


def test_unknown_trait_is_refused() -> None:
    with pytest.raises(KeyError, match="keeps_shapes"):
        ops_with("keeps_shapes")
