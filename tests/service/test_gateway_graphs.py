"""The gateway's routes for the console's page of graphs, before a real server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator

import pytest

import gradrule as gr
from gradrule.v1.graph_pb2 import Graph
from tests.service.gateways import Answer, RunningGateway, read, running_gateway
from tests.service.guarded import Guarded
from tests.service.servers import RunningServer
from tests.service.test_onnx_requests import X, simple


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    """Returns a gateway before the shared server."""
    with running_gateway(server.target) as running:
        yield running


def network() -> bytes:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 2])
    weights = g.constant([[1.0, 2.0], [3.0, 4.0]], name="dense/kernel")
    g.op("Sign", g.op("MatMul", x, weights, name="dense/MatMul"), name="y")
    return g.to_bytes()


def upload(gateway: RunningGateway, data: bytes, kind: str = "application/octet-stream") -> Answer:
    return gateway.send("POST", "/console/graph", data, {"Content-Type": kind})


def test_an_uploaded_graph_is_stored_and_described(gateway: RunningGateway) -> None:
    data = network()
    answer = upload(gateway, data)
    assert answer.status == 200, answer.body
    found = answer.json
    assert found["nodeCount"] == 4
    assert found["sha256"] == hashlib.sha256(data).hexdigest()
    assert (found["outputs"], found["ops"]) == (["y"], ["Const", "MatMul", "Placeholder", "Sign"])
    assert found["inputs"] == [{"name": "x", "dtype": "float32", "shape": [None, 2]}]
    structure = Graph.FromString(base64.b64decode(found["structure"]))
    (constant,) = [node.attr["value"].tensor for node in structure.node if node.op == "Const"]
    assert [dim.size for dim in constant.tensor_shape.dim] == [2, 2]
    assert not constant.tensor_content and not constant.float_val
    missing = gateway.post("/v1/blobs:findMissing", {"sha256": [found["sha256"]]})
    assert missing.json.get("missing", []) == []


def test_an_uploaded_onnx_model_is_described_and_runs(gateway: RunningGateway) -> None:
    data = simple()
    answer = upload(gateway, data)
    assert answer.status == 200, answer.body
    found = answer.json
    assert (found["format"], found["size"]) == ("GRAPH_FORMAT_ONNX", len(data))
    assert found["inputs"] == [{"name": "/in", "dtype": "float32", "shape": [None, 4]}]
    assert found["outputs"] == ["y:out"]
    assert {"MatMul", "Relu"} <= set(found["ops"])
    spec = {
        "graph": {"blobSha256": found["sha256"], "format": found["format"]},
        "vjp": {"ys": ["y:out"], "xs": ["/in"]},
        "overrides": [{"selector": {"opType": "Relu"}, "rule": "ste"}],
    }
    drawn = gateway.post("/console/picture", {"structure": found["structure"], "request": {"spec": spec}})
    assert drawn.status == 200, drawn.body
    ran = gateway.post("/v1/evaluate", {"spec": spec, "feeds": {"/in": X.tolist()}})
    assert ran.status == 200, ran.body


@pytest.mark.parametrize(
    "text",
    [
        b'node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }',
        json.dumps({"node": [{"name": "x", "op": "Placeholder", "attr": {"dtype": {"type": "DT_FLOAT"}}}]}).encode(),
    ],
    ids=["text", "JSON"],
)
def test_text_and_json_are_graphs_too(gateway: RunningGateway, text: bytes) -> None:
    assert upload(gateway, text).json["nodes"] == ["x"]


def test_what_is_no_graph_is_refused(gateway: RunningGateway) -> None:
    for data in (b"\xff\xff", b"node { nme: 3", b"{]"):
        answer = upload(gateway, data)
        assert (answer.status, answer.json["reason"]) == (400, "INVALID_GRAPH"), data
    # A form of another page could send text.
    assert upload(gateway, network(), "text/plain").status == 415


def test_many_empty_nodes_are_refused(gateway: RunningGateway) -> None:
    answer = upload(gateway, b"\x0a\x00" * 1_000_000)
    assert (answer.status, answer.json["reason"]) == (400, "LIMIT_EXCEEDED"), answer.body


def test_a_program_is_explained_and_drawn(gateway: RunningGateway) -> None:
    found = upload(gateway, network()).json
    spec = {
        "graph": {"blobSha256": found["sha256"]},
        "overrides": [{"selector": {"opType": "Sign"}, "rule": "ste_sign"}],
        "vjp": {"ys": ["y"], "xs": ["x"]},
    }
    answer = gateway.post("/console/picture", {"structure": found["structure"], "request": {"spec": spec}})
    assert answer.status == 200, answer.body
    program, picture = answer.json["answer"]["program"], answer.json["picture"]
    assert [(item["node"], item["rule"]) for item in program["overrides"]] == [("y", "ste_sign")]
    assert "name" not in program
    box = picture["titles"].index("y")
    assert picture["legend"][picture["rule"][box]]["name"] == "ste_sign"
    assert "path" in picture["classes"][box].split()


def test_findings_are_answers_and_are_drawn_at_their_node(gateway: RunningGateway) -> None:
    found = upload(gateway, network()).json
    spec = {
        "graph": {"blobSha256": found["sha256"]},
        "overrides": [{"selector": {"opType": "Sign"}, "rule": "ste_sgn"}],
        "vjp": {"ys": ["y"], "xs": ["x"]},
    }
    answer = gateway.post("/console/picture", {"structure": found["structure"], "request": {"spec": spec}})
    assert answer.status == 200
    assert "ste_sign" in answer.json["answer"]["findings"][0]["message"]
    assert len(answer.json["picture"]["titles"]) > 3


def test_a_broken_picture_request_is_refused(gateway: RunningGateway) -> None:
    for body, field in (
        ({"request": {}, "structure": "%"}, "structure"),
        ({"request": {}, "structure": "é"}, "structure"),
        ({}, ""),
    ):
        answer = gateway.post("/console/picture", body)
        assert answer.status == 400
        assert not field or answer.json["violations"][0]["field"] == field


def test_credentials_are_checked_before_a_graph_is_received(guarded: Guarded) -> None:
    with running_gateway(guarded.running.target, "--tls-ca", str(guarded.authority.file)) as gateway:
        connection = gateway.connect()
        # The body never arrives: an answer means that the gateway did not wait for it.
        connection.putrequest("POST", "/console/graph")
        connection.putheader("Content-Type", "application/octet-stream")
        connection.putheader("Content-Length", "1000000")
        connection.endheaders()
        answer = read(connection.getresponse())
        connection.close()
        assert (answer.status, answer.json["reason"]) == (401, "UNAUTHENTICATED")
        assert answer.headers["connection"] == "close"
        headers = {
            "Content-Type": "application/octet-stream",
            "Authorization": f"Bearer {guarded.new_token('grapher')}",
        }
        assert gateway.send("POST", "/console/graph", network(), headers).status == 200
