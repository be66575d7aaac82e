"""Traces part of a Keras model to a graph without state, and runs it on a server.

Weights and state are inputs of the graph, the new state is an output. Each program is compiled at its first use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from gradrule._builder.graph import Graph
from gradrule._builder.overrides import Overrides
from gradrule._messages.call_arguments import CallParams, NoGradient
from gradrule._results.call_results import Result
from gradrule._rpc.sync_client.client import Client
from gradrule._rpc.sync_client.programs import Program
from gradrule._tracing import functions
from gradrule._tracing.keras_models import layer_scopes
from gradrule.errors import GradruleError, ProgramNotFoundError, UnsupportedError
from gradrule.keras._selection import Keyed, overrides_of
from gradrule.v1 import graph_pb2

_RANDOM_OPS = frozenset(
    {"Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle"}
    | {"RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "LogUniformCandidateSampler"}
    | {"UniformCandidateSampler", "LearnedUnigramCandidateSampler", "FixedUnigramCandidateSampler"}
)
"""Ops that draw numbers from a state of the process."""

Spec: TypeAlias = "tuple[str, tuple[int | None, ...] | None]"


@dataclass(frozen=True, slots=True)
class Slot:
    """Describes an input or output tensor: name in the graph, `tf.DType`, static `tf.TensorShape`."""

    name: str
    dtype: Any
    shape: Any

    @property
    def is_differentiable(self) -> bool:
        """Whether gradients are defined for the dtype."""
        return bool(self.dtype.is_floating or self.dtype.is_complex)


@dataclass(frozen=True, slots=True)
class TracedPart:
    """Holds the graph of a part for one mode and one signature.

    Attributes:
        graph: the graph.
        inputs: weights, state (variables that are not trained), the part's inputs, their masks, in this order.
        outputs: the part's outputs, new values of `updated`, losses that layers add, masks, in this order.
        structure: structure of the part's outputs.
        n_outputs: number of the part's outputs.
        updated: indices of the variables (weights, then state) that a call changes.
        n_losses: number of losses.
        masked: indices of the outputs with a mask.
    """

    graph: Graph
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    structure: Any
    n_outputs: int
    updated: tuple[int, ...]
    n_losses: int
    masked: tuple[int, ...]


def traced(
    part: Any, structure: Any, specs: Sequence[Spec], masks: Sequence[Spec | None], training: bool
) -> TracedPart:
    """Traces a built part.

    Args:
        part: a Keras layer or model.
        structure: structure of its inputs.
        specs: dtype and shape of each input.
        masks: dtype and shape of each input's mask, or None.
        training: whether to trace the training mode.

    Raises:
        UnsupportedError: the part uses variables that are not Keras variables.
        InvalidGraphError: the part cannot be traced.
    """
    weights, state = part.trainable_variables, part.non_trainable_variables
    variables = [*weights, *state]
    seen: dict[str, Any] = {}

    def run(weights_: Any, state_: Any, inputs: Any, input_masks: Any) -> Any:
        given = iter(input_masks)
        for tensor, mask in zip(inputs, masks, strict=True):
            if mask is not None:
                tensor._keras_mask = next(given)
        mapping = [*zip(weights, weights_, strict=True), *zip(state, state_, strict=True)]
        with _VariableScope(state_mapping=mapping, collect_losses=True) as scope:
            old = [scope.get_current_value(variable) for variable in variables]
            outputs = part(keras.tree.pack_sequence_as(structure, inputs), training=training)
            new = [scope.get_current_value(variable) for variable in variables]
            losses = list(scope.losses)
        flat = [tf.convert_to_tensor(output) for output in keras.tree.flatten(outputs)]
        output_masks = [getattr(output, "_keras_mask", None) for output in keras.tree.flatten(outputs)]
        seen["structure"] = keras.tree.map_structure(lambda _: 0, outputs)
        seen["updated"] = tuple(i for i in range(len(new)) if new[i] is not old[i])
        seen["masked"] = tuple(i for i, mask in enumerate(output_masks) if mask is not None)
        return [
            flat,
            [tf.cast(new[index], variables[index].dtype) for index in seen["updated"]],
            losses,
            [output_masks[index] for index in seen["masked"]],
        ]

    given = (
        [_spec(variable.dtype, variable.shape) for variable in weights],
        [_spec(variable.dtype, variable.shape) for variable in state],
        [_spec(*spec) for spec in specs],
        [_spec(*mask) for mask in masks if mask is not None],
    )
    # init_scope keeps the part out of a surrounding trace, such as that of a training step.
    with tf.init_scope(), layer_scopes(part, include_root=not isinstance(part, keras.Model)) as calls:
        function = functions.concrete(tf.function(run, autograph=False), given, {})
    in_words, out_words = ("weights", "state", "inputs", "masks"), ("outputs", "new_state", "losses", "output_masks")
    in_names = [f"{word}_{i}" for word, group in zip(in_words, given, strict=True) for i in range(len(group))]
    results = function.structured_outputs
    out_names = [f"{word}_{i}" for word, group in zip(out_words, results, strict=True) for i in range(len(group))]
    graph = functions.graph_of_concrete(function, dict(enumerate(in_names)), out_names, calls)
    if graph.variables:
        raise UnsupportedError(
            f"the part {part.name!r} uses variables that are not Keras variables of it, so they could not be trained: "
            f"{', '.join(sorted(graph.variables))}. Make them with add_weight"
        )
    flat_specs = [spec for group in given for spec in group]
    flat_results = [tensor for group in results for tensor in group]
    return TracedPart(
        graph,
        tuple(Slot(name, spec.dtype, spec.shape) for name, spec in zip(in_names, flat_specs, strict=True)),
        tuple(Slot(name, tensor.dtype, tensor.shape) for name, tensor in zip(out_names, flat_results, strict=True)),
        seen["structure"],
        len(results[0]),
        seen["updated"],
        len(results[2]),
        seen["masked"],
    )


class _VariableScope(keras.StatelessScope):  # type: ignore[misc]
    """Holds the values of variables during a trace; gradients treat them as TensorFlow treats variables."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        old = self.get_current_value(variable)
        super().add_update((variable, value if old is None else _assigned(old, tf.cast(value, variable.dtype))))


