"""Gives aliases to inputs and outputs of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradrule._builder.graph import Graph
from gradrule._builder.names import bare


def name_ends(graph: Graph, inputs: Mapping[str, str], outputs: Iterable[tuple[str, str]]) -> None:
    """Gives a graph its aliases: of inputs by name, and of outputs as (name, tensor).

    Inputs and variables keep their names: an output that has the name of one, and is another tensor, is told as
    `output_NAME`, for a name means one thing in feeds and in fetches.
    """
    taken = {spec.name: bare(spec.name) for spec in graph.inputs.values()}
    taken |= {name: bare(name) for name in graph.variables}
    for alias, tensor in inputs.items():
        taken[alias] = bare(tensor)
        if alias != bare(tensor):
            graph.aliases[alias] = bare(tensor)
    wished = list(outputs)
    reserved = {alias for alias, _ in wished}
    for alias, tensor in wished:
        if taken.get(alias, bare(tensor)) != bare(tensor):
            alias = f"output_{alias}"
            while alias in taken or alias in reserved:
                alias += "_"
        if alias != bare(tensor):
            graph.aliases[alias] = bare(tensor)
        taken[alias] = bare(tensor)
