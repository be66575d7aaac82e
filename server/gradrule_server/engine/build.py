"""From a checked, expanded program to a function of TensorFlow's that runs forward and backward in one call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import errors_pb2, override_pb2, program_pb2, tensor_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.bound_rules import BoundRule, CodeRule, GraphRule, OpGradientRule
from gradrule_server.engine.checks import require_same_shape
from gradrule_server.engine.gradients import Differentiation
from gradrule_server.engine.imports import import_graph, tensor_name
from gradrule_server.engine.names import IMPORT_SCOPE, readable
from gradrule_server.engine.references import Reference
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.rules import RuleContent
from gradrule_server.rules.catalogue import BUILTINS

UNCONNECTED = "unconnected"
NOT_DIFFERENTIABLE = "not_differentiable"
DENSE = "dense"
SPARSE = "sparse"

_SMALL_OPS = 256
# The executor of the calling thread does not know the control flow that these are lowered to.
_NEEDS_THREADS = frozenset(
    {
        "While",
        "StatelessWhile",
        "If",
        "StatelessIf",
        "Case",
        "StatelessCase",
        "PartitionedCall",
        "StatefulPartitionedCall",
    }
)

_UNCONNECTED_MODES = {
    program_pb2.UNCONNECTED_GRADIENTS_UNSPECIFIED: tf.UnconnectedGradients.NONE,
    program_pb2.UNCONNECTED_GRADIENTS_NONE: tf.UnconnectedGradients.NONE,
    program_pb2.UNCONNECTED_GRADIENTS_ZERO: tf.UnconnectedGradients.ZERO,
}


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the built function: a placeholder's or variable's value, or the upstream gradient of a y.

    `default`: what it is in calls that do not feed it.
    """

    name: str
    dtype: tf.DType
    shape: tf.TensorShape
    default: tf.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ParamInput:
    """A param of a bound rule, always float64."""

    rule: int
    name: str


@dataclass(slots=True, weakref_slot=True, eq=False)
class Built:
    """A function of feeds, fed grad_ys and params, in this order, that returns fetches, then tensors of gradients."""

    function: Any = None
    inputs: list[Input] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of inputs by further names that calls may use."""
    grad_ys: list[Input] = field(default_factory=list)
    params: list[ParamInput] = field(default_factory=list)
    small: bool = False
    """Few ops and no loops or branches: faster on the calling thread than on TensorFlow's threads."""
    unused: list[bool] = field(default_factory=list)
    """Per input: whether the results do not depend on it, so that a call need not feed it."""
    outputs: list[str] = field(default_factory=list)
    gradients: list[tuple[str, str]] = field(default_factory=list)
    """(x as asked, form); a dense gradient is one returned tensor, a sparse one three, the other forms none."""
    statuses: list[override_pb2.ResolutionStatus.ValueType] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)
    without_gradient: list[link_pb2.WithoutGradient] = field(default_factory=list)
    specs: dict[str, list[tensor_pb2.TensorSpec]] = field(default_factory=dict)


def build(request: link_pb2.CompileRequest, values: Sequence[tf.Tensor] = ()) -> Built:
    """Builds the program; `GradruleError` where TensorFlow refuses the graph or a rule does not fit its node.

    `values`: of the request's variables, in their order.
    """
    graph_def = tf_graph_pb2.GraphDef.FromString(request.graph)
    # Removed with the program: names are unique to it, so nothing else refers to them.
    functions = tf_private.add_functions(graph_def.library)
    try:
        built = _build(request, graph_def, values)
    except BaseException:
        tf_private.remove_functions(functions)
        raise
    weakref.finalize(built, tf_private.remove_functions, functions)
    return built


def _build(request: link_pb2.CompileRequest, graph_def: tf_graph_pb2.GraphDef, values: Sequence[tf.Tensor]) -> Built:
    contents = [_content(rule) for rule in request.rules]
    used = {mark.rule for mark in request.marks}
    built = Built(
        inputs=[
            *(_input(spec, None) for spec in request.inputs),
            *(_input(item.spec, value) for item, value in zip(request.variables, values, strict=True)),
        ],
        aliases=dict(request.input_aliases),
        params=[
            ParamInput(index, param.name)
            for index, content in enumerate(contents)
            if content is not None and index in used
            for param in content.params
        ],
    )
    built.statuses = [override_pb2.RESOLUTION_STATUS_OFF_PATH] * len(request.marks)
    # Which grad_ys are arguments is known only together with their types, which the import tells.
    fed = [index for index, upstream in enumerate(request.grad_ys) if upstream.WhichOneof("source") == "fed"]
    y_specs = _specs_of(graph_def, built.inputs, [request.ys[index].tensor for index in fed]) if fed else []
    built.grad_ys = [
        Input(request.ys[index].name, spec.dtype, spec.shape) for index, spec in zip(fed, y_specs, strict=True)
    ]

    def run(*arguments: tf.Tensor) -> list[tf.Tensor]:
        return _Trace(request, graph_def, contents, built).run(arguments)

    signature = [
        *(tf.TensorSpec(item.shape, item.dtype, name=f"in{index}") for index, item in enumerate(built.inputs)),
        *(tf.TensorSpec(item.shape, item.dtype, name=f"grad_y{index}") for index, item in enumerate(built.grad_ys)),
        *(tf.TensorSpec(None, tf.float64, name=f"param{index}") for index in range(len(built.params))),
    ]
    built.function = tf.function(run, input_signature=signature, autograph=False).get_concrete_function()
    returned = {id(tensor) for tensor in built.function.graph.outputs}
    arguments = built.function.graph.inputs[: len(built.inputs)]
    built.small = _is_small(built.function.graph)
    built.unused = [not argument.consumers() and id(argument) not in returned for argument in arguments]
    return built


