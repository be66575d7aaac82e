"""Sorts nodes topologically and finds cycles, in linear time and without recursion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.read import Draft

_SHOWN = 12


def sort_nodes(draft: Draft, findings: Findings) -> None:
    """Sets the body's `order`; adds GRAPH_CYCLE for cycles and omits their nodes and all dependents of these."""
    nodes = draft.body.nodes
    producers: list[list[int]] = []
    consumers: list[list[int]] = [[] for _ in nodes]
    waits: list[int] = []
    for position, (node, sources) in enumerate(zip(nodes, draft.sources, strict=True)):
        needs = [source[0] for source in sources if source[0] >= 0]
        if node.op == "Merge":
            # Ignore the cycles of version 1 loops: `check` reports these loops as unsupported.
            needs = [producer for producer in needs if nodes[producer].op != "NextIteration"]
        needs += node.controls
        producers.append(needs)
        waits.append(len(needs))
        for producer in needs:
            consumers[producer].append(position)
    order = [position for position, count in enumerate(waits) if not count]
    for position in order:
        for consumer in consumers[position]:
            waits[consumer] -= 1
            if not waits[consumer]:
                order.append(consumer)
    draft.body.order = order
    if len(order) < len(nodes):
        left = [position for position, count in enumerate(waits) if count]
        stuck = {position: [producer for producer in producers[position] if waits[producer]] for position in left}
        where = f" of function {quote(draft.body.name)}" if draft.body.name else ""
        for cycle in find_cycles(stuck):
            names = [nodes[position].name for position in reversed(cycle)]
            findings.add(
                Reason.ERROR_REASON_GRAPH_CYCLE, f"Nodes{where} depend on themselves: {chain_text(names)}.", names[0]
            )


def find_cycles(edges: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Returns cycles without common nodes, at least one if the graph has a cycle; each list follows the edges."""
    state: dict[int, int] = {}
    cycles: list[list[int]] = []
    for walk, start in enumerate(edges):
        if start in state:
            continue
        path, choices = [start], [iter(edges[start])]
        place = {start: 0}
        state[start] = walk
        while path:
            step = next(choices[-1], None)
            if step is None:
                place.pop(path.pop())
                choices.pop()
            elif step in place:
                cycles.append(path[place[step] :])
                break
            elif step not in state:
                state[step] = walk
                place[step] = len(path)
                path.append(step)
                choices.append(iter(edges.get(step, ())))
    return cycles


def chain_text(names: Sequence[str]) -> str:
    """Returns `'a' → 'b' → 'a'`, shortened in the middle if it is long."""
    shown = [quote(name) for name in names]
    if len(shown) > _SHOWN:
        shown = [*shown[: _SHOWN - 2], f"… {len(shown) - _SHOWN + 1} more …", shown[-1]]
    return " → ".join(chain(shown, shown[:1]))
