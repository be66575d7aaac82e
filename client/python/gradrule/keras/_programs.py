"""What a remote layer asks of its server: programs of its part, compiled at their first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule._client import Client, Program
from gradrule._overrides import Overrides
from gradrule._requests import CallParams
from gradrule._results import Result, Sparse
from gradrule.errors import GradruleError, ProgramNotFoundError
from gradrule.keras._part import Slot, TracedPart
from gradrule.keras._selection import Keyed, overrides_of


@dataclass(slots=True, eq=False)
class RemoteWords:
    """What a remote layer was given besides its part. error: the last failure, which TensorFlow may have wrapped."""

    client: Callable[[], Client]
    overrides: Overrides | Keyed | None
    params: CallParams | None
    no_gradient: str
    timeout: float | None
    error: GradruleError | None = None


@dataclass(slots=True, eq=False)
class RemotePart:
    """One traced part on the server."""

    traced: TracedPart
    words: RemoteWords
    _programs: dict[bool, Program] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Outputs for the tensors that go in; gradients flow through."""
        traced = self.traced
        names = {slot.name for slot in self._xs()}
        wanted = {index for index, slot in enumerate(traced.inputs) if slot.name in names}
        differentiable = [index for index, slot in enumerate(traced.outputs) if slot.is_differentiable]

        @tf.custom_gradient
        def remote(*given: Any) -> tuple[list[Any], Callable[..., Any]]:
            results = _run(self._forward, given, traced.outputs)

            def backward(*upstream: Any) -> list[Any]:
                given_ys = [
                    tf.zeros_like(results[index]) if upstream[index] is None else upstream[index]
                    for index in differentiable
                ]
                found = iter(self._gradients([*given, *given_ys]))
                return [next(found) if index in wanted else None for index in range(len(given))]

            return results, backward

        outputs: list[Any] = remote(*tensors)
        return outputs if isinstance(outputs, list | tuple) else [outputs]

    def release(self) -> None:
        """Makes the server forget the programs; the next call compiles them again."""
        with self._lock:
            programs, self._programs = list(self._programs.values()), {}
        for program in programs:
            try:
                program.delete(timeout=self.words.timeout)
            except ProgramNotFoundError:
                # Another layer of the same content has released it.
                continue

    def _xs(self) -> list[Slot]:
        """Inputs that get a gradient: weights and the part's inputs, as far as they are differentiable."""
        return [slot for slot in self.traced.inputs if slot.is_differentiable and not slot.name.startswith("state_")]

    def _ys(self) -> list[Slot]:
        """Outputs that gradients come back from: not the new state, which training reads off."""
        return [slot for slot in self.traced.outputs if slot.is_differentiable]

    def _gradients(self, tensors: Sequence[Any]) -> list[Any]:
        @tf.custom_gradient
        def first_order(*given: Any) -> tuple[list[Any], Callable[..., Any]]:
            def second_order(*_: Any) -> Any:
                raise NotImplementedError(
                    "a RemoteLayer gives first derivatives only; gr.trace and the client give further ones"
                )

            return _run(self._backward, given, self._xs()), second_order

        found: list[Any] = first_order(*tensors) if self._xs() else []
        return found if isinstance(found, list | tuple) else [found]

    def _forward(self, *arrays: Any) -> list[Any]:
        feeds = dict(zip((slot.name for slot in self.traced.inputs), arrays, strict=True))
        result = self._evaluate(False, feeds, None)
        return [_as(result.outputs[slot.name], slot) for slot in self.traced.outputs]

    def _backward(self, *arrays: Any) -> list[Any]:
        count = len(self.traced.inputs)
        feeds = dict(zip((slot.name for slot in self.traced.inputs), arrays[:count], strict=True))
        upstream = dict(zip((slot.name for slot in self._ys()), arrays[count:], strict=True))
        result = self._evaluate(True, feeds, upstream)
        return [_as(_dense(result.gradients[slot.name]), slot) for slot in self._xs()]

    def _evaluate(self, differentiates: bool, feeds: Mapping[Any, Any], grad_ys: dict[Any, Any] | None) -> Result:
        words = self.words
        params = words.params if differentiates else None
        try:
            program = self._program(differentiates)
            try:
                return program.evaluate(feeds, grad_ys=grad_ys, params=params, timeout=words.timeout)
            except ProgramNotFoundError:
                # The server has forgotten it, or is a new one.
                with self._lock:
                    self._programs.pop(differentiates, None)
                program = self._program(differentiates)
                return program.evaluate(feeds, grad_ys=grad_ys, params=params, timeout=words.timeout)
        except GradruleError as error:
            words.error = error
            raise

    def _program(self, differentiates: bool) -> Program:
        with self._lock:
            program = self._programs.get(differentiates)
            if program is None:
                program = self._programs[differentiates] = self._compiled(differentiates)
            return program

    def _compiled(self, differentiates: bool) -> Program:
        words, graph = self.words, self.traced.graph
        if not differentiates:
            fetches = [slot.name for slot in self.traced.outputs]
            return words.client().compile(graph, fetches=fetches, timeout=words.timeout)
        return words.client().compile(
            graph,
            ys=[slot.name for slot in self._ys()],
            xs=[slot.name for slot in self._xs()],
            unconnected_gradients="zero",
            overrides=overrides_of(graph, words.overrides),
            no_gradient=words.no_gradient,
            timeout=words.timeout,
        )


def _run(function: Callable[..., list[Any]], tensors: Sequence[Any], slots: Sequence[Slot]) -> list[Any]:
    """A function of arrays, run on tensors: at once where they have values, as a node of the graph otherwise."""
    dtypes = [slot.dtype for slot in slots]
    if tf.executing_eagerly():
        found = [tf.constant(value, dtype) for value, dtype in zip(function(*_arrays(tensors)), dtypes, strict=True)]
    else:
        found = tf.numpy_function(function, list(tensors), dtypes)
    for tensor, slot in zip(found, slots, strict=True):
        tensor.set_shape(slot.shape)
    return list(found)


def _arrays(tensors: Sequence[Any]) -> list[Any]:
    return [tensor.numpy() for tensor in tensors]


def _as(value: Any, slot: Slot) -> Any:
    return np.asarray(value, slot.dtype.as_numpy_dtype)


def _dense(gradient: Any) -> Any:
    return gradient.to_dense() if isinstance(gradient, Sparse) else gradient
