"""Traces part of a Keras model to a graph without state: weights and state are inputs, the new state is an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from gradrule._builder.graph import Graph
from gradrule._tracing import functions
from gradrule._tracing.keras_models import layer_scopes
from gradrule.errors import UnsupportedError

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
        state: variables that are not trained, in the order of the inputs; more than the part's
            `non_trainable_variables` if it uses others, as a stateful recurrent layer does.
    """

    graph: Graph
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    structure: Any
    n_outputs: int
    updated: tuple[int, ...]
    n_losses: int
    masked: tuple[int, ...]
    state: tuple[Any, ...]


def traced(
    part: Any,
    structure: Any,
    specs: Sequence[Spec],
    masks: Sequence[Spec | None],
    training: bool,
    state: Sequence[Any] | None = None,
) -> TracedPart:
    """Traces a built part.

    Args:
        part: a Keras layer or model.
        structure: structure of its inputs.
        specs: dtype and shape of each input.
        masks: dtype and shape of each input's mask, or None.
        training: whether to trace the training mode.
        state: variables that are not trained; None: those that Keras tracks, and others that the part uses.

    Raises:
        UnsupportedError: the part uses variables that are not Keras variables.
        InvalidGraphError: the part cannot be traced.
    """
    weights = part.trainable_variables
    state = part.non_trainable_variables if state is None else state
    variables = [*weights, *state]
    seen: dict[str, Any] = {}

    def run(weights_: Any, state_: Any, inputs: Any, input_masks: Any) -> Any:
        given = iter(input_masks)
        for tensor, mask in zip(inputs, masks, strict=True):
            if mask is not None:
                tensor._keras_mask = next(given)
        mapping = [*zip(weights, weights_, strict=True), *zip(state, state_, strict=True)]
        with _VariableScope(mapping) as scope:
            old = [scope.get_current_value(variable) for variable in variables]
            outputs = part(keras.tree.pack_sequence_as(structure, inputs), training=training)
            new = [scope.get_current_value(variable) for variable in variables]
            losses = list(scope.losses)
        flat = [tf.convert_to_tensor(output) for output in keras.tree.flatten(outputs)]
        output_masks = [getattr(output, "_keras_mask", None) for output in keras.tree.flatten(outputs)]
        seen["structure"] = keras.tree.map_structure(lambda _: 0, outputs)
        seen["updated"] = tuple(i for i in range(len(new)) if new[i] is not old[i])
        seen["others"] = [variable for variable in scope.others.values() if not variable.trainable]
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
    if seen["others"]:
        return traced(part, structure, specs, masks, training, [*state, *seen["others"]])
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
        tuple(state),
    )


class _VariableScope(keras.StatelessScope):  # type: ignore[misc]
    """Holds the values of variables during a trace; gradients treat them as TensorFlow treats variables.

    `others`: variables that are used but have no value here, by id.
    """

    def __init__(self, mapping: Sequence[tuple[Any, Any]]) -> None:
        super().__init__(state_mapping=mapping, collect_losses=True)
        self.others: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None:
            self.others[id(variable)] = variable
        return value

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
