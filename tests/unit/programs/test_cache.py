"""The cache of compiled programs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule_server.link.messages import CallShape
from gradrule_server.programs.cache import InlineKey, ProgramCache, StoredKey
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import Loadable
from gradrule_server.programs.runner import CallPlan

_CALL = CallShape()


def runnable(size: int = 100) -> RunnableProgram:
    compiled = SimpleNamespace(program=b"", tail=b"")
    return RunnableProgram(compiled, Loadable("key", b"g" * size))


def test_least_recently_used_programs_are_dropped() -> None:
    cache = ProgramCache(2, 10**6)
    for name in ("a", "b"):
        cache.put(StoredKey(name, _CALL), runnable())
    assert cache.get(StoredKey("a", _CALL)) is not None
    cache.put(StoredKey("c", _CALL), runnable())
    assert [name for name in "abc" if cache.get(StoredKey(name, _CALL)) is not None] == ["a", "c"]


def test_bytes_are_limited_but_the_last_program_stays() -> None:
    cache = ProgramCache(100, 1000)
    for index in range(50):
        cache.put(StoredKey(str(index), _CALL), runnable(300))
        assert cache.held_bytes <= 1000
    large = StoredKey("large", _CALL)
    cache.put(large, runnable(5000))
    assert cache.get(large) is not None
    assert cache.held_bytes == 5000
    cache.put(large, runnable(10))
    assert cache.held_bytes == 10


def test_a_file_that_programs_share_counts_once() -> None:
    file: Any = SimpleNamespace(name=".kept-1", size=800)
    cache = ProgramCache(100, 1000)
    for index in range(5):
        compiled: Any = SimpleNamespace(program=b"", tail=b"")
        cache.put(StoredKey(str(index), _CALL), RunnableProgram(compiled, Loadable("key", b"g" * 10, files=(file,))))
    assert cache.held_bytes == 850
    cache.put(StoredKey("other", _CALL), runnable(300))
    # All of them have to go before the file does.
    assert cache.held_bytes == 300


def test_bytes_of_the_description_count() -> None:
    told = program_pb2.Program(default_gradient_nodes=["node" * 100] * 100)
    assert (
        RunnableProgram(SimpleNamespace(program=told.SerializeToString(), tail=b""), Loadable("key", b"")).size
        >= told.ByteSize()
    )


def test_removing_a_stored_program_removes_its_variants() -> None:
    cache = ProgramCache(100, 10**6)
    for call in (_CALL, CallShape(frozenset({"h"}))):
        cache.put(StoredKey("n", call), runnable())
    cache.put(StoredKey("m", _CALL), runnable())
    cache.remove(lambda key: isinstance(key, StoredKey) and key.name == "n")
    assert cache.held_bytes == 100
    assert cache.get(StoredKey("m", _CALL)) is not None


SETTINGS = {
    "params": "CallPlan.settings, from the program's param settings",
    "derivative": "part of the program's key",
    "stacked_grad_ys": "part of the program's key",
    "batching": "CallPlan.is_batched",
    "answer_packing": "the engine reads it",
    "run_timeout": "CallPlan.run_limit_s",
}
"""How a call whose header is known applies the fields of the header that are neither its program nor tensors."""


def test_plans_apply_every_field_of_a_header() -> None:
    """A new field of `EvaluateHeader` needs an entry in SETTINGS: say how `CallPlan` or the engine applies it."""
    fields = {field.name for field in evaluate_pb2.EvaluateHeader.DESCRIPTOR.fields}
    assert fields == {"program", "feeds", "grad_ys", "tangents", "vectors", *SETTINGS}


def plan(program: RunnableProgram) -> CallPlan:
    recorder: Any = None
    return CallPlan(program, b"", recorder, b"", math.inf, False)


def test_dropping_a_program_drops_only_its_plans() -> None:
    cache = ProgramCache(2, 10**6)
    keys = {name: StoredKey(name, _CALL) for name in "abc"}
    for name in "ab":
        program = runnable()
        cache.put(keys[name], program)
        for number in range(2):
            cache.add_plan(name.encode() + bytes([number]), keys[name], plan(program))
    # A plan that is used keeps its program: the other one goes.
    assert cache.find_plan(b"a\0") is not None
    cache.put(keys["c"], runnable())
    assert [cache.find_plan(name + b"\1") is not None for name in (b"a", b"b")] == [True, False]
    cache.remove(lambda key: key == keys["a"])
    assert cache.find_plan(b"a\0") is None
    assert not cache._by_header
    assert cache.held_bytes == 100


def test_plans_of_a_program_that_was_dropped_or_replaced_are_not_kept() -> None:
    cache, key, program = ProgramCache(2, 10**6), StoredKey("a", _CALL), runnable()
    cache.add_plan(b"a", key, plan(program))
    cache.put(key, program)
    cache.add_plan(b"b", key, plan(program))
    cache.put(key, runnable())
    cache.add_plan(b"c", key, plan(program))
    assert not cache._by_header


def test_oldest_plans_of_a_program_are_dropped() -> None:
    """A program that is called with other params each time does not take the memory."""
    cache, key, program = ProgramCache(2, 10**6), StoredKey("a", _CALL), runnable()
    cache.put(key, program)
    for number in range(200):
        cache.add_plan(b"%d" % number, key, plan(program))
    assert len(cache._by_header) < 200
    assert cache.held_bytes == 100 + sum(map(len, cache._by_header))
    assert cache.find_plan(b"0") is None
    assert cache.find_plan(b"199") is not None


def test_long_headers_are_not_kept() -> None:
    cache, key, program = ProgramCache(2, 10**6), StoredKey("a", _CALL), runnable()
    cache.put(key, program)
    cache.add_plan(bytes(20_000), key, plan(program))
    assert not cache._by_header


@pytest.mark.parametrize("key", [StoredKey("n", _CALL), InlineKey(b"n", 1, _CALL)])
def test_missing_program_is_none(key: StoredKey | InlineKey) -> None:
    assert ProgramCache(1, 1).get(key) is None
