"""Checks and expands a `ProgramSpec` into a request that an engine can compile. Does not call an engine.

`prepare` lists the stages.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gradrule.v1 import errors_pb2, evaluate_pb2, graph_pb2, override_pb2, program_pb2, rule_pb2
from gradrule_server import graphs
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.link.messages import CallShape, canonical
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.preparation.derivative_spec import DerivativeSpec, read_derivative_spec, unknown_value
from gradrule_server.preparation.overrides import OverrideTable, read_overrides, rule_names
from gradrule_server.preparation.references import (
    Blobs,
    GraphReader,
    Keep,
    LoadedGraph,
    ResolvedRule,
    RuleLookup,
    VariableValues,
    bind_constants,
    bind_variables,
)
from gradrule_server.rules.catalogue import per_sample

FORMAT_VERSION = 3
"""Part of every digest, so that programs of different formats have different digests."""

_GRADIENT_ATTR = "_gradient_op_type"
# Digests of stored programs contain this word, so it does not change.
_EMBEDDED = "brought"
_NAME_REASONS = (errors_pb2.ERROR_REASON_UNKNOWN_TENSOR, errors_pb2.ERROR_REASON_UNKNOWN_FEED)
_SHOWN_ALIASES = 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked program: the request to the engine, and the answer to the front end, without rule names and spec."""

    request: link_pb2.CompileRequest
    reply: link_pb2.PreparedProgram
    table: OverrideTable


@dataclass(frozen=True, slots=True)
class _ReadProgram:
    """A program that is read but not expanded. `findings`: the errors found so far."""

    spec: program_pb2.ProgramSpec
    call: CallShape
    loaded: LoadedGraph
    derivative: DerivativeSpec
    overrides: OverrideTable
    findings: list[Finding]


def prepare(
    spec: program_pb2.ProgramSpec,
    call: CallShape,
    lookup: RuleLookup,
    limits: Limits,
    store: Blobs,
    namespace: str = "gr",
    reader: GraphReader | None = None,
    keep: Keep | None = None,
) -> Prepared:
    """Checks and expands a program. Raises `GradruleError` with all findings.

    Args:
        spec: The program's spec.
        call: The structure of its calls.
        lookup: Finds rules by name.
        limits: The limits on graphs.
        store: The blobs that may hold the graph and values of variables.
        namespace: Prefix of the program's function names; must be unique per engine process, because TensorFlow
            registers functions by name for the whole process.
        reader: Reads the graph, whose large constants it moves only if there is a `keep`; None: a new one.
        keep: Keeps large values; None: the program holds all values of its graph and of variables itself.
    """
    loaded = (reader or GraphReader(moves_constants=False)).load(spec, limits, store)
    program = _read_program(spec, call, lookup, limits, loaded)
    expanded = _expand_graph(program, lookup, limits, namespace)
    _check_program(program, expanded, limits)
    program.overrides.set_embedded_contents(expanded.embedded_rules)
    values = bind_variables(spec, expanded, store, limits, keep)
    values.bound.extend(bind_constants(loaded, expanded, keep))
    request = _build_request(program, expanded, values, limits)
    request.key = _digest(program, request, values)
    return Prepared(request, _build_reply(program, expanded, request, values), program.overrides)


def _read_program(
    spec: program_pb2.ProgramSpec, call: CallShape, lookup: RuleLookup, limits: Limits, loaded: LoadedGraph
) -> _ReadProgram:
    """Reads the derivative and the overrides, and looks up the rules in the overrides."""
    graph = loaded.graph.graph
    # Remove fed placeholders from the key, because feeding a placeholder does not change the program.
    call = replace(call, feeds=call.feeds - graphs.placeholders(loaded.graph, _variable_names(spec), limits))
    derivative, findings = read_derivative_spec(spec, call)
    lookup.fetch([*rule_names(spec.overrides), *_named_gradients(graph)])
    table = read_overrides(spec.overrides, lookup, limits)
    return _ReadProgram(
        spec,
        call,
        loaded,
        derivative,
        table,
        [*findings, *_check_spec(spec, derivative), *table.findings],
    )


