"""Expands a graph for one program: checks it, inlines calls, resolves overrides and removes unneeded nodes.

`_Expansion.run` lists the stages.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.tensor_pb2 import Dt, TensorShape, TensorSpec
from gradrule_server.errors import Finding, Findings, GradruleError, Reason
from gradrule_server.graphs.check import check, check_runnable
from gradrule_server.graphs.contents import Contents, constant_digest, restore_values
from gradrule_server.graphs.copying import UNKNOWN_SHAPE, copy_function, copy_graph
from gradrule_server.graphs.expand_request import (
    CopiedTensors,
    Expanded,
    ExpandRequest,
    TensorNames,
    find_fed,
    find_requested,
    find_selected,
)
from gradrule_server.graphs.ir import (
    ARG,
    DIFFERENTIABLE,
    PLACEHOLDER_WITH_DEFAULT,
    PLACEHOLDERS,
    Body,
    Limits,
    Node,
    Ref,
    bodies_of,
    prune,
)
from gradrule_server.graphs.library import Library
from gradrule_server.graphs.node_gradients import NodeGradients
from gradrule_server.graphs.resolution_context import RequestTensors, ResolutionContext, Resolved
from gradrule_server.graphs.resolve import Resolver
from gradrule_server.graphs.rewrites import check_rewrites, rewrite
from gradrule_server.graphs.selectors import compile_selectors
from gradrule_server.graphs.variable_lowering import lower_variables
from gradrule_server.graphs.variables import VARIABLE_OPS, Variable, VariableTable
from gradrule_server.graphs.write import mark_nodes, tensor_name, write_embedded_rules, write_graph
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy.op_tables import ops_with

_DRAWS_RANDOM = ops_with("draws_random")
_INPUT = "Placeholder"
# Ops of one data input that keep the sum of all elements, or divide it by a constant.
_KEEPS_SUM = frozenset(
    {"Cast", "EnsureShape", "ExpandDims", "Identity", "Mean", "Reshape", "Squeeze", "Sum", "Transpose"}
)


class ReadGraph:
    """A parsed graph, which is checked once. Expansions do not change it.

    Args:
        graph: The graph.
        contents: The values of its moved constants.
        tensors: Names of tensors by their names in the format from which the graph was converted.
    """

    def __init__(
        self, graph: Graph, contents: Contents | None = None, tensors: Mapping[str, str] | None = None
    ) -> None:
        self.graph = graph
        self.tensors = tensors or {}
        self.contents = contents or Contents()
        self._checked: _CheckedGraph | None = None

    def check(self, limits: Limits) -> _CheckedGraph:
        """Checks the graph, infers types, and finds its functions and variables.

        Raises `GradruleError` only if the check cannot continue. All calls have the same limits.
        """
        if self._checked is None:
            findings = Findings()
            top, library = check(self.graph, limits, findings)
            self._checked = _CheckedGraph(top, library, VariableTable(top), tuple(findings.all))
        return self._checked


class _CheckedGraph(NamedTuple):
    top: Body
    library: Library
    variables: VariableTable
    findings: tuple[Finding, ...]

    def placeholders(self, given: Container[Variable | None]) -> list[str]:
        """Returns the names of the placeholders and variables that calls may feed without a new program.

        A variable that has an initialiser must have a value, because feeding another one removes the initialiser.
        """
        return [
            *(node.name for node in self.top.nodes if node.op in PLACEHOLDERS),
            *(name for name, item in self.variables.names.items() if item in given or not item.initialiser),
        ]


def placeholders(graph: ReadGraph, variables: Iterable[str], limits: Limits) -> frozenset[str]:
    """Returns the names of placeholders and variables that a call may feed without a new program.

    `variables`: names of the variables that have values.
    """
    with _paused_collection():
        checked = graph.check(limits)
        given = {checked.variables.names.get(name.removesuffix(":0")) for name in variables}
        return frozenset(checked.placeholders(given))


def expand(graph: Graph | ReadGraph, request: ExpandRequest, limits: Limits | None = None) -> Expanded:
    """Checks graph and request, resolves overrides, inlines calls and keeps only nodes that requested tensors need.

    Raises `GradruleError` with all findings.
    """
    with _paused_collection():
        source = graph if isinstance(graph, ReadGraph) else ReadGraph(graph)
        return _Expansion(source, request, limits or Limits()).run()


def variables(graph: Graph | ReadGraph, limits: Limits | None = None) -> list[link_pb2.GraphVariable]:
    """Checks a graph and returns its variables. Raises `GradruleError` with all findings."""
    with _paused_collection():
        source = graph if isinstance(graph, ReadGraph) else ReadGraph(graph)
        checked = source.check(limits or Limits())
        if checked.findings:
            raise GradruleError(checked.findings)
        return [
            link_pb2.GraphVariable(
                names=[item.name, *sorted(item.aliases)],
                dtype=item.dtype,
                shape=item.shape,
                initialised=bool(item.initialiser),
                differentiable=item.dtype in DIFFERENTIABLE,
            )
            for item in checked.variables.all()
        ]


class _Expansion:
    """One expansion. Each stage uses the attributes that the stages before it have set."""

    def __init__(self, source: ReadGraph, request: ExpandRequest, limits: Limits) -> None:
        self._source = source
        self._request = request
        self._limits = limits
        self._findings = Findings()

    def run(self) -> Expanded:
        """Runs all stages. Raises `GradruleError` with all findings."""
        self._check_graph()
        self._find_tensors()
        self._prepare_overrides()
        self._copy_graph()
        self._lower_variables()
        self._rewrite()
        self._resolve_overrides()
        self._prune()
        self._expand_embedded_rules()
        self._mark_nodes()
        return self._write()

    def _check_graph(self) -> None:
        """Checks the graph, infers types, and finds its functions and variables."""
        self._checked = self._source.check(self._limits)
        self._top, self._library, self._variables, findings = self._checked
        self._findings.all += findings

    def _find_tensors(self) -> None:
        """Finds the tensors that the request names, in the uploaded graph."""
        aliases = {alias: item.name for alias, item in self._variables.names.items()}
        self._names = TensorNames(self._top, self._findings, aliases, self._source.tensors)
        self._requested = find_requested(self._request, self._names)
        self._fed = find_fed(self._request, self._names, self._findings)
        self._selected = find_selected(self._request.overrides, self._names)

    def _prepare_overrides(self) -> None:
        """Compiles the selectors; raises all findings so far, because a graph with errors cannot be copied."""
        request, library = self._request, self._library
        self._node_gradients = NodeGradients(
            request.known_rule,
            request.add_embedded_rule,
            library.gradients,
            library.foreign,
            bool(request.ys),
            self._findings,
        )
        self._resolver = Resolver(
            compile_selectors(request.overrides, library, self._findings),
            self._node_gradients,
            bool(request.ys),
            self._findings,
            request.second_order,
            self._limits.inlined_nodes,
        )
        check_rewrites(request.rewrites, self._findings)
        self._given = self._variables.given(request.variables, "spec.variables", self._findings)
        self._findings.raise_if_any()

    def _copy_graph(self) -> None:
        """Copies the graph: inlines calls, cuts off fed tensors, and makes a function of each loop body and branch."""
        self._cut: dict[int, set[int]] = {}
        for position, output in self._fed.values():
            if self._top.nodes[position].op not in PLACEHOLDERS | VARIABLE_OPS:
                self._cut.setdefault(position, set()).add(output)
        separate = {self._requested[name] for name in (*self._request.xs, *self._request.stop_gradients)}
        used = {*self._requested.values(), *self._fed.values(), *self._selected.values()}
        self._copy = copy_graph(self._top, self._resolver, self._cut, used, separate, self._request.namespace)
        self._roots = [*(self._requested[name] for name in self._result_names()), *self._fed.values()]

    def _lower_variables(self) -> None:
        """Turns variables into inputs, and their new values into outputs."""
        self._updates: dict[Variable, Ref] = {}
        names, table = self._names, self._variables
        if table:
            fed = (table.names[names.node(ref)] for ref in self._fed.values() if names.node(ref) in table.names)
            outside = {*self._given.values(), *fed, *(table.all() if self._request.stateful else ())}
            roots = [self._copy.tensors[root] for root in self._roots]
            nodes = (names.node(self._requested[x]) for x in self._request.xs)
            xs = {table.names[node] for node in nodes if node in table.names}
            self._updates = lower_variables(self._copy, table, roots, outside, xs, self._findings)
        # Negative, so that no tensor of the uploaded graph has these keys.
        self._update_keys: list[Ref] = [(-1 - number, 0) for number in range(len(self._updates))]
        if self._request.with_updates:
            self._copy.tensors.update(zip(self._update_keys, self._updates.values(), strict=True))
            self._roots += self._update_keys

    def _rewrite(self) -> None:
        """Applies the requested rewrites."""
        tensors = self._copy.tensors
        self._dtypes = {name: _dtype(self._copy.body, tensors[ref]) for name, ref in self._requested.items()}
        xs = {tensors[self._requested[name]] for name in self._request.xs}
        self._rewritten = rewrite(self._copy, self._request.rewrites, xs)

    def _resolve_overrides(self) -> None:
        """Assigns rules to nodes of the copy and adds custom-gradient nodes for subgraphs with rules.

        Adds LIMIT_EXCEEDED if the number of overrides times the number of nodes is too large.
        """
        copy, resolver = self._copy, self._resolver
        self._context = self._resolution_context()
        patterns = sum(matcher.pattern_count for matcher in resolver.matchers)
        checks = patterns * len(copy.candidates)
        if checks > self._limits.selections:
            for matcher in resolver.matchers:
                matcher.faulty = True
            message = (
                f"{patterns} overrides and globs would each be checked against {len(copy.candidates)} nodes, "
                f"{checks} checks in all; "
                f"{self._limits.selections} is the most (--max-selections). Select more nodes with fewer overrides."
            )
            self._findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message, field="spec.overrides")
        elif self._request.ys:
            resolver.resolve(self._context)
            self._context.find_dependence()
        moved = self._context.insert_custom_gradient_nodes(copy.unique)
        copy.tensors = {ref: moved.get(target, target) for ref, target in copy.tensors.items()}
        self._matches = self._context.matches()
        if self._request.ys:
            self._findings.all += resolver.unmatched(self._context)

    def _resolution_context(self) -> ResolutionContext:
        """Returns the context for selectors: the copy, the request's tensors, and a look-up of tensors by name."""
        copy, request = self._copy, self._request
        named = CopiedTensors(copy, self._selected, self._findings)

        def copied(texts: Iterable[str]) -> frozenset[Ref]:
            return frozenset(copy.tensors[self._requested[text]] for text in texts)

        tensors = RequestTensors(copied(request.xs), copied(request.ys), copied(request.stop_gradients))
        return ResolutionContext(copy.body, copy.candidates, copy.scopes, tensors, named.look_up, named.find)

    def _prune(self) -> None:
        """Removes nodes that no result needs, and keeps the new positions of the remaining tensors."""
        # stop_gradients are not roots: a tensor that no result needs has no effect and needs no feed.
        tensors = self._copy.tensors
        moved = prune(self._copy.body, {tensors[root][0] for root in self._roots})
        self._moved = {key: (moved[node], output) for key, (node, output) in tensors.items() if node in moved}

    def _expand_embedded_rules(self) -> None:
        """Expands the embedded rules and checks that all remaining nodes may run; raises all findings."""
        self._rules = _expand_embedded_rules(self._node_gradients, self._request.namespace)
        self._bodies = [self._copy.body, *self._rules.bodies.values()]
        check_runnable(self._bodies, {**self._copy.scopes, **self._rules.scopes}, self._limits, self._findings)
        self._findings.raise_if_any()

    def _mark_nodes(self) -> None:
        """Numbers the nodes that have rules."""
        resolved = {**self._context.resolved, **self._rules.resolved}
        self._marks = mark_nodes(self._bodies, resolved, self._copy.variable_values.values())

    def _softmax_ys(self, body: Body) -> dict[str, str]:
        """Returns the softmax of each y whose elements have a constant sum, by y."""
        refs = {name: self._moved[ref] for name, ref in self._requested.items() if ref in self._moved}
        xs = {refs[name] for name in self._request.xs if name in refs}
        found = {name: _softmax_before(body, refs[name], xs) for name in self._request.ys if name in refs}
        return {name: node.name for name, node in found.items() if node is not None}

    def _write(self) -> Expanded:
        """Serializes the graph and the embedded rules, and returns the result of the expansion."""
        body, versions = self._copy.body, self._source.graph.versions
        inputs = _inputs(self._top, body, self._cut, self._fed, self._variables, set(self._given.values()))
        constants = self._take_constants()
        rules, indices = self._rules.bodies, self._node_gradients.embedded_indices
        # Write the rules after marking: their nodes have marks too, for gradients of gradients.
        embedded_rules = write_embedded_rules(rules, indices, versions, self._limits)
        given, moved, fed = self._given, self._moved, {item.name for item in inputs}
        return Expanded(
            graph_bytes=write_graph(body, rules.values(), versions),
            nodes=sum(len(inner.nodes) for root in self._bodies for inner in bodies_of(root)),
            marks=self._marks,
            scopes={inner.name: self._copy.scopes[inner.name] for inner in bodies_of(body) if inner.name},
            matches=self._matches,
            rewritten=self._rewritten,
            softmax_ys=self._softmax_ys(body),
            draws_random=any(node.op in _DRAWS_RANDOM for inner in bodies_of(body) for node in inner.nodes),
            embedded_rules=embedded_rules,
            embedded_rule_nodes={index: len(rules[name].nodes) for (name, _), index in indices.items()},
            inputs=inputs,
            input_aliases={
                alias: item.name for item in self._variables.all() for alias in item.aliases if item.name in fed
            }
            | {alias: name for alias, name in self._source.tensors.items() if name in fed},
            constants=constants,
            tensor_names={name: tensor_name(body, moved[ref]) for name, ref in self._requested.items() if ref in moved},
            dtypes=self._dtypes,
            placeholders=self._checked.placeholders(set(given.values())),
            variables={name: _variable_spec(item, optional=True) for name, item in given.items()},
            updates={
                variable.name: tensor_name(body, moved[ref])
                for variable, ref in zip(self._updates, self._update_keys, strict=True)
                if ref in moved
            },
        )

    def _take_constants(self) -> list[link_pb2.BoundVariable]:
        """Turns the moved constants of the top level into inputs, and returns them; gives the others their values."""
        top, contents, restored = self._copy.body, self._source.contents, 0
        for root in self._bodies:
            restored += sum(restore_values(body.nodes, contents) for body in bodies_of(root) if body is not top)
        if restored > contents.size + self._limits.inlined_bytes:
            message = (
                f"The constants in bodies of loops and in branches take {restored} bytes, once for each use of a "
                f"function; {self._limits.inlined_bytes} bytes more than in the graph are the most "
                f"(--max-inlined-bytes). Give constants to functions as arguments."
            )
            self._findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
            self._findings.raise_if_any()
        constants = []
        for node in list(top.nodes):
            digest = constant_digest(node)
            if not digest:
                continue
            shape, dtype = node.attrs["value"].tensor.tensor_shape, node.attrs["dtype"]
            name, attrs = node.name, {"dtype": dtype, "shape": AttrValue(shape=shape)}
            if node.controls:
                # The nodes that it waits for must run too.
                name = self._copy.unique(top, f"{node.name}/value")
                top.nodes.append(Node(name, _INPUT, (), (), attrs, node.outputs))
                node.op, node.inputs, node.attrs = "Identity", [(len(top.nodes) - 1, 0)], {"T": dtype}
            else:
                node.op, node.attrs = _INPUT, attrs
            value = link_pb2.KeptValue(offset=contents.offset(digest), sha256=digest)
            spec = TensorSpec(name=name, dtype=dtype.type, shape=shape)
            constants.append(link_pb2.BoundVariable(spec=spec, kept=value))
        return constants

    def _result_names(self) -> list[str]:
        request = self._request
        return [*request.fetches, *request.ys, *request.xs, *request.grad_y_tensors]


