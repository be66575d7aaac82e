"""Reads graph messages into bodies, with node indices in place of names.

Inputs at top level are `node`, `node:output`, `^node`; in functions `arg`, `arg:i`, `node:output_name:i`, `^node`.
Resolving an output name needs the node's inferred attributes, so it stays a name in the draft (`Source`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from gradrule.common import op_inference
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule_server import errors
from gradrule_server.errors import Findings, Reason, quote
from gradrule_server.graphs.ir import (
    ADDED_ATTR,
    ARG,
    CONTENT_ATTR,
    CUSTOM_GRADIENT_ATTRS,
    GRADIENT_ATTR,
    OPTIONAL_ATTR,
    Body,
    Node,
)
from gradrule_server.policy import NodeLimits, check_parsed_size

# Index of the producer, name of its output argument, index of the tensor within that argument. If the name is empty,
# the last index counts all outputs of the producer.
Source = tuple[int, str, int]
# Substitutes the attributes of a function's call into those of a node.
Substitute = Callable[[str, dict[str, AttrValue]], dict[str, AttrValue]]

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
_MAX_INDEX_DIGITS = 9
# Inlining prefixes the name of each inner node with the name of the call.
_MAX_NAME = 1024

# Attributes with a leading `_` are internal to TensorFlow; only these affect execution or gradients.
_KEPT_NOTES = CUSTOM_GRADIENT_ATTRS | {
    ADDED_ATTR,
    CONTENT_ATTR,
    "_num_original_outputs",
    "_lower_using_switch_merge",
    GRADIENT_ATTR,
    OPTIONAL_ATTR,
}


# Attribute kinds whose values are often equal among nodes.
_SMALL_KINDS = frozenset({"b", "i", "f", "s", "shape"})


@dataclass(slots=True)
class Draft:
    """A body whose inputs are not resolved to output indices yet."""

    body: Body
    # The data inputs of each node, arguments included.
    sources: list[list[Source]] = field(default_factory=list)
    result_sources: list[Source | None] = field(default_factory=list)
    # Nodes by name; arguments by name, as (first node, number of nodes); results as (name, number of tensors).
    index: dict[str, int] = field(default_factory=dict)
    args: dict[str, tuple[int, int]] = field(default_factory=dict)
    results: list[tuple[str, int]] = field(default_factory=list)

    def where(self, node: str) -> str:
        """Returns the node's name as error messages show it."""
        return f"Node {quote(node)}" + (f" of function {quote(self.body.name)}" if self.body.name else "")


def parse(data: bytes, bounds: NodeLimits | None = None) -> Graph:
    """Parses a serialized graph. Raises INVALID_GRAPH, or LIMIT_EXCEEDED if parsing would need too much memory."""
    check_parsed_size(data, Graph, bounds or NodeLimits(), field="graph")
    try:
        return Graph.FromString(data)
    except DecodeError as cause:
        raise errors.error(
            Reason.ERROR_REASON_INVALID_GRAPH,
            f"These {len(data)} bytes are not a graph: they do not parse as a serialised GraphDef.",
            field="graph",
        ) from cause


def read_top(graph: Graph, findings: Findings) -> Draft:
    """Reads the top level of a graph."""
    draft = Draft(Body(""))
    _read_nodes(draft, graph.node, _no_substitution(findings), findings)
    return draft


def add_arg(draft: Draft, name: str, types: Iterable[int], notes: Mapping[str, AttrValue], findings: Findings) -> None:
    """Adds one argument of a function; it may be a list of tensors."""
    body = draft.body
    start = len(body.nodes)
    check_name(name, draft, findings)
    if name in draft.args:
        message = f"Function {quote(body.name)} has two arguments {quote(name)}."
        findings.add(Reason.ERROR_REASON_DUPLICATE_NODE, message, name)
    for offset, dtype in enumerate(types):
        body.nodes.append(Node(name if offset == 0 else f"{name}_{offset}", ARG, (), (), {}, (dtype,)))
        body.arg_notes.append({key: notes[key] for key in notes if key == "_output_shapes"})
        draft.sources.append([])
    draft.args[name] = (start, len(body.nodes) - start)
    body.arg_count = len(body.nodes)


