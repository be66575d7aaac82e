"""Tests the content of rules: parsing of definitions, binding, digests."""

from __future__ import annotations

import numpy as np
import pytest

from gradrule.common import tensor_codec
from gradrule.v1 import graph_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.policy import NodeLimits
from gradrule_server.rules import Param, RuleContent, Signature, read_param_value, write_param_value
from tests.unit.rules.running import number_of

FLOAT = number_of("float32")
ONE = Signature((FLOAT,), (FLOAT,))


def definition(expression: str, *params: rule_pb2.RuleParam) -> rule_pb2.RuleDefinition:
    return rule_pb2.RuleDefinition(expression=expression, params=params)


def refused(message: rule_pb2.RuleDefinition, bounds: NodeLimits | None = None) -> tuple[str, str]:
    with pytest.raises(GradruleError) as caught:
        RuleContent.from_definition(message, bounds)
    return reason_name(caught.value.reason), caught.value.message


def ops(content: RuleContent, signature: Signature = ONE) -> list[str]:
    return [node.op for node in content.bind(signature).graph.node]


def test_rule_with_a_rule_for_its_own_gradient() -> None:
    message = definition("a * dy", rule_pb2.RuleParam(name="a", default_value=rule_pb2.ParamValue(number=2.0)))
    plain = RuleContent.from_definition(message)
    message.gradient.CopyFrom(definition("(b * dy, None, a * dy)", rule_pb2.RuleParam(name="a")))
    message.gradient.params.add(name="b")
    content = RuleContent.from_definition(message)
    assert content.gradient is not None
    assert (content.gradient.expression, content.expression) == ("(b * dy, None, a * dy)", "a * dy")
    # Params are those of both; of one name, the outer one.
    assert [(param.name, param.default) for param in content.params] == [("a", 2.0), ("b", None)]
    again = RuleContent.from_stored("kept", content.to_definition())
    assert again.to_definition() == content.to_definition()
    assert again.digest == content.digest
    message.gradient.expression = "(b * dy, None, 2 * a * dy)"
    assert len({plain.digest, content.digest, RuleContent.from_definition(message).digest}) == 3


def test_error_in_the_gradient_of_a_rule_says_so() -> None:
    message = definition("2 * dy")
    message.gradient.expression = "(dy, c * x)"
    reason, text = refused(message)
    assert (reason, text[:20]) == ("INVALID_EXPRESSION", "the rule's gradient:")
    message.gradient.Clear()
    message.gradient.SetInParent()
    assert refused(message)[0] == "INVALID_RULE"


def test_internal_attributes_of_a_graph_are_removed() -> None:
    graph = graph_pb2.Graph()
    graph.node.add(name="dy", op="Placeholder")
    node = graph.node.add(name="dx", op="Neg", input=["dy"])
    node.attr["_gradient_op_type"].s = b"gradrule"
    node.attr["_gradrule_mark"].i = 0
    bound = RuleContent(graph_bytes=graph.SerializeToString()).bind(ONE)
    assert not [name for item in bound.graph.node for name in item.attr if name.startswith("_")]


def test_definition_round_trip() -> None:
    tensor = rule_pb2.ParamValue(tensor=tensor_codec.to_message(np.array([1, 2], np.int32)))
    message = definition(
        "a * dy + b + c",
        rule_pb2.RuleParam(name="a", default_value=rule_pb2.ParamValue(number=2.0), description="factor"),
        rule_pb2.RuleParam(name="b", default_value=tensor),
        rule_pb2.RuleParam(name="c"),
    )
    content = RuleContent.from_definition(message)
    a, b, c = content.params
    assert (a.name, a.default, a.description) == ("a", 2.0, "factor")
    np.testing.assert_array_equal(np.asarray(b.default), [1.0, 2.0])
    assert np.asarray(b.default).dtype == np.float64
    assert c.default is None
    again = RuleContent.from_definition(content.to_definition())
    assert again.to_definition() == content.to_definition()
    assert again.digest == content.digest


def test_digest_depends_on_form_and_names_of_params() -> None:
    def digest(expression: str, **params: float | None) -> str:
        return RuleContent(expression=expression, params=tuple(Param(*item) for item in params.items())).digest

    same = digest("a * dy", a=1.0)
    assert same == digest(" a * dy ", a=2.0) == digest("a * dy", a=None)
    others = [digest("a*dy", a=1.0), digest("dy * a", a=1.0), digest("a * dy", a=1.0, b=1.0), digest("dy")]
    assert len({same, *others}) == 5
    assert len(same) == 64


