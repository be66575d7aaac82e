"""Each row detects planted faults: a wrong answer, another caller's value, an untyped error, a leak, a miss."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import evaluate_pb2
from gradrule.v1.graph_pb2 import Graph
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server import policy
from gradrule_server.policy import OpReview
from tests.battery import (
    amplification,
    answer_checks,
    bombs,
    crashes,
    escapes,
    faulty_proxy,
    fuzz,
    gateway,
    hangs,
    harmful_requests,
    hostile,
    http2,
    http2_cases,
    interleavings,
    kills,
    op_table,
    overload,
    rolling,
    soak,
    strangers,
    turns,
    wire,
)
from tests.battery.answer_checks import GOOD, Judgement, Verdict
from tests.battery.faulty_proxy import running_proxy
from tests.battery.figures import Clock, Findings, Scale
from tests.battery.fuzzing import sending
from tests.battery.fuzzing.cases import Cases
from tests.battery.fuzzing.seeds import methods, seeds
from tests.battery.known_answers import HealthyCalls, HealthyClient
from tests.battery.load_sender import Sender
from tests.battery.slopes import Allowance, slope
from tests.battery.soak import ALLOWED, Samples
from tests.battery.workload import WAYS, CallCounts, Load
from tests.benchmarks.attacks import Answers
from tests.policy import minimal
from tests.processes import Resources, resources
from tests.service.escape_graphs import ESCAPES
from tests.service.harmful_graphs import HarmfulGraph
from tests.service.servers import RunningServer

CASES = 24
MINIMAL_GRAPH = minimal.graph_of
ANSWERED = CallCounts(asked=1000, answered=999, ways=Counter(WAYS))
PROTOS = Path(__file__).parents[2] / "protos" / "gradrule" / "v1"
FOREVER = Clock(None)
OVERLOADED = Judgement(Verdict.REFUSED, reason="OVERLOADED")
HUNG = Judgement(Verdict.REFUSED, reason="DEADLINE_EXCEEDED", what="not done within 2 s")
BARE = replace(HUNG, is_bare=True)
CRASHED = Judgement(Verdict.REFUSED, reason="ENGINE_CRASHED", what="SIGABRT: Check failed: a < b")
CRASH = HarmfulGraph("crash", lambda: None, {}, "Check failed")


async def test_fuzzer_detects_untyped_errors(shared_server: RunningServer, scale: Scale) -> None:
    """The failing case is saved, and fails again."""
    own = replace(scale, folder=scale.folder / "planted")
    async with running_proxy(shared_server.target, typed=False) as target:
        liar_server = replace(shared_server, target=target)
        figures = await fuzz.fuzz(liar_server, own, CASES)
        first = sorted((own.folder / "fuzz").glob("fault-*.json"))[0]
        assert (await fuzz.replay(liar_server, first)).faults
    assert not figures.met
    assert any("without details" in line for line in figures.findings)
    assert not (await fuzz.replay(shared_server, first)).faults


@pytest.mark.parametrize(
    ("muted", "hung", "fault"),
    [
        (("StreamEvaluate", "RunSession"), (), "of a stream that ended well"),
        ((), ("CompileProgram",), "no answer: DEADLINE_EXCEEDED"),
    ],
)
async def test_fuzzer_detects_missing_answers(
    shared_server: RunningServer, scale: Scale, muted: tuple[str, ...], hung: tuple[str, ...], fault: str
) -> None:
    cases, silent = Cases(seeds(scale.seed), scale.seed), {*muted, *hung}
    some = [case for case in map(cases.case, range(CASES * 4)) if case.method.rpartition("/")[2] in silent]
    async with running_proxy(shared_server.target, muted=muted, hung=hung) as target, sending.channel(target) as own:
        outcomes = await asyncio.gather(*(sending.send(own, case, deadline_s=3.0) for case in some))
    assert any(fault in line for outcome in outcomes for line in outcome.faults)


async def test_fuzzer_detects_a_server_that_implements_nothing(shared_server: RunningServer, scale: Scale) -> None:
    bare = grpc.aio.server()
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    try:
        own = replace(scale, folder=scale.folder / "bare")
        figures = await fuzz.fuzz(replace(shared_server, target=f"127.0.0.1:{port}"), own, CASES // 2)
    finally:
        await bare.stop(None)
    assert not figures.met
    assert "no answer was good: nothing was shown" in figures.findings


@pytest.mark.parametrize(
    ("seen", "deaf_s", "right"),
    [
        (HealthyCalls(asked=9, answered=9, errors={"OVERLOADED": 1}), 0.5, True),
        (HealthyCalls(asked=1000, answered=995, failed=5, errors={"DEADLINE_EXCEEDED": 5}), 0.5, True),
        (HealthyCalls(asked=1000, answered=985, failed=15, errors={"DEADLINE_EXCEEDED": 15}), 0.5, False),
        (HealthyCalls(asked=10, answered=9, failed=1, errors={"UNIMPLEMENTED": 1}), 0.5, False),
        (HealthyCalls(answered=9, wrong=["request 1: y is 2, not 1"]), 0.5, False),
        (HealthyCalls(), 0.5, False),
        (HealthyCalls(answered=9), 6.0, False),
    ],
)
def test_fuzzer_reports_harm_to_other_clients(seen: HealthyCalls, deaf_s: float, right: bool) -> None:
    pulse = fuzz.HealthPoller("")
    pulse.longest_s = deaf_s
    assert (fuzz.harm_to_others(seen, pulse) == []) is right


def test_fuzzer_tolerates_few_lost_statuses() -> None:
    assert fuzz.lost_statuses(sending.Tally(cases=10_000, reasons=Counter({answer_checks.LOST_STATUS: 60}))) == []
    assert fuzz.lost_statuses(sending.Tally(cases=10_000, reasons=Counter({answer_checks.LOST_STATUS: 200})))


async def test_fuzzer_detects_a_silent_front_end() -> None:
    pulse = fuzz.HealthPoller("127.0.0.1:1")
    await pulse.run()
    assert fuzz.harm_to_others(HealthyCalls(answered=9), pulse)


def test_every_rpc_is_fuzzed() -> None:
    services = [
        service for file in PROTOS.glob("*.proto") for service in re.findall(r"(?m)^service (\w+)", file.read_text())
    ]
    assert {name.partition("/")[0] for name in methods()} == set(services)


async def test_nothing_fails_through_an_honest_proxy(shared_server: RunningServer, scale: Scale) -> None:
    async with running_proxy(shared_server.target) as target:
        assert (await fuzz.fuzz(replace(shared_server, target=target), scale, CASES)).met


async def test_callers_detect_wrong_answers(shared_server: RunningServer) -> None:
    async with running_proxy(shared_server.target, faulty_proxy.add_a_thousandth) as target:
        load, healthy = Load(target, 1, callers=2, by_name=False), HealthyClient(target, every_s=0.01)
        working = asyncio.gather(load.run(), healthy.run())
        while not (load.seen.wrong and healthy.seen.wrong) and not working.done():
            await asyncio.sleep(0.05)
        load.stop()
        healthy.stop()
        await working
    assert load.seen.wrong
    assert healthy.seen.wrong
    assert not kills.judge(load.seen, 10, 10, FOREVER, front_ended=False).met
    assert not rolling.judge(load, Findings(), 2, 2, by_time=False).met


async def test_interleavings_detect_values_of_others(shared_server: RunningServer, scale: Scale) -> None:
    async with running_proxy(shared_server.target, faulty_proxy.swap_answers()) as target:
        figures = await interleavings.interleave(target, scale, 300)
    assert not figures.met
    assert any("which is caller" in line for line in figures.findings)


def test_interleavings_report_kinds_that_are_always_refused() -> None:
    all_but_one = Counter(set(interleavings.KINDS) - {"session"})
    assert interleavings.never_answered(all_but_one, of_tenants=True) == ["session: never answered"]
    assert not interleavings.never_answered(Counter(set(interleavings.KINDS) - {"registered"}), of_tenants=False)


@pytest.mark.parametrize(
    ("seen", "killed", "ended", "met"),
    [
        (ANSWERED, 10, False, True),
        (replace(ANSWERED, answered=998, errors=Counter(INTERNAL=2)), 10, False, False),
        (replace(ANSWERED, wrong=["y is 2, not 1"]), 10, False, False),
        (ANSWERED, 9, False, False),
        (ANSWERED, 10, True, False),
        (replace(ANSWERED, ways=Counter(WAYS[1:])), 10, False, False),
        (replace(ANSWERED, asked=0, answered=0), 10, False, False),
    ],
)
def test_kills_detects_wrong_and_missing_answers(seen: CallCounts, killed: int, ended: bool, met: bool) -> None:
    assert kills.judge(seen, killed, 10, FOREVER, ended).met is met


@pytest.mark.parametrize(("leak", "flat"), [(0.0, True), (1e5, True), (4e5, False)])
def test_slopes_distinguish_growth_from_noise(leak: float, flat: bool) -> None:
    """Bytes per second over ten minutes, on a noise of 30 MiB, after a start that takes 200 MiB."""
    random = np.random.default_rng(1)
    times = np.arange(0.0, 600.0, 2.0)
    values = 500e6 + leak * times + 30e6 * random.random(len(times)) + 200e6 * np.minimum(times / 100, 1)
    assert slope(list(times), list(values), Allowance(part=0.02, constant=24 * 2**20)).is_flat is flat


@pytest.mark.parametrize("figure", [None, *ALLOWED])
def test_soak_reports_every_growing_figure(shared_server: RunningServer, figure: str | None) -> None:
    samples = Samples()
    for second in range(120):
        samples.times.append(float(second))
        for name, values in samples.values.items():
            values.append(1e9 + (1e6 if name.endswith("memory") else 1.0) * second * (name == figure))
    load = Load(shared_server.target, 1)
    load.seen = replace(ANSWERED)
    found = soak.judge(samples, load, front_ended=False)
    assert found.met is (figure is None)
    assert [line.partition(" ")[0] for line in found.findings] == ([] if figure is None else [figure])
    for seen in (replace(ANSWERED, ways=Counter(WAYS[:-1])), replace(ANSWERED, answered=0)):
        load.seen = seen
        assert not soak.judge(samples, load, front_ended=False).met


def test_unnamed_shared_memory_is_measured() -> None:
    """Arenas are such memory: /dev/shm does not list them."""
    before = resources(os.getpid()).shared_bytes
    descriptor = os.memfd_create("planted")
    os.ftruncate(descriptor, 2**24)
    with mmap.mmap(descriptor, 2**24) as mapped:
        mapped.write(bytes(2**24))
        assert resources(os.getpid()).shared_bytes - before == 2**24
    os.close(descriptor)


def sent(**changed: Any) -> dict[str, Any]:
    return {"sent": 100, "good": 19, "refusals": [0.001] * 81, "other": {}} | changed


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, True),
        ({"good": 17}, False),
        ({"good": 23}, False),
        ({"refusals": [0.001] * 70 + [0.05] * 2}, False),
        ({"refusals": []}, False),
        ({"other": {"INTERNAL": 1}}, False),
    ],
)
def test_overload_detects_low_goodput_and_slow_refusals(changed: dict[str, Any], met: bool) -> None:
    assert overload.judge(20.0, 1.0, [sent(**changed)], {}).met is met


async def test_overload_compares_answers() -> None:
    same, another = (evaluate_pb2.EvaluateResponse() for _ in range(2))
    for message, name in ((same, "y"), (another, "z")):
        message.outputs.add(name=name)
    answers = iter([same, same, another, evaluate_pb2.EvaluateResponse()])

    async def call(request: bytes, timeout: float) -> bytes:
        return next(answers).SerializeToString()

    channel = SimpleNamespace(unary_unary=lambda method: call)
    asking = Sender(channel, b"")
    for _ in range(4):
        await asking.send()
    assert asking.other == {"another answer": 2}


def test_rolling_detects_errors_and_exit_codes(shared_server: RunningServer) -> None:
    def figures(done: int = 4, *lines: str, errors: dict[str, int] | None = None, answered: int = 999) -> bool:
        load, findings = Load(shared_server.target, 1), Findings()
        load.seen = replace(ANSWERED, answered=answered, errors=Counter(errors or {}))
        for line in lines:
            findings.add(line)
        return rolling.judge(load, findings, done, 4, by_time=False).met

    assert figures()
    assert not figures(3)
    assert not figures(4, "a server that was told to stop ended with -9")
    assert not figures(4, errors={"CANCELLED": 1})
    assert not figures(4, answered=0)


QUIET = Resources(resident_bytes=10**8, descriptors=20, threads=10, shared_bytes=0)


@pytest.mark.parametrize(
    ("errors", "wrong", "p99_s", "after"),
    [
        ({"UNAVAILABLE": 1}, [], 0.1, QUIET),
        ({}, ["request 1: y is 2, not 1"], 0.1, QUIET),
        ({}, [], 1.5, QUIET),
        ({}, [], 0.1, replace(QUIET, descriptors=50)),
        ({}, [], 0.1, replace(QUIET, resident_bytes=10**9)),
    ],
)
def test_hostile_detects_harm_and_growth(
    errors: dict[str, int], wrong: list[str], p99_s: float, after: Resources
) -> None:
    assert len(hostile.judge("attack", errors, wrong, p99_s, QUIET, after)) == 1
    assert hostile.judge("attack", {}, [], 0.1, QUIET, QUIET) == []


async def test_attack_that_does_nothing_is_a_miss(
    shared_server: RunningServer, scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(target: str, seconds: float) -> hostile.Did:
        return 0, "attacks"

    monkeypatch.setattr(hostile, "ATTACKS", {"nothing": nothing})
    figures = await hostile.run_attacks(shared_server, scale, 1.0)
    assert "nothing: nothing was done" in figures.findings
    assert not figures.met


@pytest.mark.parametrize(
    ("judged", "died", "right"),
    [
        (CRASHED, True, True),
        (replace(CRASHED, what="SIGABRT"), True, False),
        (replace(CRASHED, what="Check failed: a < b"), True, False),
        (replace(CRASHED, what="Check failed: a < b"), False, False),
        (replace(CRASHED, reason="MEMORY_EXCEEDED"), True, False),
        (Judgement(Verdict.REFUSED, reason="QUARANTINED"), False, False),
        (BARE, False, False),
        (OVERLOADED, False, False),
        (OVERLOADED, True, False),
        (GOOD, False, False),
        (Judgement(Verdict.FAULT, what="INTERNAL"), False, False),
    ],
)
def test_crashes_detects_wrong_answers(judged: Judgement, died: bool, right: bool) -> None:
    assert (crashes.judge(CRASH, judged, died) == []) is right


def test_crashes_accepts_memory_errors() -> None:
    bomb, exceeded = replace(CRASH, told="MEMORY_EXCEEDED"), replace(CRASHED, reason="MEMORY_EXCEEDED")
    assert not crashes.judge(bomb, exceeded, died=True)
    assert not crashes.judge(bomb, replace(exceeded, what="the limit"), died=False)
    assert crashes.judge(bomb, replace(exceeded, what="the limit"), died=True)


@pytest.mark.parametrize(
    ("judged", "late_s", "right"),
    [
        (HUNG, 0.6, True),
        (HUNG, 1.4, False),
        (replace(HUNG, reason="MEMORY_EXCEEDED"), 0.6, True),
        (replace(HUNG, reason="LIMIT_EXCEEDED"), 0.0, False),
        (BARE, 0.6, False),
        (GOOD, 0.0, False),
        (Judgement(Verdict.FAULT, what="INTERNAL"), 0.0, False),
    ],
)
def test_hangs_detects_late_ends(judged: Judgement, late_s: float, right: bool) -> None:
    assert (hangs.judge(replace(CRASH, told=HUNG.reason), hangs.HangResult(judged, late_s)) == []) is right


WENT = bombs.BombResult(Judgement(Verdict.REFUSED, reason="MEMORY_EXCEEDED"), 1000, 10**6, 10**9, "")


@pytest.mark.parametrize(
    ("went", "right"),
    [
        (WENT, True),
        (replace(WENT, judged=GOOD), False),
        (replace(WENT, judged=OVERLOADED), False),
        (replace(WENT, judged=BARE), False),
        (replace(WENT, judged=Judgement(Verdict.FAULT, what="INTERNAL")), False),
        (replace(WENT, front_bytes=10**9), False),
        (replace(WENT, engine_bytes=6 * 10**9), False),
        (replace(WENT, next_fault="request 1: y is 2, not 1"), False),
    ],
)
def test_bombs_detects_growth(went: bombs.BombResult, right: bool) -> None:
    assert (bombs.judge(replace(CRASH, told="MEMORY_EXCEEDED"), went) == []) is right


async def test_missing_engines_are_a_timeout(shared_server: RunningServer) -> None:
    assert await harmful_requests.wait_for_engines(shared_server, 1, timeout_s=0)
    with pytest.raises(TimeoutError, match="not 9"):
        await harmful_requests.wait_for_engines(shared_server, 9, timeout_s=0)


@pytest.mark.parametrize("row", [crashes, hangs])
def test_row_that_shows_nothing_is_missed(row: Any) -> None:
    told = Counter({"LIMIT_EXCEEDED": 3})
    beside = HealthyClient("").seen
    counted = (told, 3) if row is crashes else (told, [0.0, 0.0, 0.0])
    assert not row.summary(beside, Findings(), *counted, None).met
    told["ENGINE_CRASHED" if row is crashes else "DEADLINE_EXCEEDED"] += 1
    assert row.summary(beside, Findings(), *counted, None).met
    assert not row.summary(beside, Findings(), *counted, -11).met
    beside.errors["UNAVAILABLE"] = 1
    assert not row.summary(beside, Findings(), *counted, None).met


@pytest.mark.parametrize(
    ("allowed", "category", "place", "reasons", "right"),
    [
        (True, "math", "branch", set(), True),
        (True, "math", "top", {"OP_NOT_ALLOWED"}, False),
        (True, "variable", "function", {"UNSUPPORTED_OP"}, True),
        (True, "variable", "top", {"UNSUPPORTED_OP"}, False),
        (False, "file read", "nested_function", {"OP_NOT_ALLOWED"}, True),
        (False, "file read", "nested_function", set(), False),
        (False, "file read", "top", {"INTERNAL"}, False),
    ],
)
def test_op_table_detects_wrong_decisions(
    allowed: bool, category: str, place: str, reasons: set[str], right: bool
) -> None:
    ruling = OpReview("Op", allowed, category, "", "")
    assert (op_table.wrong(ruling, place, reasons) == "") is right


@pytest.mark.parametrize("denied_beside", [False, True])
async def test_op_table_detects_an_allowed_op_in_a_refused_graph(
    shared_server: RunningServer, scale: Scale, monkeypatch: pytest.MonkeyPatch, denied_beside: bool
) -> None:
    if denied_beside:

        def graph_of(ops: Any, place: str) -> Graph:
            made = MINIMAL_GRAPH(ops, place)
            made.node.add(name="beside", op="ReadFile", input=["name"])
            made.node.add(name="name", op="Placeholder").attr["dtype"].type = Dt.DT_STRING
            next(node for node in made.node if node.name == "y0").input.append("^beside")
            return made

        monkeypatch.setattr(minimal, "graph_of", graph_of)
    some = [policy.op_reviews()[name] for name in ("Sign", "Tanh", "ReadFile")]
    figures = await op_table.check(shared_server.target, scale, some)
    assert figures.met is not denied_beside
    assert all("Sign" in line or "Tanh" in line for line in figures.findings)


async def test_amplification_detects_growth(shared_server: RunningServer) -> None:
    (fault,) = (await amplification.measure(shared_server, ["150,000 nodes"], factor=0.5, constant_bytes=0)).faults
    assert fault.startswith("150,000 nodes: ")


def test_escapes_detects_a_reached_canary() -> None:
    case = (ESCAPES[0], "outside")
    name = f"{ESCAPES[0].name} (outside)"
    assert escapes.judge([case], True, set(), {name}).met
    assert not escapes.judge([case], True, {name}, {name}).met
    assert not escapes.judge([case], True, set(), set()).met
    assert not escapes.judge([case], False, set(), {name}).met


def failed_call(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """Returns a call that failed without details."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "no")


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INVALID_ARGUMENT])
def test_errors_without_reasons_are_judged(code: grpc.StatusCode) -> None:
    assert answer_checks.check_failure(failed_call(code)).verdict is Verdict.FAULT
    assert answer_checks.check_failure(failed_call(grpc.StatusCode.UNAVAILABLE)).verdict is Verdict.REFUSED


