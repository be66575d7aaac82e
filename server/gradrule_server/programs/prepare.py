"""From a `ProgramSpec` to a checked, expanded program that an engine can compile. No engine is asked here."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from gradrule.v1 import errors_pb2, graph_pb2, override_pb2, program_pb2, rule_pb2, tensor_pb2
from gradrule_server import graphs
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.overrides import OverrideTable, read_overrides
from gradrule_server.programs.rule_lookup import RuleLookup
from gradrule_server.programs.values import Values, bind
from gradrule_server.registry.blobs import BlobStore

FORMAT_VERSION = 3
"""Goes into every digest: programs of another format are other programs."""

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class CallShape:
    """What of a call's structure, not of its values, a program depends on. Names are canonical: `y`, not `y:0`."""

    feeds: frozenset[str] = frozenset()
    grad_ys: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked program. `key` is its digest."""

    key: str
    graph_digest: str
    request: link_pb2.CompileRequest
    table: OverrideTable
    expanded: graphs.Expanded
    # Blobs that an engine reads when it loads the program.
    blobs: tuple[str, ...] = ()


def canonical(name: str) -> str:
    """`y:0` and `y` are one tensor."""
    return name.removesuffix(":0")


def prepare(
    spec: program_pb2.ProgramSpec,
    call: CallShape,
    lookup: RuleLookup,
    limits: graphs.Limits,
    store: BlobStore,
    *,
    with_updates: bool = False,
) -> Prepared:
    """Checks and expands; raises `GradruleError` with all that is wrong.

    `with_updates`: what the graph assigns to variables is computed too, as the request's `updates`.
    """
    graph_bytes, graph = _graph_of(spec, limits, store)
    graph_digest = hashlib.sha256(graph_bytes).hexdigest()
    variables = [item.name for item in spec.variables]
    # Feeding a placeholder is what placeholders are for: it makes no other program.
    call = CallShape(call.feeds - graphs.placeholders(graph, variables), call.grad_ys)
    vjp = spec.vjp
    table = read_overrides(spec.overrides, lookup)
    findings = [*_check_wishes(spec, call), *table.findings]

    def known_rule(name: str, op_type: str) -> int:
        # Labelled as the entry `{op_type: name}` of a map would be.
        return table.bind(lookup.resolve(name), op_type)

    upstream = {canonical(item.y): item.tensor for item in vjp.grad_ys}
    try:
        expanded = graphs.expand(
            graph,
            graphs.ExpandRequest(
                fetches=list(spec.fetches),
                ys=list(vjp.ys),
                xs=list(vjp.xs),
                grad_y_tensors=list(upstream.values()),
                stop_gradients=list(vjp.stop_gradients),
                fed=sorted(call.feeds),
                overrides=table.specs,
                rewrites=list(spec.rewrites),
                known_rule=known_rule,
                # TensorFlow's functions have names for the whole process, so no two programs may share one.
                namespace=f"gr{next(_serial)}",
                variables=variables,
                with_updates=with_updates,
            ),
            limits,
        )
    except GradruleError as cause:
        raise GradruleError([*cause.findings, *findings]) from None
    if findings:
        raise GradruleError(findings)
    values = bind(spec, expanded, store, limits)

    request = link_pb2.CompileRequest(
        graph=expanded.graph_bytes,
        marks=[
            link_pb2.MarkedNode(
                rule=mark.rule,
                node=mark.node,
                foreign=mark.foreign,
                subgraph_outputs=mark.outputs,
                rank=mark.rank,
                otherwise=mark.otherwise,
                op_type=mark.op_type,
                is_step=mark.is_step,
            )
            for mark in expanded.marks
        ],
        rules=table.messages(),
        scopes=expanded.scopes,
        inputs=[_input_spec(item) for item in expanded.inputs if not item.optional],
        fetches=_endpoints(spec.fetches, expanded),
        ys=_endpoints(vjp.ys, expanded),
        xs=_endpoints(vjp.xs, expanded),
        grad_ys=[_upstream(y, upstream, call, expanded) for y in vjp.ys],
        # One that nothing asked for depends on is not in the expanded graph.
        stop_gradients=[expanded.tensor_names[name] for name in vjp.stop_gradients if name in expanded.tensor_names],
        unconnected_gradients=vjp.unconnected_gradients,
        no_gradient=spec.no_gradient,
        variables=values.bound,
        updates=[link_pb2.Endpoint(name=name, tensor=tensor) for name, tensor in expanded.updates.items()],
        input_aliases={alias: item.name for item in expanded.inputs for alias in item.aliases},
    )
    key = _digest(graph_digest, spec, call, table, values, list(expanded.updates))
    request.key = key
    return Prepared(key, graph_digest, request, table, expanded, values.blobs)


def _graph_of(spec: program_pb2.ProgramSpec, limits: graphs.Limits, store: BlobStore) -> tuple[bytes, graph_pb2.Graph]:
    source = spec.graph.WhichOneof("source")
    if source == "blob_sha256":
        size = store.size(spec.graph.blob_sha256)
        if size > limits.graph_bytes:
            raise error(
                errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                f"the graph has {size} bytes; {limits.graph_bytes} is the most, unless the server is started with a "
                "larger --max-graph-bytes",
                field="spec.graph",
            )
        data = store.read(spec.graph.blob_sha256)
        return data, graphs.parse(data)
    if source == "serialized":
        return spec.graph.serialized, graphs.parse(spec.graph.serialized)
    if source == "inline":
        return spec.graph.inline.SerializeToString(deterministic=True), spec.graph.inline
    raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the program has no graph", field="spec.graph")


def _check_wishes(spec: program_pb2.ProgramSpec, call: CallShape) -> list[Finding]:
    vjp, findings = spec.vjp, []

    def add(reason: errors_pb2.ErrorReason.ValueType, message: str, field: str) -> None:
        findings.append(Finding(reason, message, field=field))

    if not spec.fetches and not vjp.ys:
        add(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            "nothing is asked for: name fetches, or ys and xs",
            "spec.fetches",
        )
    if spec.overrides and not vjp.ys:
        add(
            errors_pb2.ERROR_REASON_INVALID_OVERRIDE,
            "there are overrides but no ys: overrides change gradients, and none is asked for",
            "spec.overrides",
        )
    if bool(vjp.ys) != bool(vjp.xs):
        given, missing = ("ys", "xs") if vjp.ys else ("xs", "ys")
        add(errors_pb2.ERROR_REASON_INVALID_DERIVATIVE, f"there are {given} but no {missing}", f"spec.vjp.{missing}")
    for value, enum, where in (
        (vjp.unconnected_gradients, program_pb2.UnconnectedGradients, "spec.vjp.unconnected_gradients"),
        (spec.no_gradient, program_pb2.NoGradient, "spec.no_gradient"),
    ):
        if value not in enum.values():
            known = ", ".join(enum.keys()[1:])
            add(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"there is no value {value}; there are {known}", where)
    asked = [canonical(item.y) for item in vjp.grad_ys]
    for name in sorted({name for name in asked if asked.count(name) > 1}):
        add(errors_pb2.ERROR_REASON_INVALID_DERIVATIVE, f"grad_ys names {name!r} twice", "spec.vjp.grad_ys")
    ys = {canonical(name) for name in vjp.ys}
    for name in sorted({canonical(item.y) for item in vjp.grad_ys} | call.grad_ys):
        if name not in ys:
            add(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                f"grad_ys names {name!r}, which is none of the ys",
                "grad_ys",
            )
    return findings


def _input_spec(item: graphs.GraphInput) -> tensor_pb2.TensorSpec:
    return tensor_pb2.TensorSpec(name=item.name, dtype=item.dtype, shape=item.shape)


def _endpoints(names: Sequence[str], expanded: graphs.Expanded) -> list[link_pb2.Endpoint]:
    return [link_pb2.Endpoint(name=name, tensor=expanded.tensor_names[name]) for name in names]


def _upstream(y: str, upstream: dict[str, str], call: CallShape, expanded: graphs.Expanded) -> link_pb2.Upstream:
    name = canonical(y)
    if name in call.grad_ys:
        return link_pb2.Upstream(fed=True)
    if name in upstream:
        return link_pb2.Upstream(tensor=expanded.tensor_names[upstream[name]])
    return link_pb2.Upstream(ones=True)


def _digest(
    graph_digest: str,
    spec: program_pb2.ProgramSpec,
    call: CallShape,
    table: OverrideTable,
    values: Values,
    updates: Sequence[str],
) -> str:
    """SHA-256 over all that decides what is computed; param values are not part of it."""
    rules = [
        ["op", bound.rule.name]
        if bound.rule.content is None
        else ["content", bound.rule.content.digest, bound.rule.name]
        for bound in table.bound
    ]
    overrides = [
        [
            item.selector.SerializeToString(deterministic=True).hex(),
            item.rule_index,
            item.label,
            item.optional,
            item.index,
            item.is_preset,
        ]
        for item in table.specs
    ]
    vjp = spec.vjp
    content = {
        "format": FORMAT_VERSION,
        "graph": graph_digest,
        "rules": rules,
        "overrides": overrides,
        "fetches": list(spec.fetches),
        "ys": list(vjp.ys),
        "xs": list(vjp.xs),
        "grad_ys": [[item.y, item.tensor] for item in vjp.grad_ys],
        "grad_ys_fed": sorted(call.grad_ys),
        "feeds": sorted(call.feeds),
        "stop_gradients": list(vjp.stop_gradients),
        "unconnected_gradients": vjp.unconnected_gradients,
        "no_gradient": spec.no_gradient,
        "rewrites": list(spec.rewrites),
        "variables": values.content,
        "updates": list(updates),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def override_values(table: OverrideTable) -> bytes:
    """The overrides' param values, which distinguish programs of one digest from each other."""
    items = sorted(table.settings.items())
    return b"".join(
        override_pb2.Override(
            label=f"{rule}.{name}", params={"value": rule_pb2.ParamValue.FromString(value.SerializeToString())}
        ).SerializeToString(deterministic=True)
        for (rule, name), value in items
    )
