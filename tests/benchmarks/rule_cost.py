"""What an override costs beside the same gradient written by hand, both in this process, without any wire."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

import gradrule as gr
from tests.benchmarks.context import Bench
from tests.benchmarks.measure import Row, in_turns

if TYPE_CHECKING:
    import tensorflow as tf

    from gradrule_server.preparation.references import ResolvedRule

Backward = Callable[[Any, Any], Any]
"""(x, dy) → dx, in TensorFlow."""

ELEMENTS = 1 << 20


class _Builtins:
    """Rules of the catalogue, without a registry."""

    def fetch(self, names: Iterable[str]) -> None:
        """Does nothing: all are there."""

    def resolve(self, name: str) -> ResolvedRule:
        from gradrule_server.preparation.references import ResolvedRule
        from gradrule_server.rules.catalogue import BUILTINS

        return ResolvedRule(name, BUILTINS[name].content)


def _by_rule(rule: str) -> Callable[[tf.Tensor], Any]:
    """sum(2 · sign(x)) and its gradient by x, as an engine builds and runs it."""
    import tensorflow as tf

    from gradrule.v1 import program_pb2
    from gradrule_server.engine.build import build
    from gradrule_server.graphs import Limits
    from gradrule_server.link.messages import CallShape
    from gradrule_server.preparation.prepare import prepare
    from tests.stores import no_blobs

    g = gr.Graph()
    sign = g.op_output("Sign", g.placeholder("x", "float32", [ELEMENTS]))
    g.reduce_sum(sign * 2.0, axis=[0], name="y")
    spec = program_pb2.ProgramSpec(fetches=["y"], vjp=program_pb2.Vjp(ys=["y"], xs=["x"]))
    spec.graph.serialized = g.to_bytes()
    spec.overrides.add(rule=rule).selector.op_type = "Sign"
    prepared = prepare(spec, CallShape(), _Builtins(), Limits(), no_blobs())
    built = build(prepared.request)
    values = {item.name: item.value.number for item in prepared.table.params.call_settings({}, {0})}
    params = [tf.constant(values[item.name], tf.float64) for item in built.params]
    return lambda x: built.function(x, *params)


def _by_hand(backward: Backward) -> Callable[[tf.Tensor], Any]:
    """The same with `tf.custom_gradient`."""
    import tensorflow as tf

    @tf.custom_gradient
    def sign(x: Any) -> Any:
        return tf.sign(x), functools.partial(backward, x)

    @tf.function(input_signature=[tf.TensorSpec([ELEMENTS], tf.float32)], autograph=False)
    def both(x: Any) -> Any:
        y = tf.reduce_sum(sign(x) * 2.0)
        return y, tf.gradients(y, x)[0]

    function: Callable[[tf.Tensor], Any] = both.get_concrete_function()
    return function


def _ste_sign(x: Any, dy: Any) -> Any:
    import tensorflow as tf

    return tf.where(tf.abs(x) <= 1.0, dy, tf.zeros_like(dy))


def _fast_sigmoid(x: Any, dy: Any) -> Any:
    import tensorflow as tf

    return dy * (1.0 / tf.square(1.0 + 25.0 * tf.abs(x)))


def rule_cost(bench: Bench) -> list[Row]:
    """Elementwise rules on a million numbers."""
    import tensorflow as tf

    x = tf.constant(np.random.default_rng(0).normal(size=ELEMENTS).astype(np.float32))
    rows = []
    for rule, backward in (("ste_sign", _ste_sign), ("fast_sigmoid", _fast_sigmoid)):
        ours, theirs = _by_rule(rule), _by_hand(backward)
        for got, wanted in zip(tf.nest.flatten(ours(x)), tf.nest.flatten(theirs(x)), strict=True):
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-5)
        steps = {
            "rule": functools.partial(_cpu_us, functools.partial(ours, x), bench.counts.rule_calls),
            "hand": functools.partial(_cpu_us, functools.partial(theirs, x), bench.counts.rule_calls),
        }
        found = in_turns(steps, rounds=bench.counts.rounds, budget_s=bench.counts.budget_s)
        what = f"processor time of an override with {rule}, 1 Mi numbers, in process"
        rows.append(Row("rules", what, "tf.custom_gradient by hand", "µs", found["rule"], found["hand"], 1.05))
    return rows


def _cpu_us(call: Callable[[], object], calls: int) -> float:
    """Returns processor time of a call, on all threads."""
    call()
    started = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - started) * 1e6 / calls
