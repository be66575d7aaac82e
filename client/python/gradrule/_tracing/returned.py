"""Removes or marks the Identity nodes that TensorFlow adds while it traces a function.

TensorFlow returns each result of a function through an Identity, and each result of a loop or branch too. Aliases name
the tensors that the Python function returned, so the Identities of the top level are removed. An Identity that must
stay has the attribute `_gradrule_added`: overrides select it only by its exact name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradrule._tracing.bodies import Body, Library, Node

ADDED_ATTR = "_gradrule_added"

_ADDED_NAME = re.compile(r"(.*/)?Identity(_\d+)?")
_CONTROL_FLOW = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}


def return_tensors_directly(library: Library) -> None:
    """Makes the top level return the tensors that the Python function returned; marks other added Identities."""
    for body in library.bodies.values():
        if body.gradient_of is None:
            added = _result_identities(body)
            if body is library.root:
                added = _TopLevel(body).without(added)
            for node in [*added.values(), *_after_control_flow(body)]:
                node.attr[ADDED_ATTR].b = True


def _result_identities(body: Body) -> dict[str, Node]:
    """Returns the Identities that TensorFlow added for results, by result."""
    definition = body.definition
    used = {_source(text) for node in definition.node_def for text in node.input}
    found = {}
    for result in definition.signature.output_arg:
        name = _source(definition.ret[result.name])
        node = body.nodes.get(name)
        # A result always passes an added Identity; an Identity of the user with the same name has a consumer.
        if node is not None and node.op == "Identity" and _ADDED_NAME.fullmatch(name) and name not in used:
            found[result.name] = node
    return found


def _after_control_flow(body: Body) -> list[Node]:
    """Returns the Identities that TensorFlow added after loops and branches."""
    return [
        node
        for node in body.definition.node_def
        if node.op == "Identity"
        and (source := body.nodes.get(_source(node.input[0]))) is not None
        and source.op in _CONTROL_FLOW
    ]


class _TopLevel:
    """Removes Identities from the top level.

    The control inputs of such an Identity are the function's side effects, such as assignments. They move to the node
    that computes the result. A side effect that depends on the result cannot move there; it still runs with every later
    result.
    """

    def __init__(self, body: Body) -> None:
        self._body = body

    def without(self, added: dict[str, Node]) -> dict[str, Node]:
        """Removes Identities; returns those that must stay, by result."""
        definition = self._body.definition
        kept: dict[str, Node] = {}
        removed: dict[str, Node] = {}
        for result, node in added.items():
            # A graph's input cannot be its output too, and its node takes no control inputs.
            (kept if _source(node.input[0]) not in self._body.nodes else removed)[result] = node
        late = {}
        for result, node in removed.items():
            late[result] = self._move_controls(node)
        still_run = self._before(_source(definition.ret[result]) for result in kept)
        still_run |= self._before(_source(node.input[0]) for node in removed.values())
        for result, node in removed.items():
            if late[result] <= still_run:
                definition.ret[result] = node.input[0]
                self._body.remove_node(node)
            else:
                kept[result] = node
        return kept

    def _move_controls(self, node: Node) -> set[str]:
        """Moves control inputs to the node before an Identity; returns those that depend on that node."""
        producer = self._body.nodes[_source(node.input[0])]
        before = self._before([producer.name])
        late = set()
        for control in sorted({_source(text) for text in node.input[1:]} - before):
            if producer.name in self._before([control]):
                late.add(control)
            else:
                producer.input.append(f"^{control}")
        return late

    def _before(self, names: Iterable[str]) -> set[str]:
        """Returns the nodes and all nodes that they depend on."""
        pending, found = list(names), set[str]()
        while pending:
            name = pending.pop()
            if name in self._body.nodes and name not in found:
                found.add(name)
                pending += [_source(text) for text in self._body.nodes[name].input]
        return found


def _source(text: str) -> str:
    """Returns the node or argument of a reference."""
    return text.removeprefix("^").partition(":")[0]