def add_result(draft: Draft, name: str, types: Iterable[int]) -> None:
    """Adds one result of a function; it may be a list of tensors."""
    count = 0
    for dtype in types:
        draft.body.result_names.append(name if count == 0 else f"{name}_{count}")
        draft.body.result_types.append(dtype)
        count += 1
    draft.results.append((name, count))


def read_function_body(draft: Draft, function: graph_pb2.Function, substitute: Substitute, findings: Findings) -> None:
    """Reads the nodes of a function and the sources of its results."""
    _read_nodes(draft, function.node_def, substitute, findings)
    where = f"of function {quote(draft.body.name)}"
    for name, count in draft.results:
        text = function.ret.get(name, "")
        source = _inner_source(text, draft)
        if source and not source[1] and source[0] + count > draft.body.arg_count:
            source = None
        if source is None:
            hint = _inner_hint(text, draft, findings)
            message = f"Result {quote(name)} {where} is {quote(text)}, which does not exist.{hint}"
            findings.add(Reason.ERROR_REASON_DANGLING_INPUT, message)
        draft.result_sources += _spread(source, count)
    for name, node in sorted(function.control_ret.items()):
        if node in draft.index:
            draft.body.control_results.append((name, draft.index[node]))
        else:
            message = f"Control output {quote(name)} {where} is {quote(node)}, which does not exist."
            findings.add(Reason.ERROR_REASON_DANGLING_INPUT, message + findings.suggest_similar(node, draft.index))


def check_name(name: str, draft: Draft, findings: Findings) -> None:
    """Adds INVALID_GRAPH for a name that TensorFlow rejects, LIMIT_EXCEEDED for one that is too long."""
    if len(name) > _MAX_NAME:
        message = f"{draft.where(name)} has a name of {len(name)} characters; the limit is {_MAX_NAME}."
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message, name[:_MAX_NAME])
        return
    if not _NAME.fullmatch(name):
        findings.add(
            Reason.ERROR_REASON_INVALID_GRAPH,
            f"{draft.where(name)} has a name that TensorFlow rejects: a name starts with a letter, a digit or "
            "'.'; later characters may also be any of '_\\/>-'.",
            name,
        )


def _read_nodes(draft: Draft, messages: Sequence[graph_pb2.Node], substitute: Substitute, findings: Findings) -> None:
    body, index = draft.body, draft.index
    first = len(body.nodes)
    shared: dict[tuple[str | int | bytes, ...], dict[str, AttrValue]] = {}
    for proto in messages:
        name = proto.name
        check_name(name, draft, findings)
        if name in index or name in draft.args:
            findings.add(
                Reason.ERROR_REASON_DUPLICATE_NODE,
                f"{draft.where(name)} occurs twice; names of nodes must be unique.",
                name,
            )
        if proto.op == ARG:
            message = (
                f"{draft.where(name)} ({ARG}) is an op that only TensorFlow itself creates; send the graph as it "
                "was before TensorFlow optimised it, or use a Placeholder or an argument of the function."
            )
            findings.add(Reason.ERROR_REASON_UNSUPPORTED_OP, message, name)
        index.setdefault(name, len(body.nodes))
        attrs, is_final = _attrs(proto, shared)
        if not is_final:
            attrs = substitute(draft.where(name), attrs)
        body.nodes.append(Node(name, sys.intern(proto.op), (), (), attrs))
    read_source = _inner_source if body.name else _top_source
    for node, proto in zip(body.nodes[first:], messages, strict=True):
        sources: list[Source] = []
        controls: list[int] = []
        was_control = False
        for position, text in enumerate(proto.input):
            if text.startswith("^"):
                was_control = True
                controls += _control(node, text[1:], draft, findings)
                continue
            if controls and was_control:
                message = f"{draft.where(node.name)}: input {quote(text)} follows a control input; those must be last."
                findings.add(Reason.ERROR_REASON_INVALID_GRAPH, message, node.name)
            was_control = False
            source = read_source(text, draft)
            if source is None:
                hint = (
                    _inner_hint(text, draft, findings)
                    if body.name
                    else findings.suggest_similar(text.partition(":")[0], index)
                )
                message = (
                    f"{draft.where(node.name)}: its input {position} is {quote(text)}, which does not exist.{hint}"
                )
                findings.add(Reason.ERROR_REASON_DANGLING_INPUT, message, node.name)
                # Add a source of unknown type (0): a wrong number of inputs would give a second finding.
                source = (-1, "", 0)
            sources.append(source)
        node.controls = controls or ()
        draft.sources.append(sources)


