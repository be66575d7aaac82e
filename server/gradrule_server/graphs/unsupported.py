"""Ops that exist but that gradrule does not run, and what to do instead. UNSUPPORTED_OP, if such a node is needed."""

from __future__ import annotations

from gradrule._dtypes import REF_OFFSET
from gradrule._opdefs import OpDef
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.graphs.ir import CALLS, CONTAINERS, PLACEHOLDERS, Node

CONTROL_FLOW_V1 = (
    "is control flow of version 1; convert by building the graph with version 2: in a tf.function, or after "
    "tf.compat.v1.enable_control_flow_v2()"
)
_VARIABLE = "is a variable, which a graph cannot bring along; feed the value in its place, or freeze it to a constant"
_REFERENCE = (
    "works on a reference to a variable of TensorFlow 1; feed the value in its place, or freeze it to a constant"
)

_OPS: dict[str, str] = {
    **dict.fromkeys(("Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond"), CONTROL_FLOW_V1),
    **dict.fromkeys(("RefSwitch", "RefMerge", "RefEnter", "RefExit", "RefNextIteration", "RefSelect"), CONTROL_FLOW_V1),
    **dict.fromkeys(("VarHandleOp", "_VarHandlesOp", "Variable", "VariableV2", "TemporaryVariable"), _VARIABLE),
}

# The ops that make a loop of version 1; types cannot be followed round one.
LOOP_OPS = frozenset({"Enter", "Exit", "NextIteration", "LoopCond", "RefEnter", "RefExit", "RefNextIteration"})


def why_unsupported(node: Node, op: OpDef, *, in_function: bool) -> str:
    """A clause after the node's name (`is …`), or nothing."""
    if node.op in _OPS:
        return _OPS[node.op]
    if node.op in PLACEHOLDERS:
        if in_function:
            return "is a placeholder inside a function, where no call can feed it; make it an argument"
        if node.outputs and node.outputs[0] in (Dt.DT_RESOURCE, Dt.DT_VARIANT):
            return "is a placeholder for a resource or variant, which no call can feed; feed the value in its place"
    if any(arg.is_ref for arg in (*op.inputs, *op.outputs)) or any(dtype > REF_OFFSET for dtype in node.outputs or ()):
        return _REFERENCE
    if node.op not in CALLS and node.op not in CONTAINERS:
        function_attrs = [attr.name for attr in op.attrs if attr.type in ("func", "list(func)")]
        if function_attrs:
            return f"runs functions in a way that gradrule does not follow (attribute {function_attrs[0]!r})"
    return ""
