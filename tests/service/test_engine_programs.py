"""Programs that come and go: reused names, long names, and an engine that holds one program at a time."""

from __future__ import annotations

import asyncio
import time
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
import pytest

from gradrule.v1 import (
    evaluate_pb2,
    evaluate_pb2_grpc,
    program_pb2,
    program_pb2_grpc,
    rule_pb2,
    rule_pb2_grpc,
)
from tests.service import raw
from tests.service.answers import keeps_engine, refused_raw
from tests.service.servers import running_server
from tests.service.test_engine_work import chain


def compile_program(channel: grpc.Channel, request: evaluate_pb2.EvaluateRequest, name: str) -> str:
    """Compiles under a name and returns the digest."""
    asked = program_pb2.CompileProgramRequest(spec=request.spec, program_id=name)
    program = program_pb2_grpc.ProgramServiceStub(channel).CompileProgram(asked, timeout=120).program
    return str(program.digests.program)


def test_name_reused_while_its_old_program_is_loaded(tmp_path: Path) -> None:
    with running_server(tmp_path) as first, grpc.insecure_channel(first.target) as channel:
        compile_program(channel, raw.request(chain(20_000, "Identity")), "p")
    with running_server(tmp_path) as second, grpc.insecure_channel(second.target) as channel:
        compile_program(channel, raw.request(chain(1)), "other")

        def evaluate() -> tuple[float, str]:
            request = evaluate_pb2.EvaluateRequest(program="programs/p", feeds=raw.feeds({"x": raw.tensor([1.0])}))
            answer = raw.evaluate(channel, request, 120.0)
            value = np.frombuffer(answer.outputs[0].value.inline_tensor.tensor_content, np.float32)
            return float(value[0]), answer.digests.program

        with futures.ThreadPoolExecutor() as pool:
            in_flight = pool.submit(evaluate)
            second.wait_for_running_calls(1)
            assert not in_flight.done()
            request = program_pb2.DeleteProgramRequest(name="programs/p")
            program_pb2_grpc.ProgramServiceStub(channel).DeleteProgram(request)
            digest = compile_program(channel, raw.request(chain(1)), "p")
            assert in_flight.result()[0] == 1.0
        assert evaluate() == (-1.0, digest)


def test_engine_that_holds_one_program_runs_many(tmp_path: Path) -> None:
    """Each load evicts another program, but never one that is about to run."""

    async def storm(target: str) -> int:
        requests = [raw.request(chain(2, "Sign", f"n{number}_")) for number in range(20)]
        async with grpc.aio.insecure_channel(target) as channel:
            stub = evaluate_pb2_grpc.GradientServiceStub(channel)
            calls = [stub.Evaluate(requests[number % len(requests)], timeout=100) for number in range(200)]
            return len(await asyncio.gather(*calls))

    with running_server(tmp_path, ("--program-cache", "1")) as server:
        assert asyncio.run(storm(server.target)) == 200
        assert "incident" not in server.log.read_text()


@pytest.mark.parametrize("length", [2000, 20_000, 10_000_000])
@keeps_engine
def test_invalid_names_of_any_length_are_refused(channel: grpc.Channel, length: int) -> None:
    name = "ab" * (length // 2)
    started = time.monotonic()
    with refused_raw("UNKNOWN_RULE"):
        rule_pb2_grpc.RuleServiceStub(channel).GetRule(rule_pb2.GetRuleRequest(name=name))
    with refused_raw("PROGRAM_NOT_FOUND"):
        program_pb2_grpc.ProgramServiceStub(channel).GetProgram(program_pb2.GetProgramRequest(name=name))
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("name", ["x:00", "x:01"])
@keeps_engine
def test_fed_tensor_of_an_op_with_zeroed_outputs(channel: grpc.Channel, name: str) -> None:
    with refused_raw("UNKNOWN_FEED") as refusal:
        raw.evaluate(channel, raw.request(raw.sign_graph(), {name: raw.tensor([1.0])}))
    refusal.says(name, f"'x:{name[-1]}'")


def test_presets_are_listed(channel: grpc.Channel) -> None:
    stub = rule_pb2_grpc.RuleServiceStub(channel)
    presets = {preset.name: preset for preset in stub.ListPresets(rule_pb2.ListPresetsRequest()).presets}
    assert "guided_backprop" in presets
    assert all(preset.description and preset.overrides for preset in presets.values())
