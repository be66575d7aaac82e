"""Adds aliases for the inputs and outputs of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradrule._builder.graph import Graph
from gradrule._builder.names import bare


def name_ends(graph: Graph, inputs: Mapping[str, str], outputs: Iterable[tuple[str, str]]) -> None:
    """Adds aliases for a graph's inputs and outputs.

    A name must refer to the same tensor in feeds and in fetches. An output whose name belongs to another tensor that is
    an input or variable therefore gets the alias `output_NAME`.

    Args:
        graph: The graph to change.
        inputs: Names of tensors by alias.
        outputs: Pairs of alias and name of the tensor.
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
