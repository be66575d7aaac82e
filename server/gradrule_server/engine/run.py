"""One run of a built program: from the request's tensors to the bytes of an answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from gradrule import _tensors
from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2, tensor_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.blobs import BlobReader
from gradrule_server.engine.build import DENSE, SPARSE, UNCONNECTED, Built, Input
from gradrule_server.engine.checks import failed_check
from gradrule_server.engine.names import readable
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.rules import read_param_value

# A message ends at 2 GiB; the rest is for names and for what the front end adds.
_MAX_ANSWER_BYTES = 2**31 - 2**26
# As a varint, which a negative number fills.
_NARROW_INT_BYTES = 10
_NARROW_INTS = frozenset({"int2", "uint2", "int4", "uint4"})


def run(built: Built, request: link_pb2.RunRequest, device: str, blobs: BlobReader) -> bytes:
    """Runs the program; returns the bytes of an `EvaluateResponse` with outputs, gradients, timings and device."""
    started = time.monotonic_ns()
    call = evaluate_pb2.EvaluateRequest.FromString(request.request)
    arguments = [
        *_fed(_renamed(call.feeds, built), built.inputs, built.unused, blobs, what="feed", field="feeds"),
        *_fed(
            _by_name(call.grad_ys), built.grad_ys, [False] * len(built.grad_ys), blobs, what="grad_y", field="grad_ys"
        ),
        *_params(built, request.params),
    ]
    results = _execute(built, arguments)
    _check_size(results)
    response = evaluate_pb2.EvaluateResponse(device=device)
    values = iter(results)
    for name in built.outputs:
        _write(response.outputs.add(name=name).value.inline, next(values))
    for x, form in built.gradients:
        gradient = response.gradients.add(x=x)
        if form == DENSE:
            _write(gradient.dense, next(values))
        elif form == SPARSE:
            _write(gradient.sparse.values, next(values))
            _write(gradient.sparse.indices, next(values))
            _write(gradient.sparse.dense_shape, next(values))
        elif form == UNCONNECTED:
            gradient.unconnected.SetInParent()
        else:
            gradient.not_differentiable.SetInParent()
    finished = time.monotonic_ns()
    response.timings.queue.FromNanoseconds(max(0, started - request.received_ns))
    response.timings.run.FromNanoseconds(finished - started)
    return response.SerializeToString()


def _execute(built: Built, arguments: list[tf.Tensor]) -> Sequence[tf.Tensor]:
    try:
        with tf_private.on_calling_thread() if built.small else contextlib.nullcontext():
            results: Sequence[tf.Tensor] = built.function(*arguments)
    except tf.errors.OpError as cause:
        found = failed_check(cause.message)
        if found is not None:
            raise found from cause
        raise error(errors_pb2.ERROR_REASON_EXECUTION_FAILED, readable(cause.message)) from cause
    return results


_Given: TypeAlias = Mapping[str, tensor_pb2.TensorSource]


def _by_name(given: Iterable[tensor_pb2.NamedTensor]) -> _Given:
    return {item.name.removesuffix(":0"): item.value for item in given}


def _renamed(given: Iterable[tensor_pb2.NamedTensor], built: Built) -> _Given:
    """Feeds by the names of inputs; UNKNOWN_FEED where one input is fed under two of its names."""
    by_name = _by_name(given)
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


def _fed(
    by_name: _Given, inputs: Sequence[Input], unused: Sequence[bool], blobs: BlobReader, *, what: str, field: str
) -> list[tf.Tensor]:
    """The given values in the order of `inputs`; all that is wrong with them comes as one error."""
    findings: list[Finding] = []
    tensors: list[tf.Tensor] = []
    for item, is_unused in zip(inputs, unused, strict=True):
        value = by_name.get(item.name.removesuffix(":0"))
        if value is None and item.default is not None:
            tensors.append(item.default)
            continue
        if value is None and is_unused:
            tensors.append(tf.zeros([size or 0 for size in item.shape] if item.shape.rank else [], item.dtype))
            continue
        if value is None:
            wanted = f"{item.dtype.name} of shape {item.shape}"
            findings.append(
                Finding(
                    errors_pb2.ERROR_REASON_MISSING_FEED, f"{what} {item.name!r} is missing: {wanted}", item.name, field
                )
            )
            continue
        try:
            tensors.append(_tensor(value, item, blobs, what, field))
        except GradruleError as cause:
            findings += cause.findings
    if findings:
        raise GradruleError(findings)
    return tensors


def _tensor(value: tensor_pb2.TensorSource, item: Input, blobs: BlobReader, what: str, field: str) -> tf.Tensor:
    source = value.WhichOneof("source")
    if source is None:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{what} {item.name!r} holds no tensor", node=item.name, field=field
        )
    message = value.inline if source == "inline" else value.blob
    if message.dtype != item.dtype.base_dtype.as_datatype_enum:
        raise error(
            errors_pb2.ERROR_REASON_FEED_DTYPE,
            f"{what} {item.name!r} is {_dtype_name(message.dtype)}, but the tensor is {item.dtype.name}",
            node=item.name,
            field=field,
        )
    where = f"{what} {item.name!r}"
    array = _array(value.inline, where, field) if source == "inline" else blobs.array(value.blob, where, field)
    if not item.shape.is_compatible_with(array.shape):
        raise error(
            errors_pb2.ERROR_REASON_FEED_SHAPE,
            f"{what} {item.name!r} has shape {tf.TensorShape(array.shape)}, but the tensor has {item.shape}",
            node=item.name,
            field=field,
        )
    return tf.constant(array, dtype=item.dtype)


def _array(message: tensor_pb2.Tensor, what: str, field: str) -> np.ndarray:
    try:
        return _tensors.to_numpy(message)
    except ValueError as cause:
        raise error(errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{what}: {cause}", field=field) from cause


def _params(built: Built, settings: Iterable[link_pb2.ParamSetting]) -> list[tf.Tensor]:
    given: Mapping[tuple[int, str], rule_pb2.ParamValue] = {(item.rule, item.name): item.value for item in settings}
    tensors: list[tf.Tensor] = []
    for param in built.params:
        value = read_param_value(given[param.rule, param.name], param.name, "params")
        tensors.append(tf.constant(value, tf.float64))
    return tensors


def _check_size(results: Iterable[tf.Tensor]) -> None:
    """MESSAGE_TOO_LARGE, before anything is copied."""
    size = sum(_size_of(tensor) for tensor in results)
    if size > _MAX_ANSWER_BYTES:
        raise error(
            errors_pb2.ERROR_REASON_MESSAGE_TOO_LARGE,
            f"the answer's tensors take {size} bytes; a message holds at most {_MAX_ANSWER_BYTES}",
            field="fetches",
        )


def _size_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return sum(len(value) for value in np.asarray(tensor.numpy(), object).flat)
    size: int = tensor.shape.num_elements()
    return size * (_NARROW_INT_BYTES if tensor.dtype.name in _NARROW_INTS else tensor.dtype.size)


def _write(message: tensor_pb2.Tensor, tensor: tf.Tensor) -> None:
    # A scalar string comes as bytes, not as an array.
    _tensors.write_message(message, np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None))
    if tensor.dtype.is_quantized:
        # In NumPy such values are plain integers.
        message.dtype = tensor.dtype.as_datatype_enum


def _dtype_name(dtype: int) -> str:
    try:
        return str(tf.as_dtype(dtype).name)
    except TypeError:
        return f"of unknown type {dtype}"
