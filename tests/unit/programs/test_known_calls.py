"""Tests the table of known calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gradrule.v1 import evaluate_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.link.messages import CallShape, RunTemplate
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.cache import ProgramCache, StoredKey
from gradrule_server.programs.call_requests import MAX_TENSORS, translate
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.known_calls import KnownCalls
from gradrule_server.programs.loaded import Loadable
from gradrule_server.recovery.crash_history import CrashHistory

SETTINGS = {
    "params": "RunTemplate.settings, from the program's param settings",
    "derivative": "part of the program's key",
    "stacked_grad_ys": "part of the program's key",
    "batching": "KnownCall.is_batched",
    "answer_packing": "the engine reads it",
    "run_timeout": "KnownCall.run_limit_s",
}
"""How a call whose header is known applies the fields of the header that are neither its program nor tensors."""


def test_known_calls_apply_every_field_of_a_header() -> None:
    """A new field of `EvaluateHeader` needs an entry in SETTINGS: say how `KnownCalls.run` applies it."""
    fields = {field.name for field in evaluate_pb2.EvaluateHeader.DESCRIPTOR.fields}
    assert fields == {"program", "feeds", "grad_ys", "tangents", "vectors", *SETTINGS}


def test_calls_with_very_many_tensors_are_refused_before_they_are_translated() -> None:
    request = link_pb2.RawEvaluateRequest(program="programs/p", feeds=[{"name": "x"}] * (MAX_TENSORS + 1))
    with pytest.raises(GradruleError) as caught:
        translate(request)
    assert reason_name(caught.value.reason) == "LIMIT_EXCEEDED"


def runnable() -> RunnableProgram:
    compiled: Any = SimpleNamespace(program=b"", tail=b"")
    return RunnableProgram(compiled, Loadable("key", b"g" * 100))


def known_calls(cache: ProgramCache) -> KnownCalls:
    loaded: Any = SimpleNamespace(crash_history=CrashHistory())
    return KnownCalls(cache, loaded)


def mark_used(calls: KnownCalls, header: bytes) -> None:
    """Marks a call as used, whose engine has unloaded the program since."""
    unloaded: Any = SimpleNamespace(is_available=False)
    calls._mark_used(header, calls._calls[header], unloaded, 0.0)


def test_dropping_a_program_drops_only_its_known_calls() -> None:
    cache = ProgramCache(2, 10**6)
    calls = known_calls(cache)
    keys = {name: StoredKey(name, CallShape()) for name in "abc"}
    for name in "ab":
        program = runnable()
        cache.put(keys[name], program)
        for number in range(2):
            header = name.encode() + bytes([number])
            calls.add(header, evaluate_pb2.EvaluateHeader(), keys[name], program, RunTemplate(b""))
    # A call that is used keeps its program: the other one goes.
    mark_used(calls, b"a\0")
    cache.put(keys["c"], runnable())
    assert [name + b"\1" in calls._calls for name in (b"a", b"b")] == [True, False]
    cache.remove_stored("a")
    assert b"a\0" not in calls._calls
    assert not calls._headers


def test_least_recently_used_calls_are_dropped() -> None:
    cache, key, program = ProgramCache(2, 10**6), StoredKey("a", CallShape()), runnable()
    calls = known_calls(cache)
    cache.put(key, program)
    for number in range(2000):
        calls.add(b"%d" % number, evaluate_pb2.EvaluateHeader(), key, program, RunTemplate(b""))
        mark_used(calls, b"0")
    assert len(calls._calls) == len(calls._headers[key]) < 2000
    assert b"1" not in calls._calls


def test_long_headers_are_not_kept() -> None:
    cache, key, program = ProgramCache(2, 10**6), StoredKey("a", CallShape()), runnable()
    calls = known_calls(cache)
    cache.put(key, program)
    calls.add(bytes(20_000), evaluate_pb2.EvaluateHeader(), key, program, RunTemplate(b""))
    assert not calls._calls
