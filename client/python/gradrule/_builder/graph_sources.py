"""Converts graphs of all supported kinds to GraphDef bytes and puts them into requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from gradrule._builder import blob_values
from gradrule.errors import InvalidGraphError
from gradrule.v1.rule_pb2 import GraphSource

if TYPE_CHECKING:
    from gradrule._builder.graph import Graph

GraphLike: TypeAlias = "Graph | bytes | Any"


def graph_bytes(graph: GraphLike) -> bytes:
    """Returns the serialized GraphDef of a graph.

    Args:
        graph: A `Graph`, the bytes of a GraphDef, a GraphDef message, or an object with `as_graph_def()`.

    Raises:
        InvalidGraphError: The value is none of these.
        InvalidOverrideError: As `Graph.to_bytes`.
    """
    if isinstance(graph, bytes | bytearray | memoryview):
        return bytes(graph)
    # Exclude ints: they have a method `to_bytes` too.
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
    """Returns the GraphDef bytes for a request, without recorded overrides, which have a request field of their own."""
    if callable(write := getattr(graph, "to_bytes_without_overrides", None)):
        data: bytes = write()
        return data
    return graph_bytes(graph)


def put_graph(graph: GraphLike, source: GraphSource, blobs: blob_values.Blobs | None) -> None:
    """Writes a graph into the `GraphSource` field of a request.

    Args:
        graph: A graph, as for `graph_bytes`.
        source: The field to write to.
        blobs: Receives the bytes of a large graph by SHA-256; the field then holds only the hash. None: always write
            the bytes into the field.

    Raises:
        InvalidGraphError: As `graph_bytes`.
    """
    data = sent_bytes(graph)
    if blobs is None or len(data) <= blob_values.MAX_INLINE_GRAPH:
        source.serialized = data
        return
    known = getattr(graph, "sha256", None)
    source.blob_sha256 = known() if known is not None else blob_values.digest(data)
    blobs[source.blob_sha256] = data


def graph_source(graph: GraphLike) -> GraphSource:
    """Returns a `GraphSource` with the bytes of a graph. Raises `InvalidGraphError`."""
    return GraphSource(serialized=graph_bytes(graph))
