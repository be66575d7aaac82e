"""Reads the arguments of a built function from a request: usual calls by a plan, others tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from gradrule.common import tensor_packing
from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2, tensor_pb2
from gradrule_server.engine.large_tensors import NO_LARGE_TENSORS, LargeTensors
from gradrule_server.engine.program import BuiltProgram, Input, as_array, as_tensor
from gradrule_server.engine.tensor_sources import BlobReader, read_tensor
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import FREE_BYTES
from gradrule_server.rules import read_param_value

_Given: TypeAlias = Mapping[str, tuple[tensor_pb2.TensorSource, memoryview | None]]
"""Values by name, each with the bytes that were cut out of it, or None."""
_Value: TypeAlias = "np.ndarray | tf.Tensor"
NO_STATE: Mapping[str, tf.Tensor] = MappingProxyType({})


class _Slot(NamedTuple):
    """One argument: its position, the type and shape that it requires, and the NumPy type of its bytes."""

    position: int
    dtype_number: int
    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any]
    is_required: bool


class FeedPlan:
    """Reads the arguments of usual calls fast: all values are tensors with bytes, of the right type and shape.

    Prepared once per program, by the names that calls use. Thread-safe. is_enabled: False leaves all calls to
    `ArgumentReader`.
    """

    def __init__(self, built: BuiltProgram, *, is_enabled: bool = True) -> None:
        self._max_rank = built.max_rank
        self._template: list[Any] = []
        self.defaults: list[tf.Tensor | None] = []
        """For each argument, its value in calls that do not give it; None: calls must give it."""
        self._required = 0
        self._fields: list[tuple[str, dict[str, _Slot]]] = []
        directions = "tangents" if built.kind == evaluate_pb2.DERIVATIVE_JVP else "vectors"
        for field, inputs in (("feeds", built.inputs), ("grad_ys", built.grad_ys), (directions, built.directions)):
            slots = {item.name.removesuffix(":0"): self._slot(item) for item in inputs}
            if field == "feeds":
                self._inputs = list(zip((item.name for item in inputs), slots.values(), strict=True))
                slots |= {alias: slots[name.removesuffix(":0")] for alias, name in built.aliases.items()}
            slots |= {f"{name}:0": slot for name, slot in slots.items() if ":" not in name}
            if slots:
                self._fields.append((field, slots))
        self._params = {}
        for param in built.params:
            self._params[param.rule, param.name] = len(self._template)
            self._template.append(None)
            self.defaults.append(None)
        self._required += len(self._params)
        # The general reader checks that stacked values have the same length.
        self._is_usable = is_enabled and not built.stacked

    def _slot(self, item: Input) -> _Slot:
        position, is_required = len(self._template), item.default is None
        self._template.append(None if item.default is None else as_array(item.default))
        self.defaults.append(item.default)
        self._required += is_required
        shape = None if item.shape.rank is None else tuple(item.shape.as_list())
        # NumPy cannot read strings from bytes.
        dtype = np.dtype(item.dtype.base_dtype.as_numpy_dtype)
        return _Slot(position, item.dtype.base_dtype.as_datatype_enum, shape, dtype, is_required)

    def is_default(self, position: int, array: Any) -> bool:
        """Returns whether an argument is the default of its input."""
        return self._template[position] is not None and array is self._template[position]

    def array(self, position: int, value: _Value) -> Any:
        """Returns an argument as an array; for the default of its input, the one that `is_default` recognises."""
        if not isinstance(value, tf.Tensor):
            return value
        return self._template[position] if value is self.defaults[position] else as_array(value)

    def arrays(
        self,
        call: evaluate_pb2.EvaluateRequest,
        params: Iterable[link_pb2.ParamSetting],
        contents: LargeTensors,
        state: Mapping[str, tf.Tensor] = NO_STATE,
    ) -> Sequence[Any] | None:
        """Returns the arguments as NumPy arrays, those of `state` as tensors; None for an unusual call, perhaps valid.

        The arrays may share the memory of `call` and `contents`.
        """
        if not self._is_usable:
            return None
        values, missing = list(self._template), self._required
        for field, slots in self._fields:
            for index, item in enumerate(getattr(call, field)):
                slot = slots.get(item.name)
                if slot is None or values[slot.position] is not self._template[slot.position]:
                    return None
                array = self._array(item.value.inline_tensor, slot, contents, (field, index))
                if array is None:
                    return None
                values[slot.position] = array
                missing -= slot.is_required
        for name, slot in self._inputs if state else ():
            if name in state and values[slot.position] is self._template[slot.position]:
                values[slot.position] = state[name]
                missing -= slot.is_required
        for setting in params:
            position = self._params.get((setting.rule, setting.name))
            if position is not None:
                if not setting.value.HasField("number"):
                    return None
                values[position] = np.array(setting.value.number)
                missing -= 1
        return None if missing else values

    def _array(self, message: Any, slot: _Slot, contents: Mapping[Any, memoryview], key: tuple[str, int]) -> Any:
        """Returns a view of the tensor's bytes as an array; None if the tensor is unusual."""
        if message.dtype != slot.dtype_number or slot.dtype.hasobject:
            return None
        tensor_shape = message.tensor_shape
        if tensor_shape.unknown_rank:
            return None
        shape = tuple([dim.size for dim in tensor_shape.dim])
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


