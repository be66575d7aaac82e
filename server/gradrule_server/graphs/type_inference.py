"""Fills in what follows from the op of each node: attributes, types, functions, and why gradrule cannot run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradrule.common import op_definitions, op_inference
from gradrule.common.dtypes import REF_OFFSET, dtype_name, without_ref
from gradrule.common.op_definitions import OpDef
from gradrule.v1.graph_pb2 import AttrValue, NameAttrList
from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server.errors import Findings, Reason, quote
from gradrule_server.graphs.ir import ARG, CALLS, CONTAINERS, LOOPS, PLACEHOLDERS, Body, Limits, Node, Ref
from gradrule_server.graphs.library import Library
from gradrule_server.graphs.read import Draft, Source
from gradrule_server.graphs.variables import HANDLE_OPS
from gradrule_server.policy import attribute_faults, output_count_fault
from gradrule_server.policy.op_tables import ops_with

_REASONS = {
    "TYPE_MISMATCH": Reason.ERROR_REASON_TYPE_MISMATCH,
    "INVALID_ATTR": Reason.ERROR_REASON_INVALID_ATTR,
}

CONTROL_FLOW_V1 = (
    "is control flow of version 1; convert by building the graph with version 2: in a tf.function, or after "
    "tf.compat.v1.enable_control_flow_v2(); freeze a function with convert_variables_to_constants_v2(…, "
    "lower_control_flow=False)"
)
_TEMPORARY = "creates a variable that exists within one step only; use a tensor"
_REFERENCE = "uses a reference to a variable or resource of TensorFlow 1 in a way that gradrule does not support"
_OPTIMIZER = (
    "is the kernel of an optimiser, which changes variables; request gradients, and let a session apply them or apply "
    "them yourself"
)
_RESOURCE = (
    "creates a resource (a queue, iterator, stack or lock), which exists in a process and not in a graph; feed "
    "the values that are read from it instead"
)
_TABLE = (
    "uses a lookup table, which exists in a process and not in a graph; load the model with gr.load or gr.trace of the "
    "Python client, which replace tables by constants, or feed what is looked up"
)
_HANDLE = "uses a resource in a way that gradrule does not support; feed its output instead"
_DATASET = "is part of a dataset's pipeline, which gradrule does not run; feed its output instead"
_PYTHON = (
    "calls a Python function of the process that created the graph; write it with TensorFlow's ops, or feed its result"
)

_PYTHON_OPS = ops_with("python_function")
# Resources that exist only during one run.
_TENSOR_ARRAYS = ("TensorArray",)

_OPS: dict[str, str] = {
    **dict.fromkeys(("Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond"), CONTROL_FLOW_V1),
    **dict.fromkeys(("RefSwitch", "RefMerge", "RefEnter", "RefExit", "RefNextIteration", "RefSelect"), CONTROL_FLOW_V1),
    **dict.fromkeys(("_VarHandlesOp", "TemporaryVariable", "DestroyTemporaryVariable"), _TEMPORARY),
    **dict.fromkeys(_PYTHON_OPS, _PYTHON),
}

# Ops of version 1 loops; types cannot be inferred around their cycles.
LOOP_OPS = ops_with("loop_v1")


class TypeInference:
    """Infers the types of one body and adds findings."""

    def __init__(self, draft: Draft, library: Library, limits: Limits, findings: Findings) -> None:
        self._draft = draft
        self._body = draft.body
        self._library = library
        self._limits = limits
        self._findings = findings
        self._layouts: dict[int, op_inference.Slices] = {}
        self._attrs: dict[tuple[str | int, ...], Mapping[str, AttrValue]] = {}
        self._alike: dict[tuple[str, int, tuple[int, ...]], tuple[Mapping[str, AttrValue], Node]] = {}

    def run(self) -> None:
        """Infers the types of all nodes in topological order, then of the results."""
        nodes = self._body.nodes
        for position in self._body.order:
            node = nodes[position]
            if node.op != ARG:
                self._type_node(position, node)
        self._check_results()

    def _type_node(self, position: int, node: Node) -> None:
        node.inputs, types = self._inputs(node, self._draft.sources[position])
        # Nodes with the same attribute object and input types share the result.
        given = node.attrs
        key = (node.op, id(given), tuple(types))
        known = self._alike.get(key)
        if known is not None:
            node.attrs, node.outputs, node.unsupported = known[1].attrs, known[1].outputs, known[1].unsupported
        elif self._complete(node, types):
            self._alike[key] = given, node

    def _complete(self, node: Node, types: list[int]) -> bool:
        """Infers the types of one node; returns whether nodes with equal attributes and inputs can share the result."""
        findings, where = self._findings, self._draft.where(node.name)
        found = len(findings.all)
        op = self._library.find_op(node.op)
        if op is None:
            hint = findings.suggest(lambda: op_definitions.suggest(node.op, self._library.names()))
            message = f"{where} is of op type {quote(node.op)}, which neither TensorFlow nor the graph defines.{hint}"
            findings.add(Reason.ERROR_REASON_UNKNOWN_OP_TYPE, message, node.name)
            return False
        is_function = node.op in self._library
        if is_function and not op.attrs:
            # Before errors of the node, so that recursion is found in spite of them.
            self._find_functions(node, (), where)
        fault = output_count_fault(op, node.attrs, self._limits)
        if fault:
            findings.add(fault[0], f"{where} {fault[1]}.", node.name)
            return False
        try:
            completed = op_inference.complete(op, node.attrs, types)
        except op_inference.InferenceError as cause:
            findings.add(_REASONS[cause.kind], f"{where}: {cause.message}.", node.name)
            return False
        node.attrs, node.outputs = self._shared(node, completed), completed.outputs
        node.unsupported = why_unsupported(node, op, in_function=bool(self._body.name))
        self._check_values(node, op, where)
        self._find_functions(node, types, where)
        # A full list of findings does not grow, so new findings cannot be detected; do not share the result then.
        return not node.functions and not is_function and not findings.all[found:] and not findings.full

    def _shared(self, node: Node, completed: op_inference.Completed) -> Mapping[str, AttrValue]:
        """Returns one shared object for all nodes of an op with equal attributes that are types only."""
        key: list[str | int] = [node.op]
        for name, value in node.attrs.items():
            if value.WhichOneof("value") != "type":
                return completed.attrs
            key += (name, value.type)
        # The cached attributes keep the objects alive whose id() is in the key.
        key += map(id, completed.added.values())
        return self._attrs.setdefault(tuple(key), completed.attrs)

    def _inputs(self, node: Node, sources: list[Source]) -> tuple[tuple[Ref, ...], list[int]]:
        nodes, top = self._body.nodes, not self._body.name
        refs: list[Ref] = []
        types: list[int] = []
        for producer, arg, index in sources:
            outputs = nodes[producer].outputs if producer >= 0 else None
            if outputs is None:
                refs.append((max(producer, 0), 0))
                types.append(0)
                continue
            flat = index if top or not arg else self._flat(producer, arg, index, node)
            if flat is None:
                flat, dtype = 0, 0
            elif flat < len(outputs):
                dtype = outputs[flat]
            else:
                self._no_output(node, producer, f"output {flat}; it has {len(outputs)}")
                dtype = 0
            refs.append((producer, flat))
            types.append(dtype)
        return tuple(refs), types

    def _flat(self, producer: int, arg: str, index: int, node: Node | None) -> int | None:
        """Returns the flat index of output `arg:index`; None after adding a finding."""
        layout = self._layout(producer)
        if arg not in layout:
            names = ", ".join(layout) or "none"
            self._no_output(node, producer, f"output {quote(arg)}; its outputs are: {names}")
            return None
        start, count = layout[arg]
        if index >= count:
            self._no_output(node, producer, f"output {index} of {quote(arg)}; there are {count}")
            return None
        return start + index

    def _layout(self, producer: int) -> op_inference.Slices:
        if producer not in self._layouts:
            node = self._body.nodes[producer]
            op = self._library.find_op(node.op)
            self._layouts[producer] = op_inference.output_slices(op, node.attrs) if op else {}
        return self._layouts[producer]

    def _no_output(self, node: Node | None, producer: int, what: str) -> None:
        user = f"{self._draft.where(node.name)} takes" if node else f"A result of function {quote(self._body.name)} is"
        message = f"{user} an output that {quote(self._body.nodes[producer].name)} does not have: {what}."
        self._findings.add(Reason.ERROR_REASON_DANGLING_INPUT, message, node.name if node else "")

    def _check_values(self, node: Node, op: op_definitions.OpDef, where: str) -> None:
        faults = list(attribute_faults(op, node.attrs, self._limits))
        if node.op == "Const" and not faults and node.attrs["value"].tensor.dtype != node.attrs["dtype"].type:
            declared, actual = node.attrs["dtype"].type, node.attrs["value"].tensor.dtype
            what = f"has type {dtype_name(declared)}, but a value of type {dtype_name(actual)}"
            faults.append((Reason.ERROR_REASON_INVALID_TENSOR, what))
        for reason, what in faults:
            self._findings.add(reason, f"{where} {what}.", node.name)

    def _find_functions(self, node: Node, types: Sequence[int], where: str) -> None:
        if node.op in self._library:
            body = self._library.body(node.op, node.attrs, where)
            node.functions = (("f", (body,)),) if body else ()
            return
        attrs = ("f",) if node.op in CALLS else CONTAINERS.get(node.op)
        if attrs is None:
            return
        found: list[tuple[str, tuple[Body, ...]]] = []
        complete = True
        for attr in attrs:
            bodies = [
                self._library.body(function.name, function.attr, where) for function in _functions(node.attrs[attr])
            ]
            known = tuple(body for body in bodies if body)
            complete &= len(known) == len(bodies)
            found.append((attr, known))
        if complete:
            node.functions = tuple(found)
            self._check_signatures(node, types, where)

    def _check_signatures(self, node: Node, types: Sequence[int], where: str) -> None:
        outputs = list(node.outputs or ())
        args = types if node.op in CALLS or node.op in LOOPS else types[1:]
        for attr, bodies in node.functions:
            for body in bodies:
                name = f"the function {quote(body.name)}, its {attr}"
                # References are passed by value.
                given = [without_ref(dtype) for dtype in args]
                self._check_same_types(
                    node, where, f"the arguments of {name},", body.arg_types, given, "what the node passes on"
                )
                if attr == "cond":
                    if len(body.result_types) != 1:
                        message = f"{where}: {name}, has {len(body.result_types)} results instead of one condition."
                        self._findings.add(Reason.ERROR_REASON_TYPE_MISMATCH, message, node.name)
                else:
                    self._check_same_types(
                        node, where, f"the results of {name},", body.result_types, outputs, "the node's outputs"
                    )
        if node.op in LOOPS and not node.attrs["output_shapes"].list.shape:
            # TensorFlow's gradient of a loop needs one shape per loop variable.
            unknown = AttrValue.ListValue(shape=[TensorShape(unknown_rank=True)] * len(outputs))
            node.attrs = {**node.attrs, "output_shapes": AttrValue(list=unknown)}

    def _check_same_types(
        self, node: Node, where: str, what: str, have: list[int], want: list[int], expected: str
    ) -> None:
        if len(have) == len(want) and all(a == b or not a or not b for a, b in zip(have, want, strict=True)):
            return
        message = f"{where}: {what} are {_types_text(have)}, but {expected}: {_types_text(want)}."
        self._findings.add(Reason.ERROR_REASON_TYPE_MISMATCH, message, node.name)

    def _check_results(self) -> None:
        body = self._body
        for name, dtype, source in zip(
            body.result_names, body.result_types, self._draft.result_sources, strict=bool(body.name)
        ):
            producer, arg, index = source or (0, "", 0)
            outputs = body.nodes[producer].outputs if source else None
            if outputs is None:
                body.results.append((producer, 0))
                continue
            flat = self._flat(producer, arg, index, None) if arg else index
            body.results.append((producer, flat or 0))
            if flat is not None and outputs[flat] and outputs[flat] != dtype:
                message = (
                    f"Result {quote(name)} of function {quote(body.name)} is {dtype_name(outputs[flat])}, "
                    f"but its signature says {dtype_name(dtype)}."
                )
                self._findings.add(Reason.ERROR_REASON_TYPE_MISMATCH, message)


def _functions(value: AttrValue) -> list[NameAttrList]:
    return list(value.list.func) if value.WhichOneof("value") == "list" else [value.func]


def _types_text(types: list[int]) -> str:
    shown = ", ".join(dtype_name(dtype) for dtype in types[:16])
    return f"({shown}{', …' if len(types) > 16 else ''})"


def why_unsupported(node: Node, op: OpDef, *, in_function: bool) -> str:
    """Returns the reason as a clause after the node's name (`is …`), or an empty string."""
    if node.op in _OPS:
        return _OPS[node.op]
    if node.op in PLACEHOLDERS:
        if in_function:
            return "is a placeholder inside a function, where no call can feed it; make it an argument"
        if node.outputs and node.outputs[0] in (Dt.DT_RESOURCE, Dt.DT_VARIANT):
            return "is a placeholder for a resource or variant, which no call can feed; feed the value in its place"
    if node.op not in HANDLE_OPS:
        why = _why_not_on_resources(node, op)
        if why:
            return why
    if node.op not in CALLS and node.op not in CONTAINERS:
        function_attrs = [attr.name for attr in op.attrs if attr.type in ("func", "list(func)")]
        if function_attrs:
            return f"runs functions in a way that gradrule does not support (attribute {function_attrs[0]!r})"
    return ""


def _why_not_on_resources(node: Node, op: OpDef) -> str:
    """Returns the reason for ops on references, and on resources other than variables; otherwise an empty string."""
    args = (*op.inputs, *op.outputs)
    is_reference = any(arg.is_ref for arg in args) or any(dtype > REF_OFFSET for dtype in node.outputs or ())
    touches = is_reference or any(arg.type == Dt.DT_RESOURCE for arg in args)
    if node.op.startswith(("ResourceApply", "ResourceSparseApply", "Apply", "SparseApply")) and touches:
        return _OPTIMIZER
    if "Dataset" in node.op or "Iterator" in node.op:
        return _DATASET
    if touches and ("HashTable" in node.op or node.op.startswith(("LookupTable", "InitializeTable"))):
        return _TABLE
    if node.op.startswith(_TENSOR_ARRAYS) and not is_reference:
        return ""
    if is_reference:
        return _REFERENCE
    if any(arg.type == Dt.DT_RESOURCE for arg in op.inputs):
        return _HANDLE
    return _RESOURCE if touches else ""
