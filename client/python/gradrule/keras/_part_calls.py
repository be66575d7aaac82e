"""Calls the programs of a traced part on the server: forward, gradients, and gradients of gradients.

Each program is compiled at its first use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from gradrule._bridges.handle_release import release_with
from gradrule._builder.graph import Graph
from gradrule._builder.overrides import Override, Overrides
from gradrule._messages.call_arguments import CallParams, NoGradient
from gradrule._results.call_results import Sparse
from gradrule._rpc.shared_memory import MIN_SHARED_BYTES
from gradrule._rpc.sync_client.client import Client
from gradrule._rpc.sync_client.forward import ForwardHandle
from gradrule._rpc.sync_client.programs import Program
from gradrule.errors import (
    GradruleError,
    HandleExpiredError,
    ProgramNotFoundError,
    QuotaExceededError,
    UnsupportedError,
)
from gradrule.keras._part import Slot, TracedPart
from gradrule.keras._selection import Keyed, overrides_of

_T = TypeVar("_T")

_Kind: TypeAlias = Literal["forward", "kept", "gradient", "second"]
"""Kinds of programs of a part: outputs; outputs and gradients, for kept forward runs; gradients; second derivatives."""

# Time for which forward runs are not kept after the server refused one because its quota was used up.
_PAUSE_AFTER_REFUSAL_S = 60.0


@dataclass(slots=True, eq=False)
class RemoteOptions:
    """Holds the options of a remote layer.

    Attributes:
        client: Returns the client in use.
        overrides: Overrides within the part, or rules by layer and op type.
        params: Values of the rules' params by label.
        no_gradient: Policy for ops without a gradient, as for `client.evaluate`.
        timeout: Timeout of each request in seconds; None: the client's default.
        error: The last failure, without TensorFlow's wrapper; None if no call has failed.
    """

    client: Callable[[], Client]
    overrides: Overrides | Keyed | None
    params: CallParams | None
    no_gradient: NoGradient
    timeout: float | None
    error: GradruleError | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class ForwardRun:
    """Refers to one forward run of a part. The server releases it when the object is dropped.

    Attributes:
        handle: Handle of the run; None: the server keeps nothing, and a gradient runs the part again.
        refusal: Why the part has no gradient; raised when one is requested.
        pull_backs: Number of pull-backs, counted by graphs.
    """

    handle: ForwardHandle | None = None
    refusal: GradruleError | None = None
    pull_backs: int = 0


class PartCalls:
    """Calls the programs of a part. Arguments and results are arrays. Safe to share between threads.

    Attributes:
        xs: Inputs that get a gradient: the differentiable weights and inputs of the part.
        ys: Outputs that gradients start from.
        x_indices: Indices of the xs among the inputs.
        y_indices: Indices of the ys among the outputs.
    """

    def __init__(self, traced: TracedPart, options: RemoteOptions) -> None:
        self._traced = traced
        self._options = options
        self._lock = threading.Lock()
        self._programs: dict[_Kind, Program] = {}
        self._keeps_after = 0.0
        # Bytes of the outputs of the last forward pass.
        self._output_bytes = 0
        self.x_indices = [
            index
            for index, slot in enumerate(traced.inputs)
            if slot.is_differentiable and not slot.name.startswith("state_")
        ]
        self.y_indices = [index for index, slot in enumerate(traced.outputs) if slot.is_differentiable]
        self.xs = [traced.inputs[index] for index in self.x_indices]
        self.ys = [traced.outputs[index] for index in self.y_indices]

    def forward(self, *arrays: Any) -> list[Any]:
        """Returns the outputs for the inputs."""
        with self._recording():
            feeds, timeout = self._feeds(arrays), self._options.timeout
            result = self._call("forward", lambda program: program.evaluate(feeds, timeout=timeout))
            return self._outputs(result.outputs)

    def forward_and_keep(self, run: ForwardRun, *arrays: Any) -> list[Any]:
        """Returns the outputs for the inputs, and keeps the run on the server if that is possible.

        run: gets the handle, or the reason why there is no gradient.
        """
        with self._recording():
            try:
                self._program("kept")
            except GradruleError as refusal:
                # The gradient may never be requested.
                run.refusal = refusal
                return self.forward(*arrays)
            if self._is_repeatable("kept") and self._is_slower_to_keep(arrays):
                return self.forward(*arrays)
            feeds, options = self._feeds(arrays), self._options

            def start(program: Program) -> ForwardHandle:
                return program.forward(feeds, params=options.params, repeat_if_lost=False, timeout=options.timeout)

            try:
                run.handle = self._call("kept", start)
                release_with(run, run.handle)
            except QuotaExceededError:
                if not self._is_repeatable("kept"):
                    raise
                self._keeps_after = time.monotonic() + _PAUSE_AFTER_REFUSAL_S
                return self.forward(*arrays)
            return self._outputs(run.handle.outputs)

    def pull_back(self, run: ForwardRun, *arrays: Any, is_last: bool = False) -> list[Any]:
        """Returns the gradients of the xs, from the inputs and the upstream gradients of the ys.

        Args:
            run: The forward run. If the server no longer has it, the part runs again.
            arrays: Inputs and upstream gradients.
            is_last: Whether the server releases the run afterwards.

        Raises:
            HandleExpiredError: The server no longer has the run, and the part draws random numbers.
        """
        with self._recording():
            if run.refusal is not None:
                raise run.refusal
            feeds, grad_ys, _ = self._split(arrays)
            options = self._options
            if run.handle is not None:
                try:
                    gradients = run.handle.vjp(grad_ys, close=is_last, timeout=options.timeout)
                except HandleExpiredError:
                    if not self._is_repeatable("gradient"):
                        raise
                else:
                    return self._gradients(gradients)
            self._require_repeatable("gradient", "the forward run was not kept")
            result = self._call(
                "gradient",
                lambda program: program.evaluate(
                    feeds, grad_ys=grad_ys, params=options.params, timeout=options.timeout
                ),
            )
            return self._gradients(result.gradients)

    def second_derivatives(self, *arrays: Any) -> list[Any]:
        """Returns the gradients, by the xs and the upstream gradients, of the sum over the xs of gradient times vector.

        arrays: Inputs, upstream gradients of the ys, vectors of the xs.
        """
        with self._recording():
            feeds, upstream, vectors = self._split(arrays)
            self._require_repeatable("second", "second derivatives run the part again")
            fed = {**feeds, **{_upstream_name(name): value for name, value in upstream.items()}}
            options = self._options
            found = self._call(
                "second",
                lambda program: program.hvp(
                    fed, vectors, params=options.params, every_order=True, timeout=options.timeout
                ),
            )
            return self._by_slot(found, [*self.xs, *(_upstream_slot(slot) for slot in self.ys)])

    def sparse_gradients(self) -> frozenset[str]:
        """Returns the names of the xs whose gradients are slices."""
        with self._lock:
            program = self._programs.get("gradient") or self._programs.get("kept")
        if program is None:
            with self._recording():
                program = self._program("kept")
        return frozenset(program.sparse_gradients)

    def gradient_slots(self) -> list[Slot]:
        """Returns the tensors of the gradients: one if dense, otherwise values, indices and shape of slices."""
        sparse = self.sparse_gradients()
        return [part for slot in self.xs for part in (_slices(slot) if slot.name in sparse else [slot])]

    def is_repeatable(self) -> bool:
        """Returns whether a gradient may run the part again: it draws no random numbers without a seed."""
        try:
            return self._is_repeatable("gradient")
        except GradruleError:
            # The part has no gradient. A pull-back raises this error; the forward pass does not need it.
            return True

    def _is_slower_to_keep(self, arrays: Sequence[Any]) -> bool:
        """Returns whether running forward twice is the better choice.

        Requests of handles send large tensors inline, which takes longer than a second forward pass through memory that
        is shared with the server (docs/design/decisions.md has the figures).
        """
        if time.monotonic() < self._keeps_after:
            return True
        size = sum(getattr(array, "nbytes", 0) for array in arrays) + self._output_bytes
        return size >= MIN_SHARED_BYTES and self._options.client().may_share_memory

    def release(self) -> None:
        """Deletes the programs on the server; the next call compiles them again."""
        with self._lock:
            programs, self._programs = list(self._programs.values()), {}
        for program in programs:
            try:
                program.delete(timeout=self._options.timeout)
            except ProgramNotFoundError:
                # Another layer with the same content has deleted the program.
                continue

    def _call(self, kind: _Kind, function: Callable[[Program], _T]) -> _T:
        """Calls a program; compiles it again if the server no longer has it."""
        program = self._program(kind)
        try:
            return function(program)
        except ProgramNotFoundError:
            # The server has deleted the program or was restarted.
            with self._lock:
                if self._programs.get(kind) is program:
                    del self._programs[kind]
        return function(self._program(kind))

    def _program(self, kind: _Kind) -> Program:
        with self._lock:
            program = self._programs.get(kind)
            if program is None:
                program = self._programs[kind] = self._compile(kind)
            return program

    def _compile(self, kind: _Kind) -> Program:
        options, graph = self._options, self._traced.graph
        client, timeout = options.client(), options.timeout
        outputs = [slot.name for slot in self._traced.outputs]
        if kind == "forward":
            return client.compile(graph, fetches=outputs, timeout=timeout)
        ys, xs = [slot.name for slot in self.ys], [slot.name for slot in self.xs]
        overrides = overrides_of(graph, options.overrides)
        if kind == "second":
            graph, ys, added = _with_products(graph, self.ys)
            xs += [_upstream_name(slot.name) for slot in self.ys]
            overrides = _exempting(added, overrides)
        return client.compile(
            graph,
            fetches=outputs if kind == "kept" else (),
            ys=ys,
            xs=xs,
            unconnected_gradients="zero",
            overrides=overrides,
            no_gradient=options.no_gradient,
            timeout=timeout,
        )

    def _is_repeatable(self, kind: _Kind) -> bool:
        return self._program(kind).repeatable

    def _require_repeatable(self, kind: _Kind, why: str) -> None:
        if not self._is_repeatable(kind):
            raise UnsupportedError(
                f"{why}, and the part draws random numbers, which would be others. Draw them with keras.random and a "
                "keras.random.SeedGenerator of the layer, as keras.layers.Dropout does, or with "
                "tf.random.stateless_uniform and a seed that is an input"
            )

    def _feeds(self, arrays: Sequence[Any]) -> dict[Any, Any]:
        return dict(zip((slot.name for slot in self._traced.inputs), arrays, strict=True))

    def _split(self, arrays: Sequence[Any]) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
        """Returns inputs, upstream gradients of the ys and vectors of the xs, by name."""
        inputs, ys = len(self._traced.inputs), len(self.ys)
        upstream = zip((slot.name for slot in self.ys), arrays[inputs : inputs + ys], strict=True)
        vectors = zip((slot.name for slot in self.xs), arrays[inputs + ys :], strict=False)
        return self._feeds(arrays[:inputs]), dict(upstream), dict(vectors)

    def _gradients(self, values: Mapping[str, Any]) -> list[Any]:
        """Returns the tensors of the gradients, see `gradient_slots`."""
        found = []
        for slot in self.xs:
            value = values[slot.name]
            if slot.name in self.sparse_gradients():
                found += [np.asarray(value.values, slot.dtype.as_numpy_dtype), np.asarray(value.indices, np.int64)]
                found.append(np.asarray(value.dense_shape, np.int64))
            else:
                found.append(np.asarray(value, slot.dtype.as_numpy_dtype))
        return found

    def _outputs(self, values: Mapping[str, Any]) -> list[Any]:
        outputs = self._by_slot(values, self._traced.outputs)
        self._output_bytes = sum(output.nbytes for output in outputs)
        return outputs

    @staticmethod
    def _by_slot(values: Mapping[str, Any], slots: Sequence[Slot]) -> list[Any]:
        return [np.asarray(_dense(values[slot.name]), slot.dtype.as_numpy_dtype) for slot in slots]

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Records the error that leaves the context."""
        try:
            yield
        except GradruleError as error:
            self._options.error = error
            raise


