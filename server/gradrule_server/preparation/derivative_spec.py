"""What a program, or one call of it, wants differentiated: every kind of derivative in one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.errors import Finding
from gradrule_server.graphs import DIFFERENTIABLE, Expanded
from gradrule_server.link.shape import CallShape, canonical

Kind = evaluate_pb2.Derivative

_KINDS = {
    "vjp": Kind.DERIVATIVE_VJP,
    "jvp": Kind.DERIVATIVE_JVP,
    "jacobian": Kind.DERIVATIVE_JACOBIAN,
    "hvp": Kind.DERIVATIVE_HVP,
}
_NAMES = {
    Kind.DERIVATIVE_VJP: "a vector-Jacobian product",
    Kind.DERIVATIVE_JVP: "a Jacobian-vector product",
    Kind.DERIVATIVE_JACOBIAN: "a Jacobian",
    Kind.DERIVATIVE_BATCH_JACOBIAN: "a batched Jacobian",
    Kind.DERIVATIVE_HVP: "a Hessian-vector product",
}
# What a call gives besides feeds, by the only kind that takes it.
_TAKES = {"grad_ys": Kind.DERIVATIVE_VJP, "tangents": Kind.DERIVATIVE_JVP, "vectors": Kind.DERIVATIVE_HVP}
_MOVED = {Kind.DERIVATIVE_JVP: "tangents", Kind.DERIVATIVE_HVP: "vectors"}
_CARRIERS = frozenset({Dt.DT_RESOURCE, Dt.DT_VARIANT})


@dataclass(frozen=True, slots=True)
class DerivativeSpec:
    """What is differentiated, and how. `part`: the field of the spec that asks.

    `grad_ys`: tensors of the graph by canonical y; `grad_ys_fed`: canonical ys whose grad_y each call gives.
    `directions`: canonical xs for which calls give a tangent or a vector; None: all that can have one.
    """

    kind: Kind.ValueType = Kind.DERIVATIVE_UNSPECIFIED
    part: str = "vjp"
    ys: Sequence[str] = ()
    xs: Sequence[str] = ()
    grad_ys: Mapping[str, str] = field(default_factory=dict)
    grad_ys_fed: frozenset[str] = frozenset()
    stop_gradients: Sequence[str] = ()
    unconnected_gradients: program_pb2.UnconnectedGradients.ValueType = program_pb2.UNCONNECTED_GRADIENTS_UNSPECIFIED
    directions: frozenset[str] | None = None
    stacked: bool = False
    dense: bool = False

    @property
    def second_order(self) -> bool:
        """Whether gradients are differentiated again."""
        return self.kind == Kind.DERIVATIVE_HVP

    def directed(self, expanded: Expanded) -> list[bool]:
        """For each x whether calls give a direction; empty for kinds without. An x that stands there twice has one."""
        if self.kind not in _MOVED:
            return []
        seen: set[str] = set()
        found = []
        for x in self.xs:
            name = canonical(x)
            wanted = _can_move(expanded, x) if self.directions is None else name in self.directions
            found.append(wanted and name not in seen)
            seen.add(name)
        return found

    def undirected(self, expanded: Expanded) -> list[Finding]:
        """INVALID_DERIVATIVE for each x with a direction whose type has no gradient."""
        word = _MOVED.get(self.kind, "")
        return [
            Finding(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                f"{word} name {x!r}, whose type has no derivatives: leave it out",
                field=word,
            )
            for x in self.xs
            if canonical(x) in (self.directions or ()) and not _can_move(expanded, x)
        ]

    def content(self) -> dict[str, object]:
        """What of it goes into a program's digest."""
        return {
            "kind": int(self.kind),
            "ys": list(self.ys),
            "xs": list(self.xs),
            "grad_ys": sorted(self.grad_ys.items()),
            "grad_ys_fed": sorted(self.grad_ys_fed),
            "stop_gradients": list(self.stop_gradients),
            "unconnected_gradients": self.unconnected_gradients,
            "stacked": self.stacked,
            "dense": self.dense,
        }


