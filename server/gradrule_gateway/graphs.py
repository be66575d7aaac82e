"""Serves the console's page of graphs: reads an uploaded graph, and draws an explained one.

These routes are no RPCs and not part of the API. What they return about a graph is computed as in the client.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import DecodeError
from starlette.requests import Request

from gradrule import _picture
from gradrule._builder import graph_formats
from gradrule._builder.graph import Graph
from gradrule._picture.page import data as picture_data
from gradrule._results.call_results import explanation
from gradrule.common.parsed_size import ParsedSizeError, check_size
from gradrule.common.structural import without_values
from gradrule.errors import GradruleError
from gradrule.v1 import blob_pb2, graph_pb2, program_pb2, rule_pb2
from gradrule_gateway import conversion, json_text
from gradrule_gateway.converters import Converters
from gradrule_gateway.problems import Problem, malformed
from gradrule_gateway.routes import ROUTES, Route
from gradrule_gateway.upstream import Metadata, Upstream

_PART_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_READ_S = 60.0
_MAX_NAMES = 20_000
# Servers have the same defaults.
_MAX_NODES = 200_000
_UNPACKING = 10
# The tag of a model's first field, the version of the format, and of no field of a GraphDef.
_ONNX_START = b"\x08"
_BRACKETS = (b"{", b"[", b"<")
# In JSON and text, each object has a bracket, and takes about 300 bytes when parsed; a string takes half of that.
_MAX_PARTS = 3_000_000
_NOT_OUTPUTS = {"NoOp", "Const", "Assert", "AssignVariableOp"}
_ROUTES: dict[str, Route] = {route.rpc: route for route in ROUTES}
COMPILE = _ROUTES["ProgramService/CompileProgram"]
_DESCRIBE = _ROUTES["ProgramService/DescribeGraph"]
_FIND_MISSING = _ROUTES["BlobService/FindMissingBlobs"]
_UPLOAD = _ROUTES["BlobService/UploadBlob"]


def check_content_type(request: Request) -> None:
    """Raises `Problem` if the body is not said to be bytes."""
    if request.headers.get("content-type", "") != "application/octet-stream":
        raise Problem("UNSUPPORTED", "expected Content-Type: application/octet-stream", status=415)


async def store_uploaded(
    upstream: Upstream, converters: Converters, caller: str, body: bytes, metadata: Metadata
) -> bytes:
    """Stores an uploaded graph as a blob and returns, in JSON, what the page shows of it.

    The body is the bytes of a GraphDef, protobuf text or protobuf JSON, or an ONNX model, which the server describes.
    Raises `Problem`.
    """
    if body.startswith(_ONNX_START):
        source = rule_pb2.GraphSource(blob_sha256=hashlib.sha256(body).hexdigest(), format=rule_pb2.GRAPH_FORMAT_ONNX)
        if await _is_missing(upstream, source.blob_sha256, metadata):
            await upstream.upload(_UPLOAD.grpc_path, _parts(source.blob_sha256, body), metadata, _TIMEOUT_S)
        request = program_pb2.DescribeGraphRequest(graph=source).SerializeToString()
        answer, _ = await upstream.unary(_DESCRIBE.grpc_path, request, metadata, _READ_S)
        facts_of = functools.partial(describe_model, digest=source.blob_sha256, size=len(body))
        return await converters.run(caller, facts_of, answer)
    try:
        async with asyncio.timeout(_READ_S):
            serialized, digest, facts = await converters.run(caller, describe, body)
    except TimeoutError:
        raise Problem("DEADLINE_EXCEEDED", f"reading the graph takes longer than {_READ_S:g} s") from None
    if await _is_missing(upstream, digest, metadata):
        await upstream.upload(_UPLOAD.grpc_path, _parts(digest, serialized), metadata, _TIMEOUT_S)
    return facts


async def _is_missing(upstream: Upstream, digest: str, metadata: Metadata) -> bool:
    request = blob_pb2.FindMissingBlobsRequest(sha256=[digest]).SerializeToString()
    answer, _ = await upstream.unary(_FIND_MISSING.grpc_path, request, metadata, _TIMEOUT_S)
    return bool(blob_pb2.FindMissingBlobsResponse.FromString(answer).missing)


async def _parts(digest: str, data: bytes) -> AsyncIterator[bytes]:
    yield blob_pb2.UploadBlobRequest(sha256=digest).SerializeToString()
    for start in range(0, len(data), _PART_BYTES):
        yield blob_pb2.UploadBlobRequest(data=data[start : start + _PART_BYTES]).SerializeToString()


def describe(body: bytes) -> tuple[bytes, str, bytes]:
    """Returns the bytes of the GraphDef in a body, their digest, and in JSON what the page shows. Raises `Problem`."""
    kind = graph_formats.kind_of(body)
    if kind != "bytes" and sum(map(body.count, _BRACKETS)) + body.count(b'"') // 4 > _MAX_PARTS:
        raise Problem("LIMIT_EXCEEDED", f"the {kind} has too many objects, lists and strings; send the graph as bytes")
    try:
        given = graph_formats.graphdef_of(body)
        _check_size(given, "")
        graph = graph_formats.read_graphdef(given)
        serialized = graph.to_bytes()
    except GradruleError as wrong:
        raise Problem("INVALID_GRAPH", wrong.message) from None
    digest = hashlib.sha256(serialized).hexdigest()
    return serialized, digest, json_text.dump({"sha256": digest, **_facts(graph, serialized)})


def describe_model(answer: bytes, digest: str, size: int) -> bytes:
    """Returns, in JSON, what the page shows of a model from the bytes of a `DescribeGraphResponse`."""
    described = program_pb2.DescribeGraphResponse.FromString(answer)
    facts = _facts(graph_formats.read_graphdef(described.structure), described.structure)
    names = {tensor: name for name, tensor in described.tensors.items()}
    for item in facts["inputs"]:
        item["name"] = names.get(item["name"], item["name"])
    outputs = [names.get(name, name) for name in facts["outputs"]]
    return json_text.dump({"sha256": digest, "format": "GRAPH_FORMAT_ONNX", **facts, "size": size, "outputs": outputs})


def _check_size(serialized: bytes, field: str) -> None:
    """Raises `Problem` for a graph with too many nodes, or that would take too much memory."""
    try:
        check_size(serialized, graph_pb2.Graph, _UNPACKING)
        message = graph_pb2.Graph.FromString(serialized)
    except ParsedSizeError as wrong:
        raise Problem("LIMIT_EXCEEDED", str(wrong), field=field) from None
    except DecodeError:
        # What reads the graph reports the error.
        return
    count = len(message.node) + sum(len(function.node_def) for function in message.library.function)
    if count > _MAX_NODES:
        raise Problem(
            "LIMIT_EXCEEDED", f"the graph has {count} nodes; the page shows at most {_MAX_NODES}", field=field
        )


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
        "nodeCount": len(message.node),
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
    except ValueError:
        raise malformed("expected base64", "structure") from None
    return json_text.dump({**value["request"], "validateOnly": True}), structure


def draw(answer: bytes, structure: bytes) -> bytes:
    """Returns the answer of CompileProgram and the picture of its graph, as JSON. Raises `Problem`."""
    _check_size(structure, "structure")
    response = program_pb2.CompileProgramResponse.FromString(answer)
    try:
        view = _picture.view(explanation(response, graph=structure), structure)
    except GradruleError as wrong:
        raise Problem("INVALID_GRAPH", wrong.message, field="structure") from None
    text = conversion.encode_answer(COMPILE, answer, "compact")
    return b'{"answer":' + text + b',"picture":' + json_text.dump(picture_data(view)) + b"}"