def _expand_graph(program: _ReadProgram, lookup: RuleLookup, limits: Limits, namespace: str) -> graphs.Expanded:
    """Expands the graph; raises the findings about the graph together with those about the request."""
    spec, derivative, table = program.spec, program.derivative, program.overrides

    def known_rule(name: str, op_type: str) -> int:
        # Label the rule like an override for the op type.
        return table.bind(lookup.resolve(name), op_type, is_default_label=True)

    request = graphs.ExpandRequest(
        fetches=list(spec.fetches),
        ys=derivative.ys,
        xs=derivative.xs,
        grad_y_tensors=list(derivative.grad_ys.values()),
        stop_gradients=derivative.stop_gradients,
        fed=sorted(program.call.feeds),
        overrides=table.specs,
        rewrites=list(spec.rewrites),
        derivative=derivative.part,
        second_order=derivative.second_order,
        known_rule=known_rule,
        add_embedded_rule=table.add_embedded_rule,
        namespace=namespace,
        variables=_variable_names(spec),
        with_updates=program.call.session,
        stateful=program.call.session,
    )
    try:
        return graphs.expand(program.loaded.graph, request, limits)
    except GradruleError as cause:
        found = [_mention_aliases(item, spec) for item in cause.findings]
        raise GradruleError([*found, *program.findings, *table.check_rules()]) from None


def _check_program(program: _ReadProgram, expanded: graphs.Expanded, limits: Limits) -> None:
    """Raises all findings about the request, tangents and vectors, rules, and the size of the program."""
    table = program.overrides
    findings = [
        *program.findings,
        *program.derivative.check_directions(expanded),
        *table.check_rules(),
        *_check_size(expanded, table, limits),
        *_check_batching(program, expanded),
    ]
    if findings:
        raise GradruleError(findings)


def _build_request(
    program: _ReadProgram, expanded: graphs.Expanded, values: VariableValues, limits: Limits
) -> link_pb2.CompileRequest:
    """Returns the request to the engine, without the key."""
    spec, derivative, table = program.spec, program.derivative, program.overrides
    for mark in expanded.marks:
        mark.every_order |= derivative.every_order
    return link_pb2.CompileRequest(
        graph=expanded.graph_bytes,
        marks=expanded.marks,
        rules=table.rule_messages(),
        scopes=expanded.scopes,
        inputs=[item for item in expanded.inputs if not item.optional],
        fetches=_endpoints(spec.fetches, expanded),
        ys=_endpoints(derivative.ys, expanded),
        xs=_endpoints(derivative.xs, expanded),
        grad_ys=[_upstream_gradient(y, derivative, expanded) for y in derivative.ys],
        # Omit stop_gradients that were pruned because no result depends on them.
        stop_gradients=[
            expanded.tensor_names[name] for name in derivative.stop_gradients if name in expanded.tensor_names
        ],
        unconnected_gradients=derivative.unconnected_gradients,
        no_gradient=spec.no_gradient,
        derivative=derivative.kind,
        stacked_grad_ys=derivative.stacked,
        split=program.call.split,
        dense_gradients=derivative.dense,
        directions=derivative.direction_flags(expanded),
        made=_derived_node_rules(table) if derivative.second_order else (),
        variables=values.bound,
        updates=[link_pb2.Endpoint(name=name, tensor=tensor) for name, tensor in expanded.updates.items()],
        input_aliases=expanded.input_aliases,
        trusted=limits.trusted,
        memory_limit=limits.engine_bytes,
        max_rank=limits.rank,
        max_unpacking=limits.unpacking,
        batched=_is_batched(program),
        jit=spec.jit == program_pb2.JIT_ON,
        matches=[
            link_pb2.Match(
                resolution=match.resolution,
                override=match.override,
                differentiable=match.differentiable,
                mark=match.mark,
                required=match.required,
            )
            for match in expanded.matches
        ],
        overrides=_checked_overrides(table, expanded),
    )


def _build_reply(
    program: _ReadProgram, expanded: graphs.Expanded, request: link_pb2.CompileRequest, values: VariableValues
) -> link_pb2.PreparedProgram:
    """Returns the description of the program for the front end, with what is known before the engine builds it."""
    notes = _notes(request, expanded)
    described = program_pb2.Program(
        digests=program_pb2.Digests(graph=program.loaded.digest, program=request.key),
        inputs=[item for item in expanded.inputs if item.optional],
        rewritten=expanded.rewritten,
        aliases=program.spec.aliases,
        draws_random=expanded.draws_random,
        notes=notes,
    )
    tail = evaluate_pb2.EvaluateResponse(rewritten=expanded.rewritten, draws_random=expanded.draws_random, notes=notes)
    used = {mark.rule for mark in expanded.marks} | {made.rule for made in request.made}
    return link_pb2.PreparedProgram(
        key=request.key,
        graph_digest=program.loaded.digest,
        likeness=program.loaded.likeness,
        nodes=expanded.nodes,
        blobs=values.blobs,
        derivative=request.derivative,
        program=described.SerializeToString(),
        tail=tail.SerializeToString(),
        # Omit negative indices, which mean `default` and foreign gradients.
        params=program.overrides.params.write(rule for rule in used if rule >= 0),
        placeholders=map(canonical, expanded.placeholders),
        is_batched=request.batched,
    )


