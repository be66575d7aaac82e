"""Lists the ops that gradrule does not run, with reasons and alternatives; UNSUPPORTED_OP reports them."""

from __future__ import annotations

from gradrule.common.dtypes import REF_OFFSET
from gradrule.common.op_definitions import OpDef
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.graphs.ir import CALLS, CONTAINERS, PLACEHOLDERS, Node
from gradrule_server.graphs.variable_ops import KNOWN
from gradrule_server.policy.op_traits import ops_with

CONTROL_FLOW_V1 = (
    "is control flow of version 1; convert by building the graph with version 2: in a tf.function, or after "
    "tf.compat.v1.enable_control_flow_v2()"
)
_TEMPORARY = "makes a variable that lives within one step only; use a tensor"
_REFERENCE = "works on a reference, to a variable or a resource of TensorFlow 1, in a way that gradrule does not follow"
_OPTIMIZER = (
    "is the kernel of an optimiser, which changes variables; ask for gradients, and let a session apply them or apply "
    "them yourself"
)
_RESOURCE = (
    "makes a resource (a table, queue, iterator, stack or lock), which lives in a process and not in a graph; feed "
    "what is read from it in its place"
)
_HANDLE = "works on a resource in a way that gradrule does not follow; feed what comes out of it in its place"
_DATASET = "is part of a dataset's pipeline, which gradrule does not run; feed what comes out of it"
_PYTHON = "calls a Python function of the process that made the graph; write it in TensorFlow's ops, or feed its result"

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


def why_unsupported(node: Node, op: OpDef, *, in_function: bool) -> str:
    """Returns the reason as a clause after the node's name (`is …`), or an empty string."""
    if node.op in _OPS:
        return _OPS[node.op]
    if node.op in PLACEHOLDERS:
        if in_function:
            return "is a placeholder inside a function, where no call can feed it; make it an argument"
        if node.outputs and node.outputs[0] in (Dt.DT_RESOURCE, Dt.DT_VARIANT):
            return "is a placeholder for a resource or variant, which no call can feed; feed the value in its place"
    if node.op not in KNOWN:
        why = _why_not_on_resources(node, op)
        if why:
            return why
    if node.op not in CALLS and node.op not in CONTAINERS:
        function_attrs = [attr.name for attr in op.attrs if attr.type in ("func", "list(func)")]
        if function_attrs:
            return f"runs functions in a way that gradrule does not follow (attribute {function_attrs[0]!r})"
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
    if node.op.startswith(_TENSOR_ARRAYS) and not is_reference:
        return ""
    if is_reference:
        return _REFERENCE
    if any(arg.type == Dt.DT_RESOURCE for arg in op.inputs):
        return _HANDLE
    return _RESOURCE if touches else ""
