"""The work for a body grows with its length, whatever it contains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gradrule.v1.tensor_pb2 import Dt
from gradrule_gateway import conversion
from gradrule_gateway.decoding import MAX_TENSORS
from gradrule_gateway.problems import Problem
from gradrule_gateway.routes import ROUTES

EVALUATE = next(route for route in ROUTES if route.rpc == "GradientService/Evaluate")


def calls_of(function: Callable[[], Any]) -> int:
    """Returns how many Python functions a call runs."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def feeds(number: int) -> bytes:
    return json.dumps({"feeds": {f"x{index}": 1 for index in range(number)}}).encode()


@pytest.mark.parametrize("convert", [conversion.decode_body, conversion.decode_to_bytes])
def test_the_work_for_many_feeds_is_proportional_to_their_number(convert: Callable[..., Any]) -> None:
    convert(EVALUATE, feeds(1))
    one, ten = (calls_of(partial(convert, EVALUATE, feeds(number))) for number in (40, 400))
    assert ten < 12 * one


def test_lists_of_enum_numbers_need_no_function_for_each() -> None:
    def body(values: list[int]) -> bytes:
        attr = {"types": {"list": {"type": values}}}
        return json.dumps({"spec": {"graph": {"inlineGraph": {"node": [{"attr": attr}]}}}}).encode()

    types = [1, 3, 5000, -1] * 100
    node = conversion.decode_body(EVALUATE, body(types)).message.spec.graph.inline_graph.node[0]
    assert list(node.attr["types"].list.type) == types
    few, many = (calls_of(partial(conversion.decode_body, EVALUATE, body([1] * number))) for number in (1, 1000))
    assert many < few + 100
    with pytest.raises(Problem, match="from -2147483648 to 2147483647"):
        conversion.decode_body(EVALUATE, body([1, 2**31]))


def test_places_are_those_of_the_tensors_without_a_type() -> None:
    typed = {"dtype": "float32", "values": [1]}
    body = {"feeds": {"a": 1, "b": typed, "c": 1}, "gradYs": [{"name": "y", "value": typed}, {"name": "z", "value": 1}]}
    message, places = conversion.decode_to_bytes(EVALUATE, json.dumps(body).encode())
    assert places == [("feeds", 0, "feeds.a"), ("feeds", 2, "feeds.c"), ("grad_ys", 1, "gradYs[1].value")]
    decoded = conversion.decoded_from_bytes(EVALUATE, message, places)
    types = {"inputs": {"a": Dt.DT_HALF}, "ys": {"z": Dt.DT_DOUBLE}}
    decoded.close(types)
    found = [
        named.value.inline_tensor.dtype for field in ("feeds", "grad_ys") for named in getattr(decoded.message, field)
    ]
    assert found == [Dt.DT_HALF, Dt.DT_FLOAT, Dt.DT_INT32, Dt.DT_FLOAT, Dt.DT_DOUBLE]
    assert conversion.close_bytes(EVALUATE, message, places, types) == decoded.message.SerializeToString()


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(Problem, match="more than 10000"):
        conversion.decode_body(EVALUATE, feeds(MAX_TENSORS + 1))


@pytest.mark.parametrize(
    ("dtype", "field", "value"),
    [
        ("DT_FLOAT", "floatVal", 1.5),
        ("DT_DOUBLE", "doubleVal", 1),
        ("DT_INT32", "intVal", 3),
        ("DT_INT64", "int64Val", "7"),
    ],
)
def test_elements_in_fields_of_the_message_cost_no_python_call_each(dtype: str, field: str, value: Any) -> None:
    def body(number: int) -> bytes:
        shape = {"dim": [{"size": number}]}
        tensor = {"dtype": dtype, "tensorShape": shape, field: [value] * number}
        return json.dumps({"feeds": {"x": {"inlineTensor": tensor}}}).encode()

    conversion.decode_body(EVALUATE, body(1))
    assert calls_of(partial(conversion.decode_body, EVALUATE, body(10_000))) < 500
