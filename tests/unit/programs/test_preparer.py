"""What becomes of a task whose worker ends, and of its graph."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gradrule.v1 import program_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.link.connection import Work
from gradrule_server.link.endings import Ending, Reason
from gradrule_server.link.shape import CallShape
from gradrule_server.policy import Limits
from gradrule_server.programs.conduct import Conduct
from gradrule_server.programs.preparer import Preparer
from gradrule_server.registry.blobs import BlobStore
from tests.unit.link.fake_engine import CRASH, KILLED, FakeEngine, FakePool

_SPEC = program_pb2.ProgramSpec(fetches=["y"]).SerializeToString()
_MEMORY = Ending(Reason.MEMORY, "SIGKILL")


class EndingEngine(FakeEngine):
    """Ends as soon as it has a request."""

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self._end = ending

    def submit(self, *given: Any, **words: Any) -> Work:
        work = super().submit(*given, **words)
        self.fake.die(self._end)
        return work


class Workers:
    """Gives each task a worker that ends as the next of `endings` says, before it answers."""

    def __init__(self, *endings: Ending) -> None:
        self.endings = list(endings)
        self.given = 0

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[FakeEngine]:
        self.given += 1
        yield EndingEngine(self.endings.pop(0))


def preparer(folder: Path, workers: Workers) -> Preparer:
    pool: Any = FakePool()
    pool.workers = workers
    return Preparer(pool, Conduct(60.0), Limits(), BlobStore(folder, 0), "ada")


async def refused(asked: Preparer) -> str:
    with pytest.raises(GradruleError) as caught:
        await asked.program(_SPEC, CallShape(), b"", 0.0)
    return reason_name(caught.value.reason)


@pytest.mark.parametrize(("ending", "reason"), [(CRASH, "ENGINE_CRASHED"), (_MEMORY, "MEMORY_EXCEEDED")])
async def test_a_graph_that_ends_two_workers_is_refused(tmp_path: Path, ending: Ending, reason: str) -> None:
    workers = Workers(ending, ending)
    asked = preparer(tmp_path, workers)
    assert await refused(asked) == reason
    assert await refused(asked) == "QUARANTINED"
    assert workers.given == 2


async def test_workers_that_somebody_kills_are_not_the_graphs_doing(tmp_path: Path) -> None:
    workers = Workers(*[KILLED] * 12)
    asked = preparer(tmp_path, workers)
    assert await refused(asked) == "ENGINE_CRASHED"
    assert await refused(asked) == "ENGINE_CRASHED"
    assert workers.given == 12
