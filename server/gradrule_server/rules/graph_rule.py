"""Parses, checks and binds rules given as graphs: variables are placeholders, results are nodes named `dx`, `dx1`, …"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gradrule.common import op_definitions, op_inference
from gradrule.common.dtypes import dtype_name
from gradrule.common.op_inference import type_attr
from gradrule.v1 import errors_pb2, graph_pb2, tensor_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.errors import Finding, GradruleError, did_you_mean, error
from gradrule_server.policy import DROPPED_ATTRS, FAKE_PARAM, NodeLimits, attribute_faults, op_fault, output_count_fault
from gradrule_server.policy.op_tables import ops_with
from gradrule_server.rules.language.source import quoted
from gradrule_server.rules.language.syntax_tree import FAMILIES, declared_params_text, split_variable
from gradrule_server.rules.signature import (
    COMPUTED_IN,
    NUMPY_TYPES,
    RuleGraph,
    Signature,
    count_noun,
    not_differentiable_error,
    variable_list,
)

_RESULT = re.compile(r"dx(0|[1-9][0-9]{0,5})?")
_UNBOUND = ("PlaceholderV2", "PlaceholderWithDefault")
_MAX_FINDINGS = 100
_SHAPE_NOT_KNOWN = frozenset({"graph"})
_FALSE = graph_pb2.AttrValue(b=False)
_UNKNOWN_SHAPE = graph_pb2.AttrValue(shape=tensor_pb2.TensorShape(unknown_rank=True))

IGNORE_DY = "_ignore_dy"
"""The attribute of a result node that says that its gradient does not depend on the upstream gradient."""
_READS_SHAPE = ops_with("reads_shape")
# Ops whose output is zero if this input is.
_KEEPS_ZERO = {"Identity": 0, "Cast": 0, "Reshape": 0, "BroadcastTo": 0, "Fill": 1}


@dataclass(frozen=True, slots=True)
class CheckedGraph:
    """A rule's graph after parsing and checking, without nodes that no result needs.

    Attributes:
        graph: The nodes, each after its inputs.
        variables: Names of placeholders by variable (`x0`).
        params: Names of placeholders by param.
        results: Names of result nodes by index of the op's input.
        ignoring_dy: The result nodes that have the attribute `_ignore_dy`.
    """

    graph: graph_pb2.Graph
    variables: Mapping[str, str]
    params: Mapping[str, str]
    results: Mapping[int, str]
    ignoring_dy: frozenset[str]


def parse_graph(serialized: bytes, params: Sequence[str], *, embedded: bool = False) -> CheckedGraph:
    """Parses and checks the graph of a rule.

    Args:
        serialized: The encoded graph.
        params: Names of the declared params.
        embedded: Whether this is an embedded rule: the expanded gradient of a function of a program's graph. Its graph
            may be constant or empty, call functions of the program, and have attributes that name gradients.

    Raises:
        GradruleError: INVALID_GRAPH, DUPLICATE_NODE, DANGLING_INPUT, GRAPH_CYCLE or UNKNOWN_OP_TYPE for an invalid
            graph; INVALID_RULE for missing or duplicate results, functions, or unknown placeholders.
    """
    graph = graph_pb2.Graph()
    try:
        graph.ParseFromString(serialized)
    except DecodeError as cause:
        raise _refused(
            errors_pb2.ERROR_REASON_INVALID_GRAPH, "the rule's graph cannot be read: the bytes are not a graph"
        ) from cause
    nodes: dict[str, graph_pb2.Node] = {}
    for node in graph.node:
        if node.name in nodes:
            raise _refused(
                errors_pb2.ERROR_REASON_DUPLICATE_NODE, "the rule's graph has two nodes of this name", node.name
            )
        nodes[node.name] = node
    results = _results(nodes, required=not embedded)
    order = _topological_order(nodes, results.values())
    needed = set(order)
    kept = graph_pb2.Graph(versions=graph.versions, node=[nodes[name] for name in order])
    ignoring_dy = frozenset(name for name in results.values() if nodes[name].attr.get(IGNORE_DY, _FALSE).b)
    if not embedded:
        _check_functions(kept.node, {function.signature.name for function in graph.library.function})
        _drop_attrs(kept.node)
    _check_ops(kept.node)
    variables, used_params = _placeholders([node for name, node in nodes.items() if name in needed], params)
    if not variables and not embedded:
        raise _refused(
            errors_pb2.ERROR_REASON_INVALID_RULE,
            "the rule's graph is only a constant: no result depends on a placeholder x, y, dy or default. "
            "ZerosLike(x) is a gradient of zeros",
        )
    return CheckedGraph(kept, variables, used_params, results, ignoring_dy)


def check_dy(form: CheckedGraph) -> None:
    """Refuses a gradient that drops the upstream gradient, unless it is zero or says `_ignore_dy`.

    Raises:
        GradruleError: INVALID_RULE.
    """
    carriers = {name for variable, name in form.variables.items() if variable.startswith(("dy", "default"))}
    zeros: set[str] = set()
    for node in form.graph.node:
        sources = [source.partition(":")[0] for source in node.input if not source.startswith("^")]
        if node.op not in _READS_SHAPE and not carriers.isdisjoint(sources):
            carriers.add(node.name)
        if _is_zero(node, sources, zeros):
            zeros.add(node.name)
    for name in form.results.values():
        if name in form.ignoring_dy:
            if name in carriers:
                raise _refused(
                    errors_pb2.ERROR_REASON_INVALID_RULE,
                    f"{IGNORE_DY} is for a gradient without dy and default, and this one depends on them",
                    name,
                )
        elif name not in carriers and name not in zeros:
            raise _refused(
                errors_pb2.ERROR_REASON_INVALID_RULE,
                "this gradient depends on neither dy nor default, so nothing of the upstream gradient gets through: "
                f"multiply by dy, or give the node the attribute {IGNORE_DY}=True if that is meant",
                name,
            )


def check_nodes(form: CheckedGraph, bounds: NodeLimits) -> list[Finding]:
    """Returns findings for denied or too large nodes of a rule's graph, with the checks for nodes of programs."""
    findings = []
    for node in form.graph.node:
        op = op_definitions.find(node.op)
        if op is None:
            raise AssertionError(f"{node.op} passed the checks")
        faults = [op_fault(op, node.attr, bounds), output_count_fault(op, node.attr, bounds)]
        faults += attribute_faults(op, node.attr, bounds)
        if node.op == FAKE_PARAM:
            # The output is uninitialised memory. A branch never reads it, but a rule could.
            faults.append((errors_pb2.ERROR_REASON_OP_NOT_ALLOWED, "is for branches, which a rule's graph cannot have"))
        for reason, what in filter(None, faults):
            findings.append(Finding(reason, f"node {quoted(node.name)} ({node.op}) {what}", node.name, "graph"))
    return findings[:_MAX_FINDINGS]


