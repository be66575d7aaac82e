"""Reads the derivative of a program and call into one structure for all kinds of derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.descriptor import EnumDescriptor

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.errors import Finding
from gradrule_server.graphs import DIFFERENTIABLE, Expanded
from gradrule_server.link.messages import CallShape, canonical

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
# Fields of a call other than feeds, each with the kinds of derivatives that use it.
_CALL_FIELDS = {
    "grad_ys": (Kind.DERIVATIVE_VJP, Kind.DERIVATIVE_HVP),
    "tangents": (Kind.DERIVATIVE_JVP,),
    "vectors": (Kind.DERIVATIVE_HVP,),
}
_DIRECTION_FIELDS = {Kind.DERIVATIVE_JVP: "tangents", Kind.DERIVATIVE_HVP: "vectors"}
_CARRIERS = frozenset({Dt.DT_RESOURCE, Dt.DT_VARIANT})


@dataclass(frozen=True, slots=True)
class DerivativeSpec:
    """The requested derivative.

    Attributes:
        kind: The kind of derivative.
        part: The field of the spec that requests it.
        ys: The tensors that are differentiated.
        xs: The tensors with respect to which they are differentiated.
        grad_ys: Tensors of the graph that are upstream gradients, by canonical name of the y.
        grad_ys_fed: Canonical names of the ys whose upstream gradient each call feeds.
        stop_gradients: Tensors that count as constants.
        unconnected_gradients: As in the message `Vjp`.
        directions: Canonical names of the xs for which calls give a tangent or a vector; None: all xs of
            differentiable types.
        stacked: Whether grad_ys have one more dimension, along which they are stacked.
        dense: Whether gradients of gathers are whole tensors; if false, they are slices.
        every_order: Whether the overrides of the graph's nodes apply to every differentiation, whatever their order.
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
    every_order: bool = False

    @property
    def second_order(self) -> bool:
        """Whether gradients are differentiated again."""
        return self.kind == Kind.DERIVATIVE_HVP

    def direction_flags(self, expanded: Expanded) -> list[bool]:
        """Returns for each x whether calls give a direction; empty for kinds of derivatives without directions.

        A repeated x has one direction.
        """
        if self.kind not in _DIRECTION_FIELDS:
            return []
        seen: set[str] = set()
        found = []
        for x in self.xs:
            name = canonical(x)
            wanted = _has_derivatives(expanded, x) if self.directions is None else name in self.directions
            found.append(wanted and name not in seen)
            seen.add(name)
        return found

    def check_directions(self, expanded: Expanded) -> list[Finding]:
        """Returns INVALID_DERIVATIVE for each x with a direction whose type has no gradient."""
        word = _DIRECTION_FIELDS.get(self.kind, "")
        return [
            Finding(
                errors_pb2.ERROR_REASON_INVALID_DERIVATIVE,
                f"{word} name {x!r}, whose type has no derivatives: omit it",
                field=word,
            )
            for x in self.xs
            if canonical(x) in (self.directions or ()) and not _has_derivatives(expanded, x)
        ]

    def digest_content(self) -> dict[str, object]:
        """Returns the content that a program's digest covers."""
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
            # Digests of other programs stay as they are.
            **({"every_order": True} if self.every_order else {}),
        }