@dataclass(slots=True, eq=False)
class _EmbeddedRules:
    """Expanded gradients by name, the matches of their nodes by id(), and public scopes by function name."""

    bodies: dict[str, Body] = field(default_factory=dict)
    resolved: dict[int, Resolved] = field(default_factory=dict)
    scopes: dict[str, str] = field(default_factory=dict)


def _expand_embedded_rules(node_gradients: NodeGradients, namespace: str) -> _EmbeddedRules:
    """Expands every embedded gradient that a node requests, including requests by nodes of such gradients.

    Overrides do not apply inside, because they select nodes of the uploaded graph only.
    """
    rules = _EmbeddedRules()
    # The list grows while it is iterated: embedded gradients request others.
    for name in node_gradients.requested:
        resolver = Resolver((), node_gradients, node_gradients.differentiates, node_gradients.findings)
        copy = copy_function(node_gradients.gradients[name], name, resolver, f"{namespace}_r{len(rules.bodies)}")
        rules.bodies[name] = copy.body
        rules.scopes.update(copy.scopes)
        context = ResolutionContext(copy.body, copy.candidates, copy.scopes)
        resolver.resolve(context)
        context.insert_custom_gradient_nodes(copy.unique)
        rules.resolved.update(context.resolved)
    # Prune last: nodes are keyed by id(), and ids of freed nodes are reused.
    for body in rules.bodies.values():
        _prune_function(body)
    return rules


