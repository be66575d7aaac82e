"""Builds the gradient of a node from the gradient of a similar node that was built before, also in another program.

TensorFlow's gradient functions and rules are Python code that takes many times as long as creating the ops that
they create. Which ops these are depends only on the type and attributes of the node, on types, shapes and producers of
its tensors, on the values of small integers among them, and on the rule. So the ops are recorded once as a template.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from gradrule_server.engine import tf_private
from gradrule_server.engine.code_rules.target import Gradient

# Attributes on which no gradient depends: gradrule's, and one that TensorFlow counts.
_IGNORED_ATTRS = frozenset({"_gradrule_mark", tf_private.GRADIENT_ATTR, "_kernel", tf_private.WAITED_FOR_ATTR})
# Gradient functions read values of sizes, axes and permutations only. Longer vectors of integers are indices.
_MAX_VALUES = 64
# Ops whose output TensorFlow may know while a graph is built.
_MAY_BE_KNOWN = frozenset({"Const", "Fill", "Cast", "BroadcastTo", "Pack", "ConcatV2", "Identity", "StopGradient"})
# Most ops of all templates of a process; one takes about a kilobyte.
_MAX_STEPS = 20_000

Key: TypeAlias = tuple[Any, ...]
# A tensor or op of a template: the number of a step or of an outer tensor, and the number of the step's output. Outer
# tensors have negative numbers.
_Ref: TypeAlias = tuple[int, int]


class _Step(NamedTuple):
    """One op of a template.

    `waits_for`: steps, or ops of outer tensors, that must have run before it. `shapes`: of its outputs.
    """

    name: str
    copied: tf_private.CopiedOp
    inputs: Sequence[_Ref]
    waits_for: Sequence[int]
    shapes: Sequence[tf.TensorShape]


@dataclass(slots=True)
class _Template:
    """The ops of a gradient, in order, and for each input the parts of its gradient: one, or three of slices.

    Attributes:
        steps: The ops.
        results: The gradients.
        names_node: Whether a message of an op names the node.
        zeros: Results that are marked as zeros.
        shapes: Steps and outputs of whose shapes Python code had told TensorFlow more than it finds out itself.
        is_checked: Whether `shapes` is complete: after the first use.
    """

    steps: Sequence[_Step]
    results: Sequence[Sequence[_Ref | None] | None]
    names_node: bool
    zeros: Sequence[_Ref]
    shapes: list[tuple[int, int]] = field(default_factory=list)
    is_checked: bool = False


class GradientTemplates:
    """Templates by everything on which the ops of a gradient depend; drops the least recently used. Not thread-safe."""

    def __init__(self) -> None:
        self._templates: OrderedDict[Key, _Template] = OrderedDict()
        self._steps = 0
        self.reused = 0
        """Number of gradients that were built from a template."""

    def clear(self) -> None:
        """Removes all templates."""
        self._templates.clear()
        self._steps = 0

    def gradients(
        self,
        key: Key,
        node: str,
        outer: Sequence[tf.Tensor],
        make: Callable[[], Sequence[Gradient]],
        is_pure: Callable[[], bool],
    ) -> Sequence[Gradient]:
        """Returns the gradients of a node in the default graph.

        Args:
            key: Everything on which the gradients depend but the tensors, and messages that name the node.
            node: The name of the node.
            outer: The tensors that the gradients may use, in an order that the key determines.
            make: Makes the gradients with TensorFlow.
            is_pure: Returns whether `make` had no other effect than to create ops.
        """
        graph = tf.compat.v1.get_default_graph()
        if not isinstance(graph, tf_private.RecordingGraph):
            return make()
        for known in (key, (*key, node)):
            template = self._templates.get(known)
            if template is None:
                continue
            self._templates.move_to_end(known)
            self.reused += 1
            return _replay(template, graph, outer)
        start, scope = len(graph.made), graph.get_name_scope()
        made = make()
        if is_pure():
            template = _record(graph.made[start:], scope, outer, made)
            if template is not None:
                self._add((*key, node) if template.names_node else key, template)
        return made

    def _add(self, key: Key, template: _Template) -> None:
        self._templates[key] = template
        self._steps += len(template.steps)
        while self._steps > _MAX_STEPS:
            _, dropped = self._templates.popitem(last=False)
            self._steps -= len(dropped.steps)


TEMPLATES = GradientTemplates()
"""The templates of this process."""


class Signatures:
    """Describes the nodes of one imported graph for the keys of templates.

    Args:
        nodes: The nodes of the graph, by their names in the graph that is built.
        varying: Names, in the graph that is built, of nodes whose values TensorFlow cannot know while it is built.
    """

    def __init__(self, nodes: Mapping[str, node_def_pb2.NodeDef], varying: Sequence[str]) -> None:
        self._nodes = nodes
        self._varying = frozenset(varying)
        self._attributes: dict[str, bytes | None] = {}

    def key(self, op: tf.Operation, dys: Sequence[Gradient], more: Hashable) -> tuple[Key, list[tf.Tensor]] | None:
        """Returns the key of a node's gradients, and the tensors that they may use; None if they have no template.

        `more`: what else they depend on, such as the rule.
        """
        graph = tf.compat.v1.get_default_graph()
        if op.graph is not graph:
            # Gradients in the graph of a loop or branch also decide which tensors the forward part keeps.
            return None
        attributes = self._attributes_of(op)
        if attributes is None:
            return None
        numbers: dict[tuple[str, int], int] = {}
        outer: list[tf.Tensor] = []
        parts: list[Any] = [more, op.type, attributes]

        def add(tensor: tf.Tensor, description: Any) -> None:
            number = numbers.setdefault(_place(tensor), len(outer))
            if number == len(outer):
                outer.append(tensor)
            parts.append((number, description))

        for value in op.inputs:
            add(value, self._describe(value))
        for output in op.outputs:
            add(output, (output.dtype, _shape(output)))
        for dy in dys:
            tensors = [dy]
            if isinstance(dy, tf.IndexedSlices):
                tensors = [dy.values, dy.indices, dy.dense_shape]
                parts.append("slices")
            for tensor in tensors:
                if tensor is None:
                    parts.append(None)
                    continue
                description = _describe_upstream(tensor)
                if description is None:
                    return None
                add(tensor, description)
        return tuple(parts), outer

    def _attributes_of(self, op: tf.Operation) -> bytes | None:
        """Returns the attributes as bytes; None for an op that was not imported or that runs functions."""
        name = op.name
        if name not in self._attributes:
            node = self._nodes.get(name)
            found = None
            if node is not None and not tf_private.runs_functions(op.type):
                own = sorted(set(node.attr) - _IGNORED_ATTRS)
                found = repr([(item, node.attr[item].SerializeToString()) for item in own]).encode()
                found = found if len(found) < 256 else hashlib.sha256(found).digest()
            self._attributes[name] = found
        return self._attributes[name]

    def _describe(self, value: tf.Tensor) -> Any:
        """Returns type, shape and producer of an input, and what TensorFlow knows of its value if it holds sizes."""
        producer, dtype, shape = value.op, value.dtype, _shape(value)
        if dtype.is_floating or dtype.is_complex or producer.type == "Placeholder":
            return dtype, shape, producer.type
        known: Any = None
        if producer.name not in self._varying:
            known = _values(value)
        if known is None and dtype.is_integer and shape is not None and len(shape) == 1:
            known = repr(tf_private.known_shape(value))
        return dtype, shape, producer.type, known


def _describe_upstream(value: tf.Tensor) -> Any:
    """Returns type, shape and producer of an upstream gradient, and its value if gradient functions may know it.

    None if that value is large.
    """
    description = value.dtype, _shape(value), value.op.type, tf_private.is_marked_zero(value)
    if value.op.type not in _MAY_BE_KNOWN:
        return description
    if value.op.type == "Const" and value.shape.num_elements() <= _MAX_VALUES:
        return description, _values(value)
    if value.op.type == "Fill":
        return description, _values(value.op.inputs[1])
    return None


def _values(value: tf.Tensor) -> Any:
    """Returns the value of a small tensor if TensorFlow knows it, else None."""
    elements = value.shape.num_elements()
    if elements is None or elements > _MAX_VALUES:
        return None
    known = tf.get_static_value(value)
    if known is None:
        # Shapes that TensorFlow infers depend on what it can compute itself, not only on what Python can.
        known = tf_private.computed_constant(value)
    return None if known is None else known.tobytes() if known.dtype != object else repr(known)


def _shape(value: tf.Tensor) -> tuple[int | None, ...] | None:
    shape = value.shape
    return None if shape.rank is None else tuple(shape)


def _record(
    made: Sequence[tf.Operation], scope: str, outer: Sequence[tf.Tensor], gradients: Sequence[Gradient]
) -> _Template | None:
    """Returns ops and the gradients that they compute as a template; None if they depend on something else."""
    refs: dict[tuple[str, int], _Ref] = {_place(tensor): (-1 - number, 0) for number, tensor in enumerate(outer)}
    numbers = {tensor.op.name: -1 - number for number, tensor in enumerate(outer)}
    groups = [None if gradient is None else _parts(gradient) for gradient in gradients]
    results = [tensor for group in groups if group is not None for tensor in group if tensor is not None]
    steps: list[_Step] = []
    for op in _needed(made, results):
        if tf_private.runs_functions(op.type) or not op.name.startswith(f"{scope}/"):
            return None
        inputs = [refs.get(_place(tensor)) for tensor in op.inputs]
        waits = [numbers.get(control.name) for control in op.control_inputs]
        if None in inputs or None in waits:
            return None
        numbers[op.name] = number = len(steps)
        refs |= {(op.name, index): (number, index) for index in range(len(op.outputs))}
        shapes = tuple(output.shape for output in op.outputs)
        name, copied = op.name.removeprefix(f"{scope}/"), tf_private.CopiedOp.of(op)
        steps.append(_Step(name, copied, inputs, waits, shapes))  # type: ignore[arg-type]
    if any(_place(tensor) not in refs for tensor in results):
        return None

    def find(tensor: tf.Tensor | None) -> _Ref | None:
        return None if tensor is None else refs[_place(tensor)]

    names_node = any(tensor.dtype == tf.string for op in made for tensor in op.outputs)
    found = [None if group is None else list(map(find, group)) for group in groups]
    zeros = [refs[_place(tensor)] for tensor in results if tf_private.is_marked_zero(tensor)]
    return _Template(steps, found, names_node, zeros)


def _place(tensor: tf.Tensor) -> tuple[str, int]:
    return tensor.op.name, tensor.value_index


def _parts(gradient: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor | None]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices, gradient.dense_shape]
    return [gradient]


def _needed(made: Sequence[tf.Operation], results: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Returns the ops on which the results depend, and those with side effects, in order."""
    needed = {tensor.op.name for tensor in results}
    kept = []
    for op in reversed(made):
        if op.name in needed or tf_private.is_stateful(op.type):
            kept.append(op)
            needed.update(tensor.op.name for tensor in op.inputs)
            needed.update(control.name for control in op.control_inputs)
    return kept[::-1]


def _replay(template: _Template, graph: tf_private.RecordingGraph, outer: Sequence[tf.Tensor]) -> list[Gradient]:
    """Creates the ops of a template in the default graph; returns the gradients."""
    ops: list[tf.Operation] = []

    def find(ref: _Ref | None) -> tf.Tensor | None:
        if ref is None:
            return None
        number, index = ref
        return outer[-1 - number] if number < 0 else ops[number].outputs[index]

    for number, step in enumerate(template.steps):
        waits_for = [outer[-1 - wait].op if wait < 0 else ops[wait] for wait in step.waits_for]
        op = graph.create(step.copied, step.name, [find(ref) for ref in step.inputs], waits_for)
        ops.append(op)
        if not template.is_checked:
            known = zip(op.outputs, step.shapes, strict=True)
            template.shapes += [(number, index) for index, (output, shape) in enumerate(known) if output.shape != shape]
        for place, index in template.shapes:
            if place == number:
                op.outputs[index].set_shape(step.shapes[index])
    template.is_checked = True
    for ref in template.zeros:
        tf_private.mark_zero(find(ref))
    return [
        None if result is None else tf.IndexedSlices(*map(find, result)) if len(result) > 1 else find(result[0])
        for result in template.results
    ]