def bind_graph(form: CheckedGraph, signature: Signature) -> RuleGraph:
    """Binds a rule to an op of these element types.

    Tensors of a 16-bit type become float32 where the rule's placeholder is float32 or has no type; a gradient that is
    float32 is rounded to the 16-bit type of its input. A placeholder of a 16-bit type is computed in that type.

    Raises:
        GradruleError: RULE_ARITY if the op lacks a variable of the rule, or an input for which the rule has a gradient;
            RULE_NOT_APPLICABLE if the type of a placeholder differs from that of the op's tensor.
    """
    graph = graph_pb2.Graph()
    graph.CopyFrom(form.graph)
    nodes = {node.name: node for node in graph.node}
    inputs: dict[str, str] = {}
    for variable, name in form.variables.items():
        family, index, _ = split_variable(variable) or ("x", 0, True)
        inputs[variable] = _bind_variable(graph, nodes, name, signature.dtype_of(family, index), variable)
    for param, name in form.params.items():
        inputs[f"param/{param}"] = _bind_param(graph, nodes, name)
    types = _complete_attrs(graph)
    for index in form.results:
        if index >= len(signature.inputs):
            raise _refused(
                errors_pb2.ERROR_REASON_RULE_ARITY,
                f"the rule gives a gradient dx{index}, but the op has {count_noun(len(signature.inputs), 'input')}"
                f"{variable_list('x', len(signature.inputs))}",
            )
        if index not in signature.differentiable:
            raise not_differentiable_error(signature, index)
    results = tuple(
        _rounded(graph, nodes, form.results[index], types, wanted) if index in form.results else None
        for index, wanted in enumerate(signature.inputs)
    )
    sources = tuple(frozenset[str]() if result is None else _SHAPE_NOT_KNOWN for result in results)
    return RuleGraph(graph, inputs, results, sources)


def _results(nodes: Mapping[str, graph_pb2.Node], *, required: bool) -> dict[int, str]:
    results: dict[int, str] = {}
    for name in nodes:
        match = _RESULT.fullmatch(name)
        if match is None:
            continue
        index = int(match[1] or 0)
        if index in results:
            raise _refused(
                errors_pb2.ERROR_REASON_INVALID_RULE,
                "dx and dx0 are the same result, and the graph has both",
                name,
            )
        results[index] = name
    if not results and required:
        near = did_you_mean("dx", nodes)
        raise _refused(
            errors_pb2.ERROR_REASON_INVALID_RULE,
            f"the rule's graph has no result: a node with the gradient of input 0 is named dx, of input 1 dx1{near}",
        )
    return dict(sorted(results.items()))


