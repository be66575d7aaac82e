"""One run of a built program: from the request's tensors to the bytes of an answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from gradrule import _tensors
from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2, tensor_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.answers import write_derivatives, write_tensor
from gradrule_server.engine.built import Built, Input
from gradrule_server.engine.checks import failed_check
from gradrule_server.engine.limits import MAX_ANSWER_BYTES
from gradrule_server.engine.names import readable
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.rules import read_param_value

T = TypeVar("T")

# As a varint, which a negative number fills.
_NARROW_INT_BYTES = 10
_NARROW_INTS = frozenset({"int2", "uint2", "int4", "uint4"})


def run(built: Built, request: link_pb2.RunRequest, device: str) -> bytes:
    """Runs the program; returns the bytes of an `EvaluateResponse` with outputs, gradients, timings and device."""
    started = time.monotonic_ns()
    call = evaluate_pb2.EvaluateRequest.FromString(request.request)
    results = execute(built, lambda: built.function(*arguments_of(built, call, request.params)))
    check_size(results)
    response = evaluate_pb2.EvaluateResponse(device=device)
    values = iter(results)
    for name in built.outputs:
        write_tensor(response.outputs.add(name=name).value.inline, next(values))
    write_derivatives(response, built, list(values))
    set_timings(response.timings, request.received_ns, started)
    return response.SerializeToString()


def set_timings(timings: evaluate_pb2.Timings, received_ns: int, started_ns: int) -> None:
    """Where the time went, until now."""
    timings.queue.FromNanoseconds(max(0, started_ns - received_ns))
    timings.run.FromNanoseconds(time.monotonic_ns() - started_ns)


def arguments_of(
    built: Built, call: evaluate_pb2.EvaluateRequest, params: Iterable[link_pb2.ParamSetting]
) -> list[tf.Tensor]:
    """What the built function takes, from what a call gives."""
    return [
        *_fed(call.feeds, built.inputs, built.unused, what="feed", field="feeds"),
        *grad_ys_of(call.grad_ys, built.grad_ys, stacked=built.stacked),
        *_directions(call, built),
        *_params(built, params),
    ]


def execute(built: Built, function: Callable[[], T]) -> T:
    """What a function of a program returns; a failed check as the error that it stands for, or EXECUTION_FAILED."""
    try:
        with tf_private.on_calling_thread() if built.small else contextlib.nullcontext():
            return function()
    except tf.errors.OpError as cause:
        found = failed_check(cause.message)
        if found is not None:
            raise found from cause
        raise error(errors_pb2.ERROR_REASON_EXECUTION_FAILED, readable(cause.message)) from cause


def grad_ys_of(given: Iterable[tensor_pb2.NamedTensor], inputs: Sequence[Input], *, stacked: bool) -> list[tf.Tensor]:
    """The fed upstream gradients; stacked, they are all of one length."""
    if stacked:
        inputs = [Input(item.name, item.dtype, tf.TensorShape([None]).concatenate(item.shape)) for item in inputs]
    tensors = _fed(given, inputs, [False] * len(inputs), what="grad_y", field="grad_ys")
    if stacked and len({int(tensor.shape[0]) for tensor in tensors}) > 1:
        sizes = ", ".join(f"{item.name!r}: {tensor.shape[0]}" for item, tensor in zip(inputs, tensors, strict=True))
        raise error(
            errors_pb2.ERROR_REASON_FEED_SHAPE,
            f"stacked grad_ys have one size on axis 0, the number of pull-backs; these have {sizes}",
            field="grad_ys",
        )
    return tensors


def _directions(call: evaluate_pb2.EvaluateRequest, built: Built) -> list[tf.Tensor]:
    is_jvp = built.kind == evaluate_pb2.DERIVATIVE_JVP
    what, field, given = ("tangent", "tangents", call.tangents) if is_jvp else ("vector", "vectors", call.vectors)
    return _fed(given, built.directions, [False] * len(built.directions), what=what, field=field)


def _fed(
    given: Iterable[tensor_pb2.NamedTensor], inputs: Sequence[Input], unused: Sequence[bool], *, what: str, field: str
) -> list[tf.Tensor]:
    """The given values in the order of `inputs`; all that is wrong with them comes as one error."""
    by_name = {item.name.removesuffix(":0"): item.value for item in given}
    findings: list[Finding] = []
    tensors: list[tf.Tensor] = []
    for item, is_unused in zip(inputs, unused, strict=True):
        value = by_name.get(item.name.removesuffix(":0"))
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
            tensors.append(_tensor(value, item, what, field))
        except GradruleError as cause:
            findings += cause.findings
    if findings:
        raise GradruleError(findings)
    return tensors


def _tensor(value: tensor_pb2.TensorSource, item: Input, what: str, field: str) -> tf.Tensor:
    if value.WhichOneof("source") is None:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{what} {item.name!r} holds no tensor", node=item.name, field=field
        )
    message = value.inline
    if message.dtype != item.dtype.base_dtype.as_datatype_enum:
        raise error(
            errors_pb2.ERROR_REASON_FEED_DTYPE,
            f"{what} {item.name!r} is {_dtype_name(message.dtype)}, but the tensor is {item.dtype.name}",
            node=item.name,
            field=field,
        )
    array = _array(message, f"{what} {item.name!r}", field)
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


def check_size(results: Iterable[tf.Tensor]) -> None:
    """MESSAGE_TOO_LARGE, before anything is copied."""
    size = sum(_size_of(tensor) for tensor in results)
    if size > MAX_ANSWER_BYTES:
        raise error(
            errors_pb2.ERROR_REASON_MESSAGE_TOO_LARGE,
            f"the answer's tensors take {size} bytes; a message holds at most {MAX_ANSWER_BYTES}",
            field="fetches",
        )


def _size_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return sum(len(value) for value in np.asarray(tensor.numpy(), object).flat)
    size: int = tensor.shape.num_elements()
    return size * (_NARROW_INT_BYTES if tensor.dtype.name in _NARROW_INTS else tensor.dtype.size)


def _dtype_name(dtype: int) -> str:
    try:
        return str(tf.as_dtype(dtype).name)
    except TypeError:
        return f"of unknown type {dtype}"
