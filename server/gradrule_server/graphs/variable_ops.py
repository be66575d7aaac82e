"""Ops that make, read and write variables, as data: what each becomes once a variable is a value.

An op's first input is the variable, given by a resource handle or by a reference; the others are as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Ops whose output stands for a variable.
SOURCES = frozenset({"VarHandleOp", "VariableV2", "Variable"})

# Ops that hand a variable on, as they hand on anything.
FORWARDING_OPS = frozenset({"Identity", "IdentityN"})

# Ops that ask whether a variable has a value; each has.
INITIALIZED_CHECKS = frozenset({"VarIsInitializedOp", "IsVariableInitialized"})


@dataclass(frozen=True, slots=True)
class Read:
    """A read: the op that takes the value in the variable's place.

    `type_attr`: its attribute for the value's element type. `attrs`: attributes that go over.
    """

    op: str
    type_attr: str
    attrs: tuple[str, ...] = ()
    # The op takes the axis to gather along as a third input: the number of batch dimensions.
    takes_axis: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """A write: the op that makes the new value.

    `takes_old`: its first input is the old value; otherwise the new value is the other input. `rows`: the indices are
    those of rows, and a scalar update stands for all that it updates.
    """

    op: str
    takes_old: bool = True
    rows: bool = False
    attrs: tuple[str, ...] = ()
    # The op would let a value of another shape through.
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

# An initialiser is such a node under the variable's name and this one.
ASSIGNMENTS = frozenset({"AssignVariableOp", "Assign"})
INITIALISER = "Assign"

# All ops that may take a handle or a reference.
KNOWN = SOURCES | FORWARDING_OPS | INITIALIZED_CHECKS | READS.keys() | WRITES.keys()
