"""Replaces variables by values: edges that carry handles become edges that carry values.

A read becomes the value of the last write that it depends on, or the initial value, which is an input like a
placeholder. A write becomes a new value. Loops pass values on as loop variables; branches return them. Later
stages, such as overrides and gradients, then handle only tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.errors import Findings, Reason
from gradrule_server.graphs.check import find_cycles
from gradrule_server.graphs.copying import Copy
from gradrule_server.graphs.ir import LOOPS, Body, Node, Ref, replaced
from gradrule_server.graphs.variable_nodes import Lowering
from gradrule_server.graphs.variables import (
    FORWARDING_OPS,
    IS_INITIALIZED_OPS,
    RANDOM_STATE_OPS,
    READS,
    VARIABLE_OPS,
    WRITES,
    Variable,
    VariableHandles,
    VariableTable,
)

# Each node stores the writes that it depends on as bits, so memory grows with the square of this number.
_MAX_WRITES = 10_000

_HANDLE = "uses the handle of a variable in a way that gradrule does not support; read the variable first"


def lower_variables(
    copy: Copy,
    table: VariableTable,
    roots: Iterable[Ref],
    given: Collection[Variable],
    differentiated: Collection[Variable],
    findings: Findings,
) -> dict[Variable, Ref]:
    """Lowers, in place, the nodes of the copy that the roots need.

    `given`: the variables whose value is an input. Other variables get the value of their initialiser; those without an
    initialiser become inputs too. `differentiated`: the variables among the xs. Returns the final values of written
    variables, as tensors of the copy's top level.
    """
    lowering = Lowering(copy, findings, differentiated)
    return _Pass(copy, table, given, lowering, findings).run({producer for producer, _ in roots})


class _VariableVersions:
    """Tracks the writes of one body, in topological order. `initial`: returns a variable's initial value."""

    def __init__(self, count: int, initial: Callable[[Variable], Ref], findings: Findings) -> None:
        self._masks = [0] * count
        self._initial = initial
        self._findings = findings
        self._refs: list[Ref] = []
        # For each variable: the bits of its writes.
        self._writes: dict[Variable, int] = {}

    def reach(self, index: int, node: Node) -> int:
        """Returns the bits of the writes that a node depends on; to be called in topological order."""
        masks, before = self._masks, 0
        for producer, _ in node.inputs:
            before |= masks[producer]
        for control in node.controls:
            before |= masks[control]
        masks[index] = before
        return before

    def at(self, variable: Variable, before: int) -> Ref:
        """Returns the variable's value after these writes."""
        own = before & self._writes.get(variable, 0)
        return self._refs[own.bit_length() - 1] if own else self._initial(variable)

    def write(self, index: int, written: Iterable[tuple[Variable, Ref]]) -> None:
        """Records that a node writes variables. Raises LIMIT_EXCEEDED for too many writes."""
        for variable, ref in written:
            if len(self._refs) >= _MAX_WRITES:
                message = f"The graph assigns to variables more than {_MAX_WRITES} times."
                self._findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
                self._findings.raise_if_any()
            bit = 1 << len(self._refs)
            self._refs.append(ref)
            known = self._writes.get(variable, 0)
            # This write hides earlier writes of the same variable from its descendants.
            self._masks[index] = (self._masks[index] & ~known) | bit
            self._writes[variable] = known | bit

    def last(self) -> dict[Variable, Ref]:
        """Returns the final value of each written variable."""
        return {variable: self._refs[bits.bit_length() - 1] for variable, bits in self._writes.items()}


