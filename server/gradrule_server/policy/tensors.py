"""Whether a tensor in a graph holds what its element type and shape say. INVALID_TENSOR, LIMIT_EXCEEDED."""

from __future__ import annotations

from gradrule._dtypes import name_of
from gradrule.v1.errors_pb2 import ErrorReason
from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape
from gradrule_server.errors import Reason
from gradrule_server.policy.bounds import Bounds

_MAX_ELEMENTS = 2**62

# Element type → bytes of one element in `tensor_content`, field of single values, how many of those make one element.
_FORMS: dict[int, tuple[int, str, int]] = {
    Dt.DT_FLOAT: (4, "float_val", 1),
    Dt.DT_DOUBLE: (8, "double_val", 1),
    Dt.DT_INT32: (4, "int_val", 1),
    Dt.DT_UINT8: (1, "int_val", 1),
    Dt.DT_INT16: (2, "int_val", 1),
    Dt.DT_INT8: (1, "int_val", 1),
    Dt.DT_STRING: (0, "string_val", 1),
    Dt.DT_COMPLEX64: (8, "scomplex_val", 2),
    Dt.DT_INT64: (8, "int64_val", 1),
    Dt.DT_BOOL: (1, "bool_val", 1),
    Dt.DT_QINT8: (1, "int_val", 1),
    Dt.DT_QUINT8: (1, "int_val", 1),
    Dt.DT_QINT32: (4, "int_val", 1),
    Dt.DT_BFLOAT16: (2, "half_val", 1),
    Dt.DT_QINT16: (2, "int_val", 1),
    Dt.DT_QUINT16: (2, "int_val", 1),
    Dt.DT_UINT16: (2, "int_val", 1),
    Dt.DT_COMPLEX128: (16, "dcomplex_val", 2),
    Dt.DT_HALF: (2, "half_val", 1),
    Dt.DT_RESOURCE: (0, "resource_handle_val", 1),
    Dt.DT_VARIANT: (0, "variant_val", 1),
    Dt.DT_UINT32: (4, "uint32_val", 1),
    Dt.DT_UINT64: (8, "uint64_val", 1),
    Dt.DT_FLOAT8_E5M2: (1, "float8_val", 1),
    Dt.DT_FLOAT8_E4M3FN: (1, "float8_val", 1),
    Dt.DT_FLOAT8_E4M3FNUZ: (1, "float8_val", 1),
    Dt.DT_FLOAT8_E4M3B11FNUZ: (1, "float8_val", 1),
    Dt.DT_FLOAT8_E5M2FNUZ: (1, "float8_val", 1),
    Dt.DT_INT4: (1, "int_val", 1),
    Dt.DT_UINT4: (1, "int_val", 1),
    Dt.DT_INT2: (1, "int_val", 1),
    Dt.DT_UINT2: (1, "int_val", 1),
    Dt.DT_FLOAT4_E2M1FN: (1, "float8_val", 1),
}
# Memory that an element of no fixed size takes at least.
_POINTER_BYTES = 16

_INVALID = Reason.ERROR_REASON_INVALID_TENSOR
_LIMIT = Reason.ERROR_REASON_LIMIT_EXCEEDED

Fault = tuple[ErrorReason.ValueType, str]


def shape_fault(shape: TensorShape, bounds: Bounds, *, known: bool) -> Fault | None:
    """What is wrong with a shape, as a clause (`has …`). `known`: all dimensions must be."""
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


def tensor_fault(tensor: Tensor, bounds: Bounds) -> Fault | None:
    """What is wrong with a tensor, as a clause (`has …`); None: nothing."""
    fault = shape_fault(tensor.tensor_shape, bounds, known=True)
    if fault:
        return fault
    form = _FORMS.get(tensor.dtype)
    if form is None:
        if tensor.HasField("packed"):
            return _INVALID, "is packed; only values of calls (feeds, grad_ys, tangents, vectors) may be"
        return _INVALID, f"has the element type {name_of(tensor.dtype)}, which no tensor can have"
    if tensor.dtype == Dt.DT_RESOURCE:
        return _INVALID, "holds a resource, which means nothing outside the process that made it"
    if tensor.dtype == Dt.DT_VARIANT and (tensor.variant_val or tensor.tensor_content):
        return _INVALID, "holds variants, which mean something only in the process that made them"
    size, field, parts = form
    elements = _count(tensor.tensor_shape)
    fault = size_fault(tensor.dtype, tensor.tensor_shape, bounds)
    if fault:
        return fault
    what = f"{name_of(tensor.dtype)} of shape {[dim.size for dim in tensor.tensor_shape.dim]}"
    content, values = len(tensor.tensor_content), len(getattr(tensor, field))
    if content and tensor.dtype == Dt.DT_STRING:
        fits = _strings_fit(tensor.tensor_content, elements)
        return None if fits else (_INVALID, f"has a tensor_content that does not hold the strings of {what}")
    if content:
        wanted = elements * size
        return None if content == wanted else (_INVALID, f"has {content} bytes, but {what} takes {wanted}")
    if values > elements * parts:
        return _INVALID, f"has {values} values in {field}, but {what} takes {elements * parts}"
    if values % parts:
        return _INVALID, f"has {values} values in {field}, but a complex element takes two"
    return None


def size_fault(dtype: int, shape: TensorShape, bounds: Bounds) -> Fault | None:
    """What is wrong with the size of a constant, as a clause (`has …`). Dimensions that are not known are 0."""
    size = _FORMS[dtype][0] if dtype in _FORMS else 0
    elements = _count(shape)
    if elements * (size or _POINTER_BYTES) > bounds.constant_bytes:
        return (
            _LIMIT,
            f"has {elements} elements, which take more than {bounds.constant_bytes} bytes (--max-constant-bytes)",
        )
    return None


def _count(shape: TensorShape) -> int:
    elements = 1
    for dim in shape.dim:
        elements *= max(dim.size, 0)
    return elements


def _strings_fit(content: bytes, count: int) -> bool:
    """Whether the bytes are `count` lengths as varints, then strings of these lengths."""
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
