"""Rules given as graphs: the variables are placeholders, the results are nodes named `dx`, `dx1`, …"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from gradrule import _infer, _opdefs
from gradrule.v1 import errors_pb2, graph_pb2, tensor_pb2
from gradrule_server.errors import Finding, GradruleError, did_you_mean, error
from gradrule_server.policy import DROPPED_ATTRS, FAKE_PARAM, NodeLimits, attribute_faults, op_fault, output_count_fault
from gradrule_server.rules import dtypes
from gradrule_server.rules.dtypes import Dt
from gradrule_server.rules.graph_builder import type_attr
from gradrule_server.rules.language.errors import quoted
from gradrule_server.rules.language.names import FAMILIES, declared, split_variable
from gradrule_server.rules.signature import RuleGraph, Signature, count, listed, not_differentiable

_RESULT = re.compile(r"dx(0|[1-9][0-9]{0,5})?")
_UNBOUND = ("PlaceholderV2", "PlaceholderWithDefault")
_MAX_FINDINGS = 100
_SHAPE_NOT_KNOWN = frozenset({"graph"})


@dataclass(frozen=True, slots=True)
class GraphForm:
    """A rule's graph, read and checked, without what no result needs.

    `variables`: `x0` → its placeholder's node name; `params` likewise; `results`: input index → result node. Nodes of
    the graph come after those that they take.
    """

    graph: graph_pb2.Graph
    variables: Mapping[str, str]
    params: Mapping[str, str]
    results: Mapping[int, str]


def read_graph(serialized: bytes, params: Sequence[str], *, brought: bool = False) -> GraphForm:
    """The rule that a graph's bytes say.

    INVALID_GRAPH, DUPLICATE_NODE, DANGLING_INPUT, GRAPH_CYCLE, UNKNOWN_OP_TYPE where it is no graph; INVALID_RULE where
    it has no results, one of them twice, a function, or a placeholder that is neither a variable nor a declared param.

    `brought`: it is the expanded gradient of a function, which a graph brought along: it may be a constant or nothing,
    run functions of the program that it is part of, and say which gradients its nodes have.
    """
    graph = graph_pb2.Graph()
    try:
        graph.ParseFromString(serialized)
    except DecodeError as cause:
        raise _refused(
            errors_pb2.ERROR_REASON_INVALID_GRAPH, "the rule's graph cannot be read: the bytes are no graph"
        ) from cause
    nodes: dict[str, graph_pb2.Node] = {}
    for node in graph.node:
        if node.name in nodes:
            raise _refused(
                errors_pb2.ERROR_REASON_DUPLICATE_NODE, "the rule's graph has two nodes of this name", node.name
            )
        nodes[node.name] = node
    results = _results(nodes, required=not brought)
    reached = _reached(nodes, results.values())
    needed = set(reached)
    kept = graph_pb2.Graph(versions=graph.versions, node=[nodes[name] for name in reached])
    if not brought:
        _check_functions(kept.node, {function.signature.name for function in graph.library.function})
        _drop_notes(kept.node)
    _check_ops(kept.node)
    variables, used_params = _placeholders([node for name, node in nodes.items() if name in needed], params)
    if not variables and not brought:
        raise _refused(
            errors_pb2.ERROR_REASON_INVALID_RULE,
            "the rule's graph is only a constant: no result depends on a placeholder x, y, dy or default. "
            "ZerosLike(x) is a gradient of zeros",
        )
    return GraphForm(kept, variables, used_params, results)


def refused_nodes(form: GraphForm, bounds: NodeLimits) -> list[Finding]:
    """What may not run of a rule's graph, or is too large: the checks that nodes of a program's graph go through."""
    findings = []
    for node in form.graph.node:
        op = _opdefs.find(node.op)
        if op is None:
            raise AssertionError(f"{node.op} passed the checks")
        faults = [op_fault(op, node.attr, bounds), output_count_fault(op, node.attr, bounds)]
        faults += attribute_faults(op, node.attr, bounds)
        if node.op == FAKE_PARAM:
            # It hands out memory as it was found, which what is around a branch never reads.
            faults.append((errors_pb2.ERROR_REASON_OP_NOT_ALLOWED, "is part of a branch, and a rule's graph has none"))
        for reason, what in filter(None, faults):
            findings.append(Finding(reason, f"node {quoted(node.name)} ({node.op}) {what}", node.name, "graph"))
    return findings[:_MAX_FINDINGS]


def bind_graph(form: GraphForm, signature: Signature) -> RuleGraph:
    """The rule for an op of these element types.

    RULE_ARITY where the op lacks a variable or an input that the rule gives a gradient for, RULE_NOT_APPLICABLE where a
    placeholder has another type than the op's tensor.
    """
    graph = graph_pb2.Graph()
    graph.CopyFrom(form.graph)
    nodes = {node.name: node for node in graph.node}
    inputs: dict[str, str] = {}
    for variable, name in form.variables.items():
        family, index, _ = split_variable(variable) or ("x", 0, True)
        _set_type(nodes[name], signature.dtype_of(family, index), variable)
        inputs[variable] = name
    for param, name in form.params.items():
        inputs[f"param/{param}"] = _feed_as_double(graph, nodes, name)
    _complete(graph)
    for index in form.results:
        if index >= len(signature.inputs):
            raise _refused(
                errors_pb2.ERROR_REASON_RULE_ARITY,
                f"the rule gives a gradient dx{index}, but the op has {count(len(signature.inputs), 'input')}"
                f"{listed('x', len(signature.inputs))}",
            )
        if index not in signature.differentiable:
            raise not_differentiable(signature, index)
    results = tuple(
        f"{form.results[index]}:0" if index in form.results else None for index in range(len(signature.inputs))
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
                "dx and dx0 are one and the same result, and the graph has both",
                name,
            )
        results[index] = name
    if not results and required:
        near = did_you_mean("dx", nodes)
        raise _refused(
            errors_pb2.ERROR_REASON_INVALID_RULE,
            f"the rule's graph has no result: the node with the gradient of input 0 is called dx, of input 1 dx1{near}",
        )
    return dict(sorted(results.items()))


def _check_functions(nodes: Iterable[graph_pb2.Node], functions: Container[str]) -> None:
    for node in nodes:
        called = [value.func.name for value in node.attr.values() if value.WhichOneof("value") == "func"]
        called += [function.name for value in node.attr.values() for function in value.list.func]
        if node.op in functions or called:
            # Functions have names for a whole process, in which other callers' rules run too.
            message = f"it runs the function {quoted(called[0] if called else node.op)}, and a rule's graph has none"
            raise _refused(errors_pb2.ERROR_REASON_INVALID_RULE, message, node.name)


def _drop_notes(nodes: Iterable[graph_pb2.Node]) -> None:
    """Attributes that begin with `_` are notes of TensorFlow's; one of them names gradients of the process."""
    for node in nodes:
        for name in [name for name in node.attr if name.startswith("_") or name in DROPPED_ATTRS]:
            del node.attr[name]