def status(reason: str, code: grpc.StatusCode, domain: str = "gradrule", message: str = "no", infos: int = 1) -> bytes:
    """Returns the status bytes as in the metadata of a failed call."""
    found = status_pb2.Status(code=code.value[0], message=message)
    for _ in range(infos):
        found.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    return bytes(found.SerializeToString())


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (status("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED), Verdict.REFUSED),
        (status("OVERLOADED", grpc.StatusCode.UNKNOWN), Verdict.FAULT),
        (status("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED, domain="example"), Verdict.FAULT),
        (status("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED, message=""), Verdict.FAULT),
        (status("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED, infos=2), Verdict.FAULT),
        (status("NOBODY_KNOWS", grpc.StatusCode.RESOURCE_EXHAUSTED), Verdict.FAULT),
        (status("INTERNAL", grpc.StatusCode.INTERNAL), Verdict.FAULT),
        (b"\xff\xff", Verdict.FAULT),
    ],
)
def test_errors_with_reasons_are_judged(data: bytes, verdict: Verdict) -> None:
    assert answer_checks.check_status(data, None).verdict is verdict


def test_http2_detects_forged_log_lines() -> None:
    good = b'{"level": "info", "message": "good"}\n'
    for wrong in (
        b"Traceback (most recent call last):",
        b'{"level": "info", "message": "forged"}',
        b'{"level": "info", "message": "' + http2_cases.SECRET + b'"}',
        b'{"level": "error", "message": "incident 1", "logger": "gradrule_server.front.calls"}',
    ):
        findings = Findings()
        assert http2.log_faults(good + wrong + b"\n" + good, findings) == 3
        assert findings.count == 1
    findings = Findings()
    http2.log_faults(good, findings)
    assert not findings.count


async def test_http2_detects_unanswered_calls() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        case = http2_cases.Case(("good_call",), (wire.PREFACE,), 1, False)
        assert await http2.send(target, case, http2.Sent(), answer_s=0.2) == ["0 of 1 calls were answered within 0.2 s"]


def test_cases_come_from_the_seed() -> None:
    first, same, other = (http2_cases.Cases(seed) for seed in (1, 1, 2))
    assert [first.case(number) for number in range(50)] == [same.case(number) for number in range(50)]
    assert [first.case(number) for number in range(50)] != [other.case(number) for number in range(50)]


def test_turns_reports_tenants_that_get_few_answers_and_sessions_that_go_on() -> None:
    answers = {"compiling": 9, "idle": 2, "b": 40, "c": 40, "d": 40, "e": 40}
    clock = Scale(1, 1, Path()).clock()
    assert turns.judge(turns.Outcome(clock, answers=answers, ended_sessions=1)).met
    starved = turns.judge(turns.Outcome(clock, answers={**answers, "compiling": 0, "e": 4}))
    assert not starved.met
    assert starved.findings == [
        "tenant compiling got no answer",
        "tenant e got 4 answers, the mean is 31",
        "no idle session has ended",
    ]


def test_strangers_reports_findings_and_attacks_that_did_nothing() -> None:
    attack, fine = strangers.ATTACKS["large rules"], Answers(calls=9, p99_ms=20.0)
    did = strangers.AttackResult(Counter(OK=3, RESOURCE_EXHAUSTED=4), front_mib=20.0)
    assert strangers.judge(attack, did, fine, fine) == []

    slow = Answers(calls=9, p99_ms=6000.0, failures=Counter(DEADLINE_EXCEEDED=2))
    for tiny, new in ((slow, fine), (fine, slow)):
        found = "\n".join(strangers.judge(attack, did, tiny, new))
        assert "failed with DEADLINE_EXCEEDED" in found
        assert "6.00 s" in found
    assert "tenant B made no calls" in strangers.judge(attack, did, Answers(), fine)
    assert "grew by 900 MiB" in strangers.judge(attack, replace(did, front_mib=900.0), fine, fine)[0]
    # Calls that never ended caused no load.
    late = replace(did, codes=Counter(DEADLINE_EXCEEDED=8))
    assert "no call of tenant A was answered" in strangers.judge(attack, late, fine, fine)[0]
    assert strangers.judge(strangers.ATTACKS["selections"], late, fine, fine) == []
    assert strangers.judge(attack, strangers.AttackResult(), fine, fine) == ["nothing was done"]


def test_gateway_reports_findings_and_attacks_that_did_nothing() -> None:
    fine, slow = gateway.Times([0.02] * 9), gateway.Times([0.02] * 9 + [6.0], Counter(ConnectionResetError=2))
    did = Counter({"connected": 4, "400": 9})
    assert gateway.judge({"calls": fine, "probes": fine}, did, 1.0) == []
    assert gateway.judge({"calls": slow}, did, 1.0) == [
        "2 calls failed with ConnectionResetError",
        "calls took 6.00 s (p99)",
    ]
    assert gateway.judge({"calls": gateway.Times()}, did, 1.0) == ["no calls were sent"]
    assert gateway.judge({"calls": fine}, Counter(), 1.0) == ["nothing was done"]
    assert "answered with 500" in gateway.judge({"calls": fine}, did + Counter({"500": 1}), 1.0)[0]


def test_strangers_has_a_row_for_each_finding() -> None:
    assert {attack.finding for attack in strangers.ATTACKS.values()} == {
        "S2",
        "S3",
        "S5",
        "S6",
        "S9",
        "S11",
        "S16",
        "S17",
    }
