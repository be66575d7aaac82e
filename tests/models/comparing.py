"""One model on a server and in local TensorFlow: outputs and gradients, plain and with rules."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from tests.models.architectures import Architecture
from tests.models.substitution import OWN_RULE, Backward, guided, own, straight_through

TOLERANCE = 2e-5
"""Of the largest element of a tensor, in float32."""

TIMEOUT_S = 300.0

VARIANTS: dict[str, tuple[Any, Backward | None]] = {
    "plain": (None, None),
    "guided_relu": ("guided_relu", guided),
    "ste": ("ste", straight_through),
    "user rule": (gr.Rule(OWN_RULE), own),
}


@dataclass
class Row:
    """What was found of one model. Seconds: tracing here; compiling and the first run of the plain program; a run.
    Differences by variant: the largest, as a part of the largest element of its tensor."""

    name: str
    op_type: str
    nodes: int = 0
    weights: int = 0
    trace_s: float = 0.0
    compile_s: float = 0.0
    first_s: float = 0.0
    run_s: float = 0.0
    differences: dict[str, float] = field(default_factory=dict)


def compare(client: Any, architecture: Architecture) -> Row:
    """Asserts that overrides reach the nodes that the local substitutes were made for; differences are told."""
    model = architecture.model()
    op_type = architecture.activation.op_type
    weights_in_all = sum(int(np.prod(variable.shape)) for variable in model.variables)
    row = Row(architecture.name, op_type, weights=weights_in_all)
    start = time.perf_counter()
    graph = gr.from_keras(model)
    row.trace_s = time.perf_counter() - start
    row.nodes = len(graph.find())
    (feed,), (fetch,) = graph.inputs, graph.outputs
    values = architecture.example()
    weights = some_weights(model)
    xs = [weight.path for weight in weights] + ([] if architecture.vocabulary else [feed])
    dy = np.random.default_rng(3).normal(size=model(values).shape).astype(np.float32)
    for variant, (rule, backward) in VARIANTS.items():
        overrides = None if rule is None else {op_type: rule}
        start = time.perf_counter()
        program = client.compile(graph, fetches=[fetch], ys=[fetch], xs=xs, overrides=overrides, timeout=TIMEOUT_S)
        seconds = [time.perf_counter() - start]
        try:
            for _ in range(2):
                start = time.perf_counter()
                result = program.evaluate({feed: values}, grad_ys={fetch: dy}, timeout=TIMEOUT_S)
                seconds.append(time.perf_counter() - start)
        finally:
            client.delete_program(program.name)
        if backward is None:
            row.compile_s, row.first_s, row.run_s = seconds
        asked, wanted = locally(model, architecture, weights, values, dy, backward)
        active = {found.node for found in result.overrides if (found.label, found.status) == (op_type, "active")}
        assert len(active) == len(asked), (variant, active, asked)
        found = [result.outputs[fetch], *(np.asarray(result.gradients[x]) for x in xs)]
        row.differences[variant] = max(difference(*pair) for pair in zip(found, wanted, strict=True))
    return row


def locally(
    model: Any, architecture: Architecture, weights: list[Any], values: Any, dy: Any, backward: Backward | None
) -> tuple[set[str], list[Any]]:
    """Where another gradient was asked for; then the output, and the gradients by the weights and,
    where it has one, by the input."""

    @tf.function(autograph=False)
    def run(x: Any, grad_y: Any) -> Any:
        sources = [weight.value for weight in weights] + ([] if architecture.vocabulary else [x])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=False)
        return [y, *map(tf.convert_to_tensor, tape.gradient(y, sources, output_gradients=grad_y))]

    asked: set[str] = set()
    with nullcontext() if backward is None else architecture.activation.by(backward, asked):
        answer = run(tf.constant(values), tf.constant(dy))
    return asked, [value.numpy() for value in answer]


def some_weights(model: Any) -> list[Any]:
    """The first, a middle and the last of at most a million elements."""
    small = [variable for variable in model.trainable_variables if np.prod(variable.shape) <= 1e6]
    return [small[0], small[len(small) // 2], small[-1]]


def difference(found: Any, wanted: Any) -> float:
    """The largest, as a part of the largest element that is wanted, which is not nothing."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype == np.float32
    largest = float(np.abs(wanted).max())
    assert np.isfinite(largest)
    assert largest > 0
    return float(np.abs(found - wanted).max()) / largest
