"""What is wrong with one node, as far as its op and its attributes tell.

Faults are clauses that follow a node's name: `has rank 9; 8 is the most`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from gradrule._opdefs import OpDef
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.errors import Reason
from gradrule_server.policy.bounds import Bounds
from gradrule_server.policy.categories import REMEDIES
from gradrule_server.policy.table import ruling_of
from gradrule_server.policy.tensors import Fault, shape_fault, size_fault, tensor_fault

# Attributes by which a node would reach what lies outside the graph, by a part of their names. Ops that have them are
# denied; should one be allowed some day, the attribute is refused all the same.
_REACHING = ("debug_urls", "debug_ops_spec", "descriptor_source", "output_stream", "file", "path")
# Numbers in attributes that say how much is held at a time, besides those that count outputs.
_AMOUNTS = frozenset({"parallel_iterations"})

# What a branch that was not taken gives.
NOT_TAKEN = "FakeParam"

# A name of a resource is the caller's, and resources are the process's: none is passed on. What configures the
# executor of a call is the server's to say.
DROPPED = frozenset({"container", "shared_name", "config", "config_proto", "executor_type"})


def refusal(op: OpDef, attrs: Mapping[str, AttrValue], bounds: Bounds) -> Fault | None:
    """OP_NOT_ALLOWED, for an op that the list denies or an attribute that reaches outside; None where it may run."""
    if bounds.trusted:
        return None
    ruling = ruling_of(op)
    if not ruling.allowed:
        return Reason.ERROR_REASON_OP_NOT_ALLOWED, (
            f"is not allowed here ({ruling.category}: {ruling.reason}); {REMEDIES[ruling.category]}. Whoever runs the "
            f"server can trust all callers with it (--trust full)"
        )
    for name in _watched(op).reaching:
        if name in attrs and _says_something(attrs[name]):
            return Reason.ERROR_REASON_OP_NOT_ALLOWED, (
                f"has the attribute {name!r}, which reaches outside the graph; leave it empty"
            )
    return None


def value_faults(op: OpDef, attrs: Mapping[str, AttrValue], bounds: Bounds) -> Iterator[Fault]:
    """INVALID_TENSOR or LIMIT_EXCEEDED for shapes, tensors and amounts in attributes: the first fault of each."""
    watched = _watched(op)
    for name in watched.shapes:
        if name in attrs:
            value = attrs[name]
            yield from _first(shape_fault(shape, bounds, known=False) for shape in (value.shape, *value.list.shape))
    if op.name == NOT_TAKEN and "shape" in attrs:
        # It is written as a constant of zeros.
        yield from _first([size_fault(attrs["dtype"].type, attrs["shape"].shape, bounds)] if "dtype" in attrs else ())
    for name in watched.tensors:
        if name in attrs:
            value = attrs[name]
            tensors = [value.tensor] if value.HasField("tensor") else value.list.tensor
            yield from _first(tensor_fault(tensor, bounds) for tensor in tensors)
    for name in watched.amounts:
        if name in attrs and attrs[name].i > bounds.node_outputs:
            message = f"has {name} = {attrs[name].i}; {bounds.node_outputs} is the most (--max-node-outputs)"
            yield Reason.ERROR_REASON_LIMIT_EXCEEDED, message


def _first(faults: Iterable[Fault | None]) -> Iterator[Fault]:
    found = next((fault for fault in faults if fault), None)
    if found:
        yield found


def count_fault(op: OpDef, attrs: Mapping[str, AttrValue], bounds: Bounds) -> Fault | None:
    """LIMIT_EXCEEDED for more outputs than a node may have; told before anything is made for each of them."""
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
    """Whether there is an input for each output: those take their place in the message."""
    return any(name in (arg.number_attr, arg.type_list_attr) for arg in op.inputs)


def _says_something(value: AttrValue) -> bool:
    return bool(value.s or any(value.list.s))


@dataclass(frozen=True, slots=True)
class _Watched:
    """Names of the attributes of an op that are looked at."""

    reaching: tuple[str, ...]
    shapes: tuple[str, ...]
    tensors: tuple[str, ...]
    amounts: tuple[str, ...]


_watched_of: WeakKeyDictionary[OpDef, _Watched] = WeakKeyDictionary()


def _watched(op: OpDef) -> _Watched:
    found = _watched_of.get(op)
    if found is None:
        texts = [attr.name for attr in op.attrs if attr.type in ("string", "list(string)")]
        found = _watched_of[op] = _Watched(
            tuple(name for name in texts if any(part in name for part in _REACHING)),
            tuple(attr.name for attr in op.attrs if attr.type in ("shape", "list(shape)")),
            tuple(attr.name for attr in op.attrs if attr.type in ("tensor", "list(tensor)")),
            tuple(attr.name for attr in op.attrs if attr.type == "int" and attr.name in _AMOUNTS),
        )
    return found
