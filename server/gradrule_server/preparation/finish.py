"""Builds the description of a compiled program from its plan and the engine's reply."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from gradrule.v1 import errors_pb2, evaluate_pb2, override_pb2, program_pb2, tensor_pb2
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.link.v1 import link_pb2
from gradrule_server.preparation.prepare import Prepared

_ACTIVE = override_pb2.RESOLUTION_STATUS_ACTIVE
_OFF_PATH = override_pb2.RESOLUTION_STATUS_OFF_PATH
_NOT_DIFFERENTIABLE = override_pb2.RESOLUTION_STATUS_NOT_DIFFERENTIABLE

# The node's rank differs from the override's rank, so it is no match.
_NO_MATCH = override_pb2.RESOLUTION_STATUS_UNSPECIFIED

NO_GRADIENT_LABEL = "no_gradient"
NO_GRADIENT_RULES = {
    program_pb2.NO_GRADIENT_DEFAULT: "default",
    program_pb2.NO_GRADIENT_PASS: "pass",
    program_pb2.NO_GRADIENT_ZERO: "zero",
}

_STATUS_TEXT = {
    _ACTIVE: "active",
    _OFF_PATH: "off the path from ys to xs",
    _NOT_DIFFERENTIABLE: "of a type without gradients",
}
_SHOWN_NODES = 5
# PlannedMatch.override of rules that the node's attribute names.
_OWN_ATTRIBUTE = -1
_NO_RANK = " (no node has this rank)"
_NONE_MADE = " (the graph has no such node, and no gradient passes through one that gradients create)"


_Matched = tuple[link_pb2.PlannedMatch, override_pb2.ResolutionStatus.ValueType]


def make_plan(prepared: Prepared) -> link_pb2.ProgramPlan:
    """Returns the plan of a prepared program, which `finish` needs."""
    expanded, request = prepared.expanded, prepared.request
    return link_pb2.ProgramPlan(
        key=prepared.key,
        graph_digest=prepared.graph_digest,
        aliases=prepared.aliases,
        optional_inputs=[
            tensor_pb2.TensorSpec(name=item.name, dtype=item.dtype, shape=item.shape, optional=True)
            for item in expanded.inputs
            if item.optional
        ],
        matches=[
            link_pb2.PlannedMatch(
                node=match.node,
                qualified_name="" if match.qualified_name == match.node else match.qualified_name,
                op_type=match.op_type,
                function=match.function,
                rule_name=match.rule_name,
                label=match.label,
                override=match.override,
                differentiable=match.differentiable,
                nodes=match.nodes,
                mark=match.mark,
                required=match.required,
            )
            for match in expanded.matches
        ],
        overrides=[
            link_pb2.PlannedOverride(
                index=item.index,
                label=item.label,
                rule_name=item.rule_name,
                rule=item.rule_index,
                optional=item.optional,
                is_preset=item.is_preset,
                has_made_nodes=bool(item.made_op_types),
                part_of_graph=item.part_of_graph,
            )
            for item in prepared.table.specs
        ],
        made=request.made,
        has_ys=bool(request.ys),
        no_gradient=request.no_gradient,
        rewritten=expanded.rewritten,
        draws_random=expanded.draws_random,
        notes=_notes(prepared),
    )


def _notes(prepared: Prepared) -> list[str]:
    """Returns a hint for each y whose gradients are zero, because its elements are those of a softmax."""
    request = prepared.request
    if request.derivative not in (evaluate_pb2.DERIVATIVE_VJP, evaluate_pb2.DERIVATIVE_HVP):
        return []
    summed = [y.name for y, upstream in zip(request.ys, request.grad_ys, strict=True) if upstream.ones]
    return [
        f"{y!r} is the output of the softmax {softmax!r}, whose elements sum to 1, so gradients of their sum are zero "
        f"up to rounding: differentiate the logits, or choose a class by grad_ys"
        for y, softmax in prepared.expanded.softmax_ys.items()
        if y in summed
    ]


def finish(plan: link_pb2.ProgramPlan, reply: link_pb2.CompileReply, device: str) -> link_pb2.FinishedProgram:
    """Returns the compiled program. Raises INACTIVE_OVERRIDE where an override has no effect."""
    statuses = _statuses(plan, reply)
    matches = [(match, status) for match, status in zip(plan.matches, statuses, strict=True) if status != _NO_MATCH]
    if plan.has_ys:
        _check_effect(plan, matches, {plan.made[index].rule for index in reply.made})
    resolutions = [
        override_pb2.Resolution(
            node=match.node,
            qualified_name=match.qualified_name,
            op_type=match.op_type,
            rule=match.rule_name,
            label=match.label,
            status=status,
            function=match.function,
            nodes=match.nodes,
        )
        for match, status in matches
    ]
    resolutions += [
        override_pb2.Resolution(
            node=node.node,
            op_type=node.op_type,
            rule=NO_GRADIENT_RULES[plan.no_gradient],
            label=NO_GRADIENT_LABEL,
            status=_ACTIVE,
        )
        for node in reply.without_gradient
    ]
    program = program_pb2.Program(
        digests=program_pb2.Digests(graph=plan.graph_digest, program=plan.key),
        inputs=[*reply.inputs, *plan.optional_inputs],
        outputs=reply.outputs,
        ys=reply.ys,
        xs=reply.xs,
        overrides=resolutions,
        default_gradient_nodes=reply.default_gradient_nodes,
        device=device,
        rewritten=plan.rewritten,
        aliases=dict(plan.aliases),
        sparse_gradients=reply.sparse_gradients,
        draws_random=plan.draws_random,
        notes=plan.notes,
    )
    tail = evaluate_pb2.EvaluateResponse(
        overrides=resolutions,
        default_gradient_nodes=reply.default_gradient_nodes,
        rewritten=plan.rewritten,
        draws_random=plan.draws_random,
        notes=plan.notes,
    )
    return link_pb2.FinishedProgram(program=program.SerializeToString(), tail=tail.SerializeToString())


def _statuses(
    plan: link_pb2.ProgramPlan, reply: link_pb2.CompileReply
) -> list[override_pb2.ResolutionStatus.ValueType]:
    statuses = []
    for match in plan.matches:
        status = reply.statuses[match.mark] if match.HasField("mark") else _OFF_PATH
        if status in (_ACTIVE, _NO_MATCH):
            statuses.append(status)
        else:
            statuses.append(_OFF_PATH if match.differentiable else _NOT_DIFFERENTIABLE)
    return statuses


def _check_effect(
    plan: link_pb2.ProgramPlan,
    matches: Sequence[_Matched],
    made: AbstractSet[int],
) -> None:
    """Raises INACTIVE_OVERRIDE for overrides without effect, and for rules that only nodes without a gradient name.

    `made`: the rules of nodes that gradients created.
    """
    findings: list[Finding] = []
    by_override: dict[int, list[_Matched]] = {}
    for match, status in matches:
        by_override.setdefault(match.override, []).append((match, status))
    effective = {item.index for item in plan.overrides if item.has_made_nodes and item.rule in made}
    # The overrides of a preset share an index; the preset has an effect if one of them has an effect.
    for item in {item.index: item for item in plan.overrides if not item.optional}.values():
        hits = by_override.get(item.index, [])
        if item.index in effective or any(status == _ACTIVE for _, status in hits):
            continue
        if item.part_of_graph and not hits:
            continue
        what = f"preset {item.label!r}" if item.is_preset else f"override {item.label!r} (rule {item.rule_name!r})"
        nothing = _NONE_MADE if item.has_made_nodes else _NO_RANK
        findings.append(
            Finding(
                errors_pb2.ERROR_REASON_INACTIVE_OVERRIDE,
                f"{what} has no effect: no gradient passes through any node that it matches"
                f"{_shown(hits) or nothing}. Set `optional` if this is intended.",
                node=hits[0][0].node if hits else "",
                field=f"overrides[{item.index}]",
            )
        )
    findings += _named_rules_without_effect(by_override.get(_OWN_ATTRIBUTE, ()))
    if findings:
        raise GradruleError(findings)


def _named_rules_without_effect(matches: Sequence[_Matched]) -> list[Finding]:
    """Returns findings for rules that attributes of nodes name; the nodes of one op type with one rule count as one."""
    groups: dict[tuple[str, str], list[_Matched]] = {}
    for match, status in matches:
        groups.setdefault((match.label, match.rule_name), []).append((match, status))
    return [
        Finding(
            errors_pb2.ERROR_REASON_INACTIVE_OVERRIDE,
            f"the rule {rule!r}, which nodes of op type {op_type!r} name themselves (gradient_override_map), has no "
            f"effect: no gradient passes through any of these nodes{_shown(hits)}. If this is intended, set `optional` "
            f"of gradient_override_map, or override the nodes in the request.",
            node=hits[0][0].node,
        )
        for (op_type, rule), hits in groups.items()
        if any(match.required for match, _ in hits) and not any(status == _ACTIVE for _, status in hits)
    ]


def _shown(hits: Sequence[_Matched]) -> str:
    """Returns the first nodes with their statuses, after a colon; an empty string for none."""
    shown = "; ".join(
        f"{match.node!r} ({match.op_type}): {_STATUS_TEXT[status]}" for match, status in hits[:_SHOWN_NODES]
    )
    more = f"; and {len(hits) - _SHOWN_NODES} more" if len(hits) > _SHOWN_NODES else ""
    return f": {shown}{more}" if shown else ""