def _with_products(graph: Graph, ys: Sequence[Slot]) -> tuple[Graph, list[str], list[str]]:
    """Returns a copy of a graph with the product of each y and its upstream gradient, which is an input.

    The gradient of the products' sum is the gradient of the ys with these upstream gradients. Also returns the names of
    the products and of all added nodes.
    """
    copy = Graph.from_bytes(graph.to_bytes_without_overrides())
    copy.aliases.update(graph.aliases)
    copy.layers.extend(graph.layers)
    products, added = [], []
    for slot in ys:
        shape = None if slot.shape.rank is None else slot.shape.as_list()
        upstream = factor = copy.placeholder(_upstream_name(slot.name), slot.dtype.name, shape)
        if slot.dtype.is_complex:
            factor = copy.op("Conj", upstream)
            added.append(factor.node)
        product = copy.op("Mul", copy.tensor(graph.aliases.get(slot.name, slot.name)), factor)
        added.append(product.node)
        if slot.dtype.is_complex:
            product = copy.op("Real", product)
            added.append(product.node)
        products.append(product.name)
    return copy, products, added


def _exempting(nodes: Sequence[str], overrides: Overrides | None) -> Overrides | None:
    """Returns the overrides without effect on some nodes; the first match wins."""
    if not overrides:
        return None
    given = [overrides] if not isinstance(overrides, Sequence) else overrides
    return [Override("default", node=list(nodes), optional=True), *given]


def _upstream_name(y: str) -> str:
    return f"upstream_{y}"


def _upstream_slot(slot: Slot) -> Slot:
    return Slot(_upstream_name(slot.name), slot.dtype, slot.shape)


def _slices(slot: Slot) -> list[Slot]:
    """Returns values, indices and shape of slices of a tensor."""
    return [
        Slot(slot.name, slot.dtype, tf.TensorShape([None]).concatenate(slot.shape[1:])),
        Slot(slot.name, tf.int64, tf.TensorShape([None])),
        Slot(slot.name, tf.int64, tf.TensorShape([slot.shape.rank])),
    ]


def _dense(gradient: Any) -> Any:
    return gradient.to_dense() if isinstance(gradient, Sparse) else gradient
