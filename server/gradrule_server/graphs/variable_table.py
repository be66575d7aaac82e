"""Finds the variables of an uploaded graph: names, types and initialisers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.ir import Body, Node, bodies_of
from gradrule_server.graphs.tensor_names import canonical, parse_tensor_name
from gradrule_server.graphs.variable_ops import ASSIGNMENTS, INITIALISER, SOURCES

# Names that TensorFlow generates for unnamed variables.
_MADE_UP = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")

_UNNAMED = "is a variable without a shared name inside a function, where no request can name it; give it one, or hand "
_UNNAMED += "its handle in as an argument"

Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class Variable:
    """A variable of a graph.

    Attributes:
        name: Name of its first top-level node.
        aliases: Other names that requests may use.
        initialiser: Name of the top-level node that assigns its initial value; empty: no node does.
    """

    name: str
    dtype: Dt.ValueType
    shape: TensorShape
    aliases: set[str] = field(default_factory=set)
    initialiser: str = ""


class VariableTable:
    """All variables of a checked graph. Nodes with equal container and shared name are one variable."""

    def __init__(self, top: Body) -> None:
        self._by_key: dict[Key, Variable] = {}
        self._by_node: dict[str, Variable] = {}
        for node in top.nodes:
            if node.op in SOURCES and node.outputs is not None:
                self._add(node)
        self._hoist(top)
        for variable in self.all():
            variable.aliases -= {variable.name}
        self._names = {variable.name: variable for variable in self.all()}
        taken = {node.name for node in top.nodes}
        for variable in self.all():
            variable.aliases = {name for name in variable.aliases if name not in taken or name in self._by_node}
            for name in variable.aliases:
                self._names.setdefault(name, variable)
        for node in top.nodes:
            owner = self._by_node.get(node.name.removesuffix(f"/{INITIALISER}"))
            # Nodes on a cycle have no inputs here; `sort_nodes` reports the cycle.
            if owner is not None and node.op in ASSIGNMENTS and node.inputs and not owner.initialiser:
                owner.initialiser = node.name if top.nodes[node.inputs[0][0]].op in SOURCES else ""

    def __bool__(self) -> bool:
        return bool(self._by_node)

    def all(self) -> list[Variable]:
        """Returns all variables, in the order of their first nodes."""
        return list(dict.fromkeys(self._by_node.values()))

    @property
    def names(self) -> Mapping[str, Variable]:
        """Variables by each name that requests may use."""
        return self._names

    def find(self, node: Node, *, at_top: bool) -> Variable | None:
        """Returns the variable of a copied node; None for an unnamed variable inside a function."""
        key = _key(node)
        if key is not None:
            return self._by_key.get(key)
        return self._by_node.get(node.name) if at_top else None

    def given(self, texts: Sequence[str], field: str, findings: Findings) -> dict[str, Variable]:
        """Returns the variables whose values a request holds. Adds UNKNOWN_TENSOR; UNKNOWN_FEED for repeated ones."""
        found: dict[str, Variable] = {}
        for position, text in enumerate(texts):
            node, output = parse_tensor_name(text) or (text, 0)
            variable = self._names.get(canonical(node, output))
            if variable is None:
                hint = findings.suggest_similar(text, self._names)
                message = f"The graph has no variable {quote(text)}.{hint}"
                findings.add(Reason.ERROR_REASON_UNKNOWN_TENSOR, message, field=f"{field}[{position}]")
            elif variable in found.values():
                message = f"The variable {quote(variable.name)} is given twice."
                findings.add(Reason.ERROR_REASON_UNKNOWN_FEED, message, variable.name, f"{field}[{position}]")
            else:
                found[text] = variable
        return found

    def _add(self, node: Node) -> None:
        key = _key(node)
        known = self._by_key.get(key) if key is not None else None
        variable = known or Variable(node.name, as_dt(node.attrs["dtype"].type), _shape(node))
        self._by_node[node.name] = variable
        variable.aliases.add(node.name)
        if key is not None:
            self._by_key[key] = variable
            variable.aliases.add(key[1])

    def _hoist(self, top: Body) -> None:
        """Adds top-level nodes, under the shared name, for variables that only functions create."""
        taken = {node.name for node in top.nodes}
        seen: set[int] = set()
        for body in bodies_of(top, seen):
            for node in body.nodes if body.name else ():
                if node.op not in SOURCES or node.outputs is None:
                    continue
                key = _key(node)
                if key is None or (key not in self._by_key and key[1] in taken):
                    node.unsupported = node.unsupported or _UNNAMED
                elif key not in self._by_key:
                    taken.add(key[1])
                    top.nodes.append(Node(key[1], node.op, [], [], node.attrs, node.outputs))
                    top.order.append(len(top.nodes) - 1)
                    self._add(top.nodes[-1])


def fed_in_place(graph: Graph, given: Iterable[str]) -> set[str]:
    """Returns the names of the variables that a call may feed without a new program.

    Feeding a variable that has an initialiser and no given value removes the initialiser, which makes a new program.
    """
    names = set()
    with_value = set(given)
    nodes = {node.name for node in graph.node}
    for node in graph.node:
        if node.op in SOURCES:
            # Test for the key first: reading a missing key adds it to a protobuf map.
            shared = node.attr["shared_name"].s.decode(errors="replace") if "shared_name" in node.attr else ""
            own = {node.name, shared} - {""}
            if own & with_value or f"{node.name}/{INITIALISER}" not in nodes:
                names |= own
    return names


def _key(node: Node) -> Key | None:
    shared = node.attrs.get("shared_name")
    name = shared.s.decode(errors="replace") if shared is not None else ""
    if not name or _MADE_UP.search(name):
        return None
    container = node.attrs.get("container")
    return (container.s.decode(errors="replace") if container is not None else "", name)


def _shape(node: Node) -> TensorShape:
    value: AttrValue | None = node.attrs.get("shape")
    # The op `Variable` has the same shape attribute for a scalar and for an unknown shape.
    if value is None or (node.op == "Variable" and not value.shape.dim):
        return TensorShape(unknown_rank=True)
    return value.shape


__all__ = ["Variable", "VariableTable", "fed_in_place"]
