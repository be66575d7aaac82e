"""Tests the estimate of the memory that a message takes once it is parsed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest
from google.protobuf.message import DecodeError, Message

from gradrule.v1 import evaluate_pb2, graph_pb2, program_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, Reason
from gradrule_server.policy import SMALL_BYTES, NodeLimits, check_parsed_size
from tests.samples import size
from tests.service import raw

MIB = 1 << 20
_MOST = size(4, 16) * MIB

# By message: the smallest encoding of one repeated part.
SMALLEST: Mapping[str, tuple[type[Message], bytes]] = {
    "nodes": (graph_pb2.Graph, b"\x0a\x00"),
    "nodes with an input": (graph_pb2.Graph, b"\x0a\x02\x1a\x00"),
    "nodes of functions": (graph_pb2.Graph, b"\x12\x04\x0a\x02\x1a\x00"),
    "inputs": (graph_pb2.Node, b"\x1a\x00"),
    "attributes": (graph_pb2.Node, b"\x2a\x02\x12\x00"),
    "overrides": (program_pb2.ProgramSpec, b"\x12\x00"),
    "dimensions": (tensor_pb2.TensorShape, b"\x12\x00"),
    "numbers": (tensor_pb2.Tensor, b"\x52\x10" + b"\x00" * 16),
    "strings": (tensor_pb2.Tensor, b"\x42\x00"),
}

# Each measurement runs in its own process, which is forked before any message is parsed.
_MEASURE = """
import importlib, json, os, sys
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
for module, name, part, times in json.load(sys.stdin):
    message = getattr(importlib.import_module(module), name)
    if os.fork():
        os.wait()
        continue
    data = bytes.fromhex(part) * times
    before = resident()
    read = message.FromString(data)
    print(resident() - before, flush=True)
    os._exit(0)
"""


def refused(data: bytes, message: type[Message] = graph_pb2.Graph, bounds: NodeLimits | None = None) -> str:
    with pytest.raises(GradruleError) as refusal:
        check_parsed_size(data, message, bounds or NodeLimits(), field="graph")
    (finding,) = refusal.value.findings
    assert (finding.reason, finding.field) == (Reason.ERROR_REASON_LIMIT_EXCEEDED, "graph")
    return finding.message


def accepted(data: bytes, message: type[Message] = graph_pb2.Graph, bounds: NodeLimits | None = None) -> None:
    check_parsed_size(data, message, bounds or NodeLimits())


def most_accepted(message: type[Message], part: bytes) -> int:
    """Returns how often a part may repeat, as a power of two, up to `_MOST` bytes."""
    times = 1 << 12
    while True:
        try:
            accepted(part * (2 * times), message)
        except GradruleError:
            break
        times *= 2
        if len(part) * times > _MOST:
            break
    return times


def test_accepted_messages_take_no_more_memory_than_allowed() -> None:
    asked = [
        (message.__module__, message.__name__, part.hex(), most_accepted(message, part))
        for message, part in SMALLEST.values()
    ]
    words = [sys.executable, "-c", _MEASURE]
    answer = subprocess.run(
        words, input=json.dumps(asked), check=True, capture_output=True, text=True, timeout=200
    ).stdout
    taken = dict(zip(SMALLEST, map(int, answer.split()), strict=True))
    allowed = {
        name: 128 * MIB + 10 * len(part) // 2 * times for name, (_, _, part, times) in zip(SMALLEST, asked, strict=True)
    }
    assert {name: bytes_taken for name, bytes_taken in taken.items() if bytes_taken >= allowed[name]} == {}


def test_very_many_small_parts_are_refused() -> None:
    message = refused(b"\x0a\x00" * 2_000_000)
    for words in ("3.8 MiB", "more than 166 MiB", "'node'", "--max-unpacking", "128 MiB and 10 times"):
        assert words in message
    accepted(b"\x0a\x00" * 2_000_000, bounds=NodeLimits(unpacking=1000))


def test_small_parts_are_counted_at_any_depth() -> None:
    spec = b"\x12\x00" * 1_000_000
    inside = b"\x12" + _size(len(spec)) + spec
    assert "'overrides'" in refused(inside, evaluate_pb2.EvaluateRequest)
    long_names = raw.graph(*(raw.node("n" * 400, "Sign", *[""] * 400) for _ in range(3_000))).SerializeToString()
    assert len(long_names) < 10 * MIB
    accepted(long_names)
    many_inputs = raw.graph(*(raw.node("n", "Sign", *[""] * 500) for _ in range(12_000))).SerializeToString()
    assert "'input'" in refused(many_inputs)


def test_realistic_messages_are_accepted() -> None:
    nodes = [raw.placeholder("model/block/x"), raw.node("model/block/y", "Sign", "model/block/x")]
    for node in nodes:
        node.attr["T"].type = raw.DT_FLOAT
    part = raw.graph(*nodes).SerializeToString()
    accepted(part * 50_000)
    content = raw.tensor([0.0] * MIB).SerializeToString()
    accepted(b"\x22" + _size(32 * MIB) + bytes(32 * MIB), tensor_pb2.Tensor)
    accepted(content, tensor_pb2.Tensor)


def test_small_messages_are_never_refused() -> None:
    accepted(b"\x0a\x00" * (SMALL_BYTES // 2))


def test_malformed_messages_are_left_to_the_parser() -> None:
    for data in (b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" + b"\xff" * 12, b"\x0f" * 8, b"\x0a\x05ab"):
        whole = b"\x22\x00" * SMALL_BYTES + data
        accepted(whole)
        with pytest.raises(DecodeError):
            graph_pb2.Graph.FromString(whole)


def test_fields_before_a_broken_field_count() -> None:
    assert "'node'" in refused(b"\x0a\x00" * 2_000_000 + b"\x0a\x05ab")


def _size(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
