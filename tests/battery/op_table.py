"""Every op that TensorFlow registers, at the top level, in a function, in a nested function, in a branch.

Target: over the wire, each is allowed or refused as the reviewed list says.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

import grpc

from gradrule import _opdefs
from gradrule.v1 import program_pb2
from gradrule_server import policy
from gradrule_server.policy import Ruling
from tests.battery import judging
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.fuzzing.sending import channel
from tests.battery.serving import served
from tests.policy import minimal

TARGET = "1,908 × 4 match the decision table"
_COMPILE = "/gradrule.v1.ProgramService/CompileProgram"
_DEADLINE_S = 60.0
_IN_FLIGHT = 16
_REFUSALS = {"OP_NOT_ALLOWED", "UNSUPPORTED_OP"}
# Placeholders and variables stand at the top level; functions are given what they hold.
_TOP_ONLY = {"input", "variable"}


def run(scale: Scale) -> Figures:
    """All ops in the long run, a sample of them else."""
    found = list(policy.rulings().values())
    with served(scale, "op_table") as server:
        return asyncio.run(
            check(server.target, scale, Random(scale.seed).sample(found, sample_size(scale, len(found))))
        )


def sample_size(scale: Scale, count: int) -> int:
    """Of so many ops: a tenth of the long run is still all of them."""
    return min(count, scale.count(10 * count))


async def check(target: str, scale: Scale, rulings: Sequence[Ruling]) -> Figures:
    """Asks about each op in each place."""
    findings, told, clock, done = Findings(), Counter[str](), scale.clock(), 0
    cases = iter([(ruling, place) for ruling in rulings for place in minimal.PLACES])

    async def worker(own: grpc.aio.Channel) -> None:
        nonlocal done
        for ruling, place in cases:
            if clock.is_over:
                return
            reasons = await _reasons(own, ruling, place)
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


async def _reasons(own: grpc.aio.Channel, ruling: Ruling, place: str) -> set[str]:
    """Of the server's findings about one op's node. A fault of the answer's is one as well."""
    op = _opdefs.find(ruling.op)
    if op is None:
        return {"the client does not know the op"}
    spec = program_pb2.ProgramSpec(fetches=["y0"])
    spec.graph.inline.CopyFrom(minimal.graph_of([op], place))
    request = program_pb2.CompileProgramRequest(spec=spec, validate_only=True).SerializeToString()
    try:
        answer = await own.unary_unary(_COMPILE)(request, timeout=_DEADLINE_S)
    except grpc.RpcError as failure:
        judged = judging.of_failure(failure)
        return {judged.what if judged.verdict is judging.Verdict.FAULT else judged.reason}
    response = program_pb2.CompileProgramResponse.FromString(answer)
    return {
        found.reason.removeprefix("ERROR_REASON_")
        for found in response.findings
        if found.node.endswith(f"{minimal.OP}0")
    }


def wrong(ruling: Ruling, place: str, reasons: set[str]) -> str:
    """What is wrong with what the server says of an op; empty where nothing is."""
    strange = reasons - _REFUSALS
    if strange:
        return f"{ruling.op}, {place}: {', '.join(sorted(strange))}"
    if not ruling.allowed and not reasons:
        return f"{ruling.op}, {place}: taken, though the list denies it ({ruling.reason})"
    at_home = place == "top" or ruling.category not in _TOP_ONLY
    if ruling.allowed and (reasons if at_home else reasons - {"UNSUPPORTED_OP"}):
        return f"{ruling.op}, {place}: {', '.join(sorted(reasons))}, though the list allows it"
    return ""
