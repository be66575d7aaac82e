"""Finds faults of nodes, shapes, tensors, blobs and values of variables: what may not run, is invalid or too large.

Most checks return faults. A fault is a reason and a clause that follows the name of a node or tensor: `has rank 9; 8 is
the most`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from google.protobuf.message import Message

from gradrule.common import tensor_codec
from gradrule.common.dtypes import NAMES, dtype_name
from gradrule.common.op_definitions import OpDef
from gradrule.common.parsed_size import ParsedSizeError, check_size
from gradrule.v1.errors_pb2 import ErrorReason
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import BlobTensor, Dt, Tensor, TensorShape, TensorSource
from gradrule_server.errors import Finding, GradruleError, Reason, Resource, error
from gradrule_server.limits import NodeLimits
from gradrule_server.policy.op_tables import REMEDIES, find_review

_MAX_ELEMENTS = 2**62

# Smallest memory of an element without a fixed size, bytes.
_POINTER_BYTES = 16

# Attributes whose names contain these words give a node access to files or the network. Ops with such attributes are
# denied; the attributes are refused too, in case such an op is allowed by mistake.
_EXTERNAL_ACCESS = ("debug_urls", "debug_ops_spec", "descriptor_source", "output_stream", "file", "path")
# Attributes, other than numbers of outputs, whose value determines how much memory the node uses.
_AMOUNTS = frozenset({"parallel_iterations"})

# TensorFlow's kernels ignore dilations of these ops in gradients, and refuse them in the forward pass.
_UNDILATED = frozenset(
    {"DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput"}
)

FAKE_PARAM = "FakeParam"
"""The op whose output replaces the outputs of a branch that does not run."""

DROPPED_ATTRS = frozenset({"container", "shared_name", "config", "config_proto", "executor_type"})
"""Attributes that are removed from every node.

