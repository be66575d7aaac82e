"""Replaces one node that reads or writes a variable by nodes that compute with values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gradrule.common.dtypes import as_dt, dtype_name
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import Dt, Tensor
from gradrule_server.errors import Findings, Reason, quote
from gradrule_server.graphs.copying import Copy
from gradrule_server.graphs.ir import ARG, DIFFERENTIABLE, GRADIENT_ATTR, Body, Node, Ref, constant_attrs
from gradrule_server.graphs.selectors import CandidateNode
from gradrule_server.graphs.variables import IS_INITIALIZED_OPS, RANDOM_STATE_OPS, READS, WRITES, Variable

_INT32 = AttrValue(type=Dt.DT_INT32)
_INT64 = AttrValue(type=Dt.DT_INT64)

# The state of the Philox algorithm: a counter of 128 bits, and a key.
_STATE_SIZE = 3
# For each number that it draws, TensorFlow advances the counter by this much.
_SKIP = 256
_NOT_PHILOX = (
    "advances a random generator whose state is not that of the Philox algorithm, three numbers of type int64; create "
    "the generator with alg='philox'"
)


class Lowering:
    """Changes nodes in place; adds helper nodes to the body, named after the changed node.

    Gradients stop at a written value, as in TensorFlow, where a read has a gradient by the variable only.
    `differentiated`: the variables among the xs.
    """

    def __init__(self, copy: Copy, findings: Findings, differentiated: Collection[Variable]) -> None:
        self._copy = copy
        self._findings = findings
        self._differentiated = differentiated
        self._candidates = self._by_place()

    def lower(self, body: Body, index: int, variable: Variable) -> list[tuple[Variable, Ref]]:
        """Replaces a node whose first input already is the variable's current value; returns the written values."""
        node, first = body.nodes[index], len(body.nodes)
        old = node.inputs[0]
        self._check_type(body, node, variable)
        if node.op in IS_INITIALIZED_OPS:
            value = Tensor(dtype=Dt.DT_BOOL, bool_val=[True])
            attrs = {"dtype": AttrValue(type=Dt.DT_BOOL), "value": AttrValue(tensor=value)}
            self.become(node, "Const", [], attrs, (Dt.DT_BOOL,))
            return []
        written = (index, 0)
        if node.op in READS:
            self._read(body, index, variable)
        elif node.op in RANDOM_STATE_OPS:
            has_size = variable.shape.unknown_rank or [dim.size for dim in variable.shape.dim] == [_STATE_SIZE]
            if variable.dtype != Dt.DT_INT64 or not has_size:
                node.unsupported = _NOT_PHILOX
                return []
            written = self._skip(body, index)
        else:
            self._write(body, index, variable)
        if node.uploaded_op in WRITES and variable in self._differentiated and variable.dtype in DIFFERENTIABLE:
            written = self._pass_gradient_to_variable(body, index, old, variable)
        for changed in (node, *body.nodes[first:]):
            changed.watched = bool(changed.inputs) and self.is_differentiable(changed)
        return [(variable, written)] if node.uploaded_op in WRITES or node.uploaded_op in RANDOM_STATE_OPS else []

    @staticmethod
    def is_differentiable(node: Node) -> bool:
        """Returns whether an output has a differentiable type."""
        return any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())

    @staticmethod
    def become(
        node: Node, op: str, inputs: Sequence[Ref], attrs: Mapping[str, AttrValue], outputs: tuple[int, ...]
    ) -> None:
        """Turns a node into another op."""
        node.uploaded_op = node.uploaded_op or node.op
        gradient = {GRADIENT_ATTR: node.attrs[GRADIENT_ATTR]} if GRADIENT_ATTR in node.attrs else {}
        node.op, node.inputs, node.attrs, node.outputs = op, list(inputs), {**attrs, **gradient}, outputs

    def become_written(self, body: Body, index: int, value: Ref, variable: Variable, *, is_checked: bool) -> None:
        """Turns a node into a written value, at which gradients stop. `is_checked`: checks the variable's shape."""
        attrs = {"T": AttrValue(type=variable.dtype)}
        if is_checked and not variable.shape.unknown_rank:
            shape = {"shape": AttrValue(shape=variable.shape)}
            value = self._add(body, index, "checked", "EnsureShape", [value], {**attrs, **shape}, variable.dtype)
        self.become(body.nodes[index], "StopGradient", [value], attrs, (variable.dtype,))

    def without_gradient(self, body: Body, value: Ref) -> Ref:
        """Returns the same value of a variable without a gradient by the variable."""
        node = body.nodes[value[0]]
        return node.inputs[0] if id(node) in self._copy.variable_values else value

    @staticmethod
    def retype_pass(node: Node, types: Sequence[int]) -> None:
        """Sets the types of an Identity or IdentityN."""
        dtypes = [as_dt(dtype) for dtype in types]
        is_list = node.op == "IdentityN"
        value = AttrValue(list=AttrValue.ListValue(type=dtypes)) if is_list else AttrValue(type=dtypes[0])
        node.attrs, node.outputs = {**node.attrs, "T": value}, tuple(types)

    def insert_args(self, body: Body, variables: Sequence[Variable]) -> None:
        """Appends arguments to a body and shifts the indices of its other nodes."""
        first, count = body.arg_count, len(variables)
        arguments = [Node(self._copy.unique(body, "variable"), ARG, [], [], {}, (item.dtype,)) for item in variables]

        def moved(index: int) -> int:
            return index + count if index >= first else index

        for node in body.nodes:
            node.inputs = [(moved(producer), output) for producer, output in node.inputs]
            node.controls = [moved(control) for control in node.controls]
        body.results = [(moved(producer), output) for producer, output in body.results]
        body.control_results = [(name, moved(control)) for name, control in body.control_results]
        body.nodes[first:first] = arguments
        body.arg_count += count
        for candidate in [candidate for (owner, _), candidate in self._candidates.items() if owner == id(body)]:
            candidate.index = moved(candidate.index)
        self._candidates = self._by_place()

    def _by_place(self) -> dict[tuple[int, int], CandidateNode]:
        """Returns the candidates that are nodes, by id() of the body and index."""
        return {(id(one.body), one.index): one for one in self._copy.candidates if one.call is None}

    def _check_type(self, body: Body, node: Node, variable: Variable) -> None:
        declared = node.attrs.get("dtype") or node.attrs.get("T")
        if declared is not None and node.op not in IS_INITIALIZED_OPS and declared.type != variable.dtype:
            name = f"{self._copy.scopes[body.name]}/{node.name}" if body.name else node.name
            message = (
                f"Node {quote(name)} ({node.op}) uses the variable {quote(variable.name)} as "
                f"{dtype_name(declared.type)}, but it is {dtype_name(variable.dtype)}."
            )
            self._findings.add(Reason.ERROR_REASON_TYPE_MISMATCH, message, name)

    def _read(self, body: Body, index: int, variable: Variable) -> None:
        node = body.nodes[index]
        read, old = READS[node.op], node.attrs
        attrs = {read.type_attr: AttrValue(type=variable.dtype)}
        attrs.update({name: old[name] for name in read.attrs if name in old})
        inputs = list(node.inputs)
        if read.takes_axis:
            axis = old["batch_dims"].i if "batch_dims" in old else 0
            inputs.append(self._constant(body, index, "axis", axis))
            attrs["Taxis"] = _INT32
        self.become(node, read.op, inputs, attrs, node.outputs or ())

    def _write(self, body: Body, index: int, variable: Variable) -> None:
        node = body.nodes[index]
        write, old = WRITES[node.op], node.attrs
        attrs = {"T": AttrValue(type=variable.dtype)}
        attrs.update({name: old[name] for name in write.attrs if name in old})
        inputs = list(node.inputs if write.takes_old else node.inputs[1:])
        if write.rows:
            inputs = self._by_rows(body, index, inputs, attrs)
        validates = (
            "validate_shape" not in old or old["validate_shape"].b or old["validate_shape"].WhichOneof("value") is None
        )
        value = inputs[0]
        if write.takes_old:
            value = self._add(body, index, "new", write.op, inputs, attrs, variable.dtype)
        is_checked = not write.keeps_shape and (write.takes_old or validates)
        self.become_written(body, index, value, variable, is_checked=is_checked)

    def _pass_gradient_to_variable(self, body: Body, index: int, old: Ref, variable: Variable) -> Ref:
        """Adds a node with a written value, whose gradient goes to the variable, through its old value."""
        types = AttrValue(list=AttrValue.ListValue(type=[variable.dtype] * 2))
        name = self._copy.unique(body, f"{body.nodes[index].name}/variable")
        outputs = (variable.dtype,) * 2
        node = Node(name, "IdentityN", [(index, 0), old], [], {"T": types}, outputs)
        body.nodes.append(node)
        self._copy.variable_values[id(node)] = node
        return len(body.nodes) - 1, 0

    def _skip(self, body: Body, index: int) -> Ref:
        """Replaces a node by the state of a random generator; returns the state after it, a counter that is higher."""
        node = body.nodes[index]
        state, _, drawn = node.inputs
        self.become(node, "Identity", [state], {"T": _INT64}, (Dt.DT_INT64,))

        def add(suffix: str, op: str, *inputs: Ref) -> Ref:
            return self._add(body, index, suffix, op, inputs, {"T": _INT64}, Dt.DT_INT64)

        bitcast_attrs = {"T": AttrValue(type=Dt.DT_UINT64), "type": _INT64}
        drawn = self._add(body, index, "drawn", "Bitcast", [drawn], bitcast_attrs, Dt.DT_INT64)
        step = self._constant(body, index, "step", [_SKIP, 0, 0], _INT64)
        low = add("low", "AddV2", state, add("skipped", "Mul", drawn, step))
        # As unsigned numbers, a sum is less than its part if it overflows; then the next number is one higher.
        sign = self._constant(body, index, "sign", -(2**63), _INT64)
        compared = [add("unsigned", "BitwiseXor", low, sign), add("unsigned_state", "BitwiseXor", state, sign)]
        overflows = self._add(body, index, "overflows", "Less", compared, {"T": _INT64}, Dt.DT_BOOL)
        cast_attrs = {"SrcT": AttrValue(type=Dt.DT_BOOL), "DstT": _INT64}
        carry = self._add(body, index, "carry", "Cast", [overflows], cast_attrs, Dt.DT_INT64)
        one, axis = self._constant(body, index, "one", 1), self._constant(body, index, "axis", 0)
        roll_attrs = {"T": _INT64, "Tshift": _INT32, "Taxis": _INT32}
        carried = self._add(body, index, "carried", "Roll", [carry, one, axis], roll_attrs, Dt.DT_INT64)
        return add("new", "AddV2", low, carried)

    def _by_rows(self, body: Body, index: int, inputs: list[Ref], attrs: Mapping[str, AttrValue]) -> list[Ref]:
        """Converts row indices for a TensorScatter op and broadcasts a scalar update to full size."""
        old, rows, updates = inputs
        kind, dtype = attrs["Tindices"], attrs["T"].type
        last = self._constant(body, index, "last", -1)
        expand_attrs = {"T": kind, "Tdim": _INT32}
        indices = self._add(body, index, "indices", "ExpandDims", [rows, last], expand_attrs, kind.type)
        row_shape = self._shape(body, index, "rows", rows, kind)
        full_shape = self._shape(body, index, "shape", old, attrs["T"])
        slice_inputs = [
            full_shape,
            self._constant(body, index, "begin", [1]),
            self._constant(body, index, "size", [-1]),
        ]
        slice_attrs = {"T": _INT32, "Index": _INT32}
        inner = self._add(body, index, "row_shape", "Slice", slice_inputs, slice_attrs, Dt.DT_INT32)
        concat_attrs = {"N": AttrValue(i=2), "T": _INT32, "Tidx": _INT32}
        axis = self._constant(body, index, "axis", 0)
        size = self._add(body, index, "sizes", "ConcatV2", [row_shape, inner, axis], concat_attrs, Dt.DT_INT32)
        broadcast_attrs = {"T": attrs["T"], "Tidx": _INT32}
        full = self._add(body, index, "updates", "BroadcastTo", [updates, size], broadcast_attrs, dtype)
        return [old, indices, full]

    def _shape(self, body: Body, index: int, suffix: str, of: Ref, dtype: AttrValue) -> Ref:
        attrs = {"T": dtype, "out_type": _INT32}
        return self._add(body, index, suffix, "Shape", [of], attrs, Dt.DT_INT32)

    def _constant(self, body: Body, index: int, suffix: str, value: int | list[int], dtype: AttrValue = _INT32) -> Ref:
        return self._add(body, index, suffix, "Const", [], constant_attrs(value, dtype.type), dtype.type)

    def _add(
        self,
        body: Body,
        index: int,
        suffix: str,
        op: str,
        inputs: Sequence[Ref],
        attrs: Mapping[str, AttrValue],
        dtype: int,
    ) -> Ref:
        """Adds a helper node, named after the node at `index`."""
        main = body.nodes[index]
        name = self._copy.unique(body, f"{main.name}/{suffix}")
        node = Node(name, op, list(inputs), [], dict(attrs), (dtype,), uploaded_op=main.uploaded_op or main.op)
        body.nodes.append(node)
        candidate = self._candidates.get((id(body), index))
        if candidate is not None:
            names = f"{candidate.name}/{suffix}", f"{candidate.qualified_name}/{suffix}"
            part = CandidateNode(*names, candidate.function, body, len(body.nodes) - 1, candidate.around)
            self._copy.candidates.append(part)
        return len(body.nodes) - 1, 0
