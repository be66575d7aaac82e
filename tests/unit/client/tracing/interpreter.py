"""A reference that runs a traced graph op by op, eagerly, from its bytes alone: nothing of the process that traced it.

Functions, loops and branches are run as Python; a region's gradient is the function that the graph's library names.
Run as a script it answers for another process: `interpreter.py graph.pb feeds.npz answers.npz Y X …`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_registry

import gradrule as gr


class Interpreter:
    """Runs one graph."""

    def __init__(self, graph: gr.Graph) -> None:
        self.message = tf.compat.v1.GraphDef.FromString(graph.to_bytes())
        self.graph = graph
        self.functions = {function.signature.name: function for function in self.message.library.function}
        self.gradients = {
            item.registered_op_type: self.functions[item.gradient_func]
            for item in self.message.library.registered_gradients
        }
        self.variables = {name: tf.Variable(value) for name, value in graph.variables.items()}

    def gradients_of(self, y: str, xs: Sequence[str], feeds: Mapping[str, Any], second: bool = False) -> Any:
        """y, and its gradients with respect to inputs and variables by name; `second`: of their sum once more."""
        inputs = {name: tf.constant(value) for name, value in feeds.items()}
        sources = [self.variables[x].handle if x in self.variables else inputs[x] for x in xs]
        with tf.GradientTape() as outer:
            outer.watch(list(inputs.values()))
            with tf.GradientTape() as tape:
                tape.watch([*inputs.values(), *(variable.handle for variable in self.variables.values())])
                value = self.run(inputs)[self.graph.tensor(y).name]
            first = tape.gradient(value, sources)
            total = tf.add_n([tf.reduce_sum(item) for item in first if item is not None]) if second else None
        if second:
            return value.numpy(), list(map(_array, outer.gradient(total, sources)))
        return value.numpy(), list(map(_array, first))

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """All tensors of the top level."""
        values: dict[str, Any] = {}
        for node in _sorted(self.message.node):
            if node.op == "Placeholder":
                outputs = [inputs[node.name]]
            elif node.op == "VarHandleOp":
                outputs = [self.variables[node.name].handle]
            else:
                given = [values[text if ":" in text else f"{text}:0"] for text in _data(node)]
                outputs = self.outputs(node, given)
            values.update({f"{node.name}:{index}": output for index, output in enumerate(outputs)})
        return values

    def call(self, function: Any, arguments: Mapping[str, Any]) -> list[Any]:
        """A function's results."""
        values: dict[str, Any] = dict(arguments)
        for node in _sorted(function.node_def):
            outputs = list(self.outputs(node, [values[text] for text in _data(node)]))
            for slot, count in _slots(node):
                for index in range(count):
                    values[f"{node.name}:{slot}:{index}"] = outputs.pop(0)
        return [values[function.ret[result.name]] for result in function.signature.output_arg]

    def positional(self, name: str, given: Sequence[Any]) -> list[Any]:
        function = self.functions[name]
        names = [argument.name for argument in function.signature.input_arg]
        return self.call(function, dict(zip(names, given, strict=True)))

    def outputs(self, node: Any, given: list[Any]) -> list[Any]:
        """What a node puts out."""
        if "_gradient_op_type" in node.attr and op_def_registry.get(node.attr["_gradient_op_type"].s.decode()) is None:
            return self._with_gradient(node, given)
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            return self.positional(node.attr["f"].func.name, given)
        if node.op in ("If", "StatelessIf"):
            branch = node.attr["then_branch" if bool(given[0]) else "else_branch"].func.name
            return self.positional(branch, given[1:])
        if node.op in ("While", "StatelessWhile"):
            while bool(self.positional(node.attr["cond"].func.name, given)[0]):
                given = self.positional(node.attr["body"].func.name, given)
            return given
        return _executed(node, given)

    def _with_gradient(self, node: Any, given: list[Any]) -> list[Any]:
        function = self.gradients.get(node.attr["_gradient_op_type"].s.decode())
        if function is None:
            return [_without_gradient(tensor) for tensor in _executed(node, given)]
        wanted = {result.name for result in function.signature.output_arg}
        known = {argument.name for argument in function.signature.input_arg}
        is_region = "_gradrule_region" in node.attr
        results = node.attr["_gradrule_outputs"].i if is_region else 0

        @tf.custom_gradient
        def node_with_gradient(*tensors: Any) -> Any:
            outputs = [tf.identity(tensor) for tensor in (tensors if is_region else _executed(node, list(tensors)))]

            def gradient(*upstream: Any) -> Any:
                xs, ys = tensors[results:], (tensors[:results] if is_region else outputs)
                letters = {"x": xs, "y": ys, "dy": upstream}
                variables = {
                    f"{letter}{index or ''}": tensor
                    for letter, tensors_of in letters.items()
                    for index, tensor in enumerate(tensors_of)
                }
                found = self.call(function, {name: variables[name] for name in known})
                by_name = dict(zip([item.name for item in function.signature.output_arg], found, strict=True))
                count = node.attr["_gradrule_inputs"].i if is_region else len(xs)
                assert wanted <= {f"dx{index or ''}" for index in range(count)}
                of_xs = [by_name.get(f"dx{index or ''}") for index in range(len(xs))]
                return [None] * results + of_xs

            return outputs, gradient

        return list(node_with_gradient(*given))