A name of a resource would give access to resources of other callers in the process. The server configures the executor.
"""

RESOURCE_TYPE = "gradrule.v1.Blob"
BLOB_NAME = re.compile(r"[0-9a-f]{64}")

_MAX_SHOWN = 5

_INVALID = Reason.ERROR_REASON_INVALID_TENSOR
_LIMIT = Reason.ERROR_REASON_LIMIT_EXCEEDED

Fault = tuple[ErrorReason.ValueType, str]
"""A reason, and a clause that follows the name of a node or tensor: `has …`, `is …`."""


def op_fault(op: OpDef, attrs: Mapping[str, AttrValue], bounds: NodeLimits) -> Fault | None:
    """Returns a fault if the op may not run, else None.

    UNSUPPORTED_OP: an attribute has a value for which TensorFlow computes wrong numbers. OP_NOT_ALLOWED: the op is
    denied, or an attribute gives access outside the graph.
    """
    if op.name in _UNDILATED and "dilations" in attrs and set(attrs["dilations"].list.i) - {1}:
        return Reason.ERROR_REASON_UNSUPPORTED_OP, (
            f"has dilations {list(attrs['dilations'].list.i)}, for which TensorFlow computes wrong gradients; use "
            "tf.nn.depthwise_conv2d or Keras' DepthwiseConv2D, which dilate by SpaceToBatchND and BatchToSpaceND"
        )
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


def shape_fault(shape: TensorShape, bounds: NodeLimits, *, known: bool) -> Fault | None:
    """Checks a shape. `known`: whether rank and all dimensions must be known."""
    if shape.unknown_rank:
        if shape.dim:
            return _INVALID, "has a shape that is of unknown rank and yet has dimensions"
        return (_INVALID, "has a shape of unknown rank") if known else None
    if len(shape.dim) > bounds.rank:
        return _LIMIT, f"has rank {len(shape.dim)}; {bounds.rank} is the most (--max-rank)"
    elements = 1
    for size in (dim.size for dim in shape.dim):
        if size < (0 if known else -1):
            return _INVALID, f"has a dimension of size {size}"
        elements *= max(size, 1)
        if elements > _MAX_ELEMENTS:
            return _INVALID, "has a shape with more elements than can be counted"
    return None


def tensor_fault(tensor: Tensor, bounds: NodeLimits) -> Fault | None:
    """Checks that the values of a tensor fit its element type and its shape."""
    fault = shape_fault(tensor.tensor_shape, bounds, known=True)
    if fault:
        return fault
    if tensor.dtype not in NAMES:
        if tensor.HasField("packed"):
            return _INVALID, "is packed; only values of calls (feeds, grad_ys, tangents, vectors) may be"
        return _INVALID, f"has the element type {dtype_name(tensor.dtype)}, which no tensor can have"
    if tensor.dtype == Dt.DT_RESOURCE:
        return _INVALID, "holds a resource, which is valid only in the process that created it"
    if tensor.dtype == Dt.DT_VARIANT and (tensor.variant_val or tensor.tensor_content):
        return _INVALID, "holds variants, which are valid only in the process that created them"
    field = tensor_codec.value_field(tensor.dtype)
    # A complex element is two values.
    parts = 2 if tensor.dtype in (Dt.DT_COMPLEX64, Dt.DT_COMPLEX128) else 1
    elements = _element_count(tensor.tensor_shape)
    fault = size_fault(tensor.dtype, tensor.tensor_shape, bounds)
    if fault:
        return fault
    what = f"{dtype_name(tensor.dtype)} of shape {[dim.size for dim in tensor.tensor_shape.dim]}"
    content, values = len(tensor.tensor_content), len(getattr(tensor, field))
    if content and tensor.dtype == Dt.DT_STRING:
        fits = _strings_fit(tensor.tensor_content, elements)
        return None if fits else (_INVALID, f"has a tensor_content that does not hold the strings of {what}")
    if content:
        wanted = elements * _element_bytes(tensor.dtype)
        return None if content == wanted else (_INVALID, f"has {content} bytes, but {what} takes {wanted}")
    if values > elements * parts:
        return _INVALID, f"has {values} values in {field}, but {what} takes {elements * parts}"
    if values % parts:
        return _INVALID, f"has {values} values in {field}, but a complex element takes two"
    return None


def size_fault(dtype: int, shape: TensorShape, bounds: NodeLimits) -> Fault | None:
    """Checks the size of a constant. Unknown dimensions count as 0."""
    elements = _element_count(shape)
    if elements * (_element_bytes(dtype) or _POINTER_BYTES) > bounds.constant_bytes:
        return (
            _LIMIT,
            f"has {elements} elements, which take more than {bounds.constant_bytes} bytes (--max-constant-bytes)",
        )
    return None


def _element_bytes(dtype: int) -> int:
    """Returns the bytes of an element in `tensor_content`; 0 for types without a fixed size, and unknown ones."""
    try:
        found = tensor_codec.numpy_dtype(dtype)
    except ValueError:
        return 0
    return 0 if found.hasobject else found.itemsize


def _element_count(shape: TensorShape) -> int:
    elements = 1
    for dim in shape.dim:
        elements *= max(dim.size, 0)
    return elements


def _strings_fit(content: bytes, count: int) -> bool:
    """Returns whether the bytes are `count` lengths as varints, followed by strings of these lengths."""
    position = total = 0
    for _ in range(count):
        length = shift = 0
        while True:
            if position >= len(content) or shift > 35:
                return False
            byte = content[position]
            position += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        total += length
    return position + total == len(content)


class Variable(Protocol):
    """A variable's element type and shape."""

    @property
    def dtype(self) -> Dt.ValueType: ...

    @property
    def shape(self) -> TensorShape: ...


