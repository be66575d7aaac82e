"""Lists the ops that create, read and write variables, with the op on values that replaces each.

The first input of each op is the variable (resource handle or reference); the other inputs are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Ops whose output stands for a variable.
SOURCES = frozenset({"VarHandleOp", "VariableV2", "Variable"})

# Ops that forward handles and references.
FORWARDING_OPS = frozenset({"Identity", "IdentityN"})

# Ops that check for a value; every variable has one.
INITIALIZED_CHECKS = frozenset({"VarIsInitializedOp", "IsVariableInitialized"})


@dataclass(frozen=True, slots=True)
class Read:
    """A read: the op that replaces it.

    `type_attr`: its attribute for the value's element type. `attrs`: attributes that are copied.
    """

    op: str
    type_attr: str
    attrs: tuple[str, ...] = ()
    # The op takes the gather axis, equal to the number of batch dimensions, as third input.
    takes_axis: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """A write: the op that computes the new value.

    `takes_old`: its first input is the old value; otherwise the other input is the new value. `rows`: indices are row
    indices, and a scalar update is broadcast.
    """

    op: str
    takes_old: bool = True
    rows: bool = False
    attrs: tuple[str, ...] = ()
    # Whether the op preserves the variable's shape; if not, the shape is checked.
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

# All ops that may take or create a handle or a reference.
KNOWN = SOURCES | FORWARDING_OPS | INITIALIZED_CHECKS | READS.keys() | WRITES.keys()
