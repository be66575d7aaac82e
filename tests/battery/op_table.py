"""Sends every op that TensorFlow registers at the top level, in a function, in a nested function and in a branch.

Target: each is allowed or refused as the reviewed list says.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random

import grpc

from gradrule.common import op_definitions
from gradrule.common.op_definitions import OpDef
from gradrule.v1 import program_pb2
from gradrule_server import policy
from gradrule_server.errors import reason_name
from gradrule_server.policy import OpReview
from tests.battery import answer_checks
from tests.battery.answer_checks import Verdict
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.fuzzing.sending import channel
from tests.battery.serving import served
from tests.policy import minimal

TARGET = "1,908 × 4 match the decision table"
_COMPILE = "/gradrule.v1.ProgramService/CompileProgram"
_DEADLINE_S = 60.0
_IN_FLIGHT = 4
_BATCH = 16
_NODE = re.compile(rf"{minimal.OP}(\d+)$")
_REFUSALS = {"OP_NOT_ALLOWED", "UNSUPPORTED_OP"}
# Placeholders and variables can only be at the top level; functions get their values as arguments.
_TOP_ONLY = {"input", "variable"}


def run(scale: Scale) -> Figures:
    """Sends all ops at full scale, otherwise a sample."""
    found = list(policy.op_reviews().values())
    with served(scale, "op_table") as server:
        return asyncio.run(
            check(server.target, scale, Random(scale.seed).sample(found, sample_size(scale, len(found))))
        )


def sample_size(scale: Scale, count: int) -> int:
    """Returns the sample size; a tenth of full scale already covers all ops."""
    return min(count, scale.count(10 * count))


async def check(target: str, scale: Scale, rulings: Sequence[OpReview]) -> Figures:
    """Sends each op at each place."""
    findings, told, clock, done = Findings(), Counter[str](), scale.clock(), 0
    batches = iter([(batch, place) for batch in _batches(rulings) for place in minimal.PLACES])

    async def worker(own: grpc.aio.Channel) -> None:
        nonlocal done
        for batch, place in batches:
            if clock.is_over:
                return
            for ruling, reasons in await _reasons(own, batch, place):
                told["refused" if reasons & _REFUSALS else "taken"] += 1
                done += 1
                fault = wrong(ruling, place, reasons)
                if fault:
                    findings.add(fault)

    async with channel(target) as own:
        await asyncio.gather(*(worker(own) for _ in range(_IN_FLIGHT)))
    return Figures(
        target=TARGET,
        cases=done,
        failures=findings.count,
        met=not findings.count and len(told) == 2,
        details={"ops": len(rulings), **told},
        findings=findings.lines,
    )


def _batches(rulings: Sequence[OpReview]) -> list[list[OpReview]]:
    """Groups ops into graphs; denied ops are separate, because one refusal would hide the others."""
    allowed = [[each for each in rulings if each.allowed is kind] for kind in (True, False)]
    return [kind[at : at + _BATCH] for kind in allowed for at in range(0, len(kind), _BATCH)]


async def _reasons(own: grpc.aio.Channel, batch: Sequence[OpReview], place: str) -> list[tuple[OpReview, set[str]]]:
    """Returns for each op the reasons of the server's findings, or what went wrong when asked one by one.

    For an allowed op, findings about any node count, as the graph must run; for a denied one, only those about its own.
    """
    ops = [_definition(ruling.op) for ruling in batch]
    spec = program_pb2.ProgramSpec(fetches=[f"{minimal.RESULT}{number}" for number in range(len(ops))])
    spec.graph.inline_graph.CopyFrom(minimal.graph_of(ops, place))
    request = program_pb2.CompileProgramRequest(spec=spec, validate_only=True).SerializeToString()
    try:
        answer: bytes = await own.unary_unary(_COMPILE)(request, timeout=_DEADLINE_S)
    except grpc.RpcError as failure:
        if len(batch) > 1:
            return await _one_by_one(own, batch, place)
        judged = answer_checks.check_failure(failure)
        return [(batch[0], {judged.what if judged.verdict is Verdict.FAULT else judged.reason})]
    found, others = reasons_by_op(len(batch), program_pb2.CompileProgramResponse.FromString(answer).findings)
    if len(batch) > 1 and (others if batch[0].allowed else not all(found)):
        # A finding that stops the analysis is reported alone, though other obstacles may exist.
        return await _one_by_one(own, batch, place)
    if batch[0].allowed:
        found[0] |= others
    return list(zip(batch, found, strict=True))


def reasons_by_op(count: int, findings: Iterable[program_pb2.Finding]) -> tuple[list[set[str]], set[str]]:
    """Returns reasons reported for the nodes of the ops, and those reported for other nodes.

    TensorFlow names no node for incompatible shapes, which are possible in the smallest graph of an op.
    """
    found: list[set[str]] = [set() for _ in range(count)]
    others: set[str] = set()
    for finding in findings:
        match = _NODE.search(finding.node)
        if finding.node:
            (found[int(match[1])] if match else others).add(reason_name(finding.reason))
    return found, others


async def _one_by_one(own: grpc.aio.Channel, batch: Sequence[OpReview], place: str) -> list[tuple[OpReview, set[str]]]:
    return [each for ruling in batch for each in await _reasons(own, [ruling], place)]


def _definition(name: str) -> OpDef:
    found = op_definitions.find(name)
    if found is None:
        raise LookupError(f"{name} is in the list and not among the op definitions")
    return found


def wrong(ruling: OpReview, place: str, reasons: set[str]) -> str:
    """Returns what is wrong with the server's findings about an op; empty if nothing."""
    strange = reasons - _REFUSALS
    if strange:
        return f"{ruling.op}, {place}: {', '.join(sorted(strange))}"
    if not ruling.allowed and not reasons:
        return f"{ruling.op}, {place}: taken, though the list denies it ({ruling.reason})"
    at_home = place == "top" or ruling.category not in _TOP_ONLY
    if ruling.allowed and (reasons if at_home else reasons - {"UNSUPPORTED_OP"}):
        return f"{ruling.op}, {place}: {', '.join(sorted(reasons))}, though the list allows it"
    return ""
