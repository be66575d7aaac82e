"""Sends requests that a server refuses, and describes how they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import evaluate_pb2, override_pb2, program_pb2, rule_pb2
from tests.service import raw


def refused_calls() -> list[tuple[str, bytes]]:
    """Returns RPCs with requests that the server refuses, each for another reason."""
    override = override_pb2.GradientOverride(rule="NoSuchRule", selector=override_pb2.Selector(op_type="Sign"))
    wrong = rule_pb2.Rule(name="Wrong", definition=rule_pb2.RuleDefinition(expression="dy +"))
    requests: list[tuple[str, Any]] = [
        ("GradientService/Evaluate", evaluate_pb2.EvaluateRequest()),
        ("GradientService/Evaluate", evaluate_pb2.EvaluateRequest(program="programs/none")),
        ("GradientService/Evaluate", raw.request(b"no graph")),
        ("GradientService/Evaluate", raw.request(raw.graph(raw.node("y", "NoSuchOp")))),
        ("GradientService/Evaluate", raw.request(raw.sign_graph(), {})),
        ("GradientService/Evaluate", raw.request(raw.sign_graph(), overrides=[override])),
        ("RuleService/CreateRule", rule_pb2.CreateRuleRequest(rule=wrong)),
        ("RuleService/DeleteRule", rule_pb2.DeleteRuleRequest(name="rules/ste_sign")),
        ("RuleService/GetRule", rule_pb2.GetRuleRequest(name="rules/none")),
        ("ProgramService/GetProgram", program_pb2.GetProgramRequest(name="programs/none")),
    ]
    encoded = [(path, request.SerializeToString()) for path, request in requests]
    return [*encoded, ("GradientService/Evaluate", b"\xff"), ("RuleService/NoSuchMethod", b"")]


def refusal(channel: grpc.Channel, path: str, request: bytes) -> tuple[Any, str, list[Any], set[str]]:
    """Returns code and text of a refused call, its typed details without the request ID, and the names of trailers."""
    call: Any = channel.unary_unary(f"/gradrule.v1.{path}")
    with pytest.raises(grpc.RpcError) as raised:
        call(request, timeout=60)
    error: Any = raised.value
    trailers = dict(error.trailing_metadata())
    # Bytes of equal messages may differ: maps have no order.
    details = [json_format.MessageToDict(detail) for detail in typed_details(trailers) if not is_request_id(detail)]
    return error.code(), error.details(), details, set(trailers)


async def refusal_reason(call: Any) -> tuple[str, str]:
    """Returns the name of the status code of an asyncio call, and its typed reason; the latter is empty without one."""
    code, info = await call.code(), error_details_pb2.ErrorInfo()
    for detail in typed_details(dict(await call.trailing_metadata() or ())):
        if detail.Unpack(info):
            break
    return code.name, info.reason


def typed_details(trailers: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the details of the status in the trailers of a call."""
    return status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b"")).details


def is_request_id(detail: Any) -> bool:
    """Returns whether a detail of an error is the ID of the request."""
    return bool(detail.Is(error_details_pb2.RequestInfo.DESCRIPTOR))
