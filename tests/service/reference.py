"""Computes reference results with local TensorFlow: the same graph, rules registered in this process, a session."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tests.service.graph_defs import all_nodes

GradientFunction = Callable[..., Any]
"""(op, *dys) → one gradient, or a tuple with one per input."""

_numbers = itertools.count()


@dataclass
class Result:
    """Holds outputs and gradients by name; `asked`: overridden nodes whose rule TensorFlow called."""

    outputs: dict[str, Any]
    gradients: dict[str, Any]
    asked: set[str] = field(default_factory=set)


def own_gradient(op_type: str) -> GradientFunction:
    """Returns the gradient function that TensorFlow registers for an op type."""
    from tensorflow.python.framework import ops

    function: GradientFunction = ops.gradient_registry.lookup(op_type)
    return function


def evaluate(
    graph_def: Any,
    feeds: Mapping[str, Any],
    fetches: Sequence[str] = (),
    ys: Sequence[str] = (),
    xs: Sequence[str] = (),
    *,
    rules: Mapping[str, GradientFunction] | None = None,
    grad_ys: Sequence[Any] | None = None,
    stop_gradients: Sequence[str] = (),
    unconnected_gradients: str = "none",
) -> Result:
    """Runs the graph here. `rules`: by node name, set by the attribute that `gradient_override_map` sets."""
    copy = type(graph_def).FromString(graph_def.SerializeToString())
    asked: set[str] = set()
    for node in all_nodes(copy):
        if rules and node.name in rules:
            registered = _register(rules[node.name], asked, node.name)
            node.attr["_gradient_op_type"].s = registered.encode()
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(copy, name="")

        def tensors(names: Sequence[str]) -> list[Any]:
            return [graph.get_tensor_by_name(name if ":" in name else f"{name}:0") for name in names]

        found = (
            tf.gradients(
                tensors(ys),
                tensors(xs),
                grad_ys=None if grad_ys is None else [tf.constant(value) for value in grad_ys],
                stop_gradients=tensors(stop_gradients),
                unconnected_gradients=unconnected_gradients,
            )
            if ys
            else []
        )
        wanted = {
            "outputs": dict(zip(fetches, tensors(fetches), strict=True)),
            "gradients": {
                x: tf.convert_to_tensor(gradient) for x, gradient in zip(xs, found, strict=True) if gradient is not None
            },
        }
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            values = session.run(wanted, dict(zip(tensors(list(feeds)), feeds.values(), strict=True)))
    return Result(values["outputs"], {x: values["gradients"].get(x) for x in xs}, asked)


def _register(rule: GradientFunction, asked: set[str], node: str) -> str:
    """Registers a function under a new name: TensorFlow's registry has no removal."""
    name = f"GradruleReference{next(_numbers)}"

    def recorded(op: Any, *dys: Any) -> Any:
        asked.add(node)
        return rule(op, *(tf.convert_to_tensor(dy) if isinstance(dy, tf.IndexedSlices) else dy for dy in dys))

    tf.RegisterGradient(name)(recorded)
    return name


def numpy_of(value: Any) -> Any:
    """Returns an array, with bfloat16 converted to float32 so that it can be compared."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