def _checked_overrides(table: OverrideTable, expanded: graphs.Expanded) -> Iterable[link_pb2.CheckedOverride]:
    """Returns the overrides that must have an effect. Those of a preset count as one."""
    matched = {match.override for match in expanded.matches}
    found: dict[int, link_pb2.CheckedOverride] = {}
    for item in table.specs:
        if not item.optional and (item.index in matched or not item.part_of_graph):
            title = f"preset {item.label!r}" if item.is_preset else f"override {item.label!r} (rule {item.rule_name!r})"
            checked = found.setdefault(item.index, link_pb2.CheckedOverride(index=item.index, title=title))
            checked.made_rules.extend([item.rule_index] if item.made_op_types else ())
    return found.values()


def _notes(request: link_pb2.CompileRequest, expanded: graphs.Expanded) -> list[str]:
    """Returns a hint for each y whose gradients are zero, because its elements are those of a softmax."""
    if request.derivative not in (evaluate_pb2.DERIVATIVE_VJP, evaluate_pb2.DERIVATIVE_HVP):
        return []
    summed = [y.name for y, upstream in zip(request.ys, request.grad_ys, strict=True) if upstream.ones]
    return [
        f"{y!r} is the output of the softmax {softmax!r}, whose elements sum to 1, so gradients of their sum are zero "
        f"up to rounding: differentiate the logits, or choose a class by grad_ys"
        for y, softmax in expanded.softmax_ys.items()
        if y in summed
    ]


def _variable_names(spec: program_pb2.ProgramSpec) -> list[str]:
    return [item.name for item in spec.variables]


def _named_gradients(graph: graph_pb2.Graph) -> list[str]:
    """Returns the gradient names that nodes request by attribute: rules or foreign gradients."""
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    names = (node.attr[_GRADIENT_ATTR].s for body in bodies for node in body if _GRADIENT_ATTR in node.attr)
    return [name.decode(errors="replace") for name in dict.fromkeys(names)]


def _check_size(expanded: graphs.Expanded, table: OverrideTable, limits: Limits) -> list[Finding]:
    """Returns LIMIT_EXCEEDED if graph rules, with one copy for each node, make the program too large."""
    # Use the size from the expansion for embedded rules, which have no content yet.
    sizes = [
        expanded.embedded_rule_nodes.get(index, 1) if rule.content is None else rule.content.size
        for index, rule in enumerate(table.bound)
    ]
    added = sum(sizes[mark.rule] for mark in expanded.marks if mark.rule >= 0)
    if expanded.nodes + added <= limits.inlined_nodes:
        return []
    message = (
        f"With its rules the program has {expanded.nodes + added} nodes, {added} of them of rules, which are copied "
        f"for each node that has one; {limits.inlined_nodes} is the most."
    )
    return [Finding(errors_pb2.ERROR_REASON_LIMIT_EXCEEDED, message, field="spec.overrides")]


def _mention_aliases(finding: Finding, spec: program_pb2.ProgramSpec) -> Finding:
    """Adds the known aliases to a finding about an unknown name, because the name may be a misspelled alias."""
    if not spec.aliases or finding.reason not in _NAME_REASONS:
        return finding
    shown = ", ".join(f"{alias!r}" for alias in itertools.islice(sorted(spec.aliases), _SHOWN_ALIASES))
    more = f" and {len(spec.aliases) - _SHOWN_ALIASES} more" if len(spec.aliases) > _SHOWN_ALIASES else ""
    return replace(finding, message=f"{finding.message} Aliases: {shown}{more}.")


def _check_spec(spec: program_pb2.ProgramSpec, derivative: DerivativeSpec) -> list[Finding]:
    findings = []

    def add(reason: errors_pb2.ErrorReason.ValueType, message: str, field: str) -> None:
        findings.append(Finding(reason, message, field=field))

    if not spec.fetches and not derivative.ys:
        add(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            "the request has no results: give fetches, or ys and xs",
            "spec.fetches",
        )
    if spec.overrides and not derivative.ys:
        add(
            errors_pb2.ERROR_REASON_INVALID_OVERRIDE,
            "there are overrides but no ys: overrides change gradients, and no gradient is requested",
            "spec.overrides",
        )
    findings += unknown_value(program_pb2.NoGradient.DESCRIPTOR, spec.no_gradient, "spec.no_gradient")
    findings += unknown_value(program_pb2.Jit.DESCRIPTOR, spec.jit, "spec.jit")
    if spec.batching.axis:
        message = f"batching along axis {spec.batching.axis}; only axis 0 can count examples"
        add(errors_pb2.ERROR_REASON_UNSUPPORTED, message, "spec.batching.axis")
    for index, override in enumerate(spec.overrides):
        findings += unknown_value(override_pb2.OverrideOrder.DESCRIPTOR, override.order, f"overrides[{index}].order")
    return findings


