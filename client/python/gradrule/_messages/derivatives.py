"""Calls that compute Jacobian-vector products, Jacobians and Hessian-vector products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from gradrule._builder import blob_values
from gradrule._builder.names import ByName, bare
from gradrule._messages.call_arguments import (
    CallParams,
    Feeds,
    GradYs,
    ProgramArguments,
    given_aliases,
    groups_of,
    with_flat_xs,
)
from gradrule._messages.program_calls import ProgramBase
from gradrule._messages.request_encoding import EncodedRequest, RequestEncoder
from gradrule._messages.request_messages import Source, program_grad_ys
from gradrule._messages.rpc_calls import Call, evaluate_call
from gradrule._messages.transfer_options import Transfer
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
    source: Source,
    feeds: Feeds | None,
    tangents: Feeds,
    params: CallParams | None,
    arguments: ProgramArguments,
    transfer: Transfer,
) -> Call[Tangents]:
    """Returns the call for Jacobian-vector products of a graph."""
    values = {"feeds": feeds, "tangents": _directions(tangents, "tangents")}
    request = _graph_request(source, values, params, arguments, program_pb2.Jvp, "jvp", transfer)
    aliases = given_aliases(source.graph, arguments)
    return evaluate_call(request, lambda response: _tangents(response, aliases), transfer)


def jacobian(
    source: Source,
    feeds: Feeds | None,
    params: CallParams | None,
    arguments: ProgramArguments,
    transfer: Transfer,
    *,
    batched: bool,
) -> Call[Jacobians]:
    """Returns the call for Jacobians of a graph."""
    kind = functools.partial(program_pb2.Jacobian, batched=batched)
    request = _graph_request(source, {"feeds": feeds}, params, arguments, kind, "jacobian", transfer)
    groups, aliases = groups_of(arguments.xs, source.graph), given_aliases(source.graph, arguments)
    return evaluate_call(request, lambda response: _jacobians(response, groups, aliases), transfer)


def hvp(
    source: Source,
    feeds: Feeds | None,
    vectors: Feeds,
    params: CallParams | None,
    arguments: ProgramArguments,
    transfer: Transfer,
) -> Call[Products]:
    """Returns the call for Hessian-vector products of a graph."""
    values = {"feeds": feeds, "vectors": _directions(vectors, "vectors")}
    request = _graph_request(source, values, params, arguments, program_pb2.Hvp, "hvp", transfer)
    groups, aliases = groups_of(arguments.xs, source.graph), given_aliases(source.graph, arguments)
    return evaluate_call(request, lambda response: _products(response, groups, aliases), transfer)


def program_jvp(
    program: ProgramBase, feeds: Feeds | None, tangents: Feeds, params: CallParams | None, transfer: Transfer
) -> Call[Tangents]:
    """Returns the call for Jacobian-vector products of a program's ys and xs."""
    values = {"feeds": feeds, "tangents": _directions(tangents, "tangents")}
    request = program._encoder.encode(values, params, derivative=evaluate_pb2.DERIVATIVE_JVP, packing=transfer.packing)
    return evaluate_call(request, lambda response: _tangents(response, program.aliases), transfer)


def program_jacobian(
    program: ProgramBase, feeds: Feeds | None, params: CallParams | None, transfer: Transfer, *, batched: bool
) -> Call[Jacobians]:
    """Returns the call for Jacobians of a program's ys and xs."""
    kind = evaluate_pb2.DERIVATIVE_BATCH_JACOBIAN if batched else evaluate_pb2.DERIVATIVE_JACOBIAN
    request = program._encoder.encode({"feeds": feeds}, params, derivative=kind, packing=transfer.packing)
    return evaluate_call(request, lambda response: _jacobians(response, program.groups, program.aliases), transfer)


def program_hvp(
    program: ProgramBase,
    feeds: Feeds | None,
    vectors: Feeds,
    grad_ys: GradYs | None,
    params: CallParams | None,
    transfer: Transfer,
    *,
    every_order: bool,
) -> Call[Products]:
    """Returns the call for Hessian-vector products of a program's ys and xs."""
    kind = evaluate_pb2.DERIVATIVE_HVP_EVERY_ORDER if every_order else evaluate_pb2.DERIVATIVE_HVP
    values = {
        "feeds": feeds,
        "grad_ys": program_grad_ys(grad_ys, program.message),
        "vectors": _directions(vectors, "vectors"),
    }
    request = program._encoder.encode(values, params, derivative=kind, packing=transfer.packing)
    return evaluate_call(request, lambda response: _products(response, program.groups, program.aliases), transfer)


def _graph_request(
    source: Source,
    values: dict[str, Feeds | None],
    params: CallParams | None,
    arguments: ProgramArguments,
    kind: Callable[..., program_pb2.Jvp | program_pb2.Jacobian | program_pb2.Hvp],
    part: str,
    transfer: Transfer,
) -> EncodedRequest:
    blobs: blob_values.Blobs = {}
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
    encoder = RequestEncoder(source.graph, source.type_of)
    request = encoder.encode({**values, "grad_ys": upstream}, params, packing=transfer.packing)
    request.set_spec(spec, blobs)
    return request


def _directions(given: Feeds, word: str) -> Feeds:
    if not hasattr(given, "items"):
        raise InvalidDerivativeError(f"{word} is a dict of values by x, not {type(given).__name__}")
    if not given:
        raise InvalidDerivativeError(f"{word} is empty: give one for at least one x")
    return given


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
