"""Calls that compute Jacobian-vector products, Jacobians and Hessian-vector products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradrule._builder import blob_values
from gradrule._builder.graph_sources import GraphLike
from gradrule._builder.names import ByName, bare
from gradrule._messages.call_arguments import (
    CallParams,
    Feeds,
    GradYs,
    ProgramArguments,
    given_aliases,
    groups_of,
    name_of_tensor,
    with_flat_xs,
)
from gradrule._messages.request_messages import (
    Source,
    TypeOf,
    add_named_tensor,
    evaluate_request,
    program_grad_ys,
    types_of_specs,
)
from gradrule._messages.rpc_calls import Call, evaluate_call
from gradrule._results.answers import labels
from gradrule._results.call_results import Groups, Sparse, array, gradients_by_x, regrouped
from gradrule.common.tensor_codec import Array
from gradrule.errors import InvalidDerivativeError
from gradrule.v1 import evaluate_pb2, program_pb2

Tangents = ByName[Array | None]
"""By y an array; None if y's dtype has no derivatives."""

Jacobians = ByName[Any]
"""By y, then by x (by group and x if xs were given in groups): an array, or None if y does not depend on x."""

Products = ByName[Any]
"""By x (by group and x if xs were given in groups): an array, a `Sparse`, or None if there is no derivative."""


def jvp(
    source: Source, feeds: Feeds | None, tangents: Feeds, params: CallParams | None, arguments: ProgramArguments
) -> Call[Tangents]:
    """Returns the call for Jacobian-vector products of a graph."""
    blobs = blob_values.blobs_in(feeds, tangents)
    request = _graph_request(source, feeds, params, arguments, program_pb2.Jvp, "jvp", blobs)
    _add_directions(request, tangents, source.type_of, "tangents", source.graph)
    return evaluate_call(request, lambda response: _tangents(response, given_aliases(source.graph, arguments)), blobs)


def jacobian(
    source: Source, feeds: Feeds | None, params: CallParams | None, arguments: ProgramArguments, *, batched: bool
) -> Call[Jacobians]:
    """Returns the call for Jacobians of a graph."""
    blobs = blob_values.blobs_in(feeds)
    request = _graph_request(source, feeds, params, arguments, program_pb2.Jacobian, "jacobian", blobs)
    request.spec.jacobian.batched = batched
    groups, aliases = groups_of(arguments.xs, source.graph), given_aliases(source.graph, arguments)
    return evaluate_call(request, lambda response: _jacobians(response, groups, aliases), blobs)


def hvp(
    source: Source, feeds: Feeds | None, vectors: Feeds, params: CallParams | None, arguments: ProgramArguments
) -> Call[Products]:
    """Returns the call for Hessian-vector products of a graph."""
    blobs = blob_values.blobs_in(feeds, vectors)
    request = _graph_request(source, feeds, params, arguments, program_pb2.Hvp, "hvp", blobs)
    _add_directions(request, vectors, source.type_of, "vectors", source.graph)
    groups, aliases = groups_of(arguments.xs, source.graph), given_aliases(source.graph, arguments)
    return evaluate_call(request, lambda response: _products(response, groups, aliases), blobs)


def program_jvp(
    program: program_pb2.Program, feeds: Feeds | None, tangents: Feeds, params: CallParams | None
) -> Call[Tangents]:
    """Returns the call for Jacobian-vector products of a program's ys and xs."""
    request = _program_request(program, feeds, params, evaluate_pb2.DERIVATIVE_JVP)
    _add_directions(request, tangents, types_of_specs(program.xs), "tangents", program)
    return evaluate_call(
        request, lambda response: _tangents(response, program.aliases), blob_values.blobs_in(feeds, tangents)
    )


def program_jacobian(
    program: program_pb2.Program, feeds: Feeds | None, params: CallParams | None, groups: Groups, *, batched: bool
) -> Call[Jacobians]:
    """Returns the call for Jacobians of a program's ys and xs."""
    kind = evaluate_pb2.DERIVATIVE_BATCH_JACOBIAN if batched else evaluate_pb2.DERIVATIVE_JACOBIAN
    request = _program_request(program, feeds, params, kind)
    return evaluate_call(
        request, lambda response: _jacobians(response, groups, program.aliases), blob_values.blobs_in(feeds)
    )


