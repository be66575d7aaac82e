"""HTTP requests to a gateway before a real server."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
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


@pytest.mark.parametrize("form", ["compact", "base64"])
def test_large_tensors_are_converted_in_another_process(gateway: RunningGateway, form: str) -> None:
    values = (np.arange(200_000) % 7 - 3).reshape(400, 500)
    # Integers without a type: the program says float32.
    answer = gateway.post(f"/v1/evaluate?format={form}", {"spec": SIGN, "feeds": {"x": values.tolist()}})
    assert answer.status == 200, answer.body
    found = answer.json["gradients"]["x"]
    assert (found["dtype"], found["shape"]) == ("float32", [400, 500])
    if form == "compact":
        array = np.array(found["values"], np.float32)
    else:
        array = np.frombuffer(base64.b64decode(found["base64"]), np.float32).reshape(found["shape"])
    np.testing.assert_array_equal(array, (abs(values) <= 1).astype(np.float32))


def test_problems_of_large_bodies_come_from_the_other_process(gateway: RunningGateway) -> None:
    answer = gateway.post("/v1/evaluate", {"spec": SIGN, "feeds": {"x": [[0.5] * 200_000, [1]]}})
    assert (answer.status, answer.json["reason"]) == (400, "INVALID_TENSOR")
    assert answer.json["violations"][0]["field"] == "feeds.x"
