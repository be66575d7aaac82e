"""Pictures of an explained graph: one SVG file, or one HTML page in which scopes fold. No TensorFlow, no library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradrule._picture import svg
from gradrule._picture.facts import facts_of
from gradrule._picture.reading import read
from gradrule._picture.view import View, view_of
from gradrule.v1.graph_pb2 import Graph

if TYPE_CHECKING:
    from gradrule._results import Explanation


def view(explanation: Explanation, graph: bytes) -> View:
    """What both pictures show, from a GraphDef's bytes and what the server says of them."""
    structure = read(Graph.FromString(graph))
    return view_of(structure, facts_of(structure, explanation))


def draw_svg(explanation: Explanation, graph: bytes) -> str:
    """A static picture, folded to about sixty boxes."""
    return svg.draw(view(explanation, graph))


def draw_html(explanation: Explanation, graph: bytes) -> str:
    """A page that needs no other file and no network."""
    raise NotImplementedError
