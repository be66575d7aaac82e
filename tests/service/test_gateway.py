"""HTTP requests to a gateway before a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.gateways import RunningGateway, running_gateway
from tests.service.servers import RunningServer

SIGN = {
    "graph": {
        "inlineGraph": {
            "node": [
                {"name": "x", "op": "Placeholder", "attr": {"dtype": {"type": "DT_FLOAT"}}},
                {"name": "y", "op": "Sign", "input": ["x"]},
            ]
        }
    },
    "overrides": [{"selector": {"opType": "Sign"}, "rule": "ste_sign"}],
    "fetches": ["y"],
    "vjp": {"ys": ["y"], "xs": ["x"]},
}


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    """Returns a gateway before the shared server."""
    with running_gateway(server.target) as running:
        yield running


def test_an_inline_program_is_evaluated(gateway: RunningGateway) -> None:
    answer = gateway.post("/v1/evaluate", {"spec": SIGN, "feeds": {"x": [-2, 0.5, 3]}})
    assert answer.status == 200, answer.body
    assert answer.json["outputs"] == {"y": {"dtype": "float32", "shape": [3], "values": [-1, 1, 1]}}
    assert answer.json["gradients"] == {"x": {"dtype": "float32", "shape": [3], "values": [0, 1, 0]}}


def test_errors_are_problems(gateway: RunningGateway) -> None:
    answer = gateway.get("/v1/rules/stx")
    assert (answer.status, answer.headers["content-type"]) == (404, "application/problem+json")
    assert answer.json["reason"] == "UNKNOWN_RULE"
    assert "'ste'" in answer.json["detail"]
