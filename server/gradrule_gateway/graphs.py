"""Serves the console's page of graphs: reads an uploaded graph, and draws an explained one.

These routes are no RPCs and not part of the API. What they return about a graph is computed as in the client. The
server checks the caller's credentials before the gateway receives an uploaded graph.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gradrule import _picture
from gradrule._builder.graph import Graph
from gradrule._builder.graph_formats import read_graph
from gradrule._picture.page import data as picture_data
from gradrule._picture.structural import without_values
from gradrule._results.call_results import explanation
from gradrule.errors import GradruleError
from gradrule.v1 import blob_pb2, graph_pb2, program_pb2
from gradrule_gateway import conversion, json_text
from gradrule_gateway.converters import Converters
from gradrule_gateway.problems import Problem, malformed
from gradrule_gateway.routes import ROUTES, Route
from gradrule_gateway.upstream import Metadata, Upstream

_PART_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_MAX_NAMES = 20_000
_EMPTY_DIGEST = hashlib.sha256().hexdigest()
_NOT_OUTPUTS = {"NoOp", "Const", "Assert"}
_ROUTES: dict[str, Route] = {route.rpc: route for route in ROUTES}
COMPILE = _ROUTES["ProgramService/CompileProgram"]
_FIND_MISSING = _ROUTES["BlobService/FindMissingBlobs"]
_UPLOAD = _ROUTES["BlobService/UploadBlob"]


async def read_uploaded(upstream: Upstream, converters: Converters, request: Request, metadata: Metadata) -> Response:
    """Stores an uploaded graph as a blob and returns what the page shows of it.

    The body is the bytes of a GraphDef, protobuf text or protobuf JSON. Raises `Problem`.
    """
    if request.headers.get("content-type", "") != "application/octet-stream":
        raise Problem("UNSUPPORTED", "expected Content-Type: application/octet-stream", status=415)
    # The server checks the caller's credentials and rights here, before the gateway keeps bytes of the body.
    await _is_missing(upstream, _EMPTY_DIGEST, metadata)
    body = await request.body()
    serialized, facts = await converters.run(describe, body)
    digest = hashlib.sha256(serialized).hexdigest()
    if await _is_missing(upstream, digest, metadata):
        await upstream.upload(_UPLOAD.grpc_path, _parts(digest, serialized), metadata, _TIMEOUT_S)
    return Response(json_text.dump({"sha256": digest, **facts}), media_type="application/json")


async def _is_missing(upstream: Upstream, digest: str, metadata: Metadata) -> bool:
    request = blob_pb2.FindMissingBlobsRequest(sha256=[digest]).SerializeToString()
    answer, _ = await upstream.unary(_FIND_MISSING.grpc_path, request, metadata, _TIMEOUT_S)
    return bool(blob_pb2.FindMissingBlobsResponse.FromString(answer).missing)


async def _parts(digest: str, data: bytes) -> AsyncIterator[bytes]:
    yield blob_pb2.UploadBlobRequest(sha256=digest).SerializeToString()
    for start in range(0, len(data), _PART_BYTES):
        yield blob_pb2.UploadBlobRequest(data=data[start : start + _PART_BYTES]).SerializeToString()


def describe(body: bytes) -> tuple[bytes, dict[str, Any]]:
    """Returns the bytes of the GraphDef in a body, and what the page shows of it. Raises `Problem`."""
    try:
        graph = read_graph(body)
        serialized = graph.to_bytes()
    except GradruleError as wrong:
        raise Problem("INVALID_GRAPH", wrong.message) from None
    return serialized, _facts(graph, serialized)


def _facts(graph: Graph, serialized: bytes) -> dict[str, Any]:
    """Returns the tensors that a program may use, and the graph without the values of its constants."""
    message = graph_pb2.Graph.FromString(serialized)
    used = {name.lstrip("^").partition(":")[0] for node in message.node for name in node.input}
    outputs = [node.name for node in message.node if node.name not in used and node.op not in _NOT_OUTPUTS]
    inputs = [
        {"name": spec.name, "dtype": spec.dtype, "shape": None if spec.shape is None else list(spec.shape)}
        for spec in graph.inputs.values()
    ]
    structure = without_values(message).SerializeToString()
    ops = sorted({node.op for node in message.node})
    return {
        "size": len(serialized),
        "nodes": [node.name for node in message.node[:_MAX_NAMES]],
        "ops": ops,
        "inputs": inputs,
        "outputs": outputs[:100],
        "structure": base64.b64encode(structure).decode(),
    }


def decode_request(body: bytes) -> tuple[bytes, bytes]:
    """Returns the body of CompileProgram and the graph to draw. Raises `Problem`."""
    value = json_text.parse(body)
    if not isinstance(value, dict) or not isinstance(value.get("request"), dict):
        raise malformed("expected an object with the fields request and structure")
    try:
        structure = base64.b64decode(str(value.get("structure", "")), validate=True)
    except binascii.Error:
        raise malformed("expected base64", "structure") from None
    return json_text.dump({**value["request"], "validateOnly": True}), structure


def draw(answer: bytes, structure: bytes) -> bytes:
    """Returns the answer of CompileProgram and the picture of its graph, as JSON. Raises `Problem`."""
    response = program_pb2.CompileProgramResponse.FromString(answer)
    try:
        view = _picture.view(explanation(response, graph=structure), structure)
    except GradruleError as wrong:
        raise Problem("INVALID_GRAPH", wrong.message, field="structure") from None
    text = conversion.encode_answer(COMPILE, answer, "compact")
    return b'{"answer":' + text + b',"picture":' + json_text.dump(picture_data(view)) + b"}"