def program_hvp(
    program: program_pb2.Program,
    feeds: Feeds | None,
    vectors: Feeds,
    grad_ys: GradYs | None,
    params: CallParams | None,
    groups: Groups,
    *,
    every_order: bool,
) -> Call[Products]:
    """Returns the call for Hessian-vector products of a program's ys and xs."""
    kind = evaluate_pb2.DERIVATIVE_HVP_EVERY_ORDER if every_order else evaluate_pb2.DERIVATIVE_HVP
    request = _program_request(program, feeds, params, kind)
    type_of = types_of_specs([*program.xs, *program.ys])
    _add_directions(request, vectors, type_of, "vectors", program)
    for y, value in program_grad_ys(grad_ys, program).items():
        add_named_tensor(request, "grad_ys", y, value, type_of)
    return evaluate_call(
        request, lambda response: _products(response, groups, program.aliases), blob_values.blobs_in(feeds, vectors)
    )


def _graph_request(
    source: Source,
    feeds: Feeds | None,
    params: CallParams | None,
    arguments: ProgramArguments,
    kind: type[program_pb2.Jvp | program_pb2.Jacobian | program_pb2.Hvp],
    part: str,
    blobs: blob_values.Blobs,
) -> evaluate_pb2.EvaluateRequest:
    spec, upstream = source.spec(with_flat_xs(arguments, source.graph), blobs)
    vjp = spec.vjp
    if vjp.grad_ys:
        raise InvalidDerivativeError(
            f"grad_ys of {vjp.grad_ys[0].y!r} names the tensor {vjp.grad_ys[0].tensor!r}; here they are arrays"
        )
    derivative = kind(ys=vjp.ys, xs=vjp.xs, stop_gradients=vjp.stop_gradients)
    if not isinstance(derivative, program_pb2.Jvp):
        derivative.unconnected_gradients = vjp.unconnected_gradients
    getattr(spec, part).CopyFrom(derivative)
    request = evaluate_request(feeds, source.type_of, grad_ys=upstream, params=params, graph=source.graph)
    request.spec.CopyFrom(spec)
    return request


def _program_request(
    program: program_pb2.Program,
    feeds: Feeds | None,
    params: CallParams | None,
    derivative: evaluate_pb2.Derivative.ValueType,
) -> evaluate_pb2.EvaluateRequest:
    request = evaluate_request(feeds, types_of_specs([*program.inputs, *program.ys]), params=params, graph=program)
    request.program = program.name
    request.derivative = derivative
    return request


def _add_directions(
    request: evaluate_pb2.EvaluateRequest, given: Feeds, type_of: TypeOf, word: str, graph: GraphLike | None
) -> None:
    if not hasattr(given, "items"):
        raise InvalidDerivativeError(f"{word} is a dict of values by x, not {type(given).__name__}")
    if not given:
        raise InvalidDerivativeError(f"{word} is empty: give one for at least one x")
    for key, value in given.items():
        name = name_of_tensor(key, graph)
        add_named_tensor(request, word, name, value, type_of)


def _tangents(response: evaluate_pb2.EvaluateResponse, aliases: Mapping[str, str]) -> Tangents:
    names = labels(aliases)
    found = {
        names.get(bare(item.name), item.name): array(item.value.inline_tensor) if item.HasField("value") else None
        for item in response.output_tangents
    }
    return ByName(found, aliases)


def _jacobians(response: evaluate_pb2.EvaluateResponse, groups: Groups, aliases: Mapping[str, str]) -> Jacobians:
    names = labels(aliases)
    by_y: dict[str, dict[str, Array | None]] = {}
    for block in response.jacobians:
        by_x = by_y.setdefault(names.get(bare(block.y), block.y), {})
        by_x[names.get(bare(block.x), block.x)] = array(block.dense) if block.HasField("dense") else None
    return ByName({y: regrouped(ByName(by_x, aliases), groups) for y, by_x in by_y.items()}, aliases)


def _products(response: evaluate_pb2.EvaluateResponse, groups: Groups, aliases: Mapping[str, str]) -> Products:
    found: ByName[Array | Sparse | None] = gradients_by_x(response.gradients, aliases)
    return regrouped(found, groups)