def value_fault(
    value: TensorSource,
    variable: Variable,
    blob_size: Callable[[str], int],
    bounds: NodeLimits,
) -> Fault | None:
    """Checks the value of a variable. `blob_size`: returns the size of a blob in bytes, by its SHA-256."""
    source = value.WhichOneof("source")
    if source not in ("inline_tensor", "blob"):
        return _INVALID, "holds no tensor, inline or as a blob"
    if source == "inline_tensor":
        dtype, shape = value.inline_tensor.dtype, value.inline_tensor.tensor_shape
        fault = tensor_fault(value.inline_tensor, bounds)
    else:
        dtype, shape = value.blob.dtype, value.blob.shape
        fault = blob_fault(value.blob, blob_size(value.blob.sha256), bounds)
    if fault is not None:
        return fault
    if dtype != variable.dtype:
        message = f"is {dtype_name(dtype)}, but the variable is {dtype_name(variable.dtype)}"
        return Reason.ERROR_REASON_FEED_DTYPE, message
    got, wanted = tensor_codec.shape_tuple(shape), tensor_codec.shape_tuple(variable.shape)
    if wanted is not None and not _is_compatible(got or (), wanted):
        shapes = f"has shape {_shape_text(got or ())}, but the variable has {_shape_text(wanted)}"
        return Reason.ERROR_REASON_FEED_SHAPE, shapes
    return None


def blob_fault(blob: BlobTensor, size: int, bounds: NodeLimits) -> Fault | None:
    """Checks a tensor that is stored in a blob of `size` bytes."""
    fault = shape_fault(blob.shape, bounds, known=True)
    if fault is not None:
        return fault
    try:
        dtype = tensor_codec.numpy_dtype(blob.dtype)
    except ValueError as cause:
        return _INVALID, f"cannot be a blob: {cause}"
    if dtype.hasobject:
        return _INVALID, "is a blob of strings; strings travel inline"
    shape = [dim.size for dim in blob.shape.dim]
    wanted = math.prod(shape) * dtype.itemsize
    if size != wanted:
        what = f"{dtype_name(blob.dtype)} of shape {shape}"
        return _INVALID, f"is a blob of {size} bytes, but {what} takes {wanted}"
    return None


def _is_compatible(got: Iterable[int | None], wanted: tuple[int | None, ...]) -> bool:
    sizes = tuple(got)
    return len(sizes) == len(wanted) and all(b is None or a == b for a, b in zip(sizes, wanted, strict=True))


def _shape_text(shape: Iterable[int | None]) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"


def check_parsed_size(data: bytes, message: type[Message], bounds: NodeLimits, *, field: str = "") -> None:
    """Raises LIMIT_EXCEEDED for an encoded message that would take far more memory than it has bytes.

    Accepts bytes that are not a valid message, which the parser refuses.

    Args:
        data: The encoded message.
        message: Its type.
        bounds: The limits.
        field: The field of the request that holds the message, for the error.
    """
    try:
        check_size(data, message, bounds.unpacking)
    except ParsedSizeError as cause:
        raise error(_LIMIT, f"{cause} (--max-unpacking)", field=field) from None


def check_blob_name(name: str) -> None:
    """Raises MALFORMED_REQUEST unless `name` is a SHA-256 in hex."""
    if BLOB_NAME.fullmatch(name) is None:
        raise error(
            Reason.ERROR_REASON_MALFORMED_REQUEST,
            f"{name[:80]!r} is not a SHA-256: 64 characters of 0-9 and a-f",
            field="sha256",
        )


def missing_blobs(names: Iterable[str]) -> GradruleError:
    """Returns a BLOB_NOT_FOUND error with one resource for each blob."""
    missing = list(names)
    shown = ", ".join(missing[:_MAX_SHOWN])
    if len(missing) > _MAX_SHOWN:
        shown += f", and {len(missing) - _MAX_SHOWN} more"
    finding = Finding(
        Reason.ERROR_REASON_BLOB_NOT_FOUND,
        f"the server does not have the blob{'s' if len(missing) > 1 else ''} {shown}; upload what is missing, and send "
        "the request again",
    )
    return GradruleError([finding], resources=[Resource(RESOURCE_TYPE, name) for name in missing])