def _derived_node_rules(table: OverrideTable) -> list[link_pb2.MadeNode]:
    """Returns the rules for nodes that gradients create, from overrides for every order that select by op type."""
    return [
        link_pb2.MadeNode(op_type=op_type, rule=item.rule_index)
        for item in table.specs
        for op_type in sorted(item.made_op_types)
    ]


def _endpoints(names: Sequence[str], expanded: graphs.Expanded) -> list[link_pb2.Endpoint]:
    return [link_pb2.Endpoint(name=name, tensor=expanded.tensor_names[name]) for name in names]


def _upstream_gradient(y: str, derivative: DerivativeSpec, expanded: graphs.Expanded) -> link_pb2.Upstream:
    name = canonical(y)
    if name in derivative.grad_ys_fed:
        return link_pb2.Upstream(fed=True)
    if name in derivative.grad_ys:
        return link_pb2.Upstream(tensor=expanded.tensor_names[derivative.grad_ys[name]])
    return link_pb2.Upstream(ones=True)


def _digest(program: _ReadProgram, request: link_pb2.CompileRequest, values: VariableValues) -> str:
    """Returns the SHA-256 of everything that determines the computation, except param values."""
    spec, table = program.spec, program.overrides
    rules = [_identity(rule) for rule in table.bound]
    overrides = [
        [
            item.selector.SerializeToString(deterministic=True).hex(),
            item.rule_index,
            item.label,
            item.optional,
            item.index,
            item.is_preset,
            item.every_order,
        ]
        for item in table.specs
    ]
    content = {
        "format": FORMAT_VERSION,
        "graph": program.loaded.digest,
        "rules": rules,
        "overrides": overrides,
        "fetches": list(spec.fetches),
        "feeds": sorted(program.call.feeds),
        "derivative": program.derivative.digest_content(),
        "directions": list(request.directions),
        "split": request.split,
        "session": program.call.session,
        "no_gradient": spec.no_gradient,
        "rewrites": list(spec.rewrites),
        "variables": values.content,
    }
    if request.batched:
        content["batching"] = {"axis": spec.batching.axis}
    if request.jit:
        content["jit"] = True
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_batched(program: _ReadProgram) -> bool:
    """Returns whether calls may run together: calls of the shape for which the spec declares it."""
    batching, call = program.spec.batching, program.call
    is_declared = batching.HasField("axis") and (batching.allowed or not batching.HasField("allowed"))
    return is_declared and not (call.derivative or call.feeds or call.stacked_grad_ys or call.session or call.split)


def _check_batching(program: _ReadProgram, expanded: graphs.Expanded) -> list[Finding]:
    """Returns UNSUPPORTED for each reason why calls of a program that declares batching cannot run together."""
    if not _is_batched(program):
        return []
    problems = []
    if program.derivative.kind == evaluate_pb2.DERIVATIVE_JACOBIAN:
        problems.append("a whole Jacobian has entries for pairs of examples; set `batched` of the Jacobian")
    if program.spec.jit == program_pb2.JIT_ON:
        problems.append("XLA compiles each size of a run on its own, which takes seconds; set jit to OFF")
    if expanded.draws_random:
        problems.append("the graph draws random numbers, which depend on the size of a run; feed them")
    used = {mark.rule for mark in expanded.marks}
    if program.derivative.second_order:
        used |= {made.rule for made in _derived_node_rules(program.overrides)}
    # Negative indices mean `default` and foreign gradients.
    rules = [program.overrides.bound[index] for index in used if index >= 0]
    mixing = {rule.name for rule in rules if rule.content is not None and per_sample(rule.content) is False}
    problems += [f"the rule {name!r} is not per sample: it combines examples along axis 0" for name in sorted(mixing)]
    reason = errors_pb2.ERROR_REASON_UNSUPPORTED
    return [Finding(reason, f"batching: {problem}", field="spec.batching") for problem in problems]


def _identity(rule: ResolvedRule) -> list[str]:
    if rule.embedded:
        # The graph digest covers the content. The expanded form has names of functions that differ each time.
        return [_EMBEDDED, rule.name]
    return ["op", rule.name] if rule.content is None else ["content", rule.content.digest, rule.name]


def override_values(table: OverrideTable) -> bytes:
    """Returns the serialized param values of overrides, which distinguish programs of equal digests."""
    items = sorted(table.params.settings.items())
    return b"".join(
        override_pb2.GradientOverride(
            label=f"{rule}.{name}", params={"value": rule_pb2.ParamValue.FromString(value.SerializeToString())}
        ).SerializeToString(deterministic=True)
        for (rule, name), value in items
    )
