"""Tests ranges of params: parsing, checking, and their place in definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradrule.common import tensor_codec
from gradrule.v1 import rule_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.rules import Param, RuleContent, write_param_value
from gradrule_server.rules.params import Range, parse_range

NUMBERS = [-math.inf, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, math.inf, math.nan]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("", NUMBERS),
        ("  ", NUMBERS),
        ("> 0", [0.5, 1, 2, math.inf]),
        (">= 0", [0, 0.5, 1, 2, math.inf]),
        ("< 0", [-math.inf, -2, -1, -0.5]),
        ("<=0", [-math.inf, -2, -1, -0.5, 0]),
        ("> -1, < 1", [-0.5, 0, 0.5]),
        (" >= -1 ,<= 1.0 ", [-1, -0.5, 0, 0.5, 1]),
        ("> 0, > 0.5", [1, 2, math.inf]),
        ("integer", [-2, -1, 0, 1, 2]),
        ("> 0, integer", [1, 2]),
        (">= 5e-1, <= .5", [0.5]),
        (">= 1, <= 1, integer", [1]),
        ("> 0.5, < 1.5, integer", [1]),
        ("< 1e300", [-math.inf, -2, -1, -0.5, 0, 0.5, 1, 2]),
    ],
)
def test_numbers_inside_a_range(text: str, inside: list[float]) -> None:
    found = parse_range(text)
    kept = [number for number in NUMBERS if found.problem(number) is None]
    np.testing.assert_array_equal(kept, inside)
    for number in NUMBERS:
        alone, among = found.problem(np.array([number])), found.problem(np.array([[inside[0], number]]))
        assert (alone is None) == (among is None) == (found.problem(number) is None)


def test_error_names_number_element_and_range() -> None:
    found = parse_range(" > 0, integer ")
    assert found.problem(0.5) == "0.5 is outside its range: > 0, integer"
    tensor = np.array([[1.0, 2.0], [3.0, -1.0]])
    assert found.problem(tensor) == "-1 (element 3 of the tensor) is outside its range: > 0, integer"
    assert found.problem(np.zeros((0, 2))) is None
    assert parse_range(" ") == Range()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("positive", "'positive' is not a condition"),
        ("> 0,", "'' is not a condition"),
        ("> a", "'> a' is not a condition"),
        ("= 1", "'= 1' is not a condition"),
        ("0 <", "'0 <' is not a condition"),
        ("> 1e999", "too large"),
        ("> nan", "not a condition"),
        ("> 1, < 0", "no number is in the range"),
        ("> 1, < 1", "no number is in the range"),
        (">= 1, < 1", "no number is in the range"),
        ("> 0, < 1, integer", "no number is in the range"),
        ("> 0.2, < 0.8, integer", "no number is in the range"),
        ("> 0, " * 60, "at most 256 characters"),
    ],
)
def test_invalid_range_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_range(text)


def declaring(range_: str, default: rule_pb2.ParamValue | None = None) -> rule_pb2.RuleDefinition:
    param = rule_pb2.RuleParam(name="alpha", range=range_, default_value=default)
    return rule_pb2.RuleDefinition(expression="alpha * dy", params=[param])


def test_range_is_part_of_the_definition() -> None:
    content = RuleContent.from_definition(declaring("> 0", write_param_value(2.0)))
    assert content.params[0].range == "> 0"
    assert content.to_definition() == declaring("> 0", write_param_value(2.0))
    assert content.digest == RuleContent.from_definition(declaring("")).digest


def refused(definition: rule_pb2.RuleDefinition) -> tuple[str, str, str]:
    with pytest.raises(GradruleError) as caught:
        RuleContent.from_definition(definition)
    (finding,) = caught.value.findings
    return reason_name(finding.reason), finding.field, finding.message


def test_invalid_declaration_is_refused() -> None:
    reason, field, message = refused(declaring("above 0"))
    assert (reason, field) == ("INVALID_RULE", "params[0].range")
    assert "param 'alpha': 'above 0' is not a condition" in message
    reason, field, message = refused(declaring("> 0", write_param_value(-1.0)))
    assert (reason, field) == ("INVALID_PARAM", "params[0].default_value")
    assert message == "param 'alpha': -1 is outside its range: > 0 (its default value)"


def test_all_invalid_params_are_reported() -> None:
    definition = rule_pb2.RuleDefinition(
        expression="dy",
        params=[
            rule_pb2.RuleParam(name="a", range="?"),
            rule_pb2.RuleParam(name="b", range="< 0", default_value=write_param_value(1.0)),
            rule_pb2.RuleParam(name="c", range="< 0"),
        ],
    )
    with pytest.raises(GradruleError) as caught:
        RuleContent.from_definition(definition)
    assert [finding.field for finding in caught.value.findings] == ["params[0].range", "params[1].default_value"]


def test_values_are_checked() -> None:
    param = Param("alpha", None, "", "> 0")
    param.check(write_param_value(1.0), "here")
    param.check(write_param_value(np.array([1.0, 2.0])), "here")
    for value, words in (
        (write_param_value(0.0), "0 is outside its range: > 0"),
        (write_param_value(math.nan), "nan is outside its range"),
        (write_param_value(np.array([1.0, -2.0])), "-2 \\(element 1 of the tensor\\)"),
        (rule_pb2.ParamValue(), "has neither a number nor a tensor"),
        (rule_pb2.ParamValue(tensor=tensor_codec.to_message(np.array([1j]))), "complex128"),
    ):
        with pytest.raises(GradruleError, match=words) as caught:
            param.check(value, "here")
        assert reason_name(caught.value.reason) == "INVALID_PARAM"
        assert caught.value.findings[0].field == "here"


def test_without_a_range_all_values_are_accepted() -> None:
    Param("alpha").check(write_param_value(math.nan), "here")
    with pytest.raises(GradruleError):
        Param("alpha").check(rule_pb2.ParamValue(), "here")
