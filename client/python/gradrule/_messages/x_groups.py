"""xs in groups: `xs={"weights": ["w", "b"], "inputs": ["x"]}`. The server knows a flat list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.names import bare
from gradrule._messages.request_messages import GroupedNames, Words, listed, name_of_tensor, names_of
from gradrule._results.call_results import Groups


def groups_of(xs: GroupedNames, graph: GraphLike | None = None) -> Groups:
    """The groups, as names; aliases stay what they are."""
    if not isinstance(xs, Mapping):
        return None
    return {
        group: [name if isinstance(name, str) else name_of_tensor(name, graph) for name in listed(names)]
        for group, names in xs.items()
    }


def flat(xs: GroupedNames, graph: GraphLike | None = None) -> list[str]:
    """All names in order; of one that stands in two groups, the first."""
    groups = groups_of(xs, graph)
    if groups is None:
        return names_of(xs, graph)
    found: dict[str, str] = {}
    for names in groups.values():
        for name in names_of(names, graph):
            found.setdefault(bare(name), name)
    return list(found.values())


def flat_words(words: Words, graph: GraphLike) -> Words:
    """The same without groups."""
    return replace(words, xs=flat(words.xs, graph)) if isinstance(words.xs, Mapping) else words