class ArgumentReader:
    """Reads the values of requests. `blobs`: holds the values that requests name by their hash."""

    def __init__(self, blobs: BlobReader) -> None:
        self._blobs = blobs

    def for_folder(self, blob_folder: str) -> ArgumentReader:
        """Returns a reader whose blobs are in a subfolder; without a name, this reader."""
        return ArgumentReader(self._blobs.for_folder(blob_folder)) if blob_folder else self

    def arguments(
        self,
        built: BuiltProgram,
        call: evaluate_pb2.EvaluateRequest,
        params: Iterable[link_pb2.ParamSetting],
        state: Mapping[str, tf.Tensor] = NO_STATE,
        contents: LargeTensors = NO_LARGE_TENSORS,
    ) -> list[tf.Tensor]:
        """Returns the arguments of the built function as tensors.

        Args:
            built: The program.
            call: The request.
            params: Values of the params of rules.
            state: Values, by name, of inputs that the call does not feed.
            contents: Bytes of tensors that were cut out of the request.
        """
        values = built.feed_plan.arrays(call, params, contents, state)
        if values is None:
            values = self._values(built, call, params, state, contents)
        dtypes = [item.dtype for item in (*built.inputs, *built.grad_ys, *built.directions)]
        dtypes += [tf.float64] * len(built.params)
        # Values of variables may be large: they stay on the device.
        plan = built.feed_plan
        return [
            default if plan.is_default(position, value) else as_tensor(value, dtype)
            for position, (value, dtype, default) in enumerate(zip(values, dtypes, plan.defaults, strict=True))
        ]

    def arrays(
        self,
        built: BuiltProgram,
        call: evaluate_pb2.EvaluateRequest,
        params: Iterable[link_pb2.ParamSetting],
        contents: LargeTensors = NO_LARGE_TENSORS,
    ) -> Sequence[Any]:
        """Returns the arguments of the built function as NumPy arrays, which may share the memory of the request."""
        values = built.feed_plan.arrays(call, params, contents)
        if values is None:
            given = self._values(built, call, params, NO_STATE, contents)
            values = [built.feed_plan.array(position, value) for position, value in enumerate(given)]
        return values

    def _values(
        self,
        built: BuiltProgram,
        call: evaluate_pb2.EvaluateRequest,
        params: Iterable[link_pb2.ParamSetting],
        state: Mapping[str, tf.Tensor],
        contents: LargeTensors,
    ) -> list[_Value]:
        feeds = _rename_aliases(_by_name(call.feeds, "feeds", contents, built), built)
        return [
            *self._read(feeds, built.inputs, built, what="feed", field="feeds", unused=built.unused, state=state),
            *self._read_grad_ys(call.grad_ys, built.grad_ys, contents, stacked=built.stacked, built=built),
            *self._read_directions(call, built, contents),
            *_read_params(built, params),
        ]

    def grad_ys(
        self,
        given: Sequence[tensor_pb2.NamedTensor],
        inputs: Sequence[Input],
        contents: LargeTensors = NO_LARGE_TENSORS,
        *,
        stacked: bool,
        built: BuiltProgram,
    ) -> list[tf.Tensor]:
        """Returns upstream gradients; stacked ones have the same size on axis 0. `built`: gives the limits."""
        values = self._read_grad_ys(given, inputs, contents, stacked=stacked, built=built)
        return [as_tensor(value, item.dtype) for value, item in zip(values, inputs, strict=True)]

    def _read_grad_ys(
        self,
        given: Sequence[tensor_pb2.NamedTensor],
        inputs: Sequence[Input],
        contents: LargeTensors,
        *,
        stacked: bool,
        built: BuiltProgram,
    ) -> list[_Value]:
        if stacked:
            inputs = [Input(item.name, item.dtype, tf.TensorShape([None]).concatenate(item.shape)) for item in inputs]
        by_name = _by_name(given, "grad_ys", contents, built)
        tensors = self._read(by_name, inputs, built, what="grad_y", field="grad_ys")
        if stacked and len({int(tensor.shape[0]) for tensor in tensors}) > 1:
            sizes = ", ".join(f"{item.name!r}: {tensor.shape[0]}" for item, tensor in zip(inputs, tensors, strict=True))
            raise error(
                errors_pb2.ERROR_REASON_FEED_SHAPE,
                f"stacked grad_ys have one size on axis 0, the number of pull-backs; these have {sizes}",
                field="grad_ys",
            )
        return tensors

    def _read_directions(
        self, call: evaluate_pb2.EvaluateRequest, built: BuiltProgram, contents: LargeTensors
    ) -> list[_Value]:
        is_jvp = built.kind == evaluate_pb2.DERIVATIVE_JVP
        what, field, given = ("tangent", "tangents", call.tangents) if is_jvp else ("vector", "vectors", call.vectors)
        return self._read(_by_name(given, field, contents, built), built.directions, built, what=what, field=field)

    def _read(
        self,
        by_name: _Given,
        inputs: Sequence[Input],
        built: BuiltProgram,
        *,
        what: str,
        field: str,
        unused: Sequence[bool] = (),
        state: Mapping[str, tf.Tensor] = NO_STATE,
    ) -> list[_Value]:
        """Returns the given values in the order of `inputs`. Reports all their faults in one error."""
        findings: list[Finding] = []
        tensors: list[_Value] = []
        for item, is_unused in zip(inputs, unused or [False] * len(inputs), strict=True):
            value = by_name.get(item.name.removesuffix(":0"))
            default = state.get(item.name, item.default)
            if value is None and default is not None:
                tensors.append(default)
                continue
            if value is None and is_unused:
                tensors.append(_unused_value(item))
                continue
            if value is None:
                wanted = f"{item.dtype.name} of shape {item.shape}"
                findings.append(
                    Finding(
                        errors_pb2.ERROR_REASON_MISSING_FEED,
                        f"{what} {item.name!r} is missing: {wanted}",
                        item.name,
                        field,
                    )
                )
                continue
            try:
                tensors.append(read_tensor(*value, item, built.max_rank, self._blobs, what, field))
            except GradruleError as cause:
                findings += cause.findings
        if findings:
            raise GradruleError(findings)
        return tensors


