"""Runs a rule on tensors, without a graph: `SampleRule`."""

from __future__ import annotations

import asyncio
import re

import numpy as np

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2, tensor_pb2
from gradrule_server.errors import error
from gradrule_server.link.messages import sampled_gradient
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.preparer import RegistryLookup
from gradrule_server.programs.run_modes import RunOnce
from gradrule_server.programs.service import ProgramService
from gradrule_server.registry.rules import RuleRegistry

_INPUT = re.compile(r"x([0-9]*)")


async def sample_rule(
    request: link_pb2.RawSampleRuleRequest,
    raw: bytes,
    rules: RuleRegistry,
    program_service: ProgramService,
    received_ns: int,
    ends_at: float,
) -> rule_pb2.SampleRuleResponse:
    """Runs a rule. Raises MISSING_FEED for a needed value that is neither given nor computed by `op_type`."""
    evaluation = await program_service.preparer.sample(raw, RegistryLookup(rules), ends_at)
    answer = await program_service.run_inline(evaluation, received_ns, RunOnce(ends_at))
    # Broadcasting may make large tensors.
    return await asyncio.to_thread(_response, evaluate_pb2.EvaluateResponse.FromString(answer), _inputs(request))


def _inputs(request: link_pb2.RawSampleRuleRequest) -> list[tensor_pb2.Tensor]:
    """Returns the values of x, x1, …, which a worker has checked."""
    found = {
        int(match[1] or 0): item.value.inline_tensor
        for item in request.values
        if (match := _INPUT.fullmatch(item.name))
    }
    return [found[index] for index in sorted(found)]


def _response(answer: evaluate_pb2.EvaluateResponse, xs: list[tensor_pb2.Tensor]) -> rule_pb2.SampleRuleResponse:
    """Returns gradients as `dx`, `dx1`, …, and outputs as `y`, `y1`, …"""
    response = rule_pb2.SampleRuleResponse()
    found: dict[str, tensor_pb2.Tensor] = {}
    for gradient in answer.gradients:
        if gradient.WhichOneof("value") == "dense":
            found[sampled_gradient(int(gradient.x[1:]))] = gradient.dense
    for output in answer.outputs:
        if output.name.startswith("op:"):
            index = int(output.name.removeprefix("op:"))
            response.outputs.add(name=f"y{index or ''}").value.inline_tensor.CopyFrom(output.value.inline_tensor)
        else:
            found[output.name] = output.value.inline_tensor
    for index, x in enumerate(xs):
        entry = response.gradients.add(name=f"dx{index or ''}")
        value = found.get(sampled_gradient(index))
        if value is not None:
            entry.value.inline_tensor.CopyFrom(_shaped_like(value, x, index))
    return response


def _shaped_like(gradient: tensor_pb2.Tensor, x: tensor_pb2.Tensor, index: int) -> tensor_pb2.Tensor:
    """Returns the gradient in its input's shape; broadcasts rank 0, as nodes do. Raises RULE_OUTPUT."""
    shape, wanted = ([dim.size for dim in tensor.tensor_shape.dim] for tensor in (gradient, x))
    if shape == wanted:
        return gradient
    if not shape:
        return tensor_codec.to_message(np.broadcast_to(tensor_codec.to_numpy(gradient), wanted))
    raise error(
        errors_pb2.ERROR_REASON_RULE_OUTPUT,
        f"the gradient of x{index} has shape {shape}, but x{index} has {wanted}: do the given values have shapes that "
        f"fit? Only rank 0 is broadcast, sum_to(v, x{index}) sums down to the input's shape",
        field="values",
    )
