"""Networks for the rows of maps, override maps that differ, and the cost of a map in TensorFlow alone.

Run as a module, `python -m tests.benchmarks.maps_work NETWORK FILE`, it is a process of its own that knows nothing yet:
prints as JSON the processor seconds of a trace with gradients under an override map, and of its first run. FILE is a
serialized frozen graph; `-` takes the network from Keras.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gradrule as gr

LAYERS, WIDTH, LENGTH, HEADS = 12, 256, 64, 4
"""The transformer's encoder layers, and the sizes of its values."""
NETWORKS = ("resnet50", "transformer")
TITLES = {
    "resnet50": "ResNet50 (1 × 224 × 224 × 3)",
    "transformer": f"transformer encoder ({LAYERS} layers, width {WIDTH}, length {LENGTH})",
}
_SHAPES = {"resnet50": (1, 224, 224, 3), "transformer": (1, LENGTH, WIDTH)}
_LOCAL = {"resnet50": "Relu", "transformer": "Softmax"}

_UNARY = (
    "where(x > 0, maximum(dy, 0), {0} * dy)",
    "dy * ({0} + sigmoid(x))",
    "clip(dy, -{0}, {0})",
    "{0} * default",
    "dy / (1 + {0} * abs(x))",
)
_WEIGHTED = ("({0} * default0, default1)", "(default0 / (1 + {0}), default1)")
_ANY = ("each({0} * default)",)

# Selections of nodes, with the formulas that fit them; each takes a number. `first` sets them apart on purpose: by op
# type, by a glob of names, by scope, by place.
_SELECTIONS: dict[str, Sequence[tuple[dict[str, Any], Sequence[str]]]] = {
    "resnet50": (
        ({"op_type": "Relu"}, _UNARY),
        ({"op_type": "Conv2D"}, _WEIGHTED),
        ({"node": "**conv2_**/Relu"}, _UNARY),
        ({"op_type": "BiasAdd"}, _WEIGHTED),
        ({"node": "**conv4_**/convolution", "op_type": "Conv2D"}, _WEIGHTED),
        ({"op_type": "MatMul"}, _WEIGHTED),
        ({"node": "**conv5_block2_out*/Relu"}, _UNARY),
        ({"op_type": "Relu", "position": "nearest_xs"}, _UNARY),
        ({"op_type": "AddV2", "node": "**_add*/Add"}, _ANY),
        ({"node": "**conv3_**/Relu"}, _UNARY),
        ({"op_type": "MaxPool"}, _ANY),
        ({"op_type": "Relu", "position": "nearest_ys"}, _UNARY),
    ),
    "transformer": (
        ({"op_type": "Softmax"}, _UNARY),
        ({"op_type": "Einsum"}, _WEIGHTED),
        ({"op_type": "Erfc"}, _UNARY),
        ({"op_type": "MatMul"}, _WEIGHTED),
        ({"node": "**block3_**/Softmax"}, _UNARY),
        ({"op_type": "BiasAdd"}, _WEIGHTED),
        ({"op_type": "Rsqrt"}, _UNARY),
        ({"node": "**block7_up*/**", "op_type": "BiasAdd"}, _WEIGHTED),
        ({"op_type": "SquaredDifference"}, _ANY),
        ({"node": "**block1?_**/Softmax"}, _UNARY),
        ({"op_type": "Erfc", "position": "nearest_ys"}, _UNARY),
        ({"op_type": "MatMul", "node": "**_down*/**"}, _WEIGHTED),
    ),
}


@dataclass(frozen=True)
class Network:
    """A network as a client holds it, with an input. frozen: its serialized GraphDef; empty from Keras."""

    name: str
    graph: gr.Graph
    x: str
    y: str
    value: Any
    frozen: bytes = b""

    def evaluate(self, client: gr.Client, overrides: Sequence[gr.Override]) -> gr.Result:
        """Returns the outputs and the gradient of the input under an override map; the graph is in the request."""
        return client.evaluate(
            self.graph, {self.x: self.value}, fetches=[self.y], ys=[self.y], xs=[self.x], overrides=overrides
        )