def _check_ops(nodes: Iterable[graph_pb2.Node]) -> None:
    for node in nodes:
        if _opdefs.find(node.op) is None:
            message = f"there is no op type {quoted(node.op)}.{did_you_mean(node.op, _opdefs.names())}"
            raise _refused(errors_pb2.ERROR_REASON_UNKNOWN_OP_TYPE, message, node.name)


def _complete(graph: graph_pb2.Graph) -> None:
    """Fills in attributes that follow from the inputs, now that the inputs have types."""
    outputs: dict[str, tuple[int, ...]] = {}
    # Placeholders of params were added last; all else is in order.
    for node in sorted(graph.node, key=lambda item: item.op != "Placeholder"):
        op = _opdefs.find(node.op)
        if op is None:
            raise AssertionError(f"{node.op} passed the checks")
        sources = [source.partition(":") for source in node.input if not source.startswith("^")]
        try:
            types = [outputs[name][int(index or 0)] for name, _, index in sources]
        except (IndexError, ValueError):
            message = f"one of its inputs {list(node.input)} is an output that its node does not have"
            raise _refused(errors_pb2.ERROR_REASON_DANGLING_INPUT, message, node.name) from None
        try:
            completed = _infer.complete(op, dict(node.attr), types)
        except _infer.InferError as cause:
            reason = errors_pb2.ErrorReason.Value(f"ERROR_REASON_{cause.kind}")
            raise _refused(reason, cause.message, node.name) from cause
        for name, value in completed.added.items():
            node.attr[name].CopyFrom(value)
        outputs[node.name] = completed.outputs


