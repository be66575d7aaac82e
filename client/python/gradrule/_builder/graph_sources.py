"""Anything that is a graph, as the bytes that travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from gradrule._builder import blob_values
from gradrule.errors import InvalidGraphError
from gradrule.v1.rule_pb2 import GraphSource

if TYPE_CHECKING:
    from gradrule._builder.graph import Graph

GraphLike: TypeAlias = "Graph | bytes | Any"


def graph_bytes(graph: GraphLike) -> bytes:
    """The bytes of a `Graph`, of a GraphDef's bytes, or of a GraphDef message. Raises `InvalidGraphError`."""
    if isinstance(graph, bytes | bytearray | memoryview):
        return bytes(graph)
    # A builder's graph, or any protobuf message; `to_bytes` alone would take an int.
    for method in ("to_bytes", "SerializeToString"):
        if not isinstance(graph, int) and callable(write := getattr(graph, method, None)):
            data: bytes = write()
            return data
    if callable(as_graph_def := getattr(graph, "as_graph_def", None)):
        return graph_bytes(as_graph_def())
    raise InvalidGraphError(
        f"{type(graph).__name__} is no graph; give a gr.Graph, a GraphDef, its bytes, or what gr.load returns"
    )


def sent_bytes(graph: GraphLike) -> bytes:
    """Returns the GraphDef bytes that a request carries; recorded overrides travel in a field of their own."""
    if callable(write := getattr(graph, "to_bytes_without_overrides", None)):
        data: bytes = write()
        return data
    return graph_bytes(graph)


def put_graph(graph: GraphLike, source: GraphSource, blobs: blob_values.Blobs | None) -> None:
    """Puts a graph into a request: a large one by its hash, its bytes into `blobs`; None: the bytes themselves."""
    data = sent_bytes(graph)
    if blobs is None or len(data) <= blob_values.MAX_INLINE_GRAPH:
        source.serialized = data
        return
    known = getattr(graph, "sha256", None)
    source.blob_sha256 = known() if known is not None else blob_values.digest(data)
    blobs[source.blob_sha256] = data


def graph_source(graph: GraphLike) -> GraphSource:
    """The message that carries a graph."""
    return GraphSource(serialized=graph_bytes(graph))
