"""Builds the call that samples a rule.

An expression or graph rule runs as its own graph. If the rule needs an op (for its outputs or its gradient, or because
the rule is an op's gradient), a graph of that one op is differentiated with the rule as override.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from gradrule.common import op_definitions, op_inference, tensor_codec
from gradrule.v1 import errors_pb2, evaluate_pb2, graph_pb2, override_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, did_you_mean, error
from gradrule_server.link.messages import sampled_gradient
from gradrule_server.policy import NodeLimits, tensor_fault
from gradrule_server.preparation.overrides import INLINE_RULE, OverrideTable
from gradrule_server.preparation.references import ResolvedRule, RuleLookup
from gradrule_server.rules import RuleContent, Signature, read_param_value

_VARIABLE = re.compile(r"(x|y|dy|default)(0|[1-9][0-9]{0,3})?")
_PARAM_PREFIX = "param/"
_SALT = "salt"


def sample_call(
    request: rule_pb2.SampleRuleRequest, lookup: RuleLookup, bounds: NodeLimits
) -> evaluate_pb2.EvaluateRequest:
    """Returns the call. Raises MISSING_FEED for a needed value that is neither given nor computed by `op_type`."""
    source = request.WhichOneof("source")
    if source is None:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            "the request has no rule: give a name or a definition",
            field="source",
        )
    values = _values(request, bounds)
    xs = [values[f"x{index}"] for index in range(_count(values, "x"))]
    if not xs:
        raise error(errors_pb2.ERROR_REASON_MISSING_FEED, "a rule needs a value of x: give x", field="values")
    content: RuleContent | None
    op_type = request.op_type
    if source == "definition":
        content = RuleContent.from_definition(request.definition, bounds)
    else:
        rule = lookup.resolve(request.name)
        content = rule.content
        op_type = op_type or (rule.name if content is None else "")
    if op_type:
        return _op_graph_call(request, op_type, xs, values)
    if content is None:
        raise error(
            errors_pb2.ERROR_REASON_MISSING_FEED, "an OP rule needs an op to run on: give op_type", field="op_type"
        )
    if request.attrs:
        raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "attrs belong to an op: give op_type too", field="attrs")
    return _rule_graph_call(request, content, xs, values, bounds)


def _values(request: rule_pb2.SampleRuleRequest, bounds: NodeLimits) -> dict[str, tensor_pb2.Tensor]:
    values: dict[str, tensor_pb2.Tensor] = {}
    for item in request.values:
        match = _VARIABLE.fullmatch(item.name)
        if match is None:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_FEED,
                f"{item.name!r} is not a variable of a rule: x, y, dy, default, with or without an index",
                field="values",
            )
        name = f"{match[1]}{match[2] or 0}"
        if name in values:
            raise error(errors_pb2.ERROR_REASON_UNKNOWN_FEED, f"{name} is given twice", field="values")
        values[name] = _checked(item.value, item.name, bounds)
    return values


def _checked(source: tensor_pb2.TensorSource, name: str, bounds: NodeLimits) -> tensor_pb2.Tensor:
    """Returns the tensor. Raises INVALID_TENSOR or LIMIT_EXCEEDED if it cannot be read."""
    fault = tensor_fault(source.inline_tensor, bounds)
    if source.WhichOneof("source") is None:
        fault = errors_pb2.ERROR_REASON_INVALID_TENSOR, "holds no tensor"
    if fault is not None:
        raise error(fault[0], f"{name} {fault[1]}", field="values")
    try:
        tensor_codec.to_numpy(source.inline_tensor)
    except ValueError as cause:
        raise error(errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{name}: {cause}", field="values") from cause
    return source.inline_tensor


def _indices(values: Iterable[str], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in values if name.rstrip("0123456789") == prefix)


def _count(values: Iterable[str], prefix: str) -> int:
    """Returns the number of values with the prefix. Raises MISSING_FEED if the numbering has a gap."""
    indices = _indices(values, prefix)
    for index, found in enumerate(indices):
        if index != found:
            raise error(
                errors_pb2.ERROR_REASON_MISSING_FEED,
                f"{prefix}{found} is given, but {prefix}{index} is not",
                field="values",
            )
    return len(indices)


def _outputs(values: Mapping[str, tensor_pb2.Tensor], xs: list[tensor_pb2.Tensor]) -> list[tensor_pb2.Tensor]:
    """Returns for each output a tensor of its type and shape: y, else dy, else x for the first output."""
    count = max([0, *_indices(values, "y"), *_indices(values, "dy")]) + 1
    outputs = [values.get(f"y{index}") or values.get(f"dy{index}") for index in range(count)]
    outputs[0] = outputs[0] or xs[0]
    found = [output for output in outputs if output is not None]
    if len(found) < count:
        index = outputs.index(None)
        raise error(
            errors_pb2.ERROR_REASON_MISSING_FEED,
            f"output {count - 1} is given, but neither y{index} nor dy{index} is",
            field="values",
        )
    return found


def _rule_graph_call(
    request: rule_pb2.SampleRuleRequest,
    content: RuleContent,
    xs: list[tensor_pb2.Tensor],
    values: dict[str, tensor_pb2.Tensor],
    bounds: NodeLimits,
) -> evaluate_pb2.EvaluateRequest:
    """Returns a call that runs the rule's own graph as a forward program."""
    outputs = _outputs(values, xs)
    rule_graph = content.bind(Signature(tuple(x.dtype for x in xs), tuple(y.dtype for y in outputs)))
    missing = [
        variable
        for variable in rule_graph.inputs
        if not variable.startswith((_PARAM_PREFIX, "dy")) and variable != _SALT and variable not in values
    ]
    if missing:
        raise error(
            errors_pb2.ERROR_REASON_MISSING_FEED,
            f"the rule uses {', '.join(missing)}: give it, or op_type for an op that computes it",
            field="values",
        )
    evaluation = evaluate_pb2.EvaluateRequest()
    evaluation.spec.graph.inline_graph.CopyFrom(rule_graph.graph)
    for index, result in enumerate(rule_graph.results):
        if result is not None:
            # Use new names, because two inputs may share a result, and an input may be a result.
            node = evaluation.spec.graph.inline_graph.node.add(
                name=sampled_gradient(index), op="Identity", input=[result]
            )
            evaluation.spec.fetches.append(node.name)
    params = _param_values(request, content, bounds)
    for variable, placeholder in rule_graph.inputs.items():
        feed = evaluation.feeds.add(name=placeholder)
        if variable == _SALT:
            # Use a constant salt: it is otherwise derived from the name of the node, and there is no node here.
            feed.value.inline_tensor.CopyFrom(tensor_codec.to_message(np.int64(0)))
        elif variable.startswith(_PARAM_PREFIX):
            feed.value.inline_tensor.CopyFrom(params[variable.removeprefix(_PARAM_PREFIX)])
        else:
            feed.value.inline_tensor.CopyFrom(values.get(variable) or _ones_like(outputs[int(variable[2:])]))
    return evaluation


