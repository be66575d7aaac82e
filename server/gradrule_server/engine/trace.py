"""Traces the function of a program: imports its graph and differentiates it as requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2, tensor_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.backward import Backward, jacobian, stacked_vjp
from gradrule_server.engine.bound_rules import BoundRule, CodeRule, GraphRule, OpGradientRule
from gradrule_server.engine.code_rules.target import Dependence
from gradrule_server.engine.derivatives import (
    Derivatives,
    DifferentiationRequest,
    NamedTensor,
    checked_upstream,
    hvp,
    jvp,
    vjp,
)
from gradrule_server.engine.differentiation import Differentiation
from gradrule_server.engine.gradient_templates import Signatures
from gradrule_server.engine.graph_import import IMPORT_SCOPE, import_graph, remove_labels, tensor_name
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.engine.tf_errors import clean_message, error_message, refusal
from gradrule_server.errors import error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.rules import RuleContent
from gradrule_server.rules.catalogue import per_sample

_SCOPE = "reference"


class ReferenceForwards:
    """Imports the program's graph once more for each baseline, with the xs replaced by it. Unused ops never run."""

    def __init__(
        self, graph_def: tf_graph_pb2.GraphDef, feeds: Mapping[str, tf.Tensor], xs: Mapping[str, tf.Tensor]
    ) -> None:
        self._graph_def = graph_def
        self._feeds = feeds
        self._xs = xs
        self._graph = tf.compat.v1.get_default_graph()
        self._scopes: dict[str, str] = {}

    def find(self, tensor: tf.Tensor, baseline: tf.Tensor) -> tf.Tensor:
        """Returns the tensor with the xs at the baseline. Raises RULE_NOT_APPLICABLE inside loops and branches."""
        baseline = tf_private.from_graph(self._graph, baseline)
        # Placeholders are arguments of the function and not imported.
        if any(tensor is x for x in self._xs.values()):
            return self._baseline(tensor, baseline)
        if any(tensor is fed for fed in self._feeds.values()):
            return tensor
        if tensor.graph is not self._graph or not tensor.name.startswith(IMPORT_SCOPE):
            raise error(
                errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
                f"{tensor.name!r} lies in a loop or a branch, where there is no reference forward",
            )
        name = tensor.name.removeprefix(IMPORT_SCOPE)
        if baseline.name not in self._scopes:
            # Gradients may be built in another graph; the forward part belongs to this one.
            with self._graph.as_default():
                self._scopes[baseline.name] = self._import(baseline)
        return self._graph.get_tensor_by_name(f"{self._scopes[baseline.name]}/{name}")

    def _import(self, baseline: tf.Tensor) -> str:
        scope = f"{_SCOPE}_{len(self._scopes)}"
        bound = {**self._feeds, **{name: self._baseline(x, baseline) for name, x in self._xs.items()}}
        try:
            # Leaves the name scope of gradients, on which imported names must not depend.
            with self._graph.name_scope(None):
                import_graph(self._graph_def, bound, [], scope=scope)
        except (ValueError, TypeError) as cause:
            raise error(
                errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
                f"the graph cannot be run with the xs replaced by a baseline: {clean_message(error_message(cause))}",
            ) from cause
        return scope

    @staticmethod
    def _baseline(x: tf.Tensor, baseline: tf.Tensor) -> tf.Tensor:
        return tf.broadcast_to(tf.cast(baseline, x.dtype), tf.shape(x))


_KIND = evaluate_pb2.Derivative