@tf.custom_gradient
def _without_gradient(tensor: Any) -> Any:
    def gradient(dy: Any) -> Any:
        raise AssertionError("the node names a gradient that the graph does not have")

    return tf.identity(tensor), gradient


def _executed(node: Any, given: list[Any]) -> list[Any]:
    if node.op == "Const":
        return [tf.constant(tf.make_ndarray(node.attr["value"].tensor))]
    attrs: list[Any] = []
    for attr in op_def_registry.get(node.op).attr:
        if attr.name in node.attr:
            value = node.attr[attr.name]
            kind = value.WhichOneof("value")
            attrs += [attr.name, _attr(value, kind)]
    count = sum(count for _, count in _slots(node))
    outputs = execute.execute(node.op, count, inputs=given, attrs=tuple(attrs), ctx=context.context())
    if outputs is None:
        return []
    execute.record_gradient(node.op, given, tuple(attrs), outputs)
    return list(outputs)


def _attr(value: Any, kind: str) -> Any:
    if kind == "shape":
        return tf.TensorShape(value.shape)
    if kind == "list":
        items = next(
            (
                list(getattr(value.list, name))
                for name in ("s", "i", "f", "b", "type", "shape")
                if getattr(value.list, name)
            ),
            [],
        )
        return [tf.TensorShape(item) if hasattr(item, "dim") else item for item in items]
    return getattr(value, kind)


def _slots(node: Any) -> list[tuple[str, int]]:
    slots = []
    for output in op_def_registry.get(node.op).output_arg:
        if output.number_attr:
            slots.append((output.name, node.attr[output.number_attr].i))
        elif output.type_list_attr:
            slots.append((output.name, len(node.attr[output.type_list_attr].list.type)))
        else:
            slots.append((output.name, 1))
    return slots


def _data(node: Any) -> list[str]:
    return [text for text in node.input if not text.startswith("^")]


def _sorted(nodes: Any) -> list[Any]:
    by_name = {node.name: node for node in nodes}
    inputs = {
        node.name: [source for text in node.input if (source := text.removeprefix("^").partition(":")[0]) in by_name]
        for node in nodes
    }
    return [by_name[name] for name in TopologicalSorter(inputs).static_order()]


def _array(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient).numpy()


def main(graph: str, feeds: str, answers: str, y: str, *xs: str) -> None:
    with np.load(feeds) as entries:
        value, gradients = Interpreter(gr.load(graph)).gradients_of(y, xs, dict(entries))
    np.savez(answers, value, *gradients)


if __name__ == "__main__":
    main(*sys.argv[1:])
    assert Path(sys.argv[3]).exists()
