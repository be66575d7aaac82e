"""Tests that a compile worker keeps the graphs that it made of ONNX models."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gradrule.v1 import program_pb2, rule_pb2
from gradrule_server.policy import Limits
from gradrule_server.preparation import onnx_models
from gradrule_server.preparation.references import GraphReader
from tests.service.test_onnx_requests import simple


def test_a_model_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[int] = []
    original = onnx_models.to_graph

    def counted(data: bytes, limits: Limits) -> Any:
        converted.append(len(data))
        return original(data, limits)

    monkeypatch.setattr(onnx_models, "to_graph", counted)
    reader, spec, no_blobs = GraphReader(), program_pb2.ProgramSpec(), cast(Any, None)
    spec.graph.serialized, spec.graph.format = simple(), rule_pb2.GRAPH_FORMAT_ONNX
    first = reader.load(spec, Limits(), no_blobs)
    assert reader.load(spec, Limits(), no_blobs) is first
    assert converted == [len(spec.graph.serialized)]
    # What was made of the bytes in one format is not taken for another format.
    spec.graph.format = rule_pb2.GRAPH_FORMAT_GRAPH_DEF
    assert reader.load(spec, Limits(), no_blobs) is not first
