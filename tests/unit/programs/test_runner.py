"""The ways in which an engine runs a program."""

from __future__ import annotations

from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.runner import RunForward, RunOnce
from tests.unit.link.fake_engine import FakeEngine


async def test_undo_releases_what_a_forward_run_keeps() -> None:
    engine = FakeEngine()
    RunForward(0.0, "h1").undo(engine)
    assert [link_pb2.ReleaseRequest.FromString(sent).handle for sent in engine.sent(Kind.RELEASE)] == ["h1"]
    assert RunOnce(0.0).undo is None
