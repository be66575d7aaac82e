"""Lists the ops that create, read and write variables, with the op on values that replaces each.

The first input of each op is the variable (resource handle or reference); the other inputs are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Ops whose output is a handle of or a reference to a variable.
SOURCES = frozenset({"VarHandleOp", "VariableV2", "Variable"})

# Ops that forward handles and references.
FORWARDING_OPS = frozenset({"Identity", "IdentityN"})

# Ops that check whether a variable has a value; here every variable has one.
INITIALIZED_CHECKS = frozenset({"VarIsInitializedOp", "IsVariableInitialized"})


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

# An initialiser is an assignment named `<variable>/Assign`.
ASSIGNMENTS = frozenset({"AssignVariableOp", "Assign"})
INITIALISER = "Assign"

# All ops that may have a handle or a reference as input or output.
KNOWN = SOURCES | FORWARDING_OPS | INITIALIZED_CHECKS | READS.keys() | WRITES.keys()
