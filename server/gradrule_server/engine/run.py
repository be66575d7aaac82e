"""Runs a built program: from the request's tensors to the bytes of the answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import tensorflow as tf

# `gradrule.common.tensor_packing` imports it at first use, when the process may no longer open files.
import zstandard  # noqa: F401

from gradrule.common import tensor_packing
from gradrule.common.tensor_packing import Packing
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.checks import MAX_ANSWER_BYTES
from gradrule_server.engine.large_tensors import LargeTensors
from gradrule_server.engine.program import Arrays, BuiltProgram
from gradrule_server.engine.response_writer import NARROW_INT_BYTES, NARROW_INTS
from gradrule_server.engine.shared_memory import AnswerArea, AttachedMemories
from gradrule_server.engine.tf_errors import translate_errors
from gradrule_server.errors import error
from gradrule_server.link.framing import Buffer
from gradrule_server.link.v1 import link_pb2


def packing_of(message: tensor_pb2.Packing) -> tensor_packing.Packing | None:
    """Returns how the tensors of an answer are packed; None: they are not. Raises MALFORMED_REQUEST."""
    try:
        return tensor_packing.packing_of(message)
    except ValueError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"answer_packing: {cause}", field="answer_packing"
        ) from cause


T = TypeVar("T")

_COMPILED = evaluate_pb2.EvaluateResponse(jit=True).SerializeToString()


def run(
    built: BuiltProgram,
    request: link_pb2.RunRequest,
    contents: LargeTensors,
    reader: ArgumentReader,
    memories: AttachedMemories,
) -> list[Buffer]:
    """Runs the program; returns the parts of an `EvaluateResponse` with outputs, gradients, timings and device.

    `contents`: bytes of tensors that were cut out of the request. `memories`: shared memory of clients.
    """
    started = time.monotonic_ns()
    call = evaluate_pb2.EvaluateRequest.FromString(request.request)
    contents, answer_area = memories.open(call, contents)
    if request.blob_folder:
        reader = reader.for_folder(request.blob_folder)
    packing = packing_of(call.answer_packing) if call.HasField("answer_packing") else None
    arrays = translate_errors(lambda: reader.arrays(built, call, request.params, contents))
    jit = built.jit
    if jit is None:
        results = translate_errors(lambda: built.call(arrays))
        return respond(built, results, request.received_ns, started, packing=packing, answer_area=answer_area)
    results, is_compiled = translate_errors(lambda: jit.run(arrays))
    parts = respond(built, results, request.received_ns, started, packing=packing, answer_area=answer_area)
    if is_compiled:
        parts.append(_COMPILED)
    return parts


def respond(
    built: BuiltProgram,
    results: Arrays,
    received_ns: int,
    started_ns: int,
    batch_size: int = 0,
    *,
    packing: Packing | None = None,
    answer_area: AnswerArea | None = None,
) -> list[Buffer]:
    """Returns the parts of the `EvaluateResponse` with the results of a run. Raises MESSAGE_TOO_LARGE.

    `packing`: how results are packed. `room`: where large results are written instead, if they are not packed.
    """
    _check_bytes(built.writer.size_of(results))
    queue_ns = max(0, started_ns - received_ns)
    parts = built.writer.write(results, queue_ns, started_ns, packing=packing, answer_area=answer_area)
    if batch_size:
        parts.append(evaluate_pb2.EvaluateResponse(batch_size=batch_size).SerializeToString())
    return parts


def set_timings(timings: evaluate_pb2.Timings, received_ns: int, started_ns: int) -> None:
    """Sets the time that the call waited and the time that it has run until now."""
    timings.queue.FromNanoseconds(max(0, started_ns - received_ns))
    timings.run.FromNanoseconds(time.monotonic_ns() - started_ns)


def execute(built: BuiltProgram, function: Callable[[], T]) -> T:
    """Returns what a function of a program returns; small ones run on this thread. Raises as `translated`."""
    with tf_private.on_calling_thread() if built.small else contextlib.nullcontext():
        return translate_errors(function)


def check_size(results: Iterable[tf.Tensor]) -> None:
    """Raises MESSAGE_TOO_LARGE if the results do not fit into an answer. Copies nothing."""
    _check_bytes(sum(_size_of(tensor) for tensor in results))


def _check_bytes(size: int) -> None:
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
    return size * (NARROW_INT_BYTES if tensor.dtype.name in NARROW_INTS else tensor.dtype.size)
