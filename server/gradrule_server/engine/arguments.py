"""Reads the arguments of a built function from a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from gradrule.common import tensor_codec, tensor_packing
from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2, tensor_pb2
from gradrule_server.engine.blobs import BlobReader
from gradrule_server.engine.large_tensors import LargeTensors
from gradrule_server.engine.program import BuiltProgram, Input, as_array
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import FREE_BYTES
from gradrule_server.rules import read_param_value

_Given: TypeAlias = Mapping[str, tuple[tensor_pb2.TensorSource, memoryview | None]]
"""Values by name; the bytes of a large one apart."""
_Value: TypeAlias = "np.ndarray | tf.Tensor"
_NONE_APART: LargeTensors = MappingProxyType({})


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
        state: Mapping[str, tf.Tensor] | None = None,
        contents: LargeTensors = _NONE_APART,
    ) -> list[tf.Tensor]:
        """Returns the arguments of the built function as tensors.

        Raises MEMORY_EXCEEDED if the call cannot fit into memory.

        Args:
            built: The program.
            call: The request.
            params: Values of the params of rules.
            state: Values, by name, of inputs that the call does not feed.
            contents: Bytes of tensors that were cut out of the request.
        """
        values = self._values(built, call, params, state, contents)
        dtypes = [item.dtype for item in (*built.inputs, *built.grad_ys, *built.directions)]
        dtypes += [tf.float64] * len(built.params)
        if built.memory_check is not None:
            built.memory_check.check(values)
        return [_as_tensor(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]

    def arrays(
        self,
        built: BuiltProgram,
        call: evaluate_pb2.EvaluateRequest,
        params: Iterable[link_pb2.ParamSetting],
        contents: LargeTensors = _NONE_APART,
    ) -> Sequence[Any]:
        """Returns the arguments of the built function as NumPy arrays, which may share the memory of the request."""
        values = built.feed_plan.arrays(call, params, contents)
        if values is None:
            given = self._values(built, call, params, None, contents)
            values = [as_array(value) if isinstance(value, tf.Tensor) else value for value in given]
        if built.memory_check is not None:
            built.memory_check.check(values)
        return values

    def _values(
        self,
        built: BuiltProgram,
        call: evaluate_pb2.EvaluateRequest,
        params: Iterable[link_pb2.ParamSetting],
        state: Mapping[str, tf.Tensor] | None,
        contents: LargeTensors,
    ) -> list[_Value]:
        return [
            *self._fed(
                _renamed(_by_name(call.feeds, "feeds", contents, built.max_unpacking), built),
                built.inputs,
                built.unused,
                state or {},
                built.max_rank,
                what="feed",
                field="feeds",
            ),
            *self._grad_ys(call.grad_ys, built.grad_ys, contents, stacked=built.stacked, built=built),
            *self._directions(call, built, contents),
            *_params(built, params),
        ]

    def grad_ys(
        self,
        given: Sequence[tensor_pb2.NamedTensor],
        inputs: Sequence[Input],
        contents: LargeTensors = _NONE_APART,
        *,
        stacked: bool,
        built: BuiltProgram,
    ) -> list[tf.Tensor]:
        """Returns upstream gradients; stacked ones have the same size on axis 0. `built`: gives the limits."""
        values = self._grad_ys(given, inputs, contents, stacked=stacked, built=built)
        return [_as_tensor(value, item.dtype) for value, item in zip(values, inputs, strict=True)]

    def _grad_ys(
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
        tensors = self._given(given, inputs, contents, built, what="grad_y", field="grad_ys")
        if stacked and len({int(tensor.shape[0]) for tensor in tensors}) > 1:
            sizes = ", ".join(f"{item.name!r}: {tensor.shape[0]}" for item, tensor in zip(inputs, tensors, strict=True))
            raise error(
                errors_pb2.ERROR_REASON_FEED_SHAPE,
                f"stacked grad_ys have one size on axis 0, the number of pull-backs; these have {sizes}",
                field="grad_ys",
            )
        return tensors

    def _directions(
        self, call: evaluate_pb2.EvaluateRequest, built: BuiltProgram, contents: LargeTensors
    ) -> list[_Value]:
        is_jvp = built.kind == evaluate_pb2.DERIVATIVE_JVP
        what, field, given = ("tangent", "tangents", call.tangents) if is_jvp else ("vector", "vectors", call.vectors)
        return self._given(given, built.directions, contents, built, what=what, field=field)

    def _given(
        self,
        given: Sequence[tensor_pb2.NamedTensor],
        inputs: Sequence[Input],
        contents: LargeTensors,
        built: BuiltProgram,
        *,
        what: str,
        field: str,
    ) -> list[_Value]:
        by_name, unused = _by_name(given, field, contents, built.max_unpacking), [False] * len(inputs)
        return self._fed(by_name, inputs, unused, {}, built.max_rank, what=what, field=field)

    def _fed(
        self,
        by_name: _Given,
        inputs: Sequence[Input],
        unused: Sequence[bool],
        state: Mapping[str, tf.Tensor],
        max_rank: int,
        *,
        what: str,
        field: str,
    ) -> list[_Value]:
        """Returns the given values in the order of `inputs`. Reports all their faults in one error."""
        findings: list[Finding] = []
        tensors: list[_Value] = []
        for item, is_unused in zip(inputs, unused, strict=True):
            value = by_name.get(item.name.removesuffix(":0"))
            default = state.get(item.name, item.default)
            if value is None and default is not None:
                tensors.append(default)
                continue
            if value is None and is_unused:
                tensors.append(_nothing(item))
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
                tensors.append(self._tensor(*value, item, max_rank, what, field))
            except GradruleError as cause:
                findings += cause.findings
        if findings:
            raise GradruleError(findings)
        return tensors

    def _tensor(
        self,
        value: tensor_pb2.TensorSource,
        content: memoryview | None,
        item: Input,
        max_rank: int,
        what: str,
        field: str,
    ) -> np.ndarray:
        source = value.WhichOneof("source")
        if source not in ("inline_tensor", "blob"):
            fault = "lies in shared memory, which this request does not use" if source else "holds no tensor"
            raise error(
                errors_pb2.ERROR_REASON_INVALID_TENSOR,
                f"{what} {item.name!r} {fault}",
                node=item.name,
                field=field,
            )
        packed = value.inline_tensor.packed if value.inline_tensor.HasField("packed") else None
        inline = value.inline_tensor if packed is None else packed
        message = value.blob if source == "blob" else inline
        if message.dtype != item.dtype.base_dtype.as_datatype_enum:
            raise error(
                errors_pb2.ERROR_REASON_FEED_DTYPE,
                f"{what} {item.name!r} is {_dtype_name(message.dtype)}, but the tensor is {item.dtype.name}",
                node=item.name,
                field=field,
            )
        where = f"{what} {item.name!r}"
        shape = message.tensor_shape if isinstance(message, tensor_pb2.Tensor) else message.shape
        if len(shape.dim) > max_rank:
            raise error(
                errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                f"{where} has rank {len(shape.dim)}; {max_rank} is the most (--max-rank)",
                node=item.name,
                field=field,
            )
        if packed is not None:
            # The shape is checked first: a tensor of a wrong shape is not unpacked.
            _check_shape(tuple(dim.size for dim in shape.dim), item, where, field)
        array = (
            self._blobs.array(value.blob, where, field) if source == "blob" else _array(inline, content, where, field)
        )
        _check_shape(array.shape, item, where, field)
        return array


def _check_shape(shape: tuple[int, ...], item: Input, where: str, field: str) -> None:
    """Raises FEED_SHAPE if an input does not take values of the shape."""
    if not item.shape.is_compatible_with(shape):
        raise error(
            errors_pb2.ERROR_REASON_FEED_SHAPE,
            f"{where} has shape {shape}, but the tensor has {item.shape}",
            node=item.name,
            field=field,
        )


def _as_tensor(value: _Value, dtype: tf.DType) -> tf.Tensor:
    """Returns a tensor with its own memory: the memory of the request is freed once it is answered."""
    return value if isinstance(value, tf.Tensor) else tf.constant(value, dtype)


def _nothing(item: Input) -> np.ndarray:
    """Returns a value for an input on which no result depends."""
    shape = [size or 0 for size in item.shape] if item.shape.rank else []
    dtype = np.dtype(item.dtype.as_numpy_dtype)
    return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)


def _by_name(given: Sequence[tensor_pb2.NamedTensor], field: str, contents: LargeTensors, max_unpacking: int) -> _Given:
    """Returns values by name. Raises LIMIT_EXCEEDED if packed ones would take too much memory unpacked."""
    values = [(item.value, contents.get((field, index))) for index, item in enumerate(given)]
    packed = [
        (source.inline_tensor.packed, content) for source, content in values if source.inline_tensor.HasField("packed")
    ]
    if packed:
        _check_unpacking(packed, field, max_unpacking)
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


def _renamed(by_name: _Given, built: BuiltProgram) -> _Given:
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


def _array(
    message: tensor_pb2.Tensor | tensor_pb2.PackedTensor, content: memoryview | None, what: str, field: str
) -> np.ndarray:
    try:
        if isinstance(message, tensor_pb2.PackedTensor):
            return tensor_packing.unpack(message, content=content)
        return tensor_codec.to_numpy(message, content=content)
    except ValueError as cause:
        raise error(errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{what}: {cause}", field=field) from cause


def _params(built: BuiltProgram, settings: Iterable[link_pb2.ParamSetting]) -> list[_Value]:
    given: Mapping[tuple[int, str], rule_pb2.ParamValue] = {(item.rule, item.name): item.value for item in settings}
    read = [read_param_value(given[param.rule, param.name], param.name, "params") for param in built.params]
    return [np.asarray(value, np.float64) for value in read]


def _dtype_name(dtype: int) -> str:
    try:
        return str(tf.as_dtype(dtype).name)
    except TypeError:
        return f"of unknown type {dtype}"
