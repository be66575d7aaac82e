"""Builds graphs with embedded custom gradients, as a client that traces TensorFlow makes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, ops

import gradrule as gr
from tests.service.graph_defs import all_nodes, load_graph

Outcome = Any
_numbers = itertools.count()


class CustomGradientBuilder:
    """Builds a graph. `custom_gradient` replaces TensorFlow's decorator and leaves a region in the graph."""

    def __init__(self) -> None:
        self.gradients: dict[str, function_pb2.FunctionDef] = {}
        self._inner: dict[str, function_pb2.FunctionDef] = {}

    def custom_gradient(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function like `tf.custom_gradient`, without variables."""

        def call(*args: Any) -> Any:
            xs = [tf.convert_to_tensor(arg) for arg in args]
            result, backward = function(*xs)
            is_one = not isinstance(result, list | tuple)
            xs, ys = _here(xs), _here([result] if is_one else list(result))
            name = f"grad_of_{function.__name__}_{next(_numbers)}"
            further = self._trace(name, xs, ys, backward)
            with ops.get_default_graph().gradient_override_map({"IdentityN": name}):
                passed = tf.identity_n([*ys, *xs, *further])
            knot = passed[0].op
            for note, value in (("outputs", len(ys)), ("inputs", len(xs))):
                knot._set_attr(f"_gradrule_{note}", attr_value_pb2.AttrValue(i=value))
            knot._set_attr("_gradrule_region", attr_value_pb2.AttrValue(s=function.__name__.encode()))
            return passed[0] if is_one else type(result)(passed[: len(ys)])

        return call

    def _trace(self, name: str, xs: Sequence[Any], ys: Sequence[Any], backward: Callable[..., Any]) -> list[Any]:
        """Adds the gradient to the function library; returns the tensors it needs besides the region's inputs."""
        graph = func_graph.FuncGraph(name)
        with graph.as_default():
            dys = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in ys]
            given = backward(*dys)
            gradients = list(given) if isinstance(given, list | tuple) else [given]
            results = {
                f"dx{index or ''}": tf.convert_to_tensor(value)
                for index, value in enumerate(gradients)
                if value is not None
            }
            results = {key: graph.capture(value) for key, value in results.items()}
        asked = list(results.values())
        used = [index for index, dy in enumerate(dys) if dy.consumers() or any(dy is value for value in asked)]
        variables, inputs = [f"dy{index or ''}" for index in used], [dys[index] for index in used]
        further: list[Any] = []
        for outer, inner in graph.captures:
            outer = _here([outer])[0]
            index = next((index for index, y in enumerate(ys) if y is outer), None)
            family = "y"
            if index is None:
                known = [*xs, *further]
                family, index = "x", next((index for index, x in enumerate(known) if x is outer), len(known))
                if index == len(known):
                    further.append(outer)
            variables.append(f"{family}{index or ''}")
            inputs.append(inner)
        graph.inputs, graph.outputs = inputs, asked
        definition = atomic_function.from_func_graph(name, graph, {}).cached_definition
        for inner_function in graph.as_graph_def().library.function:
            self._inner[inner_function.signature.name] = inner_function
        self.gradients[name] = _renamed(definition, variables, list(results))
        return further

    def add_gradients(self, graph_def: Any) -> Any:
        """Returns the GraphDef with its gradient functions."""
        there = {function.signature.name for function in graph_def.library.function}
        for name, function in {**self._inner, **self.gradients}.items():
            if name not in there:
                graph_def.library.function.add().CopyFrom(function)
        for name in self.gradients:
            graph_def.library.registered_gradients.add(gradient_func=name, registered_op_type=name)
        return graph_def


def graph_with_gradients(build: Callable[[Callable[..., Any]], None]) -> gr.Graph:
    """Returns the graph that `build` makes with the `custom_gradient` it receives."""
    return load_graph(graph_def_with_gradients(build))


def graph_def_with_gradients(build: Callable[[Callable[..., Any]], None]) -> Any:
    """Returns the GraphDef that `build` makes with the `custom_gradient` it receives."""
    drawing = CustomGradientBuilder()
    with tf.Graph().as_default() as graph:
        build(drawing.custom_gradient)
    return drawing.add_gradients(graph.as_graph_def())


def custom_gradient_nodes(graph_def: Any) -> list[Any]:
    """Returns all nodes that hold the results of a region."""
    return [node for node in all_nodes(graph_def) if "_gradrule_outputs" in node.attr]


def _here(tensors: Sequence[Any]) -> list[Any]:
    graph = ops.get_default_graph()
    return [tensor if tensor.graph is graph else graph.capture(tensor) for tensor in tensors]


def _renamed(definition: Any, variables: list[str], results: list[str]) -> Any:
    """Returns the function with the names of a rule's variables and results."""
    renamed = function_pb2.FunctionDef()
    renamed.CopyFrom(definition)
    old = [arg.name for arg in definition.signature.input_arg]
    new = dict(zip(old, variables, strict=True))
    for arg in renamed.signature.input_arg:
        arg.name = new[arg.name]
    inside = {node.name: f"n_{node.name}" for node in renamed.node_def}
    for node in renamed.node_def:
        node.name = inside[node.name]
        node.input[:] = [_moved(source, new, inside) for source in node.input]
    returned = [_moved(renamed.ret[arg.name], new, inside) for arg in renamed.signature.output_arg]
    renamed.ret.clear()
    for arg, result, source in zip(renamed.signature.output_arg, results, returned, strict=True):
        arg.name = result
        renamed.ret[result] = source
    for key in list(renamed.control_ret):
        renamed.control_ret[key] = inside[renamed.control_ret[key]]
    return renamed


def _moved(source: str, args: dict[str, str], inside: dict[str, str]) -> str:
    name, colon, rest = source.removeprefix("^").partition(":")
    target = args.get(name) or inside[name]
    return f"{'^' if source.startswith('^') else ''}{target}{colon}{rest}"
