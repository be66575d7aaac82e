"""Computes small tensors whose inputs are known, so that shapes, axes and conditions are known too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradrule._models.onnx_calls import Array, OpCall

_MOST_ELEMENTS = 1024


def folded(call: OpCall) -> Array | None:
    """Returns the result of a call if all inputs are known and small, and it is quick to compute; else None."""
    compute = _FOLDED.get(call.node.op_type)
    if compute is None:
        return None
    tensors = [call.tensor(index) for index in range(len(call)) if call.has(index)]
    if any(item.array is None or item.weight or not item.dtype for item in tensors):
        return None
    arrays = [item.array for item in tensors if item.array is not None]
    if sum(array.size for array in arrays) > _MOST_ELEMENTS or len(tensors) != len(call):
        return None
    if np.prod([float(size) for size in np.broadcast_shapes(*_shapes(call, arrays))]) > _MOST_ELEMENTS:
        return None
    with np.errstate(all="ignore"):
        try:
            result = compute(call, *arrays)
        except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError):
            return None
    return None if result is None else np.asarray(result)


def _shapes(call: OpCall, arrays: list[Array]) -> list[tuple[int, ...]]:
    """Returns the shapes that must fit each other, since the operation broadcasts."""
    if call.node.op_type not in _BROADCAST:
        return [()]
    try:
        return [np.broadcast_shapes(*(array.shape for array in arrays))]
    except ValueError:
        return [()]


def _gather(call: OpCall, x: Array, indices: Array) -> Array:
    return np.asarray(np.take(x, indices, axis=call.axis()))


def _slice(call: OpCall, x: Array, starts: Array, ends: Array, axes: Any = None, steps: Any = None) -> Array:
    key = [slice(None)] * x.ndim
    for position, start in enumerate(starts.tolist()):
        axis = int(axes[position]) if axes is not None else position
        step = int(steps[position]) if steps is not None else 1
        end = int(ends[position])
        # A negative end that is beyond the start means: all elements down to the first.
        if step < 0 and end < -x.shape[axis]:
            end = None  # type: ignore[assignment]
        key[axis] = slice(start, end, step)
    return np.asarray(x[tuple(key)])


def _squeeze(call: OpCall, x: Array, axes: Any = None) -> Array:
    given = axes.tolist() if axes is not None else call.attr("axes")
    return np.asarray(np.squeeze(x, None if given is None else tuple(given)))


def _unsqueeze(call: OpCall, x: Array, axes: Any = None) -> Array:
    given = axes.tolist() if axes is not None else call.attr("axes")
    return np.asarray(np.expand_dims(x, tuple(given)))


def _reshape(call: OpCall, x: Array, shape: Array) -> Array:
    sizes = [
        x.shape[i] if size == 0 and not call.attr("allowzero", 0) else size for i, size in enumerate(shape.tolist())
    ]
    return x.reshape(sizes)


def _range(call: OpCall, start: Array, limit: Array, delta: Array) -> Array | None:
    count = max(0, np.ceil((float(limit) - float(start)) / float(delta)))
    if start.dtype.kind != "i" or count > _MOST_ELEMENTS:
        return None
    return np.arange(int(start), int(limit), int(delta), dtype=start.dtype)


def _divide(call: OpCall, x: Array, y: Array) -> Array | None:
    if x.dtype.kind not in "iu":
        return np.asarray(np.divide(x, y).astype(x.dtype))
    if not np.all(y):
        return None
    return np.asarray(((np.abs(x) // np.abs(y)) * np.sign(x) * np.sign(y)).astype(x.dtype))


def _filled(call: OpCall, shape: Array) -> Array | None:
    if np.prod(shape.astype(float)) > _MOST_ELEMENTS:
        return None
    value = call.attr("value")
    from gradrule._models.onnx_files import array_of

    fill = np.zeros(1, np.float32) if value is None else array_of(value)
    return np.full(tuple(shape.tolist()), fill.reshape(-1)[0], fill.dtype)


def _expand(call: OpCall, x: Array, shape: Array) -> Array | None:
    sizes = np.broadcast_shapes(x.shape, tuple(shape.tolist()))
    return np.broadcast_to(x, sizes).copy() if np.prod([float(size) for size in sizes]) <= _MOST_ELEMENTS else None


def _cast(call: OpCall, x: Array) -> Array | None:
    from gradrule._models.onnx_calls import DTYPES
    from gradrule.common import tensor_codec

    name = DTYPES.get(call.attr("to"))
    if name is None or x.dtype.kind not in "iub":
        return None
    return x.astype(tensor_codec.numpy_dtype(tensor_codec.dtype_number(name)))


def _reduced(function: Callable[..., Any]) -> Callable[..., Array | None]:
    def compute(call: OpCall, x: Array, axes: Any = None) -> Array | None:
        given = axes.tolist() if axes is not None else call.attr("axes")
        if not given and call.attr("noop_with_empty_axes", 0):
            return x
        return np.asarray(
            function(x, axis=tuple(given) if given else None, keepdims=bool(call.attr("keepdims", 1)))
        ).astype(x.dtype)

    return compute


def _binary(function: Callable[..., Any]) -> Callable[..., Array]:
    def compute(call: OpCall, *arrays: Array) -> Array:
        return np.asarray(function(*arrays))

    return compute


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Not": np.logical_not,
    "Neg": np.negative,
    "Abs": np.abs,
    "Where": np.where,
}
_BROADCAST = frozenset({*_ELEMENTWISE, "Div"})

_FOLDED: Mapping[str, Callable[..., Array | None]] = {
    **{name: _binary(function) for name, function in _ELEMENTWISE.items()},
    "Div": _divide,
    "Identity": lambda call, x: x,
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    "Transpose": lambda call, x: x.transpose(call.attr("perm")),
    "Concat": lambda call, *arrays: np.concatenate(arrays, axis=call.attr("axis")),
    "Range": _range,
    "ConstantOfShape": _filled,
    "Expand": _expand,
    "ReduceProd": _reduced(np.prod),
    "ReduceSum": _reduced(np.sum),
    "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min),
}
