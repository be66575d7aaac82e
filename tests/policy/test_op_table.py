"""Every op that TensorFlow registers is treated as the policy says, at every place in a graph."""

from __future__ import annotations

import pytest

from gradrule.common import op_definitions
from gradrule_server import graphs, policy
from gradrule_server.errors import Finding, GradruleError, Reason
from tests.policy import minimal

NOT_ALLOWED, UNSUPPORTED = Reason.ERROR_REASON_OP_NOT_ALLOWED, Reason.ERROR_REASON_UNSUPPORTED_OP

# Placeholders and variables can only be at the top level; functions get their values as arguments.
_TOP_ONLY = {"input", "variable"}


def findings_of(name: str, place: str, *, trusted: bool) -> list[Finding]:
    op = op_definitions.find(name)
    assert op is not None
    made = minimal.graph_of([op], place)
    try:
        graphs.expand(made, graphs.ExpandRequest(fetches=["y0"]), graphs.Limits(trusted=trusted))
    except GradruleError as cause:
        return list(cause.findings)
    return []


def is_about_the_op(finding: Finding) -> bool:
    return finding.node.endswith(f"{minimal.OP}0")


@pytest.mark.parametrize("place", minimal.PLACES)
def test_every_op_is_treated_as_the_policy_says(place: str) -> None:
    wrong = {}
    for name, review in policy.op_reviews().items():
        found = findings_of(name, place, trusted=False)
        reasons = {finding.reason for finding in found if is_about_the_op(finding)}
        if not review.allowed:
            # gradrule refuses what it cannot analyze for all callers; for the rest only the policy decides.
            runs_when_trusted = not findings_of(name, place, trusted=True)
            is_right = reasons == {NOT_ALLOWED if runs_when_trusted else UNSUPPORTED}
        elif place != "top" and review.category in _TOP_ONLY:
            is_right = {finding.reason for finding in found} <= {UNSUPPORTED}
        else:
            is_right = not found
        if not is_right:
            wrong[name] = found
    assert not wrong


def test_refusal_names_op_category_and_setting() -> None:
    (finding,) = findings_of("ReadFile", "nested_function", trusted=False)
    assert finding.reason == NOT_ALLOWED
    assert finding.node == "y0/y0/under_test0"
    for words in ("'y0/y0/under_test0' (ReadFile)", "file read", "reads a file", "feed its content", "--trust full"):
        assert words in finding.message


def test_all_denied_ops_of_a_graph_are_reported_together() -> None:
    ops = [
        op
        for name in ("ReadFile", "Abort", "Sign", "WriteFile", "IteratorGetNext")
        if (op := op_definitions.find(name))
    ]
    fetches = [f"y{number}" for number in range(len(ops))]
    with pytest.raises(GradruleError) as refusal:
        graphs.expand(minimal.graph_of(ops, "branch"), graphs.ExpandRequest(fetches=fetches))
    about = [finding for finding in refusal.value.findings if finding.node.rstrip("0123456789").endswith(minimal.OP)]
    told = {finding.message.split("(")[1].split(")")[0]: finding.reason for finding in about}
    denied = dict.fromkeys(("ReadFile", "Abort", "WriteFile"), NOT_ALLOWED)
    assert told == denied | {"IteratorGetNext": UNSUPPORTED}


def test_unused_denied_ops_are_accepted() -> None:
    op = op_definitions.find("SaveV2")
    assert op is not None
    made = minimal.graph_of([op], "top")
    graphs.expand(made, graphs.ExpandRequest(fetches=["one0"]))
    with pytest.raises(GradruleError):
        graphs.expand(made, graphs.ExpandRequest(fetches=["y0"]))
