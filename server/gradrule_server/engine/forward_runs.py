"""Keeps forward runs until they are pulled back."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.backward import TwoPartProgram
from gradrule_server.engine.build import shape_from
from gradrule_server.engine.derivatives import WIDTHS
from gradrule_server.engine.large_tensors import LargeTensors
from gradrule_server.engine.memory_estimate import saved_bytes
from gradrule_server.engine.program import BuiltProgram, Input
from gradrule_server.engine.response_writer import write_gradient, write_tensor
from gradrule_server.engine.run import check_size, execute, packing_of, set_timings
from gradrule_server.errors import error
from gradrule_server.link.v1 import link_pb2

# Number of released names that are remembered: a run that ends after its release is not kept.
_MAX_RELEASED = 4096


@dataclass(frozen=True, slots=True)
class _Kept:
    built: BuiltProgram
    split: TwoPartProgram
    saved: Sequence[tf.Tensor]


class ForwardRuns:
    """Keeps the saved tensors of forward runs, by handle, until the front end releases them. Thread-safe."""

    def __init__(self, reader: ArgumentReader) -> None:
        self._reader = reader
        self._kept: dict[str, _Kept] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def forward(
        self, built: BuiltProgram, request: link_pb2.ForwardRequest, contents: LargeTensors, device: str
    ) -> link_pb2.ForwardReply:
        """Runs the forward part of a program. `contents`: bytes of tensors that were cut out of the request."""
        if built.two_parts is None:
            raise AssertionError("the program was not built in two parts")
        started = time.monotonic_ns()
        call = evaluate_pb2.EvaluateRequest.FromString(request.run.request)
        split = built.two_parts
        reader = self._reader.for_folder(request.run.blob_folder)
        packing = packing_of(call.answer_packing)
        outputs, saved = execute(
            built, lambda: split.forward(reader.arguments(built, call, request.run.params, contents=contents))
        )
        check_size(outputs)
        response = evaluate_pb2.EvaluateResponse(device=device)
        for name, value in zip(built.outputs, outputs, strict=True):
            write_tensor(response.outputs.add(name=name).value.inline_tensor, value, packing)
        set_timings(response.timings, request.run.received_ns, started)
        kept_bytes = saved_bytes(saved)
        with self._lock:
            if request.handle in self._released:
                del self._released[request.handle]
            else:
                self._kept[request.handle] = _Kept(built, split, saved)
        return link_pb2.ForwardReply(response=response.SerializeToString(), kept_bytes=kept_bytes)

    def pull_back(self, request: link_pb2.PullBackRequest, contents: LargeTensors) -> evaluate_pb2.PullBackResponse:
        """Runs the backward part; returns gradients. Raises HANDLE_EXPIRED if the handle is unknown."""
        started = time.monotonic_ns()
        with self._lock:
            kept = self._kept.get(request.handle)
        if kept is None:
            message = f"the engine keeps nothing under the handle {request.handle!r}; run forward again"
            raise error(errors_pb2.ERROR_REASON_HANDLE_EXPIRED, message, field="handle")
        call = evaluate_pb2.PullBackRequest.FromString(request.request)
        stacked = call.stacked_grad_ys
        packing = packing_of(call.answer_packing)
        grad_ys = self._grad_ys(call, contents, kept.built, self._reader.for_folder(request.blob_folder))
        gradients = execute(kept.built, lambda: kept.split.backward(kept.saved, grad_ys, stacked=stacked))
        check_size(gradients)
        response = evaluate_pb2.PullBackResponse()
        rest = iter(gradients)
        for (x,), form in kept.split.stacked_layout if stacked else kept.split.layout:
            write_gradient(response.gradients.add(x=x), form, [next(rest) for _ in range(WIDTHS[form])], packing)
        set_timings(response.timings, request.received_ns, started)
        return response

    def release(self, name: str) -> None:
        """Releases a forward run, even one that has not ended yet."""
        with self._lock:
            if self._kept.pop(name, None) is None:
                self._released[name] = None
                while len(self._released) > _MAX_RELEASED:
                    self._released.popitem(last=False)

    @staticmethod
    def _grad_ys(
        call: evaluate_pb2.PullBackRequest, contents: LargeTensors, built: BuiltProgram, reader: ArgumentReader
    ) -> dict[int, tf.Tensor]:
        """Returns upstream gradients by the index of their y. Raises INVALID_DERIVATIVE for any other name."""
        ys = {_canonical(spec.name): index for index, spec in enumerate(built.specs["ys"])}
        given = [_canonical(item.name) for item in call.grad_ys]
        for name in given:
            if name not in ys or given.count(name) > 1:
                why = "twice" if name in ys else f"which is none of the ys: {', '.join(ys)}"
                raise error(
                    errors_pb2.ERROR_REASON_INVALID_DERIVATIVE, f"grad_ys names {name!r} {why}", field="grad_ys"
                )
        specs = [built.specs["ys"][ys[name]] for name in given]
        inputs = [Input(spec.name, tf.as_dtype(spec.dtype), shape_from(spec.shape)) for spec in specs]
        tensors = reader.grad_ys(call.grad_ys, inputs, contents, stacked=call.stacked_grad_ys, built=built)
        return {ys[name]: tensor for name, tensor in zip(given, tensors, strict=True)}


def _canonical(name: str) -> str:
    """Returns the short name of a tensor: `y` for `y:0`."""
    return name.removesuffix(":0")