def _unused_value(item: Input) -> np.ndarray:
    """Returns a value for an input on which no result depends."""
    shape = [size or 0 for size in item.shape] if item.shape.rank else []
    dtype = np.dtype(item.dtype.as_numpy_dtype)
    return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)


def _by_name(
    given: Sequence[tensor_pb2.NamedTensor], field: str, contents: LargeTensors, built: BuiltProgram
) -> _Given:
    """Returns values by name. Raises LIMIT_EXCEEDED if packed ones would take too much memory unpacked."""
    values = [(item.value, contents.get((field, index))) for index, item in enumerate(given)]
    packed = [
        (source.inline_tensor.packed, content) for source, content in values if source.inline_tensor.HasField("packed")
    ]
    if packed:
        _check_unpacking(packed, field, built.max_unpacking)
    return {item.name.removesuffix(":0"): value for item, value in zip(given, values, strict=True)}


def _check_unpacking(
    packed: Sequence[tuple[tensor_pb2.PackedTensor, memoryview | None]], field: str, max_unpacking: int
) -> None:
    try:
        after = sum(tensor_packing.unpacked_bytes(message) for message, _ in packed)
    except ValueError as cause:
        raise error(errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{field}: {cause}", field=field) from cause
    before = sum(len(message.content if content is None else content) for message, content in packed)
    most = FREE_BYTES + max_unpacking * before
    if after > most:
        raise error(
            errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
            f"the packed tensors of {field} have {before} bytes and would take {after} unpacked; they may take "
            f"{FREE_BYTES >> 20} MiB and {max_unpacking} times their size, {most} bytes (--max-unpacking); send them "
            "unpacked, or in several calls",
            field=field,
        )


def _rename_aliases(by_name: _Given, built: BuiltProgram) -> _Given:
    """Returns feeds by the names of inputs. Raises UNKNOWN_FEED if one input is fed under two of its names."""
    if built.aliases.keys().isdisjoint(by_name):
        return by_name
    renamed = {built.aliases.get(name, name): value for name, value in by_name.items()}
    if len(renamed) < len(by_name):
        twice = next(name for alias, name in built.aliases.items() if alias in by_name)
        raise error(
            errors_pb2.ERROR_REASON_UNKNOWN_FEED,
            f"feeds name {twice!r} twice, under different names",
            node=twice,
            field="feeds",
        )
    return renamed


def _read_params(built: BuiltProgram, settings: Iterable[link_pb2.ParamSetting]) -> list[_Value]:
    given: Mapping[tuple[int, str], rule_pb2.ParamValue] = {(item.rule, item.name): item.value for item in settings}
    read = [read_param_value(given[param.rule, param.name], param.name, "params") for param in built.params]
    return [np.asarray(value, np.float64) for value in read]