def _assigned(old: Any, new: Any) -> Any:
    """Returns the new value of a variable, whose gradient is the variable's: it does not flow through the new value."""
    if not (new.dtype.is_floating or new.dtype.is_complex):
        return new

    @tf.custom_gradient
    def assigned(old: Any, new: Any) -> tuple[Any, Callable[..., Any]]:
        def to_variable(upstream: Any) -> tuple[Any, None]:
            return upstream, None

        return tf.identity(new), to_variable

    return assigned(old, new)


def _spec(dtype: str, shape: Any) -> Any:
    return tf.TensorSpec(shape, tf.as_dtype(dtype))


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


@dataclass(slots=True, eq=False)
class RemotePart:
    """Runs one traced part on the server."""

    traced: TracedPart
    options: RemoteOptions
    _programs: dict[bool, Program] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the part's outputs for its inputs; differentiable by TensorFlow.

        A gradient is `tf.IndexedSlices` where the server returns slices, as of the weights of an embedding.
        """
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
        """Deletes the programs on the server; the next call compiles them again."""
        with self._lock:
            programs, self._programs = list(self._programs.values()), {}
        for program in programs:
            try:
                program.delete(timeout=self.options.timeout)
            except ProgramNotFoundError:
                # Another layer with the same content has deleted the program.
                continue

    def _xs(self) -> list[Slot]:
        """Returns the inputs that get a gradient: the differentiable weights and inputs of the part."""
        return [slot for slot in self.traced.inputs if slot.is_differentiable and not slot.name.startswith("state_")]

    def _ys(self) -> list[Slot]:
        """Returns the outputs that gradients start from."""
        return [slot for slot in self.traced.outputs if slot.is_differentiable]

    def _gradients(self, tensors: Sequence[Any]) -> list[Any]:
        if not self._xs():
            return []
        # A node of tf.function has a fixed number of results, so the program must be compiled before.
        with self._noting_errors():
            sparse = frozenset(self._program(differentiates=True).sparse_gradients)
        slots = [part for slot in self._xs() for part in _parts(slot, slot.name in sparse)]

        def backward(*arrays: Any) -> list[Any]:
            return self._backward(arrays, sparse)

        @tf.custom_gradient
        def first_order(*given: Any) -> tuple[list[Any], Callable[..., Any]]:
            def second_order(*_: Any) -> Any:
                raise NotImplementedError(
                    "a RemoteLayer gives first derivatives only; use gr.trace and the client for higher derivatives"
                )

            return _run(backward, given, slots), second_order

        found = first_order(*tensors)
        rest = iter(found if isinstance(found, list | tuple) else [found])
        return [
            tf.IndexedSlices(next(rest), next(rest), next(rest)) if slot.name in sparse else next(rest)
            for slot in self._xs()
        ]

    def _forward(self, *arrays: Any) -> list[Any]:
        feeds = dict(zip((slot.name for slot in self.traced.inputs), arrays, strict=True))
        result = self._evaluate(False, feeds, None)
        return [_as(result.outputs[slot.name], slot) for slot in self.traced.outputs]

    def _backward(self, arrays: Sequence[Any], sparse: frozenset[str]) -> list[Any]:
        count = len(self.traced.inputs)
        feeds = dict(zip((slot.name for slot in self.traced.inputs), arrays[:count], strict=True))
        upstream = dict(zip((slot.name for slot in self._ys()), arrays[count:], strict=True))
        result = self._evaluate(True, feeds, upstream)
        found = []
        for slot in self._xs():
            gradient = result.gradients[slot.name]
            if slot.name in sparse:
                found += [_as(gradient.values, slot), np.asarray(gradient.indices, np.int64)]
                found.append(np.asarray(gradient.dense_shape, np.int64))
            else:
                found.append(_as(gradient, slot))
        return found

    def _evaluate(self, differentiates: bool, feeds: Mapping[Any, Any], grad_ys: dict[Any, Any] | None) -> Result:
        options = self.options
        params = options.params if differentiates else None
        with self._noting_errors():
            program = self._program(differentiates)
            try:
                return program.evaluate(feeds, grad_ys=grad_ys, params=params, timeout=options.timeout)
            except ProgramNotFoundError:
                # The server has deleted the program or was restarted.
                with self._lock:
                    self._programs.pop(differentiates, None)
                program = self._program(differentiates)
                return program.evaluate(feeds, grad_ys=grad_ys, params=params, timeout=options.timeout)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Keeps an error of the client for `last_error`."""
        try:
            yield
        except GradruleError as error:
            self.options.error = error
            raise

    def _program(self, differentiates: bool) -> Program:
        with self._lock:
            program = self._programs.get(differentiates)
            if program is None:
                program = self._programs[differentiates] = self._compiled(differentiates)
            return program

    def _compiled(self, differentiates: bool) -> Program:
        options, graph = self.options, self.traced.graph
        if not differentiates:
            fetches = [slot.name for slot in self.traced.outputs]
            return options.client().compile(graph, fetches=fetches, timeout=options.timeout)
        _refuse_random_ops(graph)
        return options.client().compile(
            graph,
            ys=[slot.name for slot in self._ys()],
            xs=[slot.name for slot in self._xs()],
            unconnected_gradients="zero",
            overrides=overrides_of(graph, options.overrides),
            no_gradient=options.no_gradient,
            timeout=options.timeout,
        )