def model(name: str) -> Any:
    """Returns the Keras model, with random weights."""
    import keras

    # Keras numbers the names of layers for the whole process.
    keras.utils.clear_session()
    if name == "resnet50":
        return keras.applications.ResNet50(weights=None, classifier_activation=None)
    x = last = keras.Input((LENGTH, WIDTH), name="x")
    for number in range(LAYERS):
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"block{number}_attention")
        last = keras.layers.LayerNormalization(epsilon=1e-6, name=f"block{number}_norm1")(last + attention(last, last))
        inner = keras.layers.Dense(4 * WIDTH, activation="gelu", name=f"block{number}_up")(last)
        inner = keras.layers.Dense(WIDTH, name=f"block{number}_down")(inner)
        last = keras.layers.LayerNormalization(epsilon=1e-6, name=f"block{number}_norm2")(last + inner)
    return keras.Model(x, keras.layers.Dense(10, name="head")(keras.layers.GlobalAveragePooling1D()(last)))


def network(name: str, *, is_frozen: bool) -> Network:
    """Returns a network from Keras: its weights are variables, or constants of the graph."""
    value = np.random.default_rng(0).normal(size=_SHAPES[name]).astype(np.float32)
    if not is_frozen:
        graph = gr.from_keras(model(name))
        (x,), (y,) = graph.inputs, graph.outputs
        return Network(name, graph, x, y, value)
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    traced = tf.function(model(name), input_signature=[tf.TensorSpec(_SHAPES[name], name="x")], autograph=False)
    frozen = convert_variables_to_constants_v2(traced.get_concrete_function())
    serialized: bytes = frozen.graph.as_graph_def().SerializeToString()
    (x,), (y,) = ([tensor.op.name for tensor in tensors] for tensors in (frozen.inputs, frozen.outputs))
    return Network(name, gr.Graph.from_bytes(serialized), x, y, value, serialized)


def maps(name: str) -> Iterator[list[gr.Override]]:
    """Yields override maps of a network, each different: other nodes at each step, then the same with other rules."""
    selections = _SELECTIONS[name]
    for number in itertools.count():
        turn, place = divmod(number, len(selections))
        chosen = [selections[place]]
        if turn % 2:
            # Two selections at once, in pairs that the turns before did not have.
            chosen.append(selections[(place + 1 + turn // 2 % (len(selections) - 1)) % len(selections)])
        yield [
            gr.Override(
                gr.Rule(formulas[(turn + index) % len(formulas)].format(round(0.5 + number / 1000, 3))),
                label=f"part{index}",
                optional=bool(index),
                **selector,
            )
            for index, (selector, formulas) in enumerate(chosen)
        ]


def small(seed: int) -> tuple[gr.Graph, list[gr.Override]]:
    """Returns a program of five nodes that no server has seen, with a map of its own."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 4])
    weights = g.constant(np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32))
    g.op_output("Identity", g.op_output("Sign", g.matmul(x, weights)), name="y")
    return g, [gr.Override(gr.Rule(f"where(abs(x) <= {1 + seed / 1000}, dy, 0)"), op_type="Sign")]


def local(name: str, frozen: bytes) -> dict[str, float]:
    """Returns processor seconds of TensorFlow alone: trace and gradients under an override map, and the first run."""
    import tensorflow as tf

    @tf.RegisterGradient("BenchRule")
    def rule(op: Any, dy: Any) -> Any:
        return tf.where(op.inputs[0] > 0, tf.maximum(dy, 0), tf.zeros_like(dy))

    made = None if frozen else model(name)
    x = tf.constant(np.random.default_rng(0).normal(size=_SHAPES[name]), tf.float32)
    # What the first function and the first gradient set up is no part of any network.
    tf.function(lambda value: tf.gradients(tf.tanh(value), value), autograph=False)(tf.ones([]))

    def forward(value: Any) -> Any:
        if made is not None:
            with tf.compat.v1.get_default_graph().gradient_override_map({_LOCAL[name]: "BenchRule"}):
                return made(value)
        definition = tf.compat.v1.GraphDef.FromString(frozen)
        for node in definition.node:
            if node.op == _LOCAL[name]:
                node.attr["_gradient_op_type"].s = b"BenchRule"
        placeholder = next(node.name for node in definition.node if node.op == "Placeholder")
        output = [node.name for node in definition.node if node.op == "Identity"][-1]
        (y,) = tf.import_graph_def(definition, {placeholder: value}, [f"{output}:0"], name="")
        return y

    def both(value: Any) -> list[Any]:
        y = forward(value)
        return [y, *tf.gradients(y, value)]

    started = time.process_time()
    spec = tf.TensorSpec(_SHAPES[name])
    function = tf.function(both, input_signature=[spec], autograph=False).get_concrete_function()
    traced = time.process_time()
    function(x)
    return {"trace": traced - started, "first run": time.process_time() - traced}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(json.dumps(local(sys.argv[1], b"" if sys.argv[2] == "-" else Path(sys.argv[2]).read_bytes())))