class _Trace:
    """The body of the built function, run once by `tf.function`."""

    def __init__(
        self,
        request: link_pb2.CompileRequest,
        graph_def: tf_graph_pb2.GraphDef,
        contents: Sequence[RuleContent | None],
        built: Built,
    ) -> None:
        self._request = request
        self._graph_def = graph_def
        self._contents = contents
        self._built = built

    def run(self, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        request, built = self._request, self._built
        n_inputs, n_grad_ys = len(built.inputs), len(built.grad_ys)
        feeds = dict(zip((tensor_name(item.name) for item in built.inputs), arguments[:n_inputs], strict=True))
        fed_grad_ys = list(arguments[n_inputs : n_inputs + n_grad_ys])
        params = arguments[n_inputs + n_grad_ys :]

        upstream_names = [item.tensor for item in request.grad_ys if item.WhichOneof("source") == "tensor"]
        wanted = dict.fromkeys(
            [
                *(endpoint.tensor for group in (request.fetches, request.ys, request.xs) for endpoint in group),
                *upstream_names,
                *request.stop_gradients,
            ]
        )
        tensors = dict(zip(wanted, _import(self._graph_def, feeds, list(wanted)), strict=True))
        for endpoint in request.fetches:
            _require_value(endpoint.name, tensors[endpoint.tensor])
        outputs = [tensors[endpoint.tensor] for endpoint in request.fetches]
        built.outputs = [endpoint.name for endpoint in request.fetches]
        for group, endpoints in (("outputs", request.fetches), ("ys", request.ys), ("xs", request.xs)):
            built.specs[group] = [spec_message(endpoint.name, tensors[endpoint.tensor]) for endpoint in endpoints]
        built.specs["inputs"] = [
            spec_message(item.name, feeds[tensor_name(item.name)]) for item in built.inputs if item.default is None
        ]
        if request.ys:
            outputs += self._differentiate(tensors, feeds, fed_grad_ys, params)
        return outputs

    def _differentiate(
        self,
        tensors: dict[str, tf.Tensor],
        feeds: dict[str, tf.Tensor],
        fed_grad_ys: list[tf.Tensor],
        params: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        request, built = self._request, self._built
        xs = [tensors[endpoint.tensor] for endpoint in request.xs]
        reference = Reference(
            self._graph_def, feeds, {tensor_name(endpoint.tensor): tensors[endpoint.tensor] for endpoint in request.xs}
        )
        differentiation = Differentiation(
            request.marks, self._rules(params), request.scopes, request.no_gradient, reference.of
        )
        ys, grad_ys = self._ys(tensors, fed_grad_ys)
        with differentiation.active():
            gradients = _gradients(
                ys,
                xs,
                grad_ys,
                [tensors[name] for name in request.stop_gradients],
                _UNCONNECTED_MODES[request.unconnected_gradients],
            )
        built.statuses, built.defaulted = differentiation.statuses, differentiation.defaulted
        built.without_gradient = differentiation.without_gradient
        return [
            tensor
            for endpoint, x, gradient in zip(request.xs, xs, gradients, strict=True)
            for tensor in self._lay_out(endpoint.name, x, gradient)
        ]

    def _rules(self, params: Sequence[tf.Tensor]) -> list[BoundRule]:
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

    def _ys(
        self, tensors: dict[str, tf.Tensor], fed_grad_ys: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
        """The ys that can be differentiated, each with its upstream gradient (None: ones)."""
        fed = iter(fed_grad_ys)
        ys: list[tf.Tensor] = []
        grad_ys: list[tf.Tensor | None] = []
        for endpoint, upstream in zip(self._request.ys, self._request.grad_ys, strict=True):
            y = tensors[endpoint.tensor]
            source = upstream.WhichOneof("source")
            grad_y = next(fed) if source == "fed" else tensors[upstream.tensor] if source == "tensor" else None
            where = f"grad_y of {endpoint.name!r}"
            if grad_y is not None:
                if grad_y.dtype != y.dtype:
                    raise error(
                        errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                        f"{where} is {grad_y.dtype.name}, but the y is {y.dtype.name}",
                        field="grad_ys",
                    )
                if not grad_y.shape.is_compatible_with(y.shape):
                    raise error(
                        errors_pb2.ERROR_REASON_FEED_SHAPE,
                        f"{where} has shape {grad_y.shape}, but the y has {y.shape}",
                        field="grad_ys",
                    )
                grad_y = require_same_shape(grad_y, y, errors_pb2.ERROR_REASON_FEED_SHAPE, where)
            if y.dtype.is_complex and grad_y is None:
                raise error(
                    errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                    f"y {endpoint.name!r} is {y.dtype.name}: a complex y needs a grad_y",
                    field="ys",
                )
            if y.dtype.is_floating or y.dtype.is_complex:
                ys.append(y)
                grad_ys.append(grad_y)
        return ys, grad_ys

    def _lay_out(self, name: str, x: tf.Tensor, gradient: Any) -> list[tf.Tensor]:
        layout = self._built.gradients
        if not (x.dtype.is_floating or x.dtype.is_complex):
            layout.append((name, NOT_DIFFERENTIABLE))
            return []
        if gradient is None:
            layout.append((name, UNCONNECTED))
            return []
        if isinstance(gradient, tf.IndexedSlices):
            layout.append((name, SPARSE))
            shape = tf.shape(x, out_type=tf.int64) if gradient.dense_shape is None else gradient.dense_shape
            return [gradient.values, gradient.indices, shape]
        layout.append((name, DENSE))
        return [gradient]


def _input(spec: tensor_pb2.TensorSpec, default: tf.Tensor | None) -> Input:
    return Input(spec.name, tf.as_dtype(spec.dtype), tf.TensorShape(_shape_proto(spec.shape)), default)


def _is_small(graph: tf.Graph) -> bool:
    ops = graph.get_operations()
    return len(ops) <= _SMALL_OPS and not any(op.type in _NEEDS_THREADS for op in ops)


def _content(rule: link_pb2.BoundRule) -> RuleContent | None:
    match rule.WhichOneof("form"):
        case "definition":
            return RuleContent.from_kept(rule.name, rule.definition)
        case "code":
            return BUILTINS[rule.code].content
        case _:
            return None


def _require_value(name: str, tensor: tf.Tensor) -> None:
    """UNSUPPORTED_OP for what is no value that could leave the process."""
    if tensor.dtype.base_dtype in (tf.resource, tf.variant):
        raise error(
            errors_pb2.ERROR_REASON_UNSUPPORTED_OP,
            f"{name!r} ({tensor.op.type}) is a {tensor.dtype.base_dtype.name}, which has no value to put out; fetch "
            f"what is read from it",
            node=name,
            field="spec.fetches",
        )


def _import(graph_def: tf_graph_pb2.GraphDef, feeds: dict[str, tf.Tensor], wanted: list[str]) -> list[tf.Tensor]:
    try:
        return import_graph(graph_def, feeds, wanted, scope=IMPORT_SCOPE)
    except (ValueError, TypeError, tf.errors.OpError) as cause:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_GRAPH, f"TensorFlow refuses the graph: {readable(str(cause))}"
        ) from cause


def _gradients(
    ys: list[tf.Tensor],
    xs: list[tf.Tensor],
    grad_ys: list[tf.Tensor | None],
    stop_gradients: list[tf.Tensor],
    unconnected: tf.UnconnectedGradients,
) -> list[Any]:
    if not ys:
        is_zero = unconnected == tf.UnconnectedGradients.ZERO
        return [tf.zeros_like(x) if is_zero else None for x in xs]
    try:
        gradients: list[Any] = tf.gradients(
            ys, xs, grad_ys=grad_ys, stop_gradients=stop_gradients, unconnected_gradients=unconnected
        )
    except (ValueError, TypeError, LookupError, NotImplementedError, tf.errors.OpError) as cause:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_DERIVATIVE, f"TensorFlow cannot differentiate this: {readable(str(cause))}"
        ) from cause
    return gradients


def _specs_of(graph_def: tf_graph_pb2.GraphDef, inputs: Sequence[Input], names: list[str]) -> list[tf.TensorSpec]:
    """Types and shapes of tensors, by importing the graph into a scratch one."""
    with tf.Graph().as_default():
        feeds = {tensor_name(item.name): tf.compat.v1.placeholder(item.dtype, item.shape) for item in inputs}
        tensors = _import(graph_def, feeds, names)
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def _shape_proto(shape: tensor_pb2.TensorShape) -> list[int | None] | None:
    return None if shape.unknown_rank else [None if dim.size < 0 else dim.size for dim in shape.dim]


def spec_message(name: str, tensor: tf.Tensor) -> tensor_pb2.TensorSpec:
    """A tensor's name, type and shape as a message."""
    shape = tensor_pb2.TensorShape()
    if tensor.shape.rank is None:
        shape.unknown_rank = True
    else:
        shape.dim.extend(tensor_pb2.TensorShape.Dim(size=-1 if size is None else size) for size in tensor.shape)
    return tensor_pb2.TensorSpec(name=name, dtype=tensor.dtype.base_dtype.as_datatype_enum, shape=shape)


__all__ = ["Built", "GradruleError", "Input", "ParamInput", "build", "spec_message"]