def test_definition_needs_exactly_one_form() -> None:
    assert refused(rule_pb2.RuleDefinition())[0] == "INVALID_RULE"
    assert refused(rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource()))[0] == "INVALID_RULE"
    with pytest.raises(GradruleError):
        RuleContent()


def test_all_invalid_names_of_params_are_reported() -> None:
    names = [rule_pb2.RuleParam(name=name) for name in ("x", "ok", "ok", "exp", "lambda")]
    with pytest.raises(GradruleError) as caught:
        RuleContent.from_definition(definition("dy", *names))
    assert [finding.field for finding in caught.value.findings] == [f"params[{index}].name" for index in (0, 2, 3, 4)]
    assert "declared twice" in caught.value.findings[1].message


def test_only_the_catalogue_may_name_a_param_like_a_function() -> None:
    clip = rule_pb2.RuleParam(name="clip")
    assert refused(definition("where(abs(x) < clip, dy, 0)", clip))[0] == "INVALID_RULE"
    copied = RuleContent.from_definition(definition("where(abs(x) <= clip, dy, 0)", clip))
    assert copied.params[0].name == "clip"


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (tensor_codec.to_message(np.array([1j])), "complex128"),
        (tensor_codec.to_message(np.array([b"a"], object)), "is a tensor of"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.DT_FLOAT, tensor_content=b"123"), "3 bytes"),
    ],
)
def test_default_value_must_hold_real_numbers(tensor: tensor_pb2.Tensor, words: str) -> None:
    param = rule_pb2.RuleParam(name="a", default_value=rule_pb2.ParamValue(tensor=tensor))
    reason, message = refused(definition("a * dy", param))
    assert reason == "INVALID_PARAM"
    assert words in message
    empty = rule_pb2.RuleParam(name="a", default_value=rule_pb2.ParamValue())
    assert refused(definition("a * dy", empty))[0] == "INVALID_PARAM"


def test_param_value_round_trip() -> None:
    assert read_param_value(write_param_value(0.1), "a", "") == 0.1
    array = np.array([[1.0], [np.inf]])
    np.testing.assert_array_equal(np.asarray(read_param_value(write_param_value(array), "a", "")), array)


def test_graph_has_no_unneeded_nodes() -> None:
    assert ops(RuleContent(expression="dy")) == ["Placeholder"]
    assert ops(RuleContent(expression="where(abs(x) <= 1, dy, 0)")) == [
        "Placeholder", "Abs", "Const", "LessEqual", "Placeholder", "Const", "SelectV2",
    ]  # fmt: skip
    assert ops(RuleContent(expression="dy * (2 * pi / 3)")) == ["Placeholder", "Const", "Mul"]
    twice = ops(RuleContent(expression="dy * sigmoid(3 * x) * (1 - sigmoid(3 * x))"))
    assert twice.count("Sigmoid") == 1
    scaled = ops(RuleContent(expression="scale * dy", params=(Param("scale"),)))
    assert scaled == ["Placeholder", "Placeholder", "Cast", "Mul"]
    double = Signature((number_of("float64"),), (number_of("float64"),))
    assert "Cast" not in ops(RuleContent(expression="scale * dy", params=(Param("scale"),)), double)
    assert ops(RuleContent(expression="cast(2 * dy, x)")) == ["Placeholder", "Const", "Mul"]


def test_only_used_variables_are_inputs() -> None:
    content = RuleContent(expression="where(a > 0, dy, cast(0, x))", params=(Param("a"), Param("unused")))
    graph = content.bind(ONE)
    assert set(graph.inputs) == {"param/a", "dy0"}
    types = {node.name: node.attr["dtype"].type for node in graph.graph.node if node.op == "Placeholder"}
    assert types[graph.inputs["param/a"]] == tensor_pb2.DT_DOUBLE