def _check_functions(nodes: Iterable[graph_pb2.Node], functions: Container[str]) -> None:
    for node in nodes:
        called = [value.func.name for value in node.attr.values() if value.WhichOneof("value") == "func"]
        called += [function.name for value in node.attr.values() for function in value.list.func]
        if node.op in functions or called:
            # TensorFlow registers functions by name for the whole process, in which rules of other callers run too.
            message = (
                f"it runs the function {quoted(called[0] if called else node.op)}, which a rule's graph cannot have"
            )
            raise _refused(errors_pb2.ERROR_REASON_INVALID_RULE, message, node.name)


def _drop_attrs(nodes: Iterable[graph_pb2.Node]) -> None:
    """Removes attributes that start with `_`: TensorFlow uses them internally, one of them to name gradients."""
    for node in nodes:
        for name in [name for name in node.attr if name.startswith("_") or name in DROPPED_ATTRS]:
            del node.attr[name]


def _check_ops(nodes: Iterable[graph_pb2.Node]) -> None:
    for node in nodes:
        if op_definitions.find(node.op) is None:
            message = f"there is no op type {quoted(node.op)}.{did_you_mean(node.op, op_definitions.names())}"
            raise _refused(errors_pb2.ERROR_REASON_UNKNOWN_OP_TYPE, message, node.name)


def _is_zero(node: graph_pb2.Node, sources: Sequence[str], zeros: Container[str]) -> bool:
    """Returns whether the output of a node is zero, whatever its inputs."""
    if node.op == "Const":
        # Elements are bytes or a list of numbers; all other fields are messages or numbers.
        return not any(any(value) for _, value in node.attr["value"].tensor.ListFields() if isinstance(value, Iterable))
    if node.op == "ZerosLike":
        return True
    kept = _KEEPS_ZERO.get(node.op)
    return kept is not None and kept < len(sources) and sources[kept] in zeros


def _complete_attrs(graph: graph_pb2.Graph) -> dict[str, tuple[int, ...]]:
    """Adds type attributes that follow from the types of the inputs; returns the types of all outputs by node."""
    outputs: dict[str, tuple[int, ...]] = {}
    # Sort the placeholders of params first: they were added last, but other nodes need them.
    for node in sorted(graph.node, key=lambda item: item.op != "Placeholder"):
        op = op_definitions.find(node.op)
        if op is None:
            raise AssertionError(f"{node.op} passed the checks")
        sources = [source.partition(":") for source in node.input if not source.startswith("^")]
        try:
            types = [outputs[name][int(index or 0)] for name, _, index in sources]
        except (IndexError, ValueError):
            message = f"one of its inputs {list(node.input)} is an output that its node does not have"
            raise _refused(errors_pb2.ERROR_REASON_DANGLING_INPUT, message, node.name) from None
        try:
            completed = op_inference.complete(op, dict(node.attr), types)
        except op_inference.InferenceError as cause:
            reason = errors_pb2.ErrorReason.Value(f"ERROR_REASON_{cause.kind}")
            raise _refused(reason, cause.message, node.name) from cause
        for name, value in completed.added.items():
            node.attr[name].CopyFrom(value)
        outputs[node.name] = completed.outputs
    return outputs


def _topological_order(nodes: Mapping[str, graph_pb2.Node], roots: Iterable[str]) -> list[str]:
    """Returns the nodes that the roots need, each after its inputs. Raises DANGLING_INPUT and GRAPH_CYCLE."""
    inputs: dict[str, list[str]] = {}
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in inputs:
            continue
        inputs[name] = [source.removeprefix("^").partition(":")[0] for source in nodes[name].input]
        for source, needed in zip(nodes[name].input, inputs[name], strict=True):
            if needed not in nodes:
                raise _refused(
                    errors_pb2.ERROR_REASON_DANGLING_INPUT,
                    f"input {quoted(source)} is not a node of the rule's graph.{did_you_mean(needed, nodes)}",
                    name,
                )
        pending += inputs[name]
    try:
        return list(graphlib.TopologicalSorter(inputs).static_order())
    except graphlib.CycleError as cause:
        message = "this node of the rule's graph depends on itself"
        raise _refused(errors_pb2.ERROR_REASON_GRAPH_CYCLE, message, cause.args[1][0]) from None


