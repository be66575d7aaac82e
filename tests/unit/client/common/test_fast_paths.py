"""Tests that fast paths can be turned off by name."""

from __future__ import annotations

import pytest

from gradrule._results.answers import AnswerReader
from gradrule._rpc.call_routes import Routes
from gradrule.common import fast_paths
from gradrule.v1 import evaluate_pb2


def test_names_are_read_from_a_list() -> None:
    assert fast_paths.disabled_paths("") == frozenset()
    assert fast_paths.disabled_paths(" streams, batching,") == {"streams", "batching"}
    assert fast_paths.disabled_paths("all") == set(fast_paths.FAST_PATHS)
    with pytest.raises(ValueError, match=r"no fast path 'fast'; the fast paths are streams, .*; all selects"):
        fast_paths.disabled_paths("fast")


def test_the_environment_variable_turns_the_clients_paths_off(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = evaluate_pb2.EvaluateResponse(device="CPU:0").SerializeToString()

    def kept() -> tuple[bool, bool]:
        routes, reader = Routes(use_stream=True), AnswerReader(str)
        reader.read(answer)
        streams = any(routes.may_stream(100, 0, is_open=True) for _ in range(9))
        return streams, reader._last is not None

    monkeypatch.delenv(fast_paths.VARIABLE, raising=False)
    assert kept() == (True, True)
    monkeypatch.setenv(fast_paths.VARIABLE, "streams")
    assert kept() == (False, True)
    monkeypatch.setenv(fast_paths.VARIABLE, "all")
    assert kept() == (False, False)
