"""Expands the gradient functions that a graph contains and writes each as the graph of a rule (an embedded rule)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue, Graph, Versions
from gradrule.v1.tensor_pb2 import TensorShape
from gradrule_server.errors import error
from gradrule_server.graphs.copying import copy_function
from gradrule_server.graphs.findings import Reason
from gradrule_server.graphs.ir import ARG, Body, Limits, prune
from gradrule_server.graphs.node_gradients import NodeGradients
from gradrule_server.graphs.resolution_context import ResolutionContext, Resolved
from gradrule_server.graphs.resolve import Resolver
from gradrule_server.graphs.write import write_node, written_versions

# Keeps names of inner nodes distinct from the rule's variables and results.
_INSIDE = "inside/"


@dataclass(slots=True, eq=False)
class EmbeddedRules:
    """Expanded gradients by name, the matches of their nodes by id(), and public scopes by function name."""

    bodies: dict[str, Body] = field(default_factory=dict)
    resolved: dict[int, Resolved] = field(default_factory=dict)
    scopes: dict[str, str] = field(default_factory=dict)


def expand_embedded_rules(node_gradients: NodeGradients, namespace: str) -> EmbeddedRules:
    """Expands every embedded gradient that a node requests, including requests by nodes of such gradients.

    Overrides do not apply inside, because they select nodes of the uploaded graph only.
    """
    rules = EmbeddedRules()
    # The list grows while it is iterated: embedded gradients request others.
    for name in node_gradients.requested:
        resolver = Resolver((), node_gradients, node_gradients.differentiates, node_gradients.findings)
        copy = copy_function(node_gradients.gradients[name], name, resolver, f"{namespace}_r{len(rules.bodies)}")
        rules.bodies[name] = copy.body
        rules.scopes.update(copy.scopes)
        context = ResolutionContext(copy.body, copy.candidates, copy.scopes)
        resolver.resolve(context)
        context.insert_custom_gradient_nodes(copy.unique)
        rules.resolved.update(context.resolved)
    # Prune last: nodes are keyed by id(), and ids of freed nodes are reused.
    for body in rules.bodies.values():
        _prune(body)
    return rules


def _prune(body: Body) -> None:
    """Removes nodes that no result needs, including unused arguments."""
    roots = [*(ref[0] for ref in body.results), *(position for _, position in body.control_results)]
    moved = prune(body, roots)
    body.results = [(moved[position], output) for position, output in body.results]
    body.control_results = [(name, moved[position]) for name, position in body.control_results]
    body.arg_count = sum(node.op == ARG for node in body.nodes)


def write_embedded_rules(
    bodies: Mapping[str, Body], labels: Mapping[tuple[str, str], int], versions: Versions, limits: Limits
) -> dict[int, bytes]:
    """Returns the serialized graphs of the embedded rules by index; indices of one gradient share the bytes object.

    Raises LIMIT_EXCEEDED for too many nodes or bytes: the engine receives one copy per label.
    """
    nodes = sum(len(bodies[name].nodes) for name, _ in labels)
    if nodes > limits.inlined_nodes:
        raise error(
            Reason.ERROR_REASON_LIMIT_EXCEEDED,
            f"embedded gradients of the graph have {nodes} nodes, once for each region that they belong to; "
            f"{limits.inlined_nodes} is the most (--max-inlined-nodes)",
        )
    written = {name: _write_rule(body, versions) for name, body in bodies.items()}
    added = sum(len(written[name]) for name, _ in labels) - sum(map(len, written.values()))
    if added > limits.inlined_bytes:
        raise error(
            Reason.ERROR_REASON_LIMIT_EXCEEDED,
            f"embedded gradients of the graph belong to so many regions that they take {added} bytes more; "
            f"{limits.inlined_bytes} is the most (--max-inlined-bytes)",
        )
    return {index: written[name] for (name, _), index in labels.items()}


def _write_rule(body: Body, versions: Versions) -> bytes:
    """Returns a rule's serialized graph: arguments are placeholders `x`, `y`, `dy`, …, results are nodes `dx`, ….

    Functions of loops and branches are not included; they are written with the graph.
    """
    graph = Graph(versions=written_versions(versions))
    unknown = AttrValue(shape=TensorShape(unknown_rank=True))
    for node in body.nodes:
        message = graph.node.add()
        if node.op == ARG:
            message.name, message.op = node.name, "Placeholder"
            message.attr["dtype"].type = as_dt((node.outputs or (0,))[0])
            message.attr["shape"].CopyFrom(unknown)
            continue
        write_node(node, message)
        message.name = f"{_INSIDE}{node.name}"
        message.input.extend(f"{_name(body, ref[0])}:{ref[1]}" for ref in node.inputs)
        message.input.extend(f"^{_name(body, control)}" for control in node.controls)
    for name, dtype, ref in zip(body.result_names, body.result_types, body.results, strict=True):
        message = graph.node.add(name=name, op="Identity", input=[f"{_name(body, ref[0])}:{ref[1]}"])
        message.attr["T"].type = as_dt(dtype)
        # Control outputs of the function run before its results are used.
        message.input.extend(f"^{_name(body, control)}" for _, control in body.control_results)
    return graph.SerializeToString(deterministic=True)


def _name(body: Body, index: int) -> str:
    node = body.nodes[index]
    return node.name if node.op == ARG else f"{_INSIDE}{node.name}"
