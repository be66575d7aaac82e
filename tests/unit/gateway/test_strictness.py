"""Texts that only Python would accept are refused: numbers, base64, flags of the gateway."""

from __future__ import annotations

import argparse
import json

import pytest

from gradrule.cli import gateway as flags
from gradrule.v1 import rule_pb2
from gradrule_gateway import conversion, decoding, tensors
from gradrule_gateway.problems import Problem
from gradrule_gateway.routes import ROUTES

EVALUATE = next(route for route in ROUTES if route.rpc == "GradientService/Evaluate")


@pytest.mark.parametrize("text", ["1_000", " 7", "7 ", "+3", "\u0661\u0662", "", "-", "--1", "1" * 21])
def test_integers_are_those_of_json(text: str) -> None:
    feed = {"dtype": "int64", "values": [text, 1]}
    with pytest.raises(Problem, match="is not a number"):
        conversion.decode_body(EVALUATE, json.dumps({"feeds": {"x": feed}}).encode())
    with pytest.raises(Problem, match="pageSize"):
        decoding.decode_fields(rule_pb2.ListRulesRequest(), [("pageSize", text)])


def test_the_largest_integers() -> None:
    assert tensors.parse_integer("-9223372036854775808") == -(2**63)
    assert tensors.parse_integer("18446744073709551615") == 2**64 - 1


def test_all_unknown_fields_are_named_with_suggestions() -> None:
    body = {"spek": {}, "spec": {"fetces": ["y"], "fetches": 7}, "fedds": {"x": [1]}, "feeds": {}}
    with pytest.raises(Problem) as refused:
        conversion.decode_body(EVALUATE, json.dumps(body).encode())
    assert [found.field for found in refused.value.violations] == ["spek", "spec.fetces"]
    body["spec"] = {"fetces": ["y"]}
    with pytest.raises(Problem) as refused:
        conversion.decode_body(EVALUATE, json.dumps(body).encode())
    assert [found.field for found in refused.value.violations] == ["spek", "spec.fetces", "fedds"]
    for suggestion in ("'spec'", "'fetches'", "'feeds'"):
        assert f"Did you mean {suggestion}?" in refused.value.detail
    with pytest.raises(Problem) as refused:
        conversion.decode_body(EVALUATE, json.dumps({f"x{number}": 1 for number in range(1000)}).encode())
    assert len(refused.value.violations) == 20


@pytest.mark.parametrize("text", ["AB==", "AAB=", "AB", "AA=", "AAAA=", "AAAA==", "A", "=", "AA==AA==", " AA=="])
def test_wrong_ends_of_base64(text: str) -> None:
    with pytest.raises(ValueError, match="not base64"):
        tensors.decode_base64(text)


@pytest.mark.parametrize(("text", "found"), [("", b""), ("AQ==", b"\1"), ("AQ", b"\1"), ("_-8=", b"\xff\xef")])
def test_base64(text: str, found: bytes) -> None:
    assert tensors.decode_base64(text) == found


def test_numbers_of_enums_in_queries() -> None:
    """As over gRPC: a number that this version does not know matches no rule."""
    request = rule_pb2.ListRulesRequest()
    decoding.decode_fields(request, [("kind", "77")])
    assert request.kind == 77


@pytest.mark.parametrize("text", ["example.org:8480", "http://x", "::1", "a b", "", "a/b", "a..b", "*.example.org"])
def test_hosts_that_no_header_can_have(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="without scheme and port"):
        flags._host_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "a.example",
        "*",
        "null",
        "https://a.example:443",
        "http://a.example:80",
        "https://a.example/path",
        "https://",
        "",
    ],
)
def test_origins_that_no_browser_sends(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"such as https://app\.example\.org"):
        flags._origin(text)


def test_names_are_compared_in_lower_case() -> None:
    assert [flags._host_name(text) for text in ("EXAMPLE.org", "[2001:DB8::7]", "*")] == [
        "example.org",
        "[2001:db8::7]",
        "*",
    ]
    assert flags._origin("https://App.example.org:8443/") == "https://app.example.org:8443"
