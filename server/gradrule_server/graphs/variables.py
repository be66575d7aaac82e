"""Finds the variables of a graph and the handles that refer to them, and lists the ops that use variables.

The first input of each op that reads or writes a variable is the variable (a resource handle or a reference).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradrule.common.dtypes import REF_OFFSET, as_dt
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server.errors import Findings, Reason, quote
from gradrule_server.graphs.ir import LOOPS, Body, Node, Ref, bodies_of, parse_tensor_name, short_tensor_name

# Ops whose output is a handle of or a reference to a variable.
VARIABLE_OPS = frozenset({"VarHandleOp", "VariableV2", "Variable"})

# Ops that forward handles and references.
FORWARDING_OPS = frozenset({"Identity", "IdentityN"})

# Ops that check whether a variable has a value; here every variable has one.
IS_INITIALIZED_OPS = frozenset({"VarIsInitializedOp", "IsVariableInitialized"})


@dataclass(frozen=True, slots=True)
class Read:
    """How an op that reads a variable is replaced.

    Attributes:
        op: The op that replaces it.
        type_attr: The attribute of that op for the element type of the value.
        attrs: The attributes that are copied.
        takes_axis: Whether the third input of that op is the gather axis, which is the number of batch dimensions.
    """

    op: str
    type_attr: str
    attrs: tuple[str, ...] = ()
    takes_axis: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """How an op that writes a variable is replaced.

    Attributes:
        op: The op that computes the new value.
        takes_old: Whether its first input is the old value. If false, its only input is the new value.
        rows: Whether the indices are row indices, and a scalar update is broadcast.
        attrs: The attributes that are copied.
        keeps_shape: Whether the new value always has the shape of the variable. If false, the shape is checked.
    """

    op: str
    takes_old: bool = True
    rows: bool = False
    attrs: tuple[str, ...] = ()
    keeps_shape: bool = True


READS: Mapping[str, Read] = {
    "ReadVariableOp": Read("Identity", "T"),
    "ResourceGather": Read("GatherV2", "Tparams", ("Tindices", "batch_dims"), takes_axis=True),
    "ResourceGatherNd": Read("GatherNd", "Tparams", ("Tindices",)),
    "VariableShape": Read("Shape", "T", ("out_type",)),
}

_SLICE_ATTRS = ("Index", "begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
_TENSOR_SCATTER = {
    "Add": "TensorScatterAdd",
    "Sub": "TensorScatterSub",
    "Min": "TensorScatterMin",
    "Max": "TensorScatterMax",
    "Update": "TensorScatterUpdate",
}

WRITES: Mapping[str, Write] = {
    **dict.fromkeys(("AssignVariableOp", "Assign"), Write("Identity", takes_old=False, keeps_shape=False)),
    **dict.fromkeys(("AssignAddVariableOp", "AssignAdd"), Write("AddV2", keeps_shape=False)),
    **dict.fromkeys(("AssignSubVariableOp", "AssignSub"), Write("Sub", keeps_shape=False)),
    **{
        f"{prefix}Scatter{kind}": Write(op, rows=True, attrs=("Tindices",))
        for prefix in ("Resource", "")
        for kind, op in _TENSOR_SCATTER.items()
    },
    **{
        f"{prefix}ScatterNd{kind}": Write(op, attrs=("Tindices",))
        for prefix in ("Resource", "")
        for kind, op in _TENSOR_SCATTER.items()
    },
    **dict.fromkeys(
        ("ResourceStridedSliceAssign", "StridedSliceAssign"), Write("TensorStridedSliceUpdate", attrs=_SLICE_ATTRS)
    ),
}

# Ops that return the old value of a variable, the state of a random generator, and write a new one.
RANDOM_STATE_OPS = frozenset({"RngReadAndSkip"})

# An initialiser is an assignment named `<variable>/Assign`.
ASSIGNMENTS = frozenset({"AssignVariableOp", "Assign"})
INITIALISER = "Assign"

# All ops that may have a handle or a reference as input or output.
HANDLE_OPS = VARIABLE_OPS | FORWARDING_OPS | IS_INITIALIZED_OPS | READS.keys() | WRITES.keys() | RANDOM_STATE_OPS

# Names that TensorFlow generates for unnamed variables.
_GENERATED_NAME = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")

_UNNAMED = "is a variable without a shared name inside a function, where no request can name it; give it one, or pass "
_UNNAMED += "its handle as an argument"

Key = tuple[str, str]

_MIXED = "returns handles of different variables, or of none that gradrule knows"


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
            if node.op in VARIABLE_OPS and node.outputs is not None:
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
                owner.initialiser = node.name if top.nodes[node.inputs[0][0]].op in VARIABLE_OPS else ""

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
            variable = self._names.get(short_tensor_name(node, output))
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
        for body in bodies_of(top):
            for node in body.nodes if body.name else ():
                if node.op not in VARIABLE_OPS or node.outputs is None:
                    continue
                key = _key(node)
                if key is None or (key not in self._by_key and key[1] in taken):
                    node.unsupported = node.unsupported or _UNNAMED
                elif key not in self._by_key:
                    taken.add(key[1])
                    top.nodes.append(Node(key[1], node.op, [], [], node.attrs, node.outputs))
                    top.order.append(len(top.nodes) - 1)
                    self._add(top.nodes[-1])


def _key(node: Node) -> Key | None:
    shared = node.attrs.get("shared_name")
    name = shared.s.decode(errors="replace") if shared is not None else ""
    if not name or _GENERATED_NAME.search(name):
        return None
    container = node.attrs.get("container")
    return (container.s.decode(errors="replace") if container is not None else "", name)


def _shape(node: Node) -> TensorShape:
    value: AttrValue | None = node.attrs.get("shape")
    # The op `Variable` has the same shape attribute for a scalar and for an unknown shape.
    if value is None or (node.op == "Variable" and not value.shape.dim):
        return TensorShape(unknown_rank=True)
    return value.shape


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
        if node.op in VARIABLE_OPS and (index, 0) in handles:
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
            if node.op in VARIABLE_OPS:
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
        offset = 0 if is_loop else 1
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
            returned = {result[number] for result in results}
            if is_loop:
                returned.add(passed[number])
            variable = returned.pop() if len(returned) == 1 else None
            if variable is None:
                node.unsupported = node.unsupported or (_MIXED if returned else "")
            else:
                handles[index, number] = variable
