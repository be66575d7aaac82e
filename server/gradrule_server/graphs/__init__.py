"""Reads, checks and expands graphs into the form that an engine compiles. Does not import TensorFlow.

bytes → `parse` → message → `expand` (check, resolve overrides, inline calls, prune) → `Expanded`.
"""

from gradrule_server.graphs.contents import Contents, is_large, little_endian, move_constants
from gradrule_server.graphs.expand_request import Expanded, ExpandRequest
from gradrule_server.graphs.expansion import ReadGraph, expand, placeholders, variables
from gradrule_server.graphs.ir import DIFFERENTIABLE, Limits
from gradrule_server.graphs.read import parse
from gradrule_server.graphs.resolution_context import Match
from gradrule_server.graphs.selectors import DEFAULT_RULE, OWN_GRADIENT, OverrideSpec

__all__ = [
    "DEFAULT_RULE",
    "DIFFERENTIABLE",
    "OWN_GRADIENT",
    "Contents",
    "ExpandRequest",
    "Expanded",
    "Limits",
    "Match",
    "OverrideSpec",
    "ReadGraph",
    "expand",
    "is_large",
    "little_endian",
    "move_constants",
    "parse",
    "placeholders",
    "variables",
]
