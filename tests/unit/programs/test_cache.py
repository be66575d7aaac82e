"""The cache of compiled programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gradrule.v1 import program_pb2
from gradrule_server.link.messages import CallShape
from gradrule_server.programs.cache import InlineKey, ProgramCache, StoredKey
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import Loadable
from gradrule_server.programs.stored_programs import DeletedNames

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
    cache.remove_stored("n")
    assert cache.held_bytes == 100
    assert cache.get(StoredKey("m", _CALL)) is not None


def test_watchers_learn_of_deleted_names() -> None:
    changes = DeletedNames()
    changes.add("before")
    with changes.watch() as outer:
        with changes.watch() as inner:
            changes.add("a")
        changes.add("b")
    changes.add("after")
    assert (outer, inner) == ({"a", "b"}, {"a"})


@pytest.mark.parametrize("key", [StoredKey("n", _CALL), InlineKey(b"n", 1, _CALL)])
def test_missing_program_is_none(key: StoredKey | InlineKey) -> None:
    assert ProgramCache(1, 1).get(key) is None