class _Pass:
    def __init__(
        self, copy: Copy, table: VariableTable, given: Collection[Variable], lowering: Lowering, findings: Findings
    ) -> None:
        self._copy = copy
        self._findings = findings
        self._handles = VariableHandles(copy.body, table)
        self._lowering = lowering
        nodes = copy.body.nodes
        index = {node.name: position for position, node in enumerate(nodes)}
        self._sources = {variable: index[variable.name] for variable in table.all() if variable.name in index}
        self._initialisers = {}
        for variable in table.all():
            position = index.get(variable.initialiser)
            if position is not None:
                self._initialisers[position] = variable
        # For each variable without a given value: the tensor with its initial value.
        self._computed = {
            variable: nodes[position].inputs[1]
            for position, variable in self._initialisers.items()
            if variable not in given
        }

    def run(self, roots: Collection[int]) -> dict[Variable, Ref]:
        """Lowers the nodes that the roots need; returns the final values of written variables."""
        needed = self._needed(roots)
        while cycles := self._cycles(needed):
            for cycle in cycles:
                on_cycle = set(cycle)
                self._computed = {
                    variable: ref for variable, ref in self._computed.items() if self._sources[variable] not in on_cycle
                }
        body, handles = self._copy.body, self._handles.get(self._copy.body)
        places = {
            tensor: (self._sources[handles[place]], 0) if self._is_source(body, place, handles) else place
            for tensor, place in self._copy.tensors.items()
        }
        updates = self._lower(body, {variable: (index, 0) for variable, index in self._sources.items()}, needed)
        self._copy.tensors = places
        for position, node in enumerate(body.nodes):
            variable = handles.get((position, 0)) if node.op in VARIABLE_OPS else None
            if variable is not None:
                self._lower_source(position, node, variable)
        return updates

    @staticmethod
    def _is_source(body: Body, place: Ref, handles: Mapping[Ref, Variable]) -> bool:
        return place in handles and body.nodes[place[0]].op in VARIABLE_OPS

    def _needed(self, roots: Collection[int]) -> bytearray:
        """Returns flags of the top-level nodes that the roots need, including those that compute initial values."""
        body = self._copy.body
        needed = bytearray(len(body.nodes))
        seen: set[Variable] = set()
        pending = list(roots)
        while pending:
            position = pending.pop()
            if needed[position]:
                continue
            needed[position] = 1
            node = body.nodes[position]
            pending += [producer for producer, _ in node.inputs]
            pending += node.controls
            for variable in self._handles.used_by(body, position):
                if variable not in seen:
                    seen.add(variable)
                    pending += [self._sources[variable]]
                    if variable in self._computed:
                        pending.append(self._computed[variable][0])
        return needed

    def _cycles(self, needed: bytearray) -> list[list[int]]:
        """Returns cycles of initial values that depend on themselves; their assignments are not initialisers."""
        if not self._computed:
            return []
        nodes = self._copy.body.nodes
        edges = {
            position: [*(producer for producer, _ in nodes[position].inputs), *nodes[position].controls]
            for position, is_needed in enumerate(needed)
            if is_needed
        }
        for variable, (producer, _) in self._computed.items():
            if self._sources[variable] in edges:
                edges[self._sources[variable]] = [producer]
        return find_cycles(edges)

    def _lower(self, body: Body, initial: Mapping[Variable, Ref], needed: bytearray | None) -> dict[Variable, Ref]:
        """Lowers the nodes of a body (only `needed` ones, if given); returns the final values of written variables."""
        handles = self._handles.get(body)
        at_top = not body.name
        count = len(body.nodes)
        versions = _VariableVersions(count, initial.__getitem__, self._findings)
        for index in range(body.arg_count, count):
            if needed is not None and not needed[index]:
                continue
            node = body.nodes[index]
            before = versions.reach(index, node)
            if node.op in VARIABLE_OPS and not at_top:
                self._lower_inner_source(node, handles.get((index, 0)), initial)
            elif node.functions:
                written = self._lower_container(body, index, versions, before)
                versions.write(index, written)
            elif not node.unsupported and any(ref in handles for ref in node.inputs):
                written = self._lower_node(body, index, versions, before)
                if not (at_top and index in self._initialisers):
                    versions.write(index, written)
        return versions.last()

    def _lower_node(
        self, body: Body, index: int, versions: _VariableVersions, before: int
    ) -> list[tuple[Variable, Ref]]:
        node, handles = body.nodes[index], self._handles.get(body)
        ops_on_variables = READS.keys() | WRITES.keys() | IS_INITIALIZED_OPS | RANDOM_STATE_OPS
        target = handles.get(node.inputs[0]) if node.op in ops_on_variables else None
        variables = [handles.get(ref) for ref in node.inputs]
        for number, variable in enumerate(variables):
            if variable is None:
                continue
            is_value = self._handles.is_reference(body, node.inputs[number])
            if node.op not in FORWARDING_OPS and not is_value and not (number == 0 and target is not None):
                node.unsupported = _HANDLE
                return []
            value = versions.at(variable, before)
            if is_value and body.nodes[node.inputs[number][0]].uploaded_op in WRITES:
                # The output of an assignment, used as a value, has no gradient.
                value = self._lowering.without_gradient(body, value)
            self._replace_handle(body, node, number, value)
        if target is None:
            if node.op in FORWARDING_OPS:
                types = zip(node.outputs or (), variables, strict=True)
                self._lowering.retype_pass(node, [kept if item is None else item.dtype for kept, item in types])
            return []
        return self._lowering.lower(body, index, target)

    @staticmethod
    def _replace_handle(body: Body, node: Node, number: int, value: Ref) -> None:
        """Replaces a handle by a value; a node that forwarded it becomes a control input, to keep the ordering."""
        producer = node.inputs[number][0]
        node.inputs = replaced(node.inputs, number, value)
        if body.nodes[producer].op in FORWARDING_OPS and producer != value[0] and producer not in node.controls:
            node.controls = [*node.controls, producer]

    def _lower_container(
        self, body: Body, index: int, versions: _VariableVersions, before: int
    ) -> list[tuple[Variable, Ref]]:
        """Lowers a loop or branch: its handles become values, and written variables become outputs."""
        node, handles = body.nodes[index], self._handles.get(body)
        is_loop = node.op in LOOPS
        offset = 0 if is_loop else 1
        if offset and node.inputs[0] in handles:
            self._replace_handle(body, node, 0, versions.at(handles[node.inputs[0]], before))
        passed = [handles.get(ref) for ref in node.inputs[offset:]]
        inner_bodies = [(attr, inner) for attr, bodies in node.functions for inner in bodies]
        used = dict.fromkeys(variable for variable in passed if variable is not None)
        for _, inner in inner_bodies:
            used.update(dict.fromkeys(self._handles.used_in(inner)))
        if not used:
            return []
        extra = [variable for variable in used if variable not in passed]
        outs = [handles.get((index, number)) for number in range(len(node.outputs or ()))]
        ends = []
        for attr, inner in inner_bodies:
            results = [self._handles.get(inner).get(ref) for ref in inner.results]
            args = self._give_args(inner, passed, extra)
            last = self._lower(inner, args, None)
            ends.append((attr, inner, results, {**args, **last}, last))
        written = list(dict.fromkeys(variable for *_, last in ends for variable in last))
        returned = extra if is_loop else written
        for attr, inner, results, end, _ in ends:
            if attr != "cond":
                _give_results(inner, results, returned, end)
        for number, variable in enumerate(passed):
            if variable is not None:
                self._replace_handle(body, node, number + offset, versions.at(variable, before))
        node.inputs = [*node.inputs, *(versions.at(variable, before) for variable in extra)]
        first = len(outs)
        _retype(node, passed, extra, outs, returned)
        node.watched = bool(node.inputs) and self._lowering.is_differentiable(node)
        slots = {variable: first + number for number, variable in enumerate(returned)}
        if is_loop:
            slots.update({variable: number for number, variable in reversed(list(enumerate(passed))) if variable})
        return [(variable, (index, slots[variable])) for variable in written]

    def _give_args(
        self, body: Body, passed: Sequence[Variable | None], extra: Sequence[Variable]
    ) -> dict[Variable, Ref]:
        """Turns handle arguments of a function into values and appends arguments for `extra` variables."""
        body.arg_notes = [dict(notes) for notes in body.arg_notes]
        args: dict[Variable, Ref] = {}
        for number, variable in enumerate(passed):
            if variable is not None:
                args.setdefault(variable, (number, 0))
                body.nodes[number].outputs = (variable.dtype,)
                body.arg_notes[number] = _note(variable)
        if extra:
            first = body.arg_count
            self._lowering.insert_args(body, extra)
            self._handles.shift(body, first, len(extra))
            body.arg_notes += [_note(variable) for variable in extra]
            args.update({variable: (first + number, 0) for number, variable in enumerate(extra)})
        return args

    def _lower_source(self, position: int, node: Node, variable: Variable) -> None:
        """Turns a top-level variable node into the variable's initial value."""
        source = self._sources[variable]
        if position != source:
            self._lowering.become(node, "Identity", [(source, 0)], {"T": _type(variable)}, (variable.dtype,))
        elif variable in self._computed:
            body = self._copy.body
            self._lowering.become_written(body, position, self._computed[variable], variable, is_checked=True)
        else:
            attrs = {"dtype": _type(variable), "shape": AttrValue(shape=variable.shape)}
            self._lowering.become(node, "Placeholder", [], attrs, (variable.dtype,))
            node.controls = []

    def _lower_inner_source(self, node: Node, variable: Variable | None, initial: Mapping[Variable, Ref]) -> None:
        if variable is not None:
            attrs = {"T": _type(variable)}
            self._lowering.become(node, "Identity", [initial[variable]], attrs, (variable.dtype,))


