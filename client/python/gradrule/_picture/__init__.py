"""Draws an explained graph as an SVG file, or as an HTML page with foldable scopes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from gradrule._picture import page, svg
from gradrule._picture.facts import collect_facts
from gradrule._picture.reading import read_structure
from gradrule._picture.tensors import tensor_texts
from gradrule._picture.view import View, build_view
from gradrule.errors import InvalidGraphError
from gradrule.v1.graph_pb2 import Graph

if TYPE_CHECKING:
    from gradrule._results.call_results import Explanation


def view(explanation: Explanation, graph: bytes) -> View:
    """Returns the content of the SVG file and the HTML page.

    Args:
        explanation: The result of `client.explain`.
        graph: Bytes of the explained GraphDef.

    Raises:
        InvalidGraphError: The bytes are not a GraphDef.
    """
    try:
        structure = read_structure(Graph.FromString(graph))
    except DecodeError as cause:
        raise InvalidGraphError(f"these {len(graph)} bytes are no GraphDef: {cause}") from None
    return build_view(structure, collect_facts(structure, explanation), tensor_texts(structure, explanation))


def draw_svg(explanation: Explanation, graph: bytes) -> str:
    """Returns a static SVG picture, folded to about sixty boxes. Raises `InvalidGraphError`."""
    return svg.draw(view(explanation, graph))


def draw_html(explanation: Explanation, graph: bytes) -> str:
    """Returns an HTML page that needs no other file and no network. Raises `InvalidGraphError`."""
    return page.draw(view(explanation, graph))


def draw_embedded(explanation: Explanation, graph: bytes, *, height: int = 600) -> str:
    """Returns the HTML page as an `<iframe>` for another page, such as a notebook. Raises `InvalidGraphError`.

    Args:
        explanation: The result of `client.explain`.
        graph: Bytes of the explained GraphDef.
        height: Height of the frame in pixels.
    """
    return page.embed(draw_html(explanation, graph), height)
