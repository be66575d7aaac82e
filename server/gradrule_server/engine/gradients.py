"""The one gradient that gradrule registers with TensorFlow, and what it does for each node that asks for it.

Every node of a program's graph carries `_gradient_op_type="gradrule"`, so TensorFlow asks `_dispatch` for its gradient
wherever the node lies: at top level, in a loop body, in a branch. An overridden node also carries `_gradrule_mark`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from gradrule.v1 import errors_pb2, override_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.bound_rules import BoundRule
from gradrule_server.engine.names import IMPORT_SCOPE
from gradrule_server.errors import error
from gradrule_server.link.v1 import link_pb2

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

MARK_ATTR = "_gradrule_mark"

# Registered as not differentiable, and rightly so: these cut the path on purpose, or their outputs are constants.
_GRADIENT_IS_ZERO = frozenset({"StopGradient", "ZerosLike", "OnesLike"})

_OWN_GRADIENT = -1
_FOREIGN_GRADIENT = -2

_ACTIVE = override_pb2.RESOLUTION_STATUS_ACTIVE
_OFF_PATH = override_pb2.RESOLUTION_STATUS_OFF_PATH


class Differentiation:
    """Answers TensorFlow's questions for gradients while one program is built, and notes which nodes were asked."""

    def __init__(
        self,
        marks: Sequence[link_pb2.MarkedNode],
        rules: Sequence[BoundRule],
        scopes: Mapping[str, str],
    ) -> None:
        self._marks = marks
        self._rules = rules
        self._scopes = scopes
        self._asked: set[int] = set()
        self._defaulted: dict[str, None] = {}

    @property
    def statuses(self) -> list[override_pb2.ResolutionStatus.ValueType]:
        """Per mark: ACTIVE where its gradient was asked."""
        return [_ACTIVE if index in self._asked else _OFF_PATH for index in range(len(self._marks))]

    @property
    def defaulted(self) -> list[str]:
        """Nodes without a mark whose gradient was asked, from xs towards ys."""
        return list(self._defaulted)[::-1]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within this context `_dispatch` asks this object."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def gradient(self, op: tf.Operation, dys: Sequence[Gradient]) -> Sequence[Gradient]:
        """One gradient per input of `op`."""
        index = _mark_of(op)
        if index is None:
            name = self._public_name(op)
            if name is not None:
                self._defaulted[name] = None
            return own_gradient(op, dys, name or op.name)
        mark = self._marks[index]
        self._asked.add(index)
        if mark.rule == _OWN_GRADIENT:
            return own_gradient(op, dys, mark.node)
        if mark.rule == _FOREIGN_GRADIENT:
            raise error(
                errors_pb2.ERROR_REASON_FOREIGN_GRADIENT,
                f"node {mark.node!r} ({op.type}) names the gradient {mark.foreign!r}, which exists only in the process "
                f"that made the graph. Override the node with a rule, or with 'default' for the op's own gradient.",
                node=mark.node,
            )
        return self._rules[mark.rule].gradients(op, dys, mark.node)

    def _public_name(self, op: tf.Operation) -> str | None:
        """The node's name in the uploaded graph; None for a node that a gradient made."""
        if op.name.startswith(IMPORT_SCOPE):
            return str(op.name).removeprefix(IMPORT_SCOPE)
        scope = self._scopes.get(getattr(op.graph, "name", ""))
        return None if scope is None else f"{scope}/{op.name}"


_current: contextvars.ContextVar[Differentiation] = contextvars.ContextVar("differentiation")


def own_gradient(op: tf.Operation, dys: Sequence[Gradient], node: str) -> Sequence[Gradient]:
    """The gradient that TensorFlow registers for the op's type. NO_GRADIENT if it registers none."""
    try:
        function = tf_private.gradient_of(op.type)
    except LookupError:
        raise error(
            errors_pb2.ERROR_REASON_NO_GRADIENT,
            f"node {node!r}: op type {op.type!r} has no gradient. Override it with a rule, or cut the path with "
            f"stop_gradients=[{node!r}].",
            node=node,
        ) from None
    if function is None:
        if op.type not in _GRADIENT_IS_ZERO:
            raise error(
                errors_pb2.ERROR_REASON_NO_GRADIENT,
                f"node {node!r}: TensorFlow registers {op.type!r} as not differentiable, so nothing would reach what "
                f"lies before it. Override it with a rule, or cut the path on purpose with stop_gradients=[{node!r}].",
                node=node,
            )
        return [None] * len(op.inputs)
    result: Any = function(op, *dys)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _mark_of(op: tf.Operation) -> int | None:
    try:
        return int(op.get_attr(MARK_ATTR))
    except ValueError:
        return None


@tf.RegisterGradient(tf_private.GRADIENT_NAME)
def _dispatch(op: tf.Operation, *dys: Gradient) -> Sequence[Gradient]:
    return _current.get().gradient(op, dys)
