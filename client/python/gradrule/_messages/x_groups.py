"""Flattens xs that are given in groups, such as `{"weights": ["w", "b"], "inputs": ["x"]}`: the server takes a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.names import bare
from gradrule._messages.request_messages import GroupedNames, Words, listed, name_of_tensor, names_of
from gradrule._results.call_results import Groups


def groups_of(xs: GroupedNames, graph: GraphLike | None = None) -> Groups:
    """Returns the names in each group, aliases unchanged; None if the xs are in no groups."""
    if not isinstance(xs, Mapping):
        return None
    return {
        group: [name if isinstance(name, str) else name_of_tensor(name, graph) for name in listed(names)]
        for group, names in xs.items()
    }


def flat(xs: GroupedNames, graph: GraphLike | None = None) -> list[str]:
    """Returns all names in order, each once."""
    groups = groups_of(xs, graph)
    if groups is None:
        return names_of(xs, graph)
    found: dict[str, str] = {}
    for names in groups.values():
        for name in names_of(names, graph):
            found.setdefault(bare(name), name)
    return list(found.values())


def flat_words(words: Words, graph: GraphLike) -> Words:
    """Returns the words with a flat list of xs."""
    return replace(words, xs=flat(words.xs, graph)) if isinstance(words.xs, Mapping) else words
