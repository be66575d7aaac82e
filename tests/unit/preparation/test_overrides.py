"""Tests how the overrides of a request are read."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gradrule.v1 import errors_pb2, override_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, error, reason_name
from gradrule_server.policy import NodeLimits
from gradrule_server.preparation.overrides import OverrideTable, read_overrides
from gradrule_server.preparation.references import ResolvedRule


class NoRules:
    """Has no rules; counts the look-ups."""

    asked = 0

    def fetch(self, names: Iterable[str]) -> None:
        """Does nothing, because there are no rules."""

    def resolve(self, name: str) -> ResolvedRule:
        self.asked += 1
        raise error(errors_pb2.ERROR_REASON_UNKNOWN_RULE, f"there is no rule {name!r}")


@pytest.mark.parametrize(("given", "read"), [(3, 3), (20_000, 500)])
def test_findings_about_invalid_overrides_are_limited(given: int, read: int) -> None:
    """Each override has a few bytes, but its finding has hundreds."""
    rules = NoRules()
    wrong = override_pb2.GradientOverride(selector=override_pb2.Selector(op_type="Sign"), rule="Nothing")
    table = read_overrides([wrong] * given, rules, NodeLimits())
    assert len(table.findings) == rules.asked == read
    assert not table.specs


def overriding() -> override_pb2.GradientOverride:
    override = override_pb2.GradientOverride(selector=override_pb2.Selector(op_type="Sign"), label="signs")
    override.definition.expression = "dy * a"
    override.definition.params.add(name="a")
    return override


def value(*sizes: int) -> rule_pb2.ParamValue:
    """Returns zeros of a shape."""
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DT_FLOAT)
    tensor.tensor_shape.dim.extend(tensor_pb2.TensorShape.Dim(size=size) for size in sizes)
    return rule_pb2.ParamValue(tensor=tensor)


@pytest.mark.parametrize(
    ("given", "bounds", "fault"),
    [
        (value(*[1] * 9), NodeLimits(), "has rank 9; 8 is the most (--max-rank)"),
        (value(*[1] * 9), NodeLimits(rank=9), ""),
        (value(3), NodeLimits(constant_bytes=8), "take more than 8 bytes (--max-constant-bytes)"),
        (value(3), NodeLimits(constant_bytes=12), ""),
    ],
)
def test_configured_limits_apply_to_params(given: rule_pb2.ParamValue, bounds: NodeLimits, fault: str) -> None:
    override = overriding()
    table = read_overrides([override], NoRules(), bounds)
    override.params["a"].CopyFrom(given)
    at_once = read_overrides([override], NoRules(), bounds)
    assert [fault in finding.message for finding in at_once.findings] == [True] * bool(fault)
    if not fault:
        assert table.params.call_settings({"signs": {"a": given}}, {0})
        return
    with pytest.raises(GradruleError) as caught:
        table.params.call_settings({"signs": {"a": given}}, {0})
    assert fault in caught.value.message


def test_configured_limits_apply_to_graphs_of_rules() -> None:
    """A graph within the limits is read: the error is then that two nodes have one name."""
    empty_nodes = b"\x0a\x00" * 600_000
    override = override_pb2.GradientOverride(selector=override_pb2.Selector(op_type="Sign"))
    override.definition.graph.serialized = empty_nodes
    for bounds, reason in ((NodeLimits(), "LIMIT_EXCEEDED"), (NodeLimits(unpacking=1000), "DUPLICATE_NODE")):
        (finding,) = read_overrides([override], NoRules(), bounds).findings
        assert reason_name(finding.reason) == reason
        table = OverrideTable(bounds)
        with pytest.raises(GradruleError) as caught:
            table.set_embedded_contents({table.add_embedded_rule("G"): empty_nodes})
        assert reason_name(caught.value.reason) == reason
