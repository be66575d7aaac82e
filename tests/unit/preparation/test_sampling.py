"""Tests which SampleRule requests are refused, and which calls are built for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, graph_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.graphs import Limits
from gradrule_server.link.v1 import link_pb2
from gradrule_server.preparation.references import FrontEndRuleLookup
from gradrule_server.preparation.sampling import sample_call
from gradrule_server.programs.preparer import RegistryLookup
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store

_BROKEN = tensor_pb2.Tensor(dtype=tensor_pb2.DT_FLOAT, tensor_content=b"abc")
_STRING = tensor_pb2.Tensor(dtype=tensor_pb2.DT_STRING, string_val=[b"q"])
_HUGE = tensor_pb2.Tensor(
    dtype=tensor_pb2.DT_FLOAT,
    float_val=[1.0],
    tensor_shape=tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=2**40)]),
)


_DEFAULTS = Limits()


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuleRegistry]:
    store = Store(tmp_path_factory.mktemp("store"))
    yield RuleRegistry(store, ["Sign", "Cast", "Split", "Conv2D"])
    store.close()


def asked(
    rules: RuleRegistry, request: rule_pb2.SampleRuleRequest, limits: Limits = _DEFAULTS, **values: Any
) -> evaluate_pb2.EvaluateRequest:
    for name, value in values.items():
        message = value if isinstance(value, tensor_pb2.Tensor) else tensor_codec.to_message(np.float32(value))
        request.values.add(name=name).value.inline_tensor.CopyFrom(message)
    lookup = RegistryLookup(rules)
    return sample_call(
        request, FrontEndRuleLookup(lambda asked: link_pb2.Answer(rules=lookup.find(asked.rules.names))), limits
    )


def refusal(
    rules: RuleRegistry, request: rule_pb2.SampleRuleRequest, limits: Limits = _DEFAULTS, **values: Any
) -> tuple[str, str]:
    with pytest.raises(GradruleError) as caught:
        asked(rules, request, limits, **values)
    return reason_name(caught.value.reason), caught.value.message


def formula(expression: str, *params: str) -> rule_pb2.SampleRuleRequest:
    request = rule_pb2.SampleRuleRequest()
    request.definition.expression = expression
    request.definition.params.extend(rule_pb2.RuleParam(name=name) for name in params)
    return request


@pytest.mark.parametrize(
    ("values", "reason", "word"),
    [
        ({"x": _BROKEN}, "INVALID_TENSOR", "x"),
        ({"x": [1], "dy": _BROKEN}, "INVALID_TENSOR", "dy"),
        ({"x": _HUGE}, "LIMIT_EXCEEDED", "x"),
        ({"x": tensor_pb2.Tensor()}, "INVALID_TENSOR", "x"),
        ({"x": [1], "x0": [5]}, "UNKNOWN_FEED", "x0"),
        ({"x": [1], "x2": [5]}, "MISSING_FEED", "x1"),
        ({"x": [1], "x01": [5]}, "UNKNOWN_FEED", "x01"),
        ({"x": [1], "dy2": [5]}, "MISSING_FEED", "dy1"),
        ({"dy": [1]}, "MISSING_FEED", "x"),
    ],
)
def test_invalid_values_are_refused(rules: RuleRegistry, values: dict[str, Any], reason: str, word: str) -> None:
    found, message = refusal(rules, formula("dy * x"), **values)
    assert found == reason
    assert word in message


def test_a_value_without_a_tensor_is_refused(rules: RuleRegistry) -> None:
    request = formula("dy * x")
    request.values.add(name="x")
    assert refusal(rules, request) == ("INVALID_TENSOR", "x holds no tensor")


@pytest.mark.parametrize("tensor", [_BROKEN, _STRING, _HUGE])
def test_invalid_params_are_refused(rules: RuleRegistry, tensor: tensor_pb2.Tensor) -> None:
    request = formula("dy * x * alpha", "alpha")
    request.params["alpha"].tensor.CopyFrom(tensor)
    assert refusal(rules, request, x=[1.0])[0] == "INVALID_PARAM"


def test_a_second_upstream_gradient_beside_one_y(rules: RuleRegistry) -> None:
    request = asked(rules, formula("dy * x + dy1"), x=[2.0], y=[1.0], dy=[5.0], dy1=[7.0])
    fed = {item.name: tensor_codec.to_numpy(item.value.inline_tensor).tolist() for item in request.feeds}
    assert sorted(fed.values()) == [[2.0], [5.0], [7.0]]


def test_an_upstream_gradient_of_a_missing_output_is_refused(rules: RuleRegistry) -> None:
    request = rule_pb2.SampleRuleRequest(name="Sign", op_type="Sign")
    found, message = refusal(rules, request, x=[1.0], dy1=[1.0])
    assert found == "UNKNOWN_FEED"
    assert "dy1" in message


def test_attrs_are_attributes_of_the_op(rules: RuleRegistry) -> None:
    request = rule_pb2.SampleRuleRequest(name="Cast", attrs={"DstT": graph_pb2.AttrValue(type=tensor_pb2.DT_DOUBLE)})
    spec = asked(rules, request, x=[1.0]).spec
    op = next(node for node in spec.graph.inline_graph.node if node.name == "op")
    assert (op.op, op.attr["DstT"].type) == ("Cast", tensor_pb2.DT_DOUBLE)


def test_missing_attrs_that_do_not_follow_from_inputs_are_refused(rules: RuleRegistry) -> None:
    assert refusal(rules, rule_pb2.SampleRuleRequest(name="Cast"), x=[1.0])[0] == "INVALID_ATTR"
    request = formula("dy * x")
    request.attrs["DstT"].type = tensor_pb2.DT_DOUBLE
    assert refusal(rules, request, x=[1.0])[0] == "MALFORMED_REQUEST"


def test_configured_limits_apply_to_values(rules: RuleRegistry) -> None:
    of_rank_9 = np.ones([1] * 9)
    assert refusal(rules, formula("dy * x"), x=of_rank_9)[0] == "LIMIT_EXCEEDED"
    asked(rules, formula("dy * x"), Limits(rank=9), x=of_rank_9)
    assert refusal(rules, formula("dy * x"), Limits(constant_bytes=8), x=[1.0] * 3)[0] == "LIMIT_EXCEEDED"


def test_configured_limits_apply_to_sampled_params(rules: RuleRegistry) -> None:
    def scaled() -> rule_pb2.SampleRuleRequest:
        request = formula("dy * x * alpha", "alpha")
        request.params["alpha"].tensor.CopyFrom(tensor_codec.to_message(np.ones([1] * 9, np.float32)))
        return request

    assert refusal(rules, scaled(), x=[1.0])[0] == "INVALID_PARAM"
    asked(rules, scaled(), Limits(rank=9), x=[1.0])


@pytest.mark.parametrize(
    ("limits", "reason"), [(Limits(), "LIMIT_EXCEEDED"), (Limits(unpacking=1000), "DUPLICATE_NODE")]
)
def test_configured_limits_apply_to_the_graph_of_a_rule(rules: RuleRegistry, limits: Limits, reason: str) -> None:
    """A graph within the limits is read: the error is then that two nodes have one name."""
    request = rule_pb2.SampleRuleRequest()
    request.definition.graph.serialized = b"\x0a\x00" * 600_000
    assert refusal(rules, request, limits, x=[1.0])[0] == reason
