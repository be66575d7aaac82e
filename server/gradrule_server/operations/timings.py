"""Where the time went, read out of an answer's bytes without parsing its tensors."""

from __future__ import annotations

from gradrule import _wire
from gradrule.v1 import evaluate_pb2
from gradrule_server.operations.request import EngineRun, current

_OF_EVALUATE = evaluate_pb2.EvaluateResponse.DESCRIPTOR.fields_by_name
EVALUATE_TIMINGS, EVALUATE_DEVICE = _OF_EVALUATE["timings"].number, _OF_EVALUATE["device"].number
# Caches, as metrics name them, in which a call that goes the short way finds its program.
_FOUND = {"programs": 1, "loaded": 1}
PULL_BACK_TIMINGS = evaluate_pb2.PullBackResponse.DESCRIPTOR.fields_by_name["timings"].number


def note_run(answer: bytes, handed_on_ns: int) -> None:
    """Notes an engine's `EvaluateResponse`. handed_on_ns: the `received_ns` that the engine was told."""
    request = current()
    if request is not None:
        request.ran(handed_on_ns, lambda: _engine_run(answer, EVALUATE_TIMINGS, EVALUATE_DEVICE))


def note_known(answer: bytes, handed_on_ns: int) -> None:
    """Notes the same of a call that found its program in both caches."""
    request = current()
    if request is not None:
        request.hits = _FOUND
        request.ran(handed_on_ns, lambda: _engine_run(answer, EVALUATE_TIMINGS, EVALUATE_DEVICE))


def note_pull_back(answer: bytes, handed_on_ns: int) -> None:
    """Notes an engine's `PullBackResponse`."""
    request = current()
    if request is not None:
        request.ran(handed_on_ns, lambda: _engine_run(answer, PULL_BACK_TIMINGS))


def _engine_run(answer: bytes, timings_field: int, device_field: int = 0) -> EngineRun:
    """The timings and the device in an answer; without a field for the device, none."""
    found = fields_of(answer, (timings_field, device_field))
    timings = evaluate_pb2.Timings.FromString(found.get(timings_field, b""))
    device = str(found.get(device_field, b""), "utf-8")
    return EngineRun(timings.queue.ToNanoseconds(), timings.run.ToNanoseconds(), device)


def fields_of(message: bytes, numbers: tuple[int, ...]) -> dict[int, bytes]:
    """The bytes of some length-delimited fields of a message, each that occurs last; all else is skipped, not read.

    `ValueError` where the bytes are no message.
    """
    found = _wire.fields(message, 0, len(message))
    return {number: bytes(message[start:end]) for number, start, end in found if number in numbers}
