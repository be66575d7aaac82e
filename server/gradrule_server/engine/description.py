"""Describes a program that was built: its inputs and results, and which rule each node has."""

from __future__ import annotations

from collections.abc import Sequence

from gradrule.v1 import errors_pb2, evaluate_pb2, override_pb2, program_pb2
from gradrule_server.engine.derivatives import SPARSE
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.link.v1 import link_pb2

_ACTIVE = override_pb2.RESOLUTION_STATUS_ACTIVE
_OFF_PATH = override_pb2.RESOLUTION_STATUS_OFF_PATH
_NOT_DIFFERENTIABLE = override_pb2.RESOLUTION_STATUS_NOT_DIFFERENTIABLE
# The node's rank differs from the override's rank, so it is no match.
_NO_MATCH = override_pb2.RESOLUTION_STATUS_UNSPECIFIED

_STATUS_TEXT = {
    _ACTIVE: "active",
    _OFF_PATH: "off the path from ys to xs",
    _NOT_DIFFERENTIABLE: "of a type without gradients",
}
_SHOWN_NODES = 5
# Match.override of rules that the node's attribute names.
_OWN_ATTRIBUTE = -1
_NO_RANK = " (no node has this rank)"
_NONE_MADE = " (the graph has no such node, and no gradient passes through one that gradients create)"


def describe(request: link_pb2.CompileRequest, built: BuiltProgram, device: str) -> link_pb2.CompileReply:
    """Returns the description of a program. Raises INACTIVE_OVERRIDE where an override has no effect.

    Sets the statuses of the matches in the request.
    """
    for match in request.matches:
        match.resolution.status = _status(match, built.statuses)
    matches = [match for match in request.matches if match.resolution.status != _NO_MATCH]
    _check_effect(request, matches, {request.made[index].rule for index in built.made})
    tail = evaluate_pb2.EvaluateResponse(
        overrides=[*(match.resolution for match in matches), *built.without_gradient],
        default_gradient_nodes=built.default_gradient_nodes,
    )
    program = program_pb2.Program(
        inputs=built.specs["inputs"],
        outputs=built.specs["outputs"],
        ys=built.specs["ys"],
        xs=built.specs["xs"],
        overrides=tail.overrides,
        default_gradient_nodes=tail.default_gradient_nodes,
        device=device,
        sparse_gradients=[names[-1] for names, form in built.layout if form == SPARSE],
    )
    return link_pb2.CompileReply(program=program.SerializeToString(), tail=tail.SerializeToString())


def _status(
    match: link_pb2.Match, statuses: Sequence[override_pb2.ResolutionStatus.ValueType]
) -> override_pb2.ResolutionStatus.ValueType:
    status = statuses[match.mark] if match.HasField("mark") else _OFF_PATH
    if status in (_ACTIVE, _NO_MATCH):
        return status
    return _OFF_PATH if match.differentiable else _NOT_DIFFERENTIABLE


def _check_effect(request: link_pb2.CompileRequest, matches: Sequence[link_pb2.Match], made: set[int]) -> None:
    """Raises INACTIVE_OVERRIDE for overrides without effect, and for rules that only nodes without a gradient name.

    `made`: the rules of nodes that gradients created.
    """
    findings: list[Finding] = []
    by_override: dict[int, list[link_pb2.Match]] = {}
    for match in matches:
        by_override.setdefault(match.override, []).append(match)
    for item in request.overrides:
        hits = by_override.get(item.index, [])
        if _is_active(hits) or not made.isdisjoint(item.made_rules):
            continue
        nothing = _NONE_MADE if item.made_rules else _NO_RANK
        findings.append(
            Finding(
                errors_pb2.ERROR_REASON_INACTIVE_OVERRIDE,
                f"{item.title} has no effect: no gradient passes through any node that it matches"
                f"{_shown(hits) or nothing}. Set `optional` if this is intended.",
                node=hits[0].resolution.node if hits else "",
                field=f"overrides[{item.index}]",
            )
        )
    findings += _named_rules_without_effect(by_override.get(_OWN_ATTRIBUTE, ()))
    if findings:
        raise GradruleError(findings)


def _named_rules_without_effect(matches: Sequence[link_pb2.Match]) -> list[Finding]:
    """Returns findings for rules that attributes of nodes name; the nodes of one op type with one rule count as one."""
    groups: dict[tuple[str, str], list[link_pb2.Match]] = {}
    for match in matches:
        groups.setdefault((match.resolution.label, match.resolution.rule), []).append(match)
    return [
        Finding(
            errors_pb2.ERROR_REASON_INACTIVE_OVERRIDE,
            f"the rule {rule!r}, which nodes of op type {op_type!r} name themselves (gradient_override_map), has no "
            f"effect: no gradient passes through any of these nodes{_shown(hits)}. If this is intended, set `optional` "
            f"of gradient_override_map, or override the nodes in the request.",
            node=hits[0].resolution.node,
        )
        for (op_type, rule), hits in groups.items()
        if any(match.required for match in hits) and not _is_active(hits)
    ]


def _is_active(matches: Sequence[link_pb2.Match]) -> bool:
    return any(match.resolution.status == _ACTIVE for match in matches)


def _shown(hits: Sequence[link_pb2.Match]) -> str:
    """Returns the first nodes with their statuses, after a colon; an empty string for none."""
    shown = "; ".join(
        f"{match.resolution.node!r} ({match.resolution.op_type}): {_STATUS_TEXT[match.resolution.status]}"
        for match in hits[:_SHOWN_NODES]
    )
    more = f"; and {len(hits) - _SHOWN_NODES} more" if len(hits) > _SHOWN_NODES else ""
    return f": {shown}{more}" if shown else ""