def _refuse_random_ops(graph: Graph) -> None:
    """Raises `UnsupportedError` for ops that draw other numbers in the backward pass, which runs the part again."""
    message = graph_pb2.Graph.FromString(graph.to_bytes_without_overrides())
    for nodes in [message.node, *(function.node_def for function in message.library.function)]:
        for node in nodes:
            if node.op in _RANDOM_OPS:
                raise UnsupportedError(
                    f"{node.op} node {node.name!r} would draw other random numbers in the backward pass than in the "
                    "forward pass; draw them with keras.random and a keras.random.SeedGenerator of the layer, as "
                    "keras.layers.Dropout does, or with tf.random.stateless_uniform and a seed that is an input"
                )


def _run(function: Callable[..., list[Any]], tensors: Sequence[Any], slots: Sequence[Slot]) -> list[Any]:
    """Runs a function of arrays on tensors: at once in eager mode, as a node inside `tf.function`."""
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


def _parts(slot: Slot, is_sparse: bool) -> list[Slot]:
    """Returns the tensors of a gradient: the dense one, or values, indices and shape of slices."""
    if not is_sparse:
        return [slot]
    return [
        Slot(slot.name, slot.dtype, tf.TensorShape([None]).concatenate(slot.shape[1:])),
        Slot(slot.name, tf.int64, tf.TensorShape([None])),
        Slot(slot.name, tf.int64, tf.TensorShape([slot.shape.rank])),
    ]