class Trace:
    """Builds the body of a program's function, and completes `built`.

    `backward`: after the run, the backward part of a program in two parts.
    """

    def __init__(
        self,
        request: link_pb2.CompileRequest,
        graph_def: tf_graph_pb2.GraphDef,
        contents: Sequence[RuleContent | None],
        built: BuiltProgram,
    ) -> None:
        self._request = request
        self._graph_def = graph_def
        self._contents = contents
        self._built = built
        self.backward: Backward | None = None

    def run(self, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns fetches, then derivatives or the tensors that the backward part needs, then values of variables."""
        request, built = self._request, self._built
        groups, rest = [], list(arguments)
        for group in (built.inputs, built.grad_ys, built.directions):
            groups.append(rest[: len(group)])
            rest = rest[len(group) :]
        values, fed_grad_ys, directions = groups
        feeds = dict(zip((tensor_name(item.name) for item in built.inputs), values, strict=True))

        upstream_names = [item.tensor for item in request.grad_ys if item.WhichOneof("source") == "tensor"]
        wanted = dict.fromkeys(
            [
                *(endpoint.tensor for group in (request.fetches, request.ys, request.xs) for endpoint in group),
                *upstream_names,
                *request.stop_gradients,
                *(endpoint.tensor for endpoint in request.updates),
            ]
        )
        labelled: list[str] = []
        tensors = dict(zip(wanted, import_tensors(self._graph_def, feeds, list(wanted), labelled), strict=True))
        for endpoint in request.fetches:
            _require_value(endpoint.name, tensors[endpoint.tensor])
        outputs = [tensors[endpoint.tensor] for endpoint in request.fetches]
        built.outputs = [endpoint.name for endpoint in request.fetches]
        for name, endpoints in (("outputs", request.fetches), ("ys", request.ys), ("xs", request.xs)):
            built.specs[name] = [spec_message(endpoint.name, tensors[endpoint.tensor]) for endpoint in endpoints]
        built.specs["inputs"] = [
            spec_message(item.name, feeds[tensor_name(item.name)]) for item in built.inputs if item.default is None
        ]
        if request.ys:
            nodes = {f"{IMPORT_SCOPE}{node.name}": node for node in self._graph_def.node}
            differentiation = self._create_differentiation(tensors, feeds, rest, Signatures(nodes, labelled))
            outputs += self._build_results(tensors, fed_grad_ys, directions, differentiation)
            built.statuses = differentiation.statuses
            built.default_gradient_nodes = differentiation.default_gradient_nodes
            built.without_gradient, built.made = differentiation.without_gradient, differentiation.made
        remove_labels(tf.compat.v1.get_default_graph(), labelled)
        built.updates = [endpoint.name for endpoint in request.updates]
        return [*outputs, *(tensors[endpoint.tensor] for endpoint in request.updates)]

    def _create_differentiation(
        self,
        tensors: dict[str, tf.Tensor],
        feeds: dict[str, tf.Tensor],
        params: Sequence[tf.Tensor],
        signatures: Signatures,
    ) -> Differentiation:
        request = self._request
        reference = ReferenceForwards(
            self._graph_def, feeds, {tensor_name(endpoint.tensor): tensors[endpoint.tensor] for endpoint in request.xs}
        )
        return Differentiation(
            request.marks,
            self._bind_rules(params),
            request.scopes,
            request.no_gradient,
            reference.find,
            Dependence([tensors[endpoint.tensor] for endpoint in request.xs]),
            request.made,
            again=self._built.kind == _KIND.DERIVATIVE_HVP,
            signatures=signatures,
        )

    def _build_results(
        self,
        tensors: dict[str, tf.Tensor],
        fed_grad_ys: Sequence[tf.Tensor],
        directions: Sequence[tf.Tensor],
        differentiation: Differentiation,
    ) -> list[tf.Tensor]:
        request, built = self._request, self._built
        ys = [NamedTensor(endpoint.name, tensors[endpoint.tensor]) for endpoint in request.ys]
        fed = iter(fed_grad_ys)
        stacks: list[tf.Tensor | None] = []
        upstream: list[tf.Tensor | None] = []
        for y, item in zip(ys, request.grad_ys, strict=True):
            source = item.WhichOneof("source")
            given = next(fed) if source == "fed" else None
            is_pulled = built.kind in (_KIND.DERIVATIVE_VJP, _KIND.DERIVATIVE_HVP) and not request.split
            stacks.append(given if request.stacked_grad_ys else None)
            value = tensors[item.tensor] if source == "tensor" else None if request.stacked_grad_ys else given
            is_given_later = request.stacked_grad_ys and given is not None
            upstream.append(checked_upstream(y, value) if is_pulled and not is_given_later else None)
        requested = DifferentiationRequest(
            tf.compat.v1.get_default_graph(),
            ys,
            [NamedTensor(endpoint.name, tensors[endpoint.tensor]) for endpoint in request.xs],
            upstream,
            [tensors[name] for name in request.stop_gradients],
            request.unconnected_gradients == program_pb2.UNCONNECTED_GRADIENTS_ZERO,
            request.dense_gradients,
        )
        if request.split:
            pulled = [index for index, y in enumerate(ys) if y.is_differentiable]
            self.backward = Backward(requested, pulled, differentiation)
            return [*self.backward.shapes, *self.backward.captures]
        derivatives = self._build_derivatives(requested, stacks, directions, differentiation)
        built.layout = derivatives.layout
        return derivatives.tensors

    def _build_derivatives(
        self,
        requested: DifferentiationRequest,
        stacks: Sequence[tf.Tensor | None],
        directions: Sequence[tf.Tensor],
        differentiation: Differentiation,
    ) -> Derivatives:
        kind = self._built.kind
        if kind in (_KIND.DERIVATIVE_JACOBIAN, _KIND.DERIVATIVE_BATCH_JACOBIAN):
            is_batched = kind == _KIND.DERIVATIVE_BATCH_JACOBIAN
            return jacobian(requested, differentiation, batched=is_batched, mixes_samples=self._mixes_samples)
        if kind in (_KIND.DERIVATIVE_JVP, _KIND.DERIVATIVE_HVP):
            given = iter(directions)
            by_x = [next(given) if is_given else None for is_given in self._request.directions]
            return (jvp if kind == _KIND.DERIVATIVE_JVP else hvp)(requested, by_x, differentiation)
        if self._request.stacked_grad_ys:
            return stacked_vjp(requested, stacks, differentiation)
        return vjp(requested, differentiation)

    @property
    def _mixes_samples(self) -> bool:
        """Whether a rule may compute the gradient of an example from upstream gradients of others.

        Gradients that are part of the uploaded graph count as its ops.
        """
        return any(
            content is not None and rule.WhichOneof("form") != "brought" and not per_sample(content)
            for rule, content in zip(self._request.rules, self._contents, strict=True)
        )

    def _bind_rules(self, params: Sequence[tf.Tensor]) -> list[BoundRule]:
        values: dict[int, dict[str, tf.Tensor]] = {}
        for item, value in zip(self._built.params, params, strict=True):
            values.setdefault(item.rule, {})[item.name] = value
        rules: list[BoundRule] = []
        for index, (rule, content) in enumerate(zip(self._request.rules, self._contents, strict=True)):
            given = values.get(index, {})
            if content is None:
                rules.append(OpGradientRule(rule.op_gradient))
            elif content.code is not None:
                rules.append(CodeRule(rule.name, content.code, given))
            else:
                rules.append(GraphRule(rule.name, content, given))
        return rules


def import_tensors(
    graph_def: tf_graph_pb2.GraphDef, feeds: dict[str, tf.Tensor], wanted: list[str], labelled: list[str]
) -> list[tf.Tensor]:
    """Imports a graph into the current one; returns the wanted tensors. Raises INVALID_GRAPH if TensorFlow refuses it.

    `labelled`: receives the names of ops whose labels must be removed before the graph runs (`graph_import`).
    """
    try:
        return import_graph(graph_def, feeds, wanted, scope=IMPORT_SCOPE, labelled=labelled)
    except (ValueError, TypeError, tf.errors.OpError) as cause:
        raise refusal(cause, graph_def) from cause


def spec_message(name: str, tensor: tf.Tensor) -> tensor_pb2.TensorSpec:
    """Returns the name, type and shape of a tensor as a message."""
    shape = tensor_pb2.TensorShape()
    if tensor.shape.rank is None:
        shape.unknown_rank = True
    else:
        shape.dim.extend(tensor_pb2.TensorShape.Dim(size=-1 if size is None else size) for size in tensor.shape)
    return tensor_pb2.TensorSpec(name=name, dtype=tensor.dtype.base_dtype.as_datatype_enum, shape=shape)


def _require_value(name: str, tensor: tf.Tensor) -> None:
    """Raises UNSUPPORTED_OP for a resource or variant, which cannot leave the process."""
    if tensor.dtype.base_dtype in (tf.resource, tf.variant):
        raise error(
            errors_pb2.ERROR_REASON_UNSUPPORTED_OP,
            f"{name!r} ({tensor.op.type}) is a {tensor.dtype.base_dtype.name}, which has no value to put out; fetch "
            f"what is read from it",
            node=name,
            field="spec.fetches",
        )
