"""Finds the variable behind each resource handle and reference of an expanded graph."""

from __future__ import annotations

from collections.abc import Sequence

from gradrule.common.dtypes import REF_OFFSET
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.graphs.ir import LOOPS, Body, Node, Ref, is_call
from gradrule_server.graphs.variable_ops import FORWARDING_OPS, SOURCES, WRITES
from gradrule_server.graphs.variable_table import Variable, VariableTable

_MIXED = "gives out handles that stand for different variables, or for none that gradrule knows"


class VariableHandles:
    """Maps handles and references to variables, also across calls, loops and branches.

    Nodes must be in topological order.
    """

    def __init__(self, top: Body, table: VariableTable) -> None:
        self._table = table
        self._by_body: dict[int, dict[Ref, Variable]] = {}
        self._references: dict[int, set[Ref]] = {}
        self._used: dict[int, list[Variable]] = {}
        self._trace(top, [])

    def get(self, body: Body) -> dict[Ref, Variable]:
        """Returns the variables of a body's handle and reference tensors."""
        return self._by_body[id(body)]

    def is_reference(self, body: Body, ref: Ref) -> bool:
        """Returns whether a tensor is a reference. Ops can read a reference as the value, but not a handle."""
        return ref in self._references[id(body)]

    def used_in(self, body: Body) -> list[Variable]:
        """Returns the variables that the nodes of a body and its inner functions use."""
        if id(body) not in self._used:
            found: dict[Variable, None] = {}
            for index in range(body.arg_count, len(body.nodes)):
                found.update(dict.fromkeys(self.used_by(body, index)))
            found.update(dict.fromkeys(self.get(body)[ref] for ref in body.results if ref in self.get(body)))
            self._used[id(body)] = list(found)
        return self._used[id(body)]

    def used_by(self, body: Body, index: int) -> list[Variable]:
        """Returns the variables that a node creates, takes as input, or uses in its functions."""
        node, handles = body.nodes[index], self.get(body)
        found = [handles[ref] for ref in node.inputs if ref in handles]
        if node.op in SOURCES and (index, 0) in handles:
            found.append(handles[index, 0])
        for _, bodies in node.functions:
            for inner in bodies:
                found += self.used_in(inner)
        return found

    def shift(self, body: Body, first: int, count: int) -> None:
        """Updates indices after `count` nodes were inserted into a body before `first`."""

        def moved(ref: Ref) -> Ref:
            return (ref[0] + count if ref[0] >= first else ref[0], ref[1])

        self._by_body[id(body)] = {moved(ref): variable for ref, variable in self.get(body).items()}
        self._references[id(body)] = {moved(ref) for ref in self._references[id(body)]}

    def _trace(self, body: Body, args: Sequence[Variable | None]) -> None:
        handles: dict[Ref, Variable] = {}
        self._by_body[id(body)] = handles
        handles.update({(number, 0): variable for number, variable in enumerate(args) if variable is not None})
        for index in range(body.arg_count, len(body.nodes)):
            node = body.nodes[index]
            outputs = node.outputs or ()
            if node.op in SOURCES:
                variable = self._table.find(node, at_top=not body.name)
                if variable is not None:
                    handles[index, 0] = variable
            elif node.functions:
                self._trace_container(node, index, handles)
            elif node.op in FORWARDING_OPS:
                for number, ref in enumerate(node.inputs):
                    if ref in handles and outputs[number] == Dt.DT_RESOURCE:
                        handles[index, number] = handles[ref]
            elif node.op in WRITES and outputs and outputs[0] > REF_OFFSET and node.inputs[0] in handles:
                handles[index, 0] = handles[node.inputs[0]]
        self._references[id(body)] = {
            ref for ref in handles if (body.nodes[ref[0]].outputs or (0,) * (ref[1] + 1))[ref[1]] > REF_OFFSET
        }

    def _trace_container(self, node: Node, index: int, handles: dict[Ref, Variable]) -> None:
        is_loop = node.op in LOOPS
        offset = 0 if is_loop or is_call(node) else 1
        passed = [handles.get(ref) for ref in node.inputs[offset:]]
        results: list[list[Variable | None]] = []
        for attr, bodies in node.functions:
            for inner in bodies:
                self._trace(inner, passed)
                if attr != "cond":
                    results.append([self.get(inner).get(ref) for ref in inner.results])
        for number, dtype in enumerate(node.outputs or ()):
            if dtype != Dt.DT_RESOURCE:
                continue
            meant = {result[number] for result in results}
            if is_loop:
                meant.add(passed[number])
            variable = meant.pop() if len(meant) == 1 else None
            if variable is None:
                node.unsupported = node.unsupported or (_MIXED if meant else "")
            else:
                handles[index, number] = variable
