"""Tests the conversion of values of a rule's variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule._messages.sample_requests import sample_request
from gradrule.common.dtypes import dtype_name


def types(rule: Any, op_type: str | None = None, **values: Any) -> dict[str, str]:
    request = sample_request(rule, values, None, op_type)
    return {item.name: dtype_name(item.value.inline_tensor.dtype) for item in request.values}


def test_text_that_cannot_be_a_name_is_a_formula() -> None:
    assert sample_request("dy * x", {"x": 1.0}, None, None).definition.expression == "dy * x"
    assert sample_request("dy", {"x": 1.0}, None, None).name == "dy"


def test_lists_of_integers_are_floats() -> None:
    found = types("ste", x=[1, 2], x1=3, y=[[1], [2]], dy=[1, 1], default=[0, 0], dy1=None)
    assert found == dict.fromkeys(("x", "x1", "y", "dy", "default"), "float32")


def test_arrays_bools_and_floats_keep_their_types() -> None:
    found = types(gr.Rule("dy"), x=np.array([1, 2]), x1=[True], y=np.float64([1]), dy=[1.5])
    assert found == {"x": "int64", "x1": "bool", "y": "float64", "dy": "float32"}


@pytest.mark.parametrize("words", [{"rule": "GatherV2"}, {"rule": "ste", "op_type": "GatherV2"}], ids=["op", "op_type"])
def test_inputs_that_an_op_takes_as_integers_only_stay_integers(words: dict[str, Any]) -> None:
    assert types(**words, x=[1, 2], x1=[0, 1], x2=0, dy=[1, 1]) == {
        "x": "float32", "x1": "int32", "x2": "int32", "dy": "float32",
    }  # fmt: skip


def test_outputs_follow_the_op_too() -> None:
    assert types("ste", "ArgMax", x=[1, 2], y=1) == {"x": "float32", "y": "int32"}
    assert types("ste", "AddN", x=[1, 2], x1=[1, 2]) == {"x": "float32", "x1": "float32"}


def test_ragged_lists_and_rules_of_no_kind_are_refused() -> None:
    with pytest.raises(gr.errors.InvalidTensorError, match=r"dy.*ragged"):
        types("ste", dy=[[1], [1, 2]])
    with pytest.raises(gr.errors.InvalidRuleError, match="int"):
        types(3, x=[1])
