"""Translates an index such as `h[1:, ..., None, -1]` into one `StridedSlice` node with TensorFlow's masks."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from gradrule._builder.handles import TensorHandle, as_tensor
from gradrule.common import tensor_codec
from gradrule.common.dtypes import without_ref
from gradrule.errors import InvalidGraphError, TypeMismatchError
from gradrule.v1.tensor_pb2 import Dt

if TYPE_CHECKING:
    from gradrule._builder.graph import Graph

_INT32 = np.iinfo(np.int32)
_INT64 = np.iinfo(np.int64)
_INDEX_TYPES = {Dt.DT_INT16, Dt.DT_INT32, Dt.DT_INT64}


def index(tensor: TensorHandle, key: Any) -> TensorHandle:
    """Adds the node for `tensor[key]` and returns its output.

    Args:
        tensor: the tensor to index.
        key: integers, integer scalars of the graph, slices of these, `...` and None; or one bool tensor or array,
            which selects the entries where it is true.

    Raises:
        TypeMismatchError: a part of the key is of another type.
        InvalidGraphError: the key has two `...`, or a slice has step 0.
    """
    key = as_tensor(key)
    if _is_mask(key):
        return tensor.graph.op_output("GatherNd", tensor, tensor.graph.op("Where", key))
    strided_slice = _StridedSlice(tensor)
    for part in key if isinstance(key, tuple) else (key,):
        strided_slice.add(as_tensor(part))
    return strided_slice.add_node()


def _is_mask(key: Any) -> bool:
    if isinstance(key, TensorHandle):
        return without_ref(key.number) == Dt.DT_BOOL
    return isinstance(key, np.ndarray) and key.ndim > 0 and key.dtype == bool


class _StridedSlice:
    """Collects the inputs and masks of a `StridedSlice` from the parts of an index."""

    def __init__(self, tensor: TensorHandle) -> None:
        self._tensor = tensor
        self._begin: list[Any] = []
        self._end: list[Any] = []
        self._strides: list[Any] = []
        self._masks = dict.fromkeys(("begin", "end", "ellipsis", "new_axis", "shrink_axis"), 0)

    def add(self, part: Any) -> None:
        """Adds one part of the index."""
        if part is Ellipsis:
            if self._masks["ellipsis"]:
                raise InvalidGraphError(f"{self._tensor.name!r}[…]: an index holds one `...` at most")
            self._append(0, 0, 1, "ellipsis")
        elif part is None:
            self._append(0, 0, 1, "new_axis")
        elif isinstance(part, slice):
            step = 1 if part.step is None else self._position(part.step)
            if isinstance(step, int) and step == 0:
                raise InvalidGraphError(f"{self._tensor.name!r}[…]: the step of a slice cannot be 0")
            open_ends = [name for name, edge in (("begin", part.start), ("end", part.stop)) if edge is None]
            start, stop = (0 if edge is None else self._position(edge) for edge in (part.start, part.stop))
            self._append(start, stop, step, *open_ends)
        else:
            position = self._position(part)
            self._append(position, position + 1, 1, "shrink_axis")

    def add_node(self) -> TensorHandle:
        """Adds the `StridedSlice` node and returns its output."""
        parts = (self._begin, self._end, self._strides)
        number = Dt.DT_INT64 if any(_is_wide(entry) for part in parts for entry in part) else Dt.DT_INT32
        graph = self._tensor.graph
        masks: dict[str, Any] = {f"{name}_mask": bits for name, bits in self._masks.items()}
        return graph.op_output("StridedSlice", self._tensor, *(_vector(graph, part, number) for part in parts), **masks)

    def _append(self, begin: Any, end: Any, stride: Any, *masks: str) -> None:
        for mask in masks:
            self._masks[mask] |= 1 << len(self._begin)
        self._begin.append(begin)
        self._end.append(end)
        self._strides.append(stride)

    def _position(self, value: Any) -> Any:
        """Returns an integer within int64, or an integer scalar of the graph. Raises `TypeMismatchError`."""
        value = as_tensor(value)
        where = f"{self._tensor.name!r}[…]"
        if isinstance(value, TensorHandle):
            if value.number and without_ref(value.number) not in _INDEX_TYPES:
                raise TypeMismatchError(f"{where}: {value.name!r} is {value.dtype}; an index is int32 or int64")
            if value.shape:
                raise TypeMismatchError(f"{where}: {value.name!r} is no scalar; `gather` takes many positions")
            return value
        if not isinstance(value, bool | np.bool_) and getattr(value, "ndim", 0) == 0:
            try:
                return max(_INT64.min, min(operator.index(value), _INT64.max))
            except TypeError:
                pass
        raise TypeMismatchError(
            f"{where}: {value!r} is no index; expected integers, slices, `...`, None or integer scalars of the graph "
            "(`gather` takes many positions)"
        )


def _is_wide(entry: Any) -> bool:
    if isinstance(entry, TensorHandle):
        return without_ref(entry.number) == Dt.DT_INT64
    return not _INT32.min <= entry <= _INT32.max


def _vector(graph: Graph, entries: list[Any], number: int) -> Any:
    if not any(isinstance(entry, TensorHandle) for entry in entries):
        # The end of the largest int64 index does not fit into int64; shrink_axis ignores the end.
        return np.array([min(entry, _INT64.max) for entry in entries], tensor_codec.numpy_dtype(number))
    return graph.op_output("Pack", [_typed(graph, entry, number) for entry in entries])


def _typed(graph: Graph, entry: Any, number: int) -> Any:
    if not isinstance(entry, TensorHandle):
        return np.array(min(entry, _INT64.max), tensor_codec.numpy_dtype(number))
    return entry if without_ref(entry.number) in (0, number) else graph.cast(entry, number)
