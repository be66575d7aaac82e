"""Where the bytes of a prepared program are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradrule.v1 import program_pb2
from gradrule_server import graphs
from gradrule_server.link.shape import CallShape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs import compiler
from gradrule_server.registry.blobs import BlobStore
from tests.service import raw


def test_a_prepared_program_holds_its_graph_once(tmp_path: Path) -> None:
    spec = program_pb2.ProgramSpec(fetches=["y"])
    spec.graph.inline.CopyFrom(raw.sign_graph())
    lookup: Any = None  # no rule is named
    prepared, loadable = compiler._prepare(spec, CallShape(), lookup, graphs.Limits(), BlobStore(tmp_path, 0), "ada")
    request = link_pb2.CompileRequest.FromString(loadable.request)
    assert b"Sign" in request.graph
    assert prepared.request.graph == b""
    assert prepared.expanded.graph_bytes == b""
    request.ClearField("graph")
    assert prepared.request == request
    assert (loadable.nodes, loadable.owner) == (2, "ada")
    assert (loadable.key, request.key) == (prepared.key, prepared.key)
