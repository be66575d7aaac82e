"""Rules that a graph brings along: its gradient functions, expanded as the graph itself is, each a graph by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradrule_server.graphs.copying import copy_function
from gradrule_server.graphs.ir import ARG, Body
from gradrule_server.graphs.node_gradients import NodeGradients
from gradrule_server.graphs.prune import prune
from gradrule_server.graphs.resolution_context import Resolved, is_differentiable
from gradrule_server.graphs.resolve import Resolver


@dataclass(slots=True, eq=False)
class EmbeddedRules:
    """Expanded gradients by name, what was resolved for their nodes, and the scopes of the functions inside."""

    bodies: dict[str, Body] = field(default_factory=dict)
    resolved: dict[int, Resolved] = field(default_factory=dict)
    scopes: dict[str, str] = field(default_factory=dict)


def expand_embedded_rules(wishes: NodeGradients, namespace: str) -> EmbeddedRules:
    """Expands every gradient of the graph's own that a node asks for, a node of such a gradient included.

    No override reaches them: overrides mean nodes of the graph, not those of gradients.
    """
    rules = EmbeddedRules()
    # Grows meanwhile.
    for name in wishes.asked:
        resolver = Resolver((), wishes, wishes.differentiates, wishes.findings)
        copy = copy_function(wishes.gradients[name], name, resolver, f"{namespace}_r{len(rules.bodies)}")
        rules.bodies[name] = copy.body
        rules.scopes.update(copy.scopes)
        rules.resolved.update(copy.resolved)
        for place in copy.places:
            differentiable = is_differentiable(place.node, place.input_types)
            found = wishes.match(place.node, place.name, place.function, differentiable)
            what = found or wishes.foreign_at(place.node, place.name)
            if what is not None and place.live:
                rules.resolved[id(place.node)] = [what]
    # Not before: nodes are told apart by identity, and those that go would lend theirs to new ones.
    for body in rules.bodies.values():
        _prune(body)
    return rules


def _prune(body: Body) -> None:
    """Leaves what the results need; arguments go too."""
    roots = [*(ref[0] for ref in body.results), *(position for _, position in body.control_results)]
    moved = prune(body, roots)
    body.results = [(moved[position], output) for position, output in body.results]
    body.control_results = [(name, moved[position]) for name, position in body.control_results]
    body.arg_count = sum(node.op == ARG for node in body.nodes)
