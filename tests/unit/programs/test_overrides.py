"""Reading the overrides of a request."""

from __future__ import annotations

import pytest

from gradrule.v1 import errors_pb2, override_pb2
from gradrule_server.errors import error
from gradrule_server.programs.overrides import read_overrides
from gradrule_server.programs.rule_lookup import ResolvedRule


class NoRules:
    """Knows no rule, and counts how often it is asked."""

    asked = 0

    def resolve(self, name: str) -> ResolvedRule:
        self.asked += 1
        raise error(errors_pb2.ERROR_REASON_UNKNOWN_RULE, f"there is no rule {name!r}")


@pytest.mark.parametrize(("given", "looked_at"), [(3, 3), (20_000, 500)])
def test_overrides_that_are_wrong_are_told_up_to_a_number(given: int, looked_at: int) -> None:
    """Each is a few bytes of a request; what is said of it is not."""
    rules = NoRules()
    wrong = override_pb2.Override(selector=override_pb2.Selector(op_type="Sign"), rule="Nothing")
    table = read_overrides([wrong] * given, rules)
    assert len(table.findings) == rules.asked == looked_at
    assert not table.specs