def _param_values(
    request: rule_pb2.SampleRuleRequest, content: RuleContent, bounds: NodeLimits
) -> dict[str, tensor_pb2.Tensor]:
    table = OverrideTable(bounds)
    name = request.name.removeprefix("rules/") or INLINE_RULE
    index = table.bind(ResolvedRule(name, content), name)
    findings = table.params.set(table.params.settings, index, request.params, "params")
    if findings:
        raise GradruleError(findings)
    given = {setting.name: setting.value for setting in table.params.call_settings({}, {index})}
    values = {}
    for param in content.params:
        value = param.default
        if param.name in given:
            value = read_param_value(_bounded(given[param.name], bounds), param.name, f"params.{param.name}")
        values[param.name] = tensor_codec.to_message(np.asarray(value, np.float64))
    return values


def _bounded(value: rule_pb2.ParamValue, bounds: NodeLimits) -> rule_pb2.ParamValue:
    """Returns the value. Raises INVALID_PARAM for a tensor that would be too large."""
    fault = tensor_fault(value.tensor, bounds) if value.HasField("tensor") else None
    if fault is not None:
        raise error(errors_pb2.ERROR_REASON_INVALID_PARAM, f"the param {fault[1]}", field="params")
    return value


def _op_graph_call(
    request: rule_pb2.SampleRuleRequest,
    op_type: str,
    xs: list[tensor_pb2.Tensor],
    values: dict[str, tensor_pb2.Tensor],
) -> evaluate_pb2.EvaluateRequest:
    """Returns a call that differentiates a graph of one op with the rule as its override."""
    computed = [name for name in values if name.startswith(("y", "default"))]
    if computed:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"{', '.join(computed)} cannot be given together with op_type {op_type!r}, which computes it",
            field="values",
        )
    op = op_definitions.find(op_type)
    if op is None:
        raise error(
            errors_pb2.ERROR_REASON_UNKNOWN_OP_TYPE,
            f"there is no op type {op_type!r}.{did_you_mean(op_type, op_definitions.names())}",
            field="op_type",
        )
    try:
        output_types = op_inference.complete(op, request.attrs, [x.dtype for x in xs]).outputs
    except op_inference.InferenceError as cause:
        raise error(
            errors_pb2.ErrorReason.Value(f"ERROR_REASON_{cause.kind}"), f"op {op_type!r}: {cause}", field="op_type"
        ) from cause
    beyond = [index for index in _indices(values, "dy") if index >= len(output_types)]
    if beyond:
        raise error(
            errors_pb2.ERROR_REASON_UNKNOWN_FEED,
            f"dy{beyond[0]} is given, but {op_type} has {len(output_types)} outputs, counted from 0",
            field="values",
        )
    evaluation = evaluate_pb2.EvaluateRequest()
    spec = evaluation.spec
    node = graph_pb2.Node(name="op", op=op_type, attr=request.attrs)
    for index, x in enumerate(xs):
        name = f"x{index}"
        placeholder = spec.graph.inline_graph.node.add(name=name, op="Placeholder")
        placeholder.attr["dtype"].type = x.dtype
        placeholder.attr["shape"].shape.CopyFrom(x.tensor_shape)
        node.input.append(name)
        evaluation.feeds.add(name=name).value.inline_tensor.CopyFrom(x)
        spec.vjp.xs.append(name)
    spec.graph.inline_graph.node.append(node)
    for index in range(len(output_types)):
        spec.fetches.append(f"op:{index}")
        spec.vjp.ys.append(f"op:{index}")
        if f"dy{index}" in values:
            evaluation.grad_ys.add(name=f"op:{index}").value.inline_tensor.CopyFrom(values[f"dy{index}"])
    override = spec.overrides.add(selector=override_pb2.Selector(node="op"), label="sampled", params=request.params)
    if request.WhichOneof("source") == "definition":
        override.definition.CopyFrom(request.definition)
    else:
        override.rule = request.name.removeprefix("rules/")
    return evaluation


def _ones_like(tensor: tensor_pb2.Tensor) -> tensor_pb2.Tensor:
    return tensor_codec.to_message(np.ones_like(tensor_codec.to_numpy(tensor)))
