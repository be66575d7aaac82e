"""Makes a failing request smaller, as long as it still fails: fewer overrides, ys, xs, conditions and nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from gradrule.v1 import graph_pb2
from tests.generated.requests import Override, Request

Fails = Callable[[Request], bool]
_CONDITIONS = ("op_type", "node", "node_regex", "scope", "position", "dtype", "depends_on")
_KEPT = frozenset({"Placeholder", "Const"})


def shrink(request: Request, fails: Fails, most: int = 400) -> Request:
    """The smallest request that greedy steps find; `most`: how many requests are tried."""
    tried = 0
    while True:
        for smaller in _steps(request):
            tried += 1
            if tried > most:
                return request
            if fails(smaller):
                request = smaller
                break
        else:
            return request


def _steps(request: Request) -> Iterator[Request]:
    """Smaller requests, those that leave out most first. Some are not valid; they do not fail in the same way."""
    for number in range(len(request.overrides)):
        yield replace(request, overrides=[*request.overrides[:number], *request.overrides[number + 1 :]])
    for name in ("ys", "xs", "stopped"):
        values = list(getattr(request, name))
        for value in values if len(values) > (name != "stopped") else ():
            rest = [other for other in values if other != value]
            upstream = {y: given for y, given in request.upstream.items() if name != "ys" or y != value}
            yield replace(request, **{name: rest}, upstream=upstream)
    for graph in _smaller_graphs(request.graph, {*request.ys, *request.xs, *request.stopped}):
        yield replace(request, graph=graph)
    for number, override in enumerate(request.overrides):
        for simpler in _simpler(override):
            yield replace(request, overrides=[*request.overrides[:number], simpler, *request.overrides[number + 1 :]])


def _simpler(override: Override) -> Iterator[Override]:
    given = [name for name in _CONDITIONS if getattr(override, name) not in (None, ())]
    if len(given) > 1:
        for name in given:
            yield replace(override, **{name: () if name == "depends_on" else None})
    if override.every_order:
        yield replace(override, every_order=False)
    if len(override.depends_on) > 1:
        yield replace(override, depends_on=override.depends_on[1:])


def _smaller_graphs(graph: graph_pb2.Graph, asked: set[str]) -> Iterator[graph_pb2.Graph]:
    """The graph without one node: what uses it takes one of its inputs instead."""
    for place in range(-1, len(graph.library.function)):
        for number, node in enumerate(_nodes(graph, place)):
            if node.op in _KEPT or (place < 0 and node.name in asked):
                continue
            for text in dict.fromkeys(node.input):
                changed = graph_pb2.Graph()
                changed.CopyFrom(graph)
                _bypass(changed, place, node.name, text)
                del _nodes(changed, place)[number]
                _drop_unused(changed, asked)
                yield changed


def _nodes(graph: graph_pb2.Graph, place: int) -> Any:
    return graph.node if place < 0 else graph.library.function[place].node_def


def _bypass(graph: graph_pb2.Graph, place: int, name: str, by: str) -> None:
    for node in _nodes(graph, place):
        for index, text in enumerate(node.input):
            if text.split(":")[0] == name:
                node.input[index] = by
    if place >= 0:
        returned = graph.library.function[place].ret
        for key, text in list(returned.items()):
            if text.split(":")[0] == name:
                returned[key] = by


def _drop_unused(graph: graph_pb2.Graph, asked: set[str]) -> None:
    """Takes out nodes that nothing uses, and functions that no node calls."""
    for place in range(-1, len(graph.library.function)):
        results = asked if place < 0 else {text.split(":")[0] for text in graph.library.function[place].ret.values()}
        changed = True
        while changed:
            nodes = _nodes(graph, place)
            used = results | {text.split(":")[0] for node in nodes for text in node.input}
            unused = [node for node in nodes if node.name not in used and node.op != "Placeholder"]
            changed = bool(unused)
            for node in unused:
                nodes.remove(node)
    while True:
        bodies = [graph.node, *(function.node_def for function in graph.library.function)]
        called = {
            func.name
            for nodes in bodies
            for node in nodes
            for attr in node.attr.values()
            for func in (attr.func, *attr.list.func)
        }
        unused = [function for function in graph.library.function if function.signature.name not in called]
        if not unused:
            return
        for function in unused:
            graph.library.function.remove(function)


def text(request: Request) -> str:
    """A request to read and to rebuild: the graph's nodes, and what is asked."""
    lines = []
    for place in range(-1, len(request.graph.library.function)):
        if place >= 0:
            function = request.graph.library.function[place]
            args = ", ".join(arg.name for arg in function.signature.input_arg)
            lines.append(
                f"{function.signature.name}({args}) -> {', '.join(f'{k}={v}' for k, v in function.ret.items())}"
            )
        for node in _nodes(request.graph, place):
            called = [func.name for attr in node.attr.values() for func in (attr.func, *attr.list.func) if func.name]
            own = node.attr["_gradient_op_type"].s.decode() if "_gradient_op_type" in node.attr else ""
            lines.append(f"  {node.name} = {node.op}({', '.join(node.input)}) {' '.join([*called, own])}".rstrip())
    for override in request.overrides:
        given = {one.name: getattr(override, one.name) for one in fields(override)}
        shown = {key: value for key, value in given.items() if value not in (None, (), False, {}) and key != "rule"}
        lines.append(f"override {override.rule.text!r} {shown}")
    lines.append(f"{request.kind} ys={list(request.ys)} xs={list(request.xs)} stopped={list(request.stopped)}")
    lines.append(f"feeds={ ({name: value.tolist() for name, value in request.feeds.items()}) } params={request.params}")
    return "\n".join(lines)
