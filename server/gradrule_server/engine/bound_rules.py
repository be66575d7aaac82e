"""Applies the rules of a program's overrides: from the tensors of a target to one checked gradient per input."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.checks import checked_gradient
from gradrule_server.engine.code_rules import CODE_RULES, SALTED
from gradrule_server.engine.code_rules.target import Gradient, RuleTarget, dense_upstream
from gradrule_server.engine.graph_import import NodeRefused, replay
from gradrule_server.engine.op_gradients import as_list, gradient_of
from gradrule_server.engine.tf_errors import clean_message, error_message
from gradrule_server.errors import GradruleError, error
from gradrule_server.policy.op_tables import input_numbers, ops_with
from gradrule_server.rules import RuleContent, RuleGraph, Signature

_KEEPS_SHAPE = ops_with("keeps_shape")
# An upstream gradient has the shape of its output: it was checked when it was made.
_ONE_SHAPE = frozenset({"x0", "y0", "dy0", "default0"})
_ELEMENTWISE = ops_with("elementwise")
_PERMUTES = input_numbers("permutes")
# The gradient of a Sum over all elements is its upstream gradient for each element.
_REDUCTIONS = ops_with("reduction") - {"Sum"}


class BoundRule:
    """Base of all rules: checks the gradients.

    `own_gradient`: the rule for the gradient of this rule. `param_values`: the values of its params.
    """

    own_gradient: BoundRule | None = None
    param_values: Sequence[tf.Tensor] = ()

    def __init__(self, name: str) -> None:
        self.name = name

    def gradients(self, target: RuleTarget, dys: Sequence[Gradient]) -> Sequence[Gradient]:
        """Returns one gradient per input of the target. Raises RULE_ARITY, RULE_OUTPUT or RULE_NOT_APPLICABLE."""
        raise NotImplementedError

    def identity(self, target: RuleTarget) -> Hashable | None:
        """Returns what the gradients depend on besides the op, its tensors and the params, for all programs.

        None: they also depend on the graph around the op.
        """
        return None

    def _checked(self, gradients: Sequence[Gradient], target: RuleTarget) -> list[Gradient]:
        if len(gradients) != len(target.inputs):
            raise error(
                errors_pb2.ERROR_REASON_RULE_ARITY,
                f"rule {self.name!r} gives {len(gradients)} gradients, but node {target.node!r} ({target.what}) has "
                f"{len(target.inputs)} inputs",
                node=target.node,
            )
        return [
            checked_gradient(gradient, value, rule=self.name, node=target.node, index=index)
            for index, (gradient, value) in enumerate(zip(gradients, target.inputs, strict=True))
        ]

    def _require_in_place(self, target: RuleTarget, index: int) -> None:
        """Raises RULE_NOT_APPLICABLE if elements of an output are not at the places of those of the input."""
        if target.op is not None and index in _PERMUTES.get(target.op.type, ()):
            raise self._not_applicable(
                target,
                f"it computes the gradient of input {index} element by element from dy or y, but {target.what} may "
                f"move elements; use the op's own gradient, as in 2 * default{index}, or override a node before or "
                f"after it",
            )

    def _not_applicable(self, target: RuleTarget, why: str) -> GradruleError:
        return error(
            errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
            f"rule {self.name!r} cannot be used on node {target.node!r} ({target.what}): {why}",
            node=target.node,
        )


class OpGradientRule(BoundRule):
    """Applies the gradient that TensorFlow registers for one op type to any op."""

    def __init__(self, op_type: str) -> None:
        super().__init__(op_type)
        self._op_type = op_type

    def identity(self, target: RuleTarget) -> Hashable | None:
        return "op", self._op_type

    def gradients(self, target: RuleTarget, dys: Sequence[Gradient]) -> Sequence[Gradient]:
        function = gradient_of(self._op_type)
        if function is None:
            raise self._not_applicable(target, f"TensorFlow registers {self._op_type!r} as not differentiable")
        if self._op_type in _ELEMENTWISE:
            for index in range(len(target.inputs)):
                self._require_in_place(target, index)
        try:
            gradients = as_list(function(target.op or _SubgraphAsOp(target), *dys))
        except GradruleError:
            raise
        except Exception as cause:
            # The function was written for another op type, so it can fail with any error.
            raise self._not_applicable(
                target, f"{type(cause).__name__}: {clean_message(error_message(cause))}"
            ) from cause
        return self._checked(gradients, target)


class _SubgraphAsOp:
    """Represents a subgraph as an op for a gradient function of TensorFlow's. It has no attributes."""

    def __init__(self, target: RuleTarget) -> None:
        self.inputs, self.outputs = list(target.inputs), list(target.outputs)
        self.name, self.type = target.node, target.what

    def get_attr(self, name: str) -> NoReturn:
        """Raises `ValueError`, as an op without the attribute does."""
        raise ValueError(f"a subgraph has no attribute {name!r}")