def read_derivative_spec(spec: program_pb2.ProgramSpec, call: CallShape) -> tuple[DerivativeSpec, list[Finding]]:
    """Reads the derivative of a program and call; returns it and the findings about it."""
    findings: list[Finding] = []

    def add_finding(message: str, where: str) -> None:
        findings.append(Finding(errors_pb2.ERROR_REASON_INVALID_DERIVATIVE, message, field=where))

    unknown_kind = unknown_value(Kind.DESCRIPTOR, call.derivative, "derivative")
    if unknown_kind:
        return DerivativeSpec(), unknown_kind
    part = spec.WhichOneof("derivative")
    if part is None and call.split:
        add_finding("there are no ys, so nothing can be pulled back", "evaluate.spec.vjp.ys")
    if part is None:
        for word in ("derivative", "stacked_grad_ys", *_CALL_FIELDS):
            if getattr(call, word):
                add_finding(f"{word} is for derivatives, but the program has no ys", word)
        return DerivativeSpec(), findings
    requested = getattr(spec, part)
    where = f"spec.{part}"
    own = _KINDS[part]
    if part == "jacobian" and spec.jacobian.batched:
        own = Kind.DERIVATIVE_BATCH_JACOBIAN
    kind = call.derivative or own
    every_order = kind == Kind.DERIVATIVE_HVP_EVERY_ORDER
    if every_order:
        kind = Kind.DERIVATIVE_HVP
    derivative = DerivativeSpec(
        kind=kind,
        part=part,
        ys=list(requested.ys),
        xs=list(requested.xs),
        grad_ys={canonical(item.y): item.tensor for item in spec.vjp.grad_ys}
        if kind in _CALL_FIELDS["grad_ys"]
        else {},
        grad_ys_fed=call.grad_ys,
        stop_gradients=list(requested.stop_gradients),
        unconnected_gradients=getattr(
            requested, "unconnected_gradients", program_pb2.UNCONNECTED_GRADIENTS_UNSPECIFIED
        ),
        directions=(getattr(call, _DIRECTION_FIELDS[kind]) or None) if kind in _DIRECTION_FIELDS else None,
        stacked=call.stacked_grad_ys,
        dense=part == "vjp" and requested.dense_gradients,
        every_order=every_order,
    )
    # An empty vjp means a program without derivatives.
    if bool(derivative.ys) != bool(derivative.xs) or not (derivative.ys or part == "vjp"):
        missing = "ys" if not derivative.ys else "xs"
        given = (
            f"there are {'xs' if derivative.xs else 'ys'} but no {missing}"
            if derivative.ys or derivative.xs
            else "there are no ys"
        )
        add_finding(given, f"{where}.{missing}")
    unconnected = derivative.unconnected_gradients
    findings += unknown_value(
        program_pb2.UnconnectedGradients.DESCRIPTOR, unconnected, f"{where}.unconnected_gradients"
    )
    _check_call(derivative, call, add_finding)
    if call.split:
        _check_split(derivative, add_finding)
    named = [canonical(item.y) for item in spec.vjp.grad_ys]
    for name in sorted({name for name in named if named.count(name) > 1}):
        add_finding(f"grad_ys names {name!r} twice", "spec.vjp.grad_ys")
    known_ys, known_xs = ({canonical(name) for name in names} for names in (derivative.ys, derivative.xs))
    for name in sorted({*named, *call.grad_ys} - known_ys):
        add_finding(f"grad_ys names {name!r}, which is not one of the ys", "grad_ys")
    for name in sorted((derivative.directions or frozenset()) - known_xs):
        word = _DIRECTION_FIELDS[kind]
        add_finding(f"{word} names {name!r}, which is not one of the xs: {', '.join(derivative.xs)}", word)
    return derivative, findings


def unknown_value(enum: EnumDescriptor, value: int, field: str) -> list[Finding]:
    """Returns MALFORMED_REQUEST if an enum of a request does not have this value."""
    if value in enum.values_by_number:
        return []
    message = f"there is no value {value}; there are {', '.join(item.name for item in enum.values[1:])}"
    return [Finding(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message, field=field)]


def _check_call(derivative: DerivativeSpec, call: CallShape, add_finding: Callable[[str, str], None]) -> None:
    """Adds findings for call fields that the kind of derivative does not use."""
    for word, kinds in _CALL_FIELDS.items():
        if getattr(call, word) and derivative.kind not in kinds:
            add_finding(
                f"{word} belong to {' or '.join(_NAMES[kind] for kind in kinds)}, and this is {_NAMES[derivative.kind]}"
                f"{_direction_hint(derivative.kind)}",
                word,
            )
    if call.stacked_grad_ys and derivative.kind != Kind.DERIVATIVE_VJP:
        add_finding(
            f"stacked_grad_ys belongs to {_NAMES[Kind.DERIVATIVE_VJP]}, and this is {_NAMES[derivative.kind]}",
            "stacked_grad_ys",
        )
    elif call.stacked_grad_ys and not call.grad_ys:
        add_finding("stacked_grad_ys is set, but there are no grad_ys", "stacked_grad_ys")


def _check_split(derivative: DerivativeSpec, add_finding: Callable[[str, str], None]) -> None:
    """Adds findings if the derivative cannot be split into a forward run and pull-backs."""
    if derivative.kind != Kind.DERIVATIVE_VJP:
        add_finding(
            f"only {_NAMES[Kind.DERIVATIVE_VJP]} can be pulled back, and this is {_NAMES[derivative.kind]}",
            "evaluate",
        )
    for word, given in (("grad_ys", derivative.grad_ys_fed), ("stacked_grad_ys", derivative.stacked)):
        if given:
            add_finding(f"{word} come with each pull-back, not with the forward run", f"evaluate.{word}")
    if derivative.grad_ys:
        message = "grad_ys that are tensors of the graph are part of its forward run; give them with each pull-back"
        add_finding(message, "evaluate.spec.vjp.grad_ys")


def _direction_hint(kind: Kind.ValueType) -> str:
    return f", which takes {_DIRECTION_FIELDS[kind]}" if kind in _DIRECTION_FIELDS else ""


def _has_derivatives(expanded: Expanded, x: str) -> bool:
    return expanded.dtypes[x] in DIFFERENTIABLE - _CARRIERS