def read_derivative_spec(spec: program_pb2.ProgramSpec, call: CallShape) -> tuple[DerivativeSpec, list[Finding]]:
    """What is to be computed, and what is wrong with that."""
    findings: list[Finding] = []

    def wrong(message: str, where: str, reason: errors_pb2.ErrorReason.ValueType = _INVALID) -> None:
        findings.append(Finding(reason, message, field=where))

    if call.derivative not in Kind.values():
        known = ", ".join(Kind.keys()[1:])
        wrong(f"there is no value {call.derivative}; there are {known}", "derivative", _MALFORMED)
        return DerivativeSpec(), findings
    part = spec.WhichOneof("derivative")
    if part is None and call.split:
        wrong("there are no ys, so there is nothing to pull back", "evaluate.spec.vjp.ys")
    if part is None:
        for word in ("derivative", "stacked_grad_ys", *_TAKES):
            if getattr(call, word):
                wrong(f"{word} asks for derivatives, but the program has no ys", word)
        return DerivativeSpec(), findings
    asked = getattr(spec, part)
    where = f"spec.{part}"
    own = _KINDS[part]
    if part == "jacobian" and spec.jacobian.batched:
        own = Kind.DERIVATIVE_BATCH_JACOBIAN
    kind = call.derivative or own
    wish = DerivativeSpec(
        kind=kind,
        part=part,
        ys=list(asked.ys),
        xs=list(asked.xs),
        grad_ys={canonical(item.y): item.tensor for item in spec.vjp.grad_ys} if kind == _TAKES["grad_ys"] else {},
        grad_ys_fed=call.grad_ys,
        stop_gradients=list(asked.stop_gradients),
        unconnected_gradients=getattr(asked, "unconnected_gradients", program_pb2.UNCONNECTED_GRADIENTS_UNSPECIFIED),
        directions=(getattr(call, _MOVED[kind]) or None) if kind in _MOVED else None,
        stacked=call.stacked_grad_ys,
        dense=part == "vjp" and asked.dense_gradients,
    )
    # A derivative that names nothing is that of a program that differentiates nothing.
    if bool(wish.ys) != bool(wish.xs) or not (wish.ys or part == "vjp"):
        missing = "ys" if not wish.ys else "xs"
        given = f"there are {'xs' if wish.xs else 'ys'} but no {missing}" if wish.ys or wish.xs else "there are no ys"
        wrong(given, f"{where}.{missing}")
    if wish.unconnected_gradients not in program_pb2.UnconnectedGradients.values():
        known = ", ".join(program_pb2.UnconnectedGradients.keys()[1:])
        message = f"there is no value {wish.unconnected_gradients}; there are {known}"
        wrong(message, f"{where}.unconnected_gradients", _MALFORMED)
    _check_call(wish, call, wrong)
    if call.split:
        _check_split(wish, wrong)
    named = [canonical(item.y) for item in spec.vjp.grad_ys]
    for name in sorted({name for name in named if named.count(name) > 1}):
        wrong(f"grad_ys names {name!r} twice", "spec.vjp.grad_ys")
    known_ys, known_xs = ({canonical(name) for name in names} for names in (wish.ys, wish.xs))
    for name in sorted({*named, *call.grad_ys} - known_ys):
        wrong(f"grad_ys names {name!r}, which is none of the ys", "grad_ys")
    for name in sorted((wish.directions or frozenset()) - known_xs):
        word = _MOVED[kind]
        wrong(f"{word} names {name!r}, which is none of the xs: {', '.join(wish.xs)}", word)
    return wish, findings


_INVALID = errors_pb2.ERROR_REASON_INVALID_DERIVATIVE
_MALFORMED = errors_pb2.ERROR_REASON_MALFORMED_REQUEST


def _check_call(wish: DerivativeSpec, call: CallShape, wrong: Callable[[str, str], None]) -> None:
    """What a call gives must be what the kind takes."""
    for word, kind in _TAKES.items():
        if getattr(call, word) and wish.kind != kind:
            wrong(f"{word} belong to {_NAMES[kind]}, and this is {_NAMES[wish.kind]}{_instead(wish.kind)}", word)
    if call.stacked_grad_ys and wish.kind != Kind.DERIVATIVE_VJP:
        wrong(
            f"stacked_grad_ys belongs to {_NAMES[Kind.DERIVATIVE_VJP]}, and this is {_NAMES[wish.kind]}",
            "stacked_grad_ys",
        )
    elif call.stacked_grad_ys and not call.grad_ys:
        wrong(
            "stacked_grad_ys says that grad_ys hold many upstream gradients each, but none is given", "stacked_grad_ys"
        )


def _check_split(wish: DerivativeSpec, wrong: Callable[[str, str], None]) -> None:
    """What can be pulled back later."""
    if wish.kind != Kind.DERIVATIVE_VJP:
        wrong(f"what can be pulled back is {_NAMES[Kind.DERIVATIVE_VJP]}, and this is {_NAMES[wish.kind]}", "evaluate")
    for word, given in (("grad_ys", wish.grad_ys_fed), ("stacked_grad_ys", wish.stacked)):
        if given:
            wrong(f"{word} come with each pull-back, not with the forward run", f"evaluate.{word}")
    if wish.grad_ys:
        message = "grad_ys that are tensors of the graph are part of its forward run; give them with each pull-back"
        wrong(message, "evaluate.spec.vjp.grad_ys")


def _instead(kind: Kind.ValueType) -> str:
    return f", which takes {_MOVED[kind]}" if kind in _MOVED else ""


def _can_move(expanded: Expanded, x: str) -> bool:
    return expanded.dtype_of(x) in DIFFERENTIABLE - _CARRIERS