def _attrs(
    node: graph_pb2.Node, shared: dict[tuple[str | int | bytes, ...], dict[str, AttrValue]]
) -> tuple[dict[str, AttrValue], bool]:
    """Returns a node's attributes without TensorFlow's internal ones, and whether substitution leaves them unchanged.

    Nodes with equal types and small values share one object.
    """
    attrs: dict[str, AttrValue] = {}
    key: list[str | int | bytes] = []
    is_final = True
    for name, value in node.attr.items():
        if name.startswith("_") and name not in _KEPT_NOTES:
            continue
        kind = value.WhichOneof("value")
        if kind == "type":
            key += (name, value.type)
            value = op_inference.type_attr(value.type)
        elif kind in _SMALL_KINDS:
            key += (name, value.SerializeToString())
        elif kind != "tensor":
            # Lists, functions and placeholders may refer to attributes that a call sets.
            is_final = False
        attrs[name] = value
    return (shared.setdefault(tuple(key), attrs) if len(key) == 2 * len(attrs) else attrs), is_final


def _control(node: Node, name: str, draft: Draft, findings: Findings) -> tuple[int, ...]:
    if name in draft.index:
        return (draft.index[name],)
    if name not in draft.args:
        message = f"{draft.where(node.name)}: its control input {quote('^' + name)} does not exist."
        findings.add(
            Reason.ERROR_REASON_DANGLING_INPUT, message + findings.suggest_similar(name, draft.index), node.name
        )
    return ()


def _top_source(text: str, draft: Draft) -> Source | None:
    producer = draft.index.get(text)
    if producer is not None:
        return producer, "", 0
    name, colon, number = text.rpartition(":")
    if colon and _is_index(number) and name in draft.index:
        return draft.index[name], "", int(number)
    return None


def _inner_source(text: str, draft: Draft) -> Source | None:
    parts = text.split(":")
    if parts[0] in draft.args:
        start, count = draft.args[parts[0]]
        if len(parts) == 1:
            return (start, "", 0) if count else None
        if len(parts) == 2 and _is_index(parts[1]) and int(parts[1]) < count:
            return start + int(parts[1]), "", 0
        return None
    if parts[0] not in draft.index or not 2 <= len(parts) <= 3:
        return None
    if len(parts) == 2:
        return draft.index[parts[0]], parts[1], 0
    return (draft.index[parts[0]], parts[1], int(parts[2])) if _is_index(parts[2]) else None


def _inner_hint(text: str, draft: Draft, findings: Findings) -> str:
    name = text.partition(":")[0]
    if name in draft.index:
        return " In a function an output is written 'node:output_name:index'."
    return findings.suggest_similar(name, [*draft.args, *draft.index])


def _spread(source: Source | None, count: int) -> list[Source | None]:
    """Returns the source of each tensor of a result: consecutive outputs of a node, or consecutive arguments."""
    if source is None:
        return [None] * count
    node, arg, index = source
    return [(node, arg, index + offset) if arg else (node + offset, "", 0) for offset in range(count)]


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_INDEX_DIGITS


def _no_substitution(findings: Findings) -> Substitute:
    def refuse_placeholders(where: str, attrs: dict[str, AttrValue]) -> dict[str, AttrValue]:
        for name, value in attrs.items():
            if value.WhichOneof("value") == "placeholder":
                message = f"{where}: attribute {name!r} refers to an attribute of a function, but is not in a function."
                findings.add(Reason.ERROR_REASON_INVALID_ATTR, message)
        return attrs

    return refuse_placeholders
