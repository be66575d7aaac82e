"""Checks whether the op of a node may run, and whether the attributes of the node are valid.

Each check returns faults. A fault is a reason and a clause that follows the node's name: `has rank 9; 8 is the most`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from gradrule.common.op_definitions import OpDef
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.errors import Reason
from gradrule_server.limits import NodeLimits
from gradrule_server.policy.op_table import REMEDIES, find_review
from gradrule_server.policy.tensors import Fault, shape_fault, size_fault, tensor_fault

# Attributes whose names contain these words give a node access to files or the network. Ops with such attributes are
# denied; the attributes are refused too, in case such an op is allowed by mistake.
_EXTERNAL_ACCESS = ("debug_urls", "debug_ops_spec", "descriptor_source", "output_stream", "file", "path")
# Attributes, other than numbers of outputs, whose value determines how much memory the node uses.
_AMOUNTS = frozenset({"parallel_iterations"})

FAKE_PARAM = "FakeParam"
"""The op whose output replaces the outputs of a branch that does not run."""

DROPPED_ATTRS = frozenset({"container", "shared_name", "config", "config_proto", "executor_type"})
"""Attributes that are removed from every node.

A name of a resource would give access to resources of other callers in the process. The server configures the executor.
"""


def op_fault(op: OpDef, attrs: Mapping[str, AttrValue], bounds: NodeLimits) -> Fault | None:
    """Returns OP_NOT_ALLOWED for a denied op or an attribute with access outside the graph; None if the op may run."""
    if bounds.trusted:
        return None
    review = find_review(op)
    if not review.allowed:
        return Reason.ERROR_REASON_OP_NOT_ALLOWED, (
            f"is not allowed here ({review.category}: {review.reason}); {REMEDIES[review.category]}. The "
            f"server's operator can allow it for all callers (--trust full)"
        )
    for name in _checked_attrs(op).external:
        if name in attrs and _has_text(attrs[name]):
            return Reason.ERROR_REASON_OP_NOT_ALLOWED, (
                f"has the attribute {name!r}, which reaches outside the graph; leave it empty"
            )
    return None


def attribute_faults(op: OpDef, attrs: Mapping[str, AttrValue], bounds: NodeLimits) -> Iterator[Fault]:
    """Yields INVALID_TENSOR or LIMIT_EXCEEDED for shapes, tensors and amounts: the first fault of each attribute."""
    checked = _checked_attrs(op)
    for name in checked.shapes:
        if name in attrs:
            value = attrs[name]
            yield from _first(shape_fault(shape, bounds, known=False) for shape in (value.shape, *value.list.shape))
    if op.name == FAKE_PARAM and "shape" in attrs:
        # Check the size, because `graphs.write` replaces the node by a constant of zeros.
        yield from _first([size_fault(attrs["dtype"].type, attrs["shape"].shape, bounds)] if "dtype" in attrs else ())
    for name in checked.tensors:
        if name in attrs:
            value = attrs[name]
            tensors = [value.tensor] if value.HasField("tensor") else value.list.tensor
            yield from _first(tensor_fault(tensor, bounds) for tensor in tensors)
    for name in checked.amounts:
        if name in attrs and attrs[name].i > bounds.node_outputs:
            message = f"has {name} = {attrs[name].i}; {bounds.node_outputs} is the most (--max-node-outputs)"
            yield Reason.ERROR_REASON_LIMIT_EXCEEDED, message


def _first(faults: Iterable[Fault | None]) -> Iterator[Fault]:
    found = next((fault for fault in faults if fault), None)
    if found:
        yield found


def output_count_fault(op: OpDef, attrs: Mapping[str, AttrValue], bounds: NodeLimits) -> Fault | None:
    """Returns LIMIT_EXCEEDED for too many outputs; to be called before anything is allocated for each output."""
    for arg in op.outputs:
        for name, most, setting in (
            (arg.number_attr, bounds.node_outputs, " (--max-node-outputs)"),
            (arg.type_list_attr, bounds.listed_outputs, ""),
        ):
            value = attrs.get(name) if name else None
            count = 0 if value is None else value.i or len(value.list.type)
            if count > most and not _is_counted_by_inputs(op, name):
                message = f"asks for {count} outputs by its attribute {name!r}; {most} is the most{setting}"
                return Reason.ERROR_REASON_LIMIT_EXCEEDED, message
    return None


def _is_counted_by_inputs(op: OpDef, name: str) -> bool:
    """Returns whether the node has one input for each output; the size of the message limits their number."""
    return any(name in (arg.number_attr, arg.type_list_attr) for arg in op.inputs)


def _has_text(value: AttrValue) -> bool:
    return bool(value.s or any(value.list.s))


@dataclass(frozen=True, slots=True)
class _CheckedAttrs:
    """The names of an op's attributes that are checked, by kind of check."""

    external: tuple[str, ...]
    shapes: tuple[str, ...]
    tensors: tuple[str, ...]
    amounts: tuple[str, ...]


_checked_attrs_by_op: WeakKeyDictionary[OpDef, _CheckedAttrs] = WeakKeyDictionary()


def _checked_attrs(op: OpDef) -> _CheckedAttrs:
    found = _checked_attrs_by_op.get(op)
    if found is None:
        texts = [attr.name for attr in op.attrs if attr.type in ("string", "list(string)")]
        found = _checked_attrs_by_op[op] = _CheckedAttrs(
            tuple(name for name in texts if any(part in name for part in _EXTERNAL_ACCESS)),
            tuple(attr.name for attr in op.attrs if attr.type in ("shape", "list(shape)")),
            tuple(attr.name for attr in op.attrs if attr.type in ("tensor", "list(tensor)")),
            tuple(attr.name for attr in op.attrs if attr.type == "int" and attr.name in _AMOUNTS),
        )
    return found