def _placeholders(nodes: Sequence[graph_pb2.Node], params: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    variables: dict[str, str] = {}
    used: dict[str, str] = {}
    for node in nodes:
        if node.op in _UNBOUND:
            raise _refused(
                errors_pb2.ERROR_REASON_INVALID_RULE,
                f"a rule's inputs are nodes of op Placeholder, not {quoted(node.op)}; a param may have a default value",
                node.name,
            )
        if node.op != "Placeholder":
            continue
        variable = split_variable(node.name)
        if node.name in params:
            used[node.name] = node.name
        elif variable is None:
            raise _refused(
                errors_pb2.ERROR_REASON_INVALID_RULE,
                f"placeholder {quoted(node.name)} is unknown.{did_you_mean(node.name, [*FAMILIES, *params])} "
                f"A rule's placeholders are "
                f"x, y, dy and default, with an index or without, and {declared_params_text(params)}",
                node.name,
            )
        else:
            name = f"{variable[0]}{variable[1]}"
            if name in variables:
                raise _refused(
                    errors_pb2.ERROR_REASON_INVALID_RULE,
                    f"{variables[name]!r} and {node.name!r} are the same variable, and the graph has both",
                    node.name,
                )
            variables[name] = node.name
    return variables, used


def _bind_variable(
    graph: graph_pb2.Graph, nodes: dict[str, graph_pb2.Node], name: str, dtype: int, variable: str
) -> str:
    """Gives a variable's placeholder the type of its tensor; returns the one to feed. Raises RULE_NOT_APPLICABLE."""
    node = nodes[name]
    computed_in = COMPUTED_IN.get(dtype, dtype)
    stated = node.attr["dtype"].type if "dtype" in node.attr else computed_in
    if stated not in (dtype, computed_in):
        raise _refused(
            errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
            f"the rule's placeholder {node.name!r} is {dtype_name(stated)}, but {variable} of the op is "
            f"{dtype_name(dtype)}",
            name,
        )
    if "shape" not in node.attr:
        node.attr["shape"].CopyFrom(_UNKNOWN_SHAPE)
    if stated == dtype:
        node.attr["dtype"].CopyFrom(type_attr(dtype))
        return name
    return _feed_by_cast(graph, nodes, name, dtype, stated)


def _bind_param(graph: graph_pb2.Graph, nodes: dict[str, graph_pb2.Node], name: str) -> str:
    """Adds a float64 placeholder for a param, and makes its node a cast from it; returns the placeholder's name."""
    node = nodes[name]
    dtype = node.attr["dtype"].type if "dtype" in node.attr else Dt.DT_DOUBLE
    if dtype not in NUMPY_TYPES:
        raise _refused(
            errors_pb2.ERROR_REASON_INVALID_RULE,
            f"a param is no {dtype_name(dtype)}: say a float, int or bool type",
            name,
        )
    node.attr["shape"].CopyFrom(_UNKNOWN_SHAPE)
    return _feed_by_cast(graph, nodes, name, Dt.DT_DOUBLE, dtype)


def _feed_by_cast(graph: graph_pb2.Graph, nodes: dict[str, graph_pb2.Node], name: str, source: int, target: int) -> str:
    """Makes a placeholder a cast from a new placeholder of the type `source`; returns the name of that placeholder."""
    fed = _unused_name(f"fed/{name}", nodes)
    attrs = {"dtype": type_attr(source), "shape": nodes[name].attr["shape"]}
    nodes[fed] = graph.node.add(name=fed, op="Placeholder", attr=attrs)
    nodes[name].CopyFrom(_cast(name, fed, source, target))
    return fed


def _rounded(
    graph: graph_pb2.Graph,
    nodes: Mapping[str, graph_pb2.Node],
    name: str,
    types: Mapping[str, tuple[int, ...]],
    wanted: int,
) -> str:
    """Returns the tensor of a result, rounded to `wanted` if that has 16 bits and the result is float32."""
    if not types[name] or wanted not in COMPUTED_IN or types[name][0] != COMPUTED_IN[wanted]:
        return f"{name}:0"
    rounded = _unused_name(f"rounded/{name}", nodes)
    graph.node.append(_cast(rounded, name, types[name][0], wanted))
    return f"{rounded}:0"


def _cast(name: str, tensor: str, source: int, target: int) -> graph_pb2.Node:
    attrs = {"SrcT": type_attr(source), "DstT": type_attr(target), "Truncate": _FALSE}
    return graph_pb2.Node(name=name, op="Cast", input=[tensor], attr=attrs)


def _unused_name(name: str, nodes: Container[str]) -> str:
    while name in nodes:
        name += "_"
    return name


def _refused(reason: errors_pb2.ErrorReason.ValueType, message: str, node: str = "") -> GradruleError:
    return error(reason, f"node {quoted(node)}: {message}" if node else message, node=node, field="graph")