@pytest.mark.parametrize(
    ("expression", "sources"),
    [
        ("dy", {"dy0"}),
        ("ignore_dy(x * 2)", {"x0"}),
        ("default", {"x0"}),
        ("ignore_dy(x + mean(x, axis=1))", {"x0"}),
        ("ignore_dy(mean(x, axis=1))", {"reduced/x0"}),
        ("dy * mean(x, axis='sample')", {"dy0", "reduced/x0"}),
        ("sum(dy)", set()),
        ("ignore_dy(a * x)", {"x0", "param/a"}),
        ("ignore_dy(x * sum(a * x))", {"x0"}),
        ("sum_to(dy, x)", {"x0"}),
        ("where(dy > 0, x, size(y))", {"x0", "dy0"}),
        ("ignore_dy(softmax(x, axis=0))", {"x0"}),
        ("zeros_like(dy)", {"dy0"}),
    ],
)
def test_sources_of_shapes(expression: str, sources: set[str]) -> None:
    content = RuleContent(expression=expression, params=(Param("a"),))
    assert content.bind(ONE).shape_sources == (frozenset(sources),)


def test_properties_of_a_rule() -> None:
    assert RuleContent(expression="dy").per_sample is True
    assert RuleContent(expression="dy / norm(dy)").per_sample is False
    assert RuleContent(expression="default").uses_default
    assert not RuleContent(expression="dy").uses_default


def test_code_is_a_name_and_params() -> None:
    content = RuleContent(code="lrp_epsilon", params=(Param("eps", 1e-6, "", "> 0"),))
    assert content.formula is None
    assert content.per_sample is None
    assert not content.uses_default
    written = content.to_definition()
    assert written.WhichOneof("form") is None
    assert [param.name for param in written.params] == ["eps"]
    again = RuleContent.from_stored("lrp_epsilon", written)
    assert again.code == "lrp_epsilon"
    assert again.digest == content.digest
    others = [
        RuleContent(code="lrp_zplus", params=content.params).digest,
        RuleContent(code="lrp_epsilon").digest,
        RuleContent(expression="dy", params=content.params).digest,
    ]
    assert len({content.digest, *others}) == 4
    with pytest.raises(GradruleError):
        content.bind(ONE)
    for form in ({"expression": "dy"}, {"graph_bytes": b""}):
        with pytest.raises(GradruleError):
            RuleContent(code="lrp_epsilon", **form)


@pytest.mark.parametrize("name", ["ste", "no_such_rule", "builtin/lrp_epsilon", ""])
def test_only_code_can_be_stored_without_a_form(name: str) -> None:
    with pytest.raises(GradruleError) as caught:
        RuleContent.from_stored(name, rule_pb2.RuleDefinition())
    assert reason_name(caught.value.reason) == "INVALID_RULE"


def test_stored_rule_keeps_names_of_params_that_became_functions() -> None:
    """A function that the language got later takes none away; all else is checked."""
    message = definition("normal * dy", rule_pb2.RuleParam(name="normal"))
    assert refused(message)[0] == "INVALID_RULE"
    assert ops(RuleContent.from_stored("mine", message)) == ["Placeholder", "Placeholder", "Cast", "Mul"]
    with pytest.raises(GradruleError):
        RuleContent.from_stored("mine", definition("dy", rule_pb2.RuleParam(name="x")))


def test_rule_with_random_numbers_has_the_input_salt() -> None:
    graph = RuleContent(expression="dy + normal(x, seed)", params=(Param("seed"),)).bind(ONE)
    assert set(graph.inputs) == {"dy0", "x0", "param/seed", "salt"}
    (salt,) = [node for node in graph.graph.node if node.name == graph.inputs["salt"]]
    assert salt.attr["dtype"].type == tensor_pb2.DT_INT64
    assert not salt.attr["shape"].shape.unknown_rank
    assert len(salt.attr["shape"].shape.dim) == 0
    assert graph.shape_sources == (frozenset({"dy0", "x0"}),)


def test_limits_apply_to_new_graphs_and_stored_graphs_are_not_parsed() -> None:
    """What is in bounds is read, and found to have two nodes of one name."""
    heavy = rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource(serialized=b"\x0a\x00" * 600_000))
    inner = rule_pb2.RuleDefinition(expression="dy", gradient=heavy)
    for message in (heavy, inner):
        assert refused(message)[0] == "LIMIT_EXCEEDED"
        assert refused(message, NodeLimits(unpacking=1000))[0] == "DUPLICATE_NODE"
    kept = RuleContent.from_stored("R", heavy)
    with pytest.raises(GradruleError) as caught:
        kept.check_nodes(NodeLimits())
    assert reason_name(caught.value.reason) == "DUPLICATE_NODE"
