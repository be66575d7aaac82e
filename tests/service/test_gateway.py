"""HTTP requests to a gateway before a real server."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
from google.protobuf import json_format

from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2
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


def test_blobs_are_uploaded_and_used(gateway: RunningGateway) -> None:
    values = np.arange(-600_000, 600_000, dtype=np.float32) / 300_000
    content = values.tobytes()
    sha256 = hashlib.sha256(content).hexdigest()
    assert gateway.post("/v1/blobs:findMissing", {"sha256": [sha256]}).json == {"missing": [sha256]}
    uploaded = gateway.send("PUT", f"/v1/blobs/{sha256}", content)
    assert uploaded.json == {"sha256": sha256, "sizeBytes": str(len(content))}
    assert gateway.post("/v1/blobs:findMissing", {"sha256": [sha256]}).json == {}
    blob = {"sha256": sha256, "dtype": "float32", "shape": [len(values)]}
    answer = gateway.post("/v1/evaluate?format=base64", {"spec": SIGN, "feeds": {"x": {"blob": blob}}}).json
    found = np.frombuffer(base64.b64decode(answer["outputs"]["y"]["base64"]), np.float32)
    np.testing.assert_array_equal(found, np.sign(values))


def test_a_blob_with_another_hash_is_refused(gateway: RunningGateway) -> None:
    answer = gateway.send("PUT", f"/v1/blobs/{'0' * 64}", b"other")
    assert (answer.status, answer.json["reason"]) == (400, "BLOB_MISMATCH")


def test_rules_are_created_listed_in_pages_sampled_and_deleted(gateway: RunningGateway) -> None:
    rule = {"rule": {"name": "OverHttp", "definition": {"expression": "a * dy", "params": [{"name": "a"}]}}}
    created = gateway.post("/v1/rules", rule)
    assert created.json["rule"]["name"] == "rules/OverHttp"
    try:
        assert gateway.get("/v1/rules/OverHttp").json == created.json
        page = gateway.get("/v1/rules?kind=BUILTIN&pageSize=2").json
        assert len(page["rules"]) == 2
        after = gateway.get(f"/v1/rules?kind=BUILTIN&page_size=1&pageToken={page['nextPageToken']}").json
        assert after["rules"][0]["name"] > page["rules"][1]["name"]
        sampled = gateway.post(
            "/v1/rules:sample",
            {"name": "OverHttp", "values": {"x": [1, 2], "dy": [3, "-Infinity"]}, "params": {"a": 2}},
        )
        assert sampled.json["gradients"]["dx"]["values"] == [6, "-Infinity"]
    finally:
        assert gateway.send("DELETE", "/v1/rules/OverHttp").json == {}
    assert gateway.get("/v1/rules/OverHttp").status == 404


SQUARE = {
    "graph": {
        "inlineGraph": {
            "node": [
                {"name": "x", "op": "Placeholder", "attr": {"dtype": {"type": "DT_DOUBLE"}}},
                {"name": "y", "op": "Square", "input": ["x"]},
            ]
        }
    },
}


@pytest.mark.parametrize(
    ("kind", "given", "field", "found"),
    [
        ("vjp", {"gradYs": {"y": [1, 2]}}, "gradients", {"x": [2, 12]}),
        ("jvp", {"tangents": {"x": [1, 2]}}, "outputTangents", {"y": [2, 12]}),
        ("hvp", {"vectors": {"x": [1, 2]}}, "gradients", {"x": [2, 4]}),
    ],
)
def test_derivatives_take_and_give_tensors_by_name(
    gateway: RunningGateway, kind: str, given: dict[str, object], field: str, found: dict[str, list[float]]
) -> None:
    """d(x²) = 2x and d²(x²) = 2, at x = 1 and 3."""
    spec = SQUARE | {kind: {"ys": ["y"], "xs": ["x"]}}
    answer = gateway.post("/v1/evaluate", {"spec": spec, "feeds": {"x": [1, 3]}, **given})
    assert answer.status == 200, answer.body
    # Integers became float64, as the program has it.
    assert answer.json[field] == {
        name: {"dtype": "float64", "shape": [2], "values": values} for name, values in found.items()
    }


def test_jacobians_are_objects_by_y_and_x(gateway: RunningGateway) -> None:
    spec = SQUARE | {"jacobian": {"ys": ["y"], "xs": ["x"]}}
    answer = gateway.post("/v1/evaluate", {"spec": spec, "feeds": {"x": [1, 3]}}).json
    assert answer["jacobians"]["y"]["x"]["values"] == [[2, 0], [0, 6]]


def test_a_program_that_replaces_another_has_other_types(gateway: RunningGateway) -> None:
    for dtype, value in (("int32", 2), ("float32", 1.5), ("float64", 1.5)):
        x = {"name": "x", "op": "Placeholder", "attr": {"dtype": {"type": dtype}}}
        graph = {"inlineGraph": {"node": [x, {"name": "y", "op": "Square", "input": ["x"]}]}}
        spec = {"graph": graph, "fetches": ["y"]}
        assert gateway.post("/v1/programs", {"spec": spec, "programId": "replaced"}).status == 200
        # A value that the type of the program before cannot hold: the gateway itself would refuse it.
        answer = gateway.post("/v1/evaluate", {"program": "programs/replaced", "feeds": {"x": [value]}})
        assert answer.status == 200, answer.body
        assert answer.json["outputs"]["y"]["dtype"] == dtype
        assert gateway.send("DELETE", "/v1/programs/replaced").status == 200


def test_a_value_that_does_not_convert_is_refused_with_its_path(gateway: RunningGateway) -> None:
    answer = gateway.post("/v1/evaluate", {"spec": SIGN, "feeds": {"x": ["a", "b"]}})
    assert (answer.status, answer.json["reason"]) == (400, "FEED_DTYPE")
    assert answer.json["violations"][0]["field"] == "feeds.x"


def test_protobufs_own_mapping(gateway: RunningGateway) -> None:
    request = evaluate_pb2.EvaluateRequest()
    json_format.ParseDict({"spec": SIGN}, request)
    named = request.feeds.add(name="x")
    named.value.inline_tensor.CopyFrom(tensor_codec.to_message(np.float32([-2, 0.5])))
    answer = gateway.post("/v1/evaluate?format=proto", json_format.MessageToDict(request))
    response = json_format.Parse(answer.body, evaluate_pb2.EvaluateResponse())
    np.testing.assert_array_equal(tensor_codec.to_numpy(response.gradients[0].dense), [0, 1])


def test_the_status_of_the_server(gateway: RunningGateway) -> None:
    status = gateway.get("/v1/status").json["status"]
    assert status["ready"] is True
    assert status["engines"][0]["device"]