def _reached(nodes: Mapping[str, graph_pb2.Node], roots: Iterable[str]) -> list[str]:
    """Names of the nodes that the roots depend on, in order; refuses inputs that are not there and circles."""
    done: dict[str, None] = {}
    open_nodes: set[str] = set()
    pending = [(name, False) for name in roots]
    while pending:
        name, leaving = pending.pop()
        if leaving:
            open_nodes.discard(name)
            done[name] = None
            continue
        if name in done:
            continue
        if name in open_nodes:
            raise _refused(errors_pb2.ERROR_REASON_GRAPH_CYCLE, "this node of the rule's graph depends on itself", name)
        open_nodes.add(name)
        pending.append((name, True))
        for source in nodes[name].input:
            needed = source.removeprefix("^").partition(":")[0]
            if needed not in nodes:
                raise _refused(
                    errors_pb2.ERROR_REASON_DANGLING_INPUT,
                    f"input {quoted(source)} is no node of the rule's graph.{did_you_mean(needed, nodes)}",
                    name,
                )
            if needed not in done:
                pending.append((needed, False))
    return list(done)


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
                f"x, y, dy and default, with an index or without, and {declared(params)}",
                node.name,
            )
        else:
            name = f"{variable[0]}{variable[1]}"
            if name in variables:
                raise _refused(
                    errors_pb2.ERROR_REASON_INVALID_RULE,
                    f"{variables[name]!r} and {node.name!r} are one and the same variable, and the graph has both",
                    node.name,
                )
            variables[name] = node.name
    return variables, used


def _set_type(node: graph_pb2.Node, dtype: int, variable: str) -> None:
    """Gives a placeholder its type where it is left out; any shape may come, whatever the graph says."""
    stated = node.attr["dtype"].type if "dtype" in node.attr else dtype
    if stated != dtype:
        raise _refused(
            errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
            f"the rule's placeholder {node.name!r} is {dtypes.dtype_name(stated)}, but {variable} of the op is "
            f"{dtypes.dtype_name(dtype)}",
            node.name,
        )
    node.attr["dtype"].CopyFrom(type_attr(dtype))
    if "shape" not in node.attr:
        node.attr["shape"].CopyFrom(graph_pb2.AttrValue(shape=tensor_pb2.TensorShape(unknown_rank=True)))


def _feed_as_double(graph: graph_pb2.Graph, nodes: Mapping[str, graph_pb2.Node], name: str) -> str:
    """Puts a float64 placeholder in front of a param's node, which becomes a Cast; returns the placeholder's name."""
    node = nodes[name]
    dtype = node.attr["dtype"].type if "dtype" in node.attr else Dt.DT_DOUBLE
    if dtype not in dtypes.NUMPY:
        raise _refused(
            errors_pb2.ERROR_REASON_INVALID_RULE,
            f"a param is no {dtypes.dtype_name(dtype)}: say a float, int or bool type",
            name,
        )
    fed = f"param/{name}"
    while fed in nodes:
        fed += "_"
    shape = graph_pb2.AttrValue(shape=tensor_pb2.TensorShape(unknown_rank=True))
    graph.node.add(name=fed, op="Placeholder", attr={"dtype": type_attr(Dt.DT_DOUBLE), "shape": shape})
    node.op = "Cast"
    del node.input[:]
    node.input.append(fed)
    node.attr.clear()
    node.attr["SrcT"].CopyFrom(type_attr(Dt.DT_DOUBLE))
    node.attr["DstT"].CopyFrom(type_attr(dtype))
    node.attr["Truncate"].CopyFrom(graph_pb2.AttrValue(b=False))
    return fed


def _refused(reason: errors_pb2.ErrorReason.ValueType, message: str, node: str = "") -> GradruleError:
    return error(reason, f"node {quoted(node)}: {message}" if node else message, node=node, field="graph")
