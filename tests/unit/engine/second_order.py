"""Differentiates a program twice, as the engine does while it builds one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import override_pb2, program_pb2
from gradrule_server import graphs
from gradrule_server.engine import build, tf_private
from gradrule_server.engine.bound_rules import BoundRule, GraphRule
from gradrule_server.engine.code_rules.target import Dependence
from gradrule_server.engine.differentiation import Differentiation, DifferentiationStage
from gradrule_server.engine.gradient_templates import Signatures
from gradrule_server.engine.graph_import import IMPORT_SCOPE, import_graph
from gradrule_server.link.messages import CallShape
from gradrule_server.preparation.prepare import prepare
from gradrule_server.preparation.references import ResolvedRule
from tests.stores import no_blobs
from tests.unit.engine.building import NAMESPACES


class NoRegistry:
    """Knows no rule."""

    def fetch(self, names: Iterable[str]) -> None:
        """Does nothing: there are no rules."""

    def resolve(self, name: str) -> ResolvedRule:
        raise AssertionError(f"rule {name} was requested")


def twice(
    graph: bytes,
    feeds: Mapping[str, Any],
    y: str,
    grad_y: Any,
    seed: Any,
    *,
    overrides: Sequence[override_pb2.GradientOverride] = (),
    params: Mapping[str, float] | None = None,
) -> list[Any]:
    """Returns the gradients of y by all feeds, pulled back from `grad_y`; then the gradients of the first of these by
    all feeds and by `grad_y`, pulled back from `seed`."""
    spec = program_pb2.ProgramSpec(overrides=overrides)
    spec.graph.serialized = graph
    spec.vjp.ys.append(y)
    spec.vjp.xs.extend(feeds)
    request = prepare(spec, CallShape(), NoRegistry(), graphs.Limits(), no_blobs(), next(NAMESPACES)).request
    graph_def = tf_graph_pb2.GraphDef.FromString(request.graph)
    functions = tf_private.add_functions(graph_def.library)

    def run(*values: tf.Tensor) -> list[Any]:
        *xs, upstream, again = values
        bound = {f"{name}:0": x for name, x in zip(feeds, xs, strict=True)}
        (result,) = import_graph(graph_def, bound, [request.ys[0].tensor], IMPORT_SCOPE)
        given = {name: tf.constant(value, tf.float64) for name, value in (params or {}).items()}
        rules: list[BoundRule] = []
        for rule in request.rules:
            content = build._read_content(rule)
            assert content is not None
            rules.append(GraphRule(rule.name, content, {param.name: given[param.name] for param in content.params}))
        differentiation = Differentiation(
            request.marks,
            rules,
            request.scopes,
            request.no_gradient,
            _no_reference,
            Dependence(xs),
            again=True,
            signatures=Signatures({}, ()),
        )
        with differentiation.active():
            first = tf.gradients(result, xs, grad_ys=upstream)
        with differentiation.active(DifferentiationStage.AGAIN):
            second = tf.gradients(first[0], [*xs, upstream], grad_ys=again)
        assert differentiation.statuses[:1] in ([], [override_pb2.RESOLUTION_STATUS_ACTIVE])
        return [*first, *second]

    try:
        return _run(run, [*feeds.values(), grad_y, seed])
    finally:
        tf_private.remove_functions(functions)


def twice_locally(build_y: Callable[..., Any], feeds: Sequence[Any], grad_y: Any, seed: Any) -> list[Any]:
    """Returns the gradients of `twice` for the y that `build_y` computes from the feeds, by TensorFlow alone."""

    def run(*values: tf.Tensor) -> list[Any]:
        *xs, upstream, again = values
        first = tf.gradients(build_y(*xs), xs, grad_ys=upstream)
        return [*first, *tf.gradients(first[0], [*xs, upstream], grad_ys=again)]

    return _run(run, [*feeds, grad_y, seed])


def _run(run: Callable[..., list[Any]], values: Sequence[Any]) -> list[Any]:
    exists: list[bool] = []

    def compact(*arguments: tf.Tensor) -> list[Any]:
        found = run(*arguments)
        exists.extend(value is not None for value in found)
        return [value for value in found if value is not None]

    signature = [tf.TensorSpec(np.shape(value), np.asarray(value).dtype) for value in values]
    function = tf.function(compact, input_signature=signature, autograph=False).get_concrete_function()
    results = iter(function(*map(tf.constant, values)))
    return [next(results).numpy() if is_given else None for is_given in exists]


def _no_reference(_: tf.Tensor, __: tf.Tensor) -> tf.Tensor:
    raise AssertionError("no rule of these tests reads a baseline")