def _type(variable: Variable) -> AttrValue:
    return AttrValue(type=variable.dtype)


def _note(variable: Variable) -> dict[str, AttrValue]:
    return {"_output_shapes": AttrValue(list=AttrValue.ListValue(shape=[variable.shape]))}


def _give_results(
    body: Body, results: Sequence[Variable | None], returned: Sequence[Variable], end: Mapping[Variable, Ref]
) -> None:
    """Sets a function's results to final values: in place of handles, and appended for `returned`."""
    types = list(body.result_types)
    for number, variable in enumerate(results):
        if variable is not None:
            body.results[number], types[number] = end[variable], variable.dtype
    body.results = [*body.results, *(end[variable] for variable in returned)]
    body.result_types = [*types, *(variable.dtype for variable in returned)]
    body.result_names = [*body.result_names, *("variable" for _ in returned)]


def _retype(
    node: Node,
    passed: Sequence[Variable | None],
    extra: Sequence[Variable],
    outs: Sequence[Variable | None],
    returned: Sequence[Variable],
) -> None:
    """Updates the type attributes of a node to its new inputs and outputs."""
    outputs = [
        dtype if variable is None else variable.dtype for dtype, variable in zip(node.outputs or (), outs, strict=True)
    ]
    node.outputs = (*outputs, *(variable.dtype for variable in returned))
    attrs = dict(node.attrs)
    types_out = AttrValue(list=AttrValue.ListValue(type=map(as_dt, node.outputs)))
    if "T" in attrs and node.op in LOOPS:
        attrs["T"] = types_out
    if "Tin" in attrs:
        types_in = [
            dtype if variable is None else variable.dtype
            for dtype, variable in zip(attrs["Tin"].list.type, passed, strict=True)
        ]
        types_in += [variable.dtype for variable in extra]
        attrs["Tin"] = AttrValue(list=AttrValue.ListValue(type=types_in))
    if "Tout" in attrs:
        attrs["Tout"] = types_out
    if "output_shapes" in attrs and attrs["output_shapes"].list.shape:
        shapes = [
            shape if variable is None else variable.shape
            for shape, variable in zip(attrs["output_shapes"].list.shape, outs, strict=True)
        ]
        shapes += [variable.shape for variable in returned]
        attrs["output_shapes"] = AttrValue(list=AttrValue.ListValue(shape=shapes))
    if "_num_original_outputs" in attrs and returned:
        # TensorFlow computes no gradients for outputs beyond this number.
        attrs["_num_original_outputs"] = AttrValue(i=len(node.outputs))
    node.attrs = attrs