def _prune_function(body: Body) -> None:
    """Removes nodes that no result needs, including unused arguments."""
    roots = [*(ref[0] for ref in body.results), *(position for _, position in body.control_results)]
    moved = prune(body, roots)
    body.results = [(moved[position], output) for position, output in body.results]
    body.control_results = [(name, moved[position]) for name, position in body.control_results]
    body.arg_count = sum(node.op == ARG for node in body.nodes)


def _softmax_before(body: Body, tensor: Ref, xs: Collection[Ref]) -> Node | None:
    """Returns the softmax whose elements the tensor has, possibly added up; None if there is none.

    Args:
        body: An expanded body.
        tensor: The tensor.
        xs: Tensors with respect to which the tensor is differentiated; behind one of these the sum is not constant.

    Overridden nodes are not passed: their gradients are those of their rules.
    """
    while tensor not in xs:
        node = body.nodes[tensor[0]]
        if node.mark is not None:
            return None
        if node.op == "Softmax":
            return node
        if node.op not in _KEEPS_SUM:
            return None
        tensor = node.inputs[0]
    return None


def _inputs(
    top: Body,
    body: Body,
    cut: Container[int],
    fed: Mapping[str, Ref],
    table: VariableTable,
    given: Container[Variable],
) -> list[TensorSpec]:
    """Returns the inputs of calls: needed placeholders and variables, then other fed tensors."""
    # Top-level nodes keep their names, so a name shows whether a node remains.
    kept = {node.name for node in body.nodes if node.op in PLACEHOLDERS or node.op == PLACEHOLDER_WITH_DEFAULT}
    inputs = []
    for position, node in enumerate(top.nodes):
        if node.name not in kept or position in cut:
            continue
        if node.op in VARIABLE_OPS:
            variable = table.names[node.name]
            inputs.append(_variable_spec(variable, optional=variable in given))
        else:
            optional = node.op not in PLACEHOLDERS
            dtype = _dtype(top, (position, 0))
            inputs.append(TensorSpec(name=node.name, dtype=dtype, shape=_shape(node), optional=optional))
    for name, ref in fed.items():
        if ref[0] in cut:
            node = top.nodes[ref[0]]
            shape = _shape(node) if node.op == PLACEHOLDER_WITH_DEFAULT else UNKNOWN_SHAPE.shape
            inputs.append(TensorSpec(name=name, dtype=_dtype(top, ref), shape=shape))
    return inputs


def _variable_spec(variable: Variable, *, optional: bool) -> TensorSpec:
    return TensorSpec(name=variable.name, dtype=variable.dtype, shape=variable.shape, optional=optional)


def _shape(node: Node) -> TensorShape:
    return node.attrs.get("shape", UNKNOWN_SHAPE).shape


def _dtype(top: Body, ref: Ref) -> Dt.ValueType:
    return as_dt((top.nodes[ref[0]].outputs or (0,) * (ref[1] + 1))[ref[1]])


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Disables Python's cyclic garbage collector within the context.

    Of contexts that overlap, the first one enables it again.

    Bodies and nodes form no reference cycles, so reference counting frees them. The collector would scan all of them
    repeatedly, which doubles the time for 100,000 nodes and grows faster than linearly.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
