"""Reads the arguments of usual calls fast: all values are tensors with bytes, of the right type and shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradrule.v1 import evaluate_pb2
from gradrule_server.engine.large_tensors import LargeTensors
from gradrule_server.engine.program import as_array
from gradrule_server.link.v1 import link_pb2

if TYPE_CHECKING:
    from gradrule_server.engine.program import BuiltProgram, Input


class _Slot(NamedTuple):
    """One argument: its position, the type and shape that it requires, and the NumPy type of its bytes."""

    place: int
    dtype_number: int
    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any]
    is_required: bool


class FeedPlan:
    """The arguments of a built function by the names that calls use, prepared once per program. Thread-safe."""

    def __init__(self, built: BuiltProgram, *, is_used: bool = True) -> None:
        self._max_rank = built.max_rank
        self._template: list[Any] = []
        self._required = 0
        self._fields: list[tuple[str, dict[str, _Slot]]] = []
        moves = "tangents" if built.kind == evaluate_pb2.DERIVATIVE_JVP else "vectors"
        for field, inputs in (("feeds", built.inputs), ("grad_ys", built.grad_ys), (moves, built.directions)):
            slots = {item.name.removesuffix(":0"): self._slot(item) for item in inputs}
            if field == "feeds":
                slots |= {alias: slots[name.removesuffix(":0")] for alias, name in built.aliases.items()}
            slots |= {f"{name}:0": slot for name, slot in slots.items() if ":" not in name}
            if slots:
                self._fields.append((field, slots))
        self._params = {}
        for param in built.params:
            self._params[param.rule, param.name] = len(self._template)
            self._template.append(None)
        self._required += len(self._params)
        # The general reader checks that stacked values have the same length.
        self._is_usable = is_used and not built.stacked

    def _slot(self, item: Input) -> _Slot:
        place, is_required = len(self._template), item.default is None
        self._template.append(None if item.default is None else as_array(item.default))
        self._required += is_required
        shape = None if item.shape.rank is None else tuple(item.shape.as_list())
        # NumPy cannot read strings from bytes.
        dtype = np.dtype(item.dtype.base_dtype.as_numpy_dtype)
        return _Slot(place, item.dtype.base_dtype.as_datatype_enum, shape, dtype, is_required)

    def is_default(self, place: int, array: Any) -> bool:
        """Returns whether an argument is the default of its input."""
        return self._template[place] is not None and array is self._template[place]

    def arrays(
        self, call: evaluate_pb2.EvaluateRequest, params: Iterable[link_pb2.ParamSetting], contents: LargeTensors
    ) -> Sequence[Any] | None:
        """Returns the arguments as NumPy arrays; None for an unusual call, which may be valid.

        The arrays may share the memory of `call` and `contents`.
        """
        if not self._is_usable:
            return None
        values, missing = list(self._template), self._required
        for field, slots in self._fields:
            for index, item in enumerate(getattr(call, field)):
                slot = slots.get(item.name)
                if slot is None or values[slot.place] is not self._template[slot.place]:
                    return None
                array = self._array(item.value.inline_tensor, slot, contents, (field, index))
                if array is None:
                    return None
                values[slot.place] = array
                missing -= slot.is_required
        for setting in params:
            place = self._params.get((setting.rule, setting.name))
            if place is not None:
                if not setting.value.HasField("number"):
                    return None
                values[place] = np.array(setting.value.number)
                missing -= 1
        return None if missing else values

    def _array(self, message: Any, slot: _Slot, contents: Mapping[Any, memoryview], key: tuple[str, int]) -> Any:
        """Returns a view of the tensor's bytes as an array; None if the tensor is unusual."""
        if message.dtype != slot.dtype_number or slot.dtype.hasobject:
            return None
        told = message.tensor_shape
        if told.unknown_rank:
            return None
        shape = tuple([dim.size for dim in told.dim])
        content = (contents.get(key) if contents else None) or message.tensor_content
        if shape != slot.shape and not _fits(shape, slot.shape):
            return None
        if not content or len(content) != math.prod(shape) * slot.dtype.itemsize or len(shape) > self._max_rank:
            return None
        return np.frombuffer(content, slot.dtype).reshape(shape)


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...] | None) -> bool:
    if min(shape, default=0) < 0:
        return False
    if wanted is None:
        return True
    return len(shape) == len(wanted) and all(map(_fits_size, shape, wanted))


def _fits_size(size: int, wanted: int | None) -> bool:
    return wanted is None or size == wanted
