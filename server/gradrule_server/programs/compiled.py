"""A program that an engine has compiled, and what its overrides came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gradrule.v1 import errors_pb2, evaluate_pb2, override_pb2, program_pb2, rule_pb2, tensor_pb2
from gradrule_server import graphs
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.prepare import Prepared
from gradrule_server.programs.shape import canonical

_ACTIVE = override_pb2.RESOLUTION_STATUS_ACTIVE
_OFF_PATH = override_pb2.RESOLUTION_STATUS_OFF_PATH
_NOT_DIFFERENTIABLE = override_pb2.RESOLUTION_STATUS_NOT_DIFFERENTIABLE

# Met at a node of another rank than the override's: no match after all.
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
_NO_RANK = " (none has the rank)"
_NONE_MADE = " (the graph has none, and through none that a gradient makes)"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program that can run. `message` has no name; `tail` is what an answer with an inline program ends with."""

    prepared: Prepared
    message: program_pb2.Program
    tail: bytes
    digests_tail: bytes
    placeholders: frozenset[str]
    """Canonical names of the graph's placeholders: feeding these never needs another program."""
    used_rules: frozenset[int]
    """Indices of the rules that some node carries: only their params matter."""

    @property
    def key(self) -> str:
        return self.prepared.key

    def settings(self, params: Mapping[str, evaluate_pb2.ParamValues]) -> list[link_pb2.ParamSetting]:
        """The params of one call."""
        values: dict[str, Mapping[str, rule_pb2.ParamValue]] = {label: item.values for label, item in params.items()}
        return self.prepared.table.call_settings(values, self.used_rules)


def compiled(prepared: Prepared, reply: link_pb2.CompileReply, device: str) -> Compiled:
    """Puts together what the engine found. UNMATCHED_OVERRIDE or INACTIVE_OVERRIDE where an override has no effect."""
    expanded = prepared.expanded
    statuses = _statuses(expanded, reply)
    matches = [(match, status) for match, status in zip(expanded.matches, statuses, strict=True) if status != _NO_MATCH]
    if prepared.request.ys:
        made = {prepared.request.made[index].rule for index in reply.made}
        _check_effect(prepared, matches, made)
    resolutions = [
        override_pb2.Resolution(
            node=match.node,
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
            rule=NO_GRADIENT_RULES[prepared.request.no_gradient],
            label=NO_GRADIENT_LABEL,
            status=_ACTIVE,
        )
        for node in reply.without_gradient
    ]
    digests = program_pb2.Digests(graph=prepared.graph_digest, program=prepared.key)
    optional = [
        tensor_pb2.TensorSpec(name=item.name, dtype=item.dtype, shape=item.shape, optional=True)
        for item in expanded.inputs
        if item.optional
    ]
    message = program_pb2.Program(
        digests=digests,
        inputs=[*reply.inputs, *optional],
        outputs=reply.outputs,
        ys=reply.ys,
        xs=reply.xs,
        overrides=resolutions,
        defaulted=reply.defaulted,
        device=device,
        rewritten=expanded.rewritten,
        aliases=prepared.aliases,
    )
    tail = evaluate_pb2.EvaluateResponse(overrides=resolutions, defaulted=reply.defaulted, rewritten=expanded.rewritten)
    return Compiled(
        prepared=prepared,
        message=message,
        tail=tail.SerializeToString(),
        digests_tail=evaluate_pb2.EvaluateResponse(digests=digests).SerializeToString(),
        placeholders=frozenset(canonical(name) for name in expanded.placeholders),
        used_rules=frozenset(mark.rule for mark in expanded.marks) | {made.rule for made in prepared.request.made},
    )


def _statuses(expanded: graphs.Expanded, reply: link_pb2.CompileReply) -> list[override_pb2.ResolutionStatus.ValueType]:
    statuses = []
    for match in expanded.matches:
        status = _OFF_PATH if match.mark is None else reply.statuses[match.mark]
        if status in (_ACTIVE, _NO_MATCH):
            statuses.append(status)
        else:
            statuses.append(_OFF_PATH if match.differentiable else _NOT_DIFFERENTIABLE)
    return statuses


def _check_effect(
    prepared: Prepared,
    matches: Sequence[tuple[graphs.Match, override_pb2.ResolutionStatus.ValueType]],
    made: AbstractSet[int],
) -> None:
    """`made`: rules that nodes made by gradients asked for."""
    findings: list[Finding] = []
    by_override: dict[int, list[tuple[graphs.Match, override_pb2.ResolutionStatus.ValueType]]] = {}
    for match, status in matches:
        by_override.setdefault(match.override, []).append((match, status))
    asked = {item.index for item in prepared.table.specs if item.made_op_types and item.rule_index in made}
    # A preset is many overrides under one index, and has an effect if one of them has.
    for item in {item.index: item for item in prepared.table.specs if not item.optional}.values():
        hits = by_override.get(item.index, [])
        if item.index in asked or any(status == _ACTIVE for _, status in hits):
            continue
        what = f"preset {item.label!r}" if item.is_preset else f"override {item.label!r} (rule {item.rule_name!r})"
        shown = "; ".join(
            f"{match.node!r} ({match.op_type}): {_STATUS_TEXT[status]}" for match, status in hits[:_SHOWN_NODES]
        )
        nothing = _NONE_MADE if item.made_op_types else _NO_RANK
        more = f"; and {len(hits) - _SHOWN_NODES} more" if len(hits) > _SHOWN_NODES else ""
        findings.append(
            Finding(
                errors_pb2.ERROR_REASON_INACTIVE_OVERRIDE,
                f"{what} has no effect: no gradient passes through any node that it matches"
                f"{': ' if shown else nothing}{shown}{more}. Say optional if that is meant.",
                node=hits[0][0].node if hits else "",
                field=f"overrides[{item.index}]",
            )
        )
    if findings:
        raise GradruleError(findings)
