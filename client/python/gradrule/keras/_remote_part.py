"""Runs a traced part on the server from TensorFlow, eagerly and in graphs, so that TensorFlow can differentiate it."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from gradrule._bridges.tf_functions import listed, run_on_host, without_derivative
from gradrule._tracing import tf_private
from gradrule.keras._part import Slot, TracedPart
from gradrule.keras._part_calls import ForwardRun, PartCalls, RemoteOptions

# Forward runs of graphs that wait for their pull-back; a loop in a graph makes one in each iteration. A pull-back of an
# older run repeats the forward pass, or fails if the part draws random numbers.
_MAX_WAITING_RUNS = 512

_NO_THIRD = "a RemoteLayer gives first and second derivatives; run the part locally for higher ones"


@dataclass(slots=True, eq=False)
class _GraphCall:
    """Describes one call of the part in a graph; complete before the graph runs.

    Attributes:
        graph: The graph of the call.
        pull_backs: Number of nodes of the same graph that pull back through the call.
        is_pulled_elsewhere: Whether nodes of other graphs do so, any number of times: the gradient of a `tf.function`
            whose caller holds the tape, of a loop or of a branch.
    """

    graph: weakref.ref[Any]
    pull_backs: int = 0
    is_pulled_elsewhere: bool = False

    def add_pull_back(self) -> None:
        """Counts a node of the current graph."""
        if tf.compat.v1.get_default_graph() is self.graph():
            self.pull_backs += 1
        else:
            self.is_pulled_elsewhere = True


@dataclass(slots=True, eq=False)
class RemotePart:
    """Runs one traced part on the server.

    A forward run whose gradient may be requested is kept by the server, and the gradient is pulled back through it, so
    the part runs once and random numbers are drawn once. Without a gradient, the server keeps nothing.
    """

    traced: TracedPart
    calls: PartCalls
    _runs: OrderedDict[int, tuple[_GraphCall, ForwardRun]] = field(default_factory=OrderedDict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def create(cls, traced: TracedPart, options: RemoteOptions) -> RemotePart:
        """Returns the part, which compiles its programs at their first use."""
        return cls(traced, PartCalls(traced, options))

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the part's outputs for its inputs; differentiable by TensorFlow, twice."""
        slots = self.traced.outputs
        if not (self.calls.xs and self.calls.ys):
            return run_on_host(self.calls.forward, tensors, slots)

        @tf.custom_gradient
        def remote(*given: Any) -> tuple[list[Any], Callable[..., Any]]:
            results, pull_back = self._eager(given) if tf.executing_eagerly() else self._in_graph(given)

            def backward(*upstream: Any) -> list[Any]:
                dys = [
                    tf.zeros_like(results[index]) if upstream[index] is None else upstream[index]
                    for index in self.calls.y_indices
                ]
                return self._by_input(self._gradients(pull_back, given, dys))

            return results, backward

        return listed(remote(*tensors))

    def release(self) -> None:
        """Deletes the programs on the server; the next call compiles them again."""
        self.calls.release()

    def _eager(self, given: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Runs forward now; returns the outputs, and a function that pulls back through this run."""
        # The run is released when TensorFlow drops the function, which the tape holds.
        run = ForwardRun()
        keep = self.calls.forward_and_keep if tf_private.is_recorded(given) else None
        function = self.calls.forward if keep is None else functools.partial(keep, run)

        def pull_back(tensors: Sequence[Any]) -> list[Any]:
            return run_on_host(functools.partial(self.calls.pull_back, run), tensors, self.calls.gradient_slots())

        return run_on_host(function, given, self.traced.outputs), pull_back

    def _in_graph(self, given: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Adds a node that runs forward; returns its outputs, and a function that adds a node that pulls back."""
        call = _GraphCall(weakref.ref(tf.compat.v1.get_default_graph()))
        number_slot = Slot("number", tf.int64, tf.TensorShape([]))
        *results, number = run_on_host(
            functools.partial(self._forward_in_graph, call), given, [*self.traced.outputs, number_slot]
        )

        def pull_back(tensors: Sequence[Any]) -> list[Any]:
            call.add_pull_back()
            function = functools.partial(self._pull_back_in_graph, call)
            # A node has a fixed number of results, so the program must be compiled before.
            return run_on_host(function, [number, *tensors], self.calls.gradient_slots())

        return results, pull_back

    def _forward_in_graph(self, call: _GraphCall, *arrays: Any) -> list[Any]:
        """Runs forward; returns the outputs and the number of the kept run, 0 for none."""
        # Pull-backs of other graphs may never run, or run several times, so their runs would be kept too long.
        if not call.pull_backs and (not call.is_pulled_elsewhere or self.calls.is_repeatable()):
            return [*self.calls.forward(*arrays), tf.int64.as_numpy_dtype(0)]
        with self._lock:
            for number in [number for number, (of, run) in self._runs.items() if of is call and run.pull_backs]:
                del self._runs[number]
        run, number = ForwardRun(), next(self._numbers)
        outputs = self.calls.forward_and_keep(run, *arrays)
        with self._lock:
            self._runs[number] = call, run
            while len(self._runs) > _MAX_WAITING_RUNS:
                self._runs.popitem(last=False)
        return [*outputs, tf.int64.as_numpy_dtype(number)]

    def _pull_back_in_graph(self, call: _GraphCall, number: Any, *arrays: Any) -> list[Any]:
        with self._lock:
            _, run = self._runs.get(int(number), (call, ForwardRun()))
            run.pull_backs += 1
            is_last = not call.is_pulled_elsewhere and run.pull_backs >= call.pull_backs
            if is_last:
                self._runs.pop(int(number), None)
        return self.calls.pull_back(run, *arrays, is_last=is_last)

    def _gradients(
        self, pull_back: Callable[[Sequence[Any]], list[Any]], given: Sequence[Any], dys: Sequence[Any]
    ) -> list[Any]:
        """Returns the gradients of the xs; differentiable once more, by the inputs and the upstream gradients."""

        @tf.custom_gradient
        def first(*tensors: Any) -> tuple[list[Any], Callable[..., Any]]:
            parts = pull_back(tensors)

            def second(*directions: Any) -> list[Any]:
                vectors = self._grouped(parts, directions, _dense_vector, _slices_vector)
                found = self._second_derivatives([*tensors, *vectors])
                count = len(self.calls.xs)
                return [*self._by_input(found[:count]), *found[count:]]

            return parts, second

        parts = listed(first(*given, *dys))
        return self._grouped(parts, parts, lambda part, _: part, lambda slices, _: tf.IndexedSlices(*slices))

    def _grouped(
        self,
        parts: Sequence[Any],
        others: Sequence[Any],
        of_dense: Callable[[Any, Any], Any],
        of_slices: Callable[[Sequence[Any], Sequence[Any]], Any],
    ) -> list[Any]:
        """Returns what the functions make of the tensors of each gradient and of as many other values."""
        sparse = self.calls.sparse_gradients()
        pairs = zip(parts, others, strict=True)
        found = []
        for slot in self.calls.xs:
            if slot.name in sparse:
                slices, values = zip(*(next(pairs) for _ in range(3)), strict=True)
                found.append(of_slices(slices, values))
            else:
                found.append(of_dense(*next(pairs)))
        return found

    def _second_derivatives(self, tensors: Sequence[Any]) -> list[Any]:
        slots = [*self.calls.xs, *self.calls.ys]
        compute = functools.partial(run_on_host, self.calls.second_derivatives, specs=slots)
        return without_derivative(lambda *given: compute(given), _NO_THIRD)(*tensors)

    def _by_input(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns one gradient per input; None for those that are not differentiated."""
        by_index = dict(zip(self.calls.x_indices, gradients, strict=True))
        return [by_index.get(index) for index in range(len(self.traced.inputs))]


def _dense_vector(gradient: Any, direction: Any) -> Any:
    """Returns the vector of an x with a dense gradient."""
    return tf.zeros_like(gradient) if direction is None else direction


def _slices_vector(slices: Sequence[Any], directions: Sequence[Any]) -> Any:
    """Returns the vector of an x whose gradient is slices: a tensor with the directions of the values as its rows.

    Several slices of one row must have the same direction, as they have after the slices were made a tensor.
    """
    values, indices, shape = slices
    direction = directions[0]
    if direction is None:
        return tf.zeros(shape, values.dtype)
    vector = tf.tensor_scatter_nd_update(tf.zeros(shape, values.dtype), indices[:, None], direction)
    check = tf.debugging.assert_equal(
        tf.gather(vector, indices),
        direction,
        "second derivatives of a RemoteLayer by slices of a gradient: make the gradient a tensor first, with "
        "tf.convert_to_tensor",
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(vector)
