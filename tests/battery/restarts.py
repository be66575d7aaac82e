"""Kills a server and its engine by SIGKILL; a new server starts at once on the same folder and port.

Target: a right answer within 5 s of the kill; health is NOT_SERVING while there is no engine, and SERVING only once
calls are answered.
"""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import numpy as np

from gradrule.v1 import rule_pb2, rule_pb2_grpc
from tests.battery import known_answers
from tests.battery.figures import Clock, Figures, Findings, Scale
from tests.battery.serving import data_folder
from tests.service.health import recorded_health
from tests.service.servers import started_server

TARGET = "a right answer within 5 s of kill -9; health tells NOT_SERVING, then SERVING"
LONG = 20
READY_S = 5.0
RULES = 200
_ANSWER_S = 60.0


def run(scale: Scale) -> Figures:
    """Kills the server 20 times at full scale."""
    return restart(data_folder(scale, "restarts"), scale.count(LONG), scale.clock())


def restart(folder: Path, count: int, clock: Clock, ready_s: float = READY_S) -> Figures:
    """Kills the server `count` times, each time with more rules in its registry."""
    findings, ready, told = Findings(), list[float](), list[float]()
    target = ""
    with started_server(folder) as server:
        _check_answer(server.target, 0, findings)
        target = server.target
        _register(target, 0)
        server.kill()
    while len(ready) < count and not clock.is_over:
        started_at, number = time.monotonic(), len(ready) + 1
        with (
            recorded_health(target) as seen,
            started_server(folder, ["--port", target.rpartition(":")[2]]) as server,
        ):
            _check_answer(target, number, findings)
            ready.append(time.monotonic() - started_at)
            if ready[-1] > ready_s:
                findings.add(f"restart {number}: the first answer came {ready[-1]:.1f} s after the kill")
            _register(target, number)
            server.kill()
        told.append(seen.first_answer_s - started_at)
        for fault in seen.faults():
            findings.add(f"restart {number}: {fault}")
    return Figures(
        target=TARGET,
        cases=len(ready),
        failures=findings.count,
        met=not findings.count and (len(ready) == count or clock.is_over),
        findings=findings.lines,
        details={
            "ready_p50_s": round(float(np.median(ready)), 2),
            "ready_max_s": round(max(ready), 2),
            "health_answers_max_s": round(max(told), 2),
            "rules": RULES * (len(ready) + 1),
        },
    )


def _check_answer(target: str, number: int, findings: Findings) -> None:
    """Evaluates once and records what is wrong with the answer."""
    with grpc.insecure_channel(target) as channel:
        try:
            answer: bytes = channel.unary_unary(known_answers.EVALUATE)(
                known_answers.request(number), timeout=_ANSWER_S
            )
        except grpc.RpcError as failure:
            findings.add(f"the server says that it is ready and answers {failure.code().name}")
            return
    fault = known_answers.wrong(number, answer)
    if fault:
        findings.add(fault)


def _register(target: str, round_number: int) -> None:
    """Registers rules, which the next start reads."""
    with grpc.insecure_channel(target) as channel:
        stub = rule_pb2_grpc.RuleServiceStub(channel)
        for number in range(RULES):
            rule = rule_pb2.Rule(name=f"R{round_number}x{number}")
            rule.definition.expression = f"{number + 1} * dy"
            stub.CreateRule(rule_pb2.CreateRuleRequest(rule=rule), timeout=_ANSWER_S)