class CodeRule(BoundRule):
    """Applies a rule of the catalogue that is code."""

    def __init__(self, name: str, code: str, params: Mapping[str, tf.Tensor]) -> None:
        super().__init__(name)
        self._code = code
        self._params = params
        self.param_values = [params[name] for name in sorted(params)]

    def identity(self, target: RuleTarget) -> Hashable | None:
        sources, dependence = target.sources, target.dependence
        depends = tuple((dependence.bits(source), dependence.is_x(source)) for source in sources)
        return "code", self.name, self._code, depends, target.salt if self._code in SALTED else None

    def gradients(self, target: RuleTarget, dys: Sequence[Gradient]) -> Sequence[Gradient]:
        graph = tf.compat.v1.get_default_graph()
        params = {name: tf_private.in_graph(graph, value) for name, value in self._params.items()}
        try:
            gradients = CODE_RULES[self._code](target, dense_upstream(target.outputs, dys), params)
        except GradruleError:
            raise
        except (ValueError, TypeError, LookupError, NotImplementedError, tf.errors.OpError) as cause:
            raise self._not_applicable(target, clean_message(error_message(cause))) from cause
        return self._checked(gradients, target)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A rule's graph for one signature, also as TensorFlow's message."""

    rule_graph: RuleGraph
    graph_def: tf_graph_pb2.GraphDef


class GraphRule(BoundRule):
    """Applies a rule that is an expression or a graph."""

    def __init__(self, name: str, content: RuleContent, params: Mapping[str, tf.Tensor]) -> None:
        super().__init__(name)
        self._content = content
        self._params = {f"param/{param}": value for param, value in params.items()}
        self.param_values = [params[name] for name in sorted(params)]
        if content.gradient is not None:
            # A rule and its own gradient share params of the same name.
            self.own_gradient = GraphRule(f"{name} (its gradient)", content.gradient, params)
        self._prepared: dict[Signature, _Prepared] = {}

    def identity(self, target: RuleTarget) -> Hashable | None:
        if self._content.embedded:
            # Its functions have names of their own in each program.
            return None
        salt = target.salt if "salt" in self._prepare(target).rule_graph.inputs else None
        return "rule", self.name, self._content.digest, salt

    def gradients(self, target: RuleTarget, dys: Sequence[Gradient]) -> Sequence[Gradient]:
        prepared = self._prepare(target)
        rule_graph = prepared.rule_graph
        graph = tf.compat.v1.get_default_graph()
        values = self._values(target, dys, rule_graph.inputs)
        bound = {
            f"{placeholder}:0": tf_private.in_graph(graph, values[variable])
            for variable, placeholder in rule_graph.inputs.items()
        }
        wanted = [name for name in rule_graph.results if name is not None]
        try:
            computed = dict(zip(wanted, replay(prepared.graph_def, bound, wanted, scope="rule"), strict=True))
        except NodeRefused as refused:
            column = rule_graph.columns.get(refused.name)
            where = f"node {refused.name!r} of its graph" if column is None else f"column {column} of its expression"
            raise self._not_applicable(target, f"{where}: {refused}") from refused
        gradients: list[Gradient] = []
        per_output = frozenset(f"{kind}{index}" for kind in ("y", "dy") for index in range(len(target.outputs)))
        one_shape = _ONE_SHAPE if target.op is not None and target.op.type in _KEEPS_SHAPE else frozenset()
        for index, (result, source) in enumerate(zip(rule_graph.results, rule_graph.shape_sources, strict=True)):
            gradient = None if result is None else computed[result]
            if not source.isdisjoint(per_output):
                self._require_in_place(target, index)
                self._require_not_reduced(target, gradient, index)
            # A result of tensors of the input's shape has that shape; a check at run time would cost a dozen ops.
            shape_known = source <= {f"x{index}"} | one_shape
            gradients.append(
                checked_gradient(
                    gradient,
                    target.inputs[index],
                    rule=self.name,
                    node=target.node,
                    index=index,
                    shape_known=shape_known,
                )
            )
        return gradients

    def _require_not_reduced(self, target: RuleTarget, gradient: tf.Tensor, index: int) -> None:
        """Raises RULE_NOT_APPLICABLE if the upstream gradient of one result would be that of each reduced element."""
        is_reduced = gradient.shape.rank == 0 and target.inputs[index].shape.rank != 0
        if is_reduced and target.op is not None and target.op.type in _REDUCTIONS:
            raise self._not_applicable(
                target,
                f"it gives all elements of input {index} one number, computed from dy or y; use the op's gradient, as "
                f"in 2 * default{index}, or, if that number is meant, multiply it by ones_like(x{index})",
            )

    def _prepare(self, target: RuleTarget) -> _Prepared:
        signature = Signature(
            tuple(value.dtype.base_dtype.as_datatype_enum for value in target.inputs),
            tuple(value.dtype.base_dtype.as_datatype_enum for value in target.outputs),
        )
        prepared = self._prepared.get(signature)
        if prepared is None:
            try:
                rule_graph = self._content.bind(signature)
            except GradruleError as cause:
                raise error(
                    cause.reason,
                    f"rule {self.name!r} on node {target.node!r} ({target.what}): {cause.message}",
                    node=target.node,
                ) from cause
            graph_def = tf_graph_pb2.GraphDef.FromString(rule_graph.graph.SerializeToString())
            prepared = self._prepared[signature] = _Prepared(rule_graph, graph_def)
        return prepared

    def _values(self, target: RuleTarget, dys: Sequence[Gradient], wanted: Mapping[str, str]) -> dict[str, tf.Tensor]:
        values: dict[str, tf.Tensor] = dict(self._params)
        values.update({f"x{index}": value for index, value in enumerate(target.inputs)})
        values.update({f"y{index}": value for index, value in enumerate(target.outputs)})
        for index, dy in enumerate(dys):
            if dy is not None:
                # Rules work on dense gradients only: slices have no `5 * dy`.
                values[f"dy{index}"] = tf.convert_to_tensor(dy)
            elif f"dy{index}" in wanted:
                values[f"dy{index}"] = tf.zeros_like(target.outputs[index])
        if "salt" in wanted:
            values["salt"] = tf.constant(target.salt, tf.int64)
        if any(variable.startswith("default") for variable in wanted):
            for index, (gradient, value) in enumerate(zip(target.own_gradients(dys), target.inputs, strict=True)):
                values[f"default{index}"] = tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
        return values
