"""What becomes of a task whose worker ends, or answers and asks what no worker does, and of its graph."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradrule.v1 import program_pb2, rule_pb2
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.messages import CallShape
from gradrule_server.link.request_scheduler import EngineRequest
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.programs.preparer import Preparer, RegistryLookup
from gradrule_server.recovery.crash_history import CrashHistory
from gradrule_server.recovery.endings import EndReason, EngineEnd
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store
from tests.unit.link.fake_engine import CRASH, KILLED, FakeEngine, FakePool

_SPEC = program_pb2.ProgramSpec(fetches=["y"]).SerializeToString()
_MEMORY = EngineEnd(EndReason.MEMORY, "SIGKILL")


class EndingEngine(FakeEngine):
    """Ends as soon as it has a request."""

    def __init__(self, ending: EngineEnd) -> None:
        super().__init__()
        self._end = ending

    def submit(self, *given: Any, **words: Any) -> EngineRequest:
        work = super().submit(*given, **words)
        self.fake.die(self._end)
        return work


class Workers:
    """Gives each task a worker that ends as the next of `endings` says, before it answers; None: never answers."""

    def __init__(self, *endings: EngineEnd | None) -> None:
        self.endings = list(endings)
        self.given = 0

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[FakeEngine]:
        self.given += 1
        ending = self.endings.pop(0)
        yield FakeEngine() if ending is None else EndingEngine(ending)


def preparer(folder: Path, workers: Workers) -> Preparer:
    pool: Any = FakePool()
    pool.workers = workers
    return Preparer(pool, CrashHistory(60.0), Limits(), BlobStore(folder, 0), "ada")


async def refused(asked: Preparer) -> str:
    with pytest.raises(GradruleError) as caught:
        await asked.program(_SPEC, CallShape(), b"", 0.0)
    return reason_name(caught.value.reason)


async def test_a_graph_that_ends_a_worker_is_refused(tmp_path: Path) -> None:
    workers = Workers(CRASH)
    asked = preparer(tmp_path, workers)
    assert await refused(asked) == "ENGINE_CRASHED"
    assert await refused(asked) == "QUARANTINED"
    assert workers.given == 1


async def test_a_graph_for_which_workers_lack_memory_is_not_quarantined(tmp_path: Path) -> None:
    workers = Workers(*(replace(_MEMORY) for _ in range(4)))
    asked = preparer(tmp_path, workers)
    assert await refused(asked) == "MEMORY_EXCEEDED"
    assert await refused(asked) == "MEMORY_EXCEEDED"
    assert workers.given == 4


async def test_graph_is_not_blamed_for_killed_workers(tmp_path: Path) -> None:
    workers = Workers(*[KILLED] * 12)
    asked = preparer(tmp_path, workers)
    assert await refused(asked) == "ENGINE_CRASHED"
    assert await refused(asked) == "ENGINE_CRASHED"
    assert workers.given == 12


class Attached:
    """One worker, which the test speaks for. `ended`: whether it was ended."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.ended = False

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[FakeEngine]:
        yield self.engine

    def end(self, worker: FakeEngine) -> None:
        assert worker is self.engine
        self.ended = True

    async def ask(self, data: bytes, answers: int) -> link_pb2.Answer:
        """Asks something, and returns the answer, which is the `answers`-th."""
        self.send(Kind.QUESTION, data)
        return link_pb2.Answer.FromString(await self.engine.next(Kind.ANSWER, answers))

    def send(self, kind: Kind, data: bytes) -> None:
        _, request_id, _ = self.engine.transport.sent[0]
        self.engine.fake.connection.data_received(pack_header(kind, request_id, len(data)) + data)


def prepared(message: link_pb2.PreparedProgram, request: bytes = b"") -> bytes:
    data = message.SerializeToString()
    return struct.pack("<Q", len(data)) + data + request


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 2) + b"\xff\xff",
        prepared(link_pb2.PreparedProgram(nodes=-1)),
    ],
)
async def test_damaged_answer_ends_the_worker_with_a_typed_error(tmp_path: Path, answer: bytes) -> None:
    worker = Attached()
    asked: Any = worker
    task = asyncio.create_task(refused(preparer(tmp_path, asked)))
    await worker.engine.next(Kind.PREPARE)
    worker.send(Kind.PREPARED, answer)
    assert await task == "ENGINE_CRASHED"
    assert worker.ended


@pytest.mark.parametrize(
    "questions",
    [
        [b"\xff\xff"],
        [link_pb2.Question(unknown_rule="x" * (1 << 20)).SerializeToString()],
        # The second one comes before the first one is answered.
        [link_pb2.Question(unknown_rule="x").SerializeToString()] * 2,
    ],
)
async def test_invalid_questions_end_the_connection(tmp_path: Path, questions: list[bytes]) -> None:
    worker = Attached()
    asked: Any = worker
    preparing = asyncio.create_task(preparer(tmp_path, asked).program(_SPEC, CallShape(), b"", 0.0))
    await worker.engine.next(Kind.PREPARE)
    for question in questions:
        worker.send(Kind.QUESTION, question)
    assert worker.engine.transport.is_closed
    preparing.cancel()
    await asyncio.wait([preparing])


async def test_worker_that_reads_no_answers_may_not_ask_more(tmp_path: Path) -> None:
    worker = Attached()
    asked: Any = worker
    preparing = asyncio.create_task(preparer(tmp_path, asked).program(_SPEC, CallShape(), b"", 0.0))
    await worker.engine.next(Kind.PREPARE)
    worker.engine.transport.unread = 8 << 20
    worker.send(Kind.QUESTION, link_pb2.Question(unknown_rule="x").SerializeToString())
    assert worker.engine.transport.is_closed
    preparing.cancel()
    await asyncio.wait([preparing])


async def test_worker_receives_an_error_if_the_server_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(BlobStore, "sizes", fails)
    worker = Attached()
    asked: Any = worker
    preparing = asyncio.create_task(preparer(tmp_path, asked).program(_SPEC, CallShape(), b"", 0.0))
    await worker.engine.next(Kind.PREPARE)
    question = link_pb2.Question(blob_sizes=link_pb2.Names(names=["ab" * 32]))
    told = await worker.ask(question.SerializeToString(), 1)
    assert reason_name(told.fault.reason) == "INTERNAL"
    assert "disk" not in told.fault.message
    preparing.cancel()
    await asyncio.wait([preparing])


def test_an_answer_holds_definitions_of_a_few_mebibytes(tmp_path: Path) -> None:
    """500 rules of 1 MiB in one answer would be copied several times on the event loop."""
    registry = RuleRegistry(Store(tmp_path), ["Sign"])
    graph = b"\x12\x00" * 400_000
    definition = rule_pb2.RuleDefinition(graph=rule_pb2.GraphSource(serialized=graph))
    names = [f"Large{number}" for number in range(12)]
    for name in names:
        registry.create(name, definition, "", is_checked=True)
    lookup, wanted, asked = RegistryLookup(registry), ["Sign", *names], 0
    while wanted:
        found = lookup.find(wanted)
        assert sum(rule.ByteSize() for rule in found) < 6 << 20
        assert [rule.aliases[0] for rule in found] == wanted
        wanted = [
            rule.aliases[0]
            for rule in found
            if rule.kind == rule_pb2.RULE_KIND_USER and not rule.HasField("definition")
        ]
        asked += 1
    assert asked == 2
    snapshot = rule_pb2.ListRulesResponse.FromString(lookup.snapshot([names[0]] * 1000))
    assert len(snapshot.rules) == 1


async def test_values_that_a_worker_sends_are_kept_once(tmp_path: Path) -> None:
    """The second task finds them; both programs refer to one file, which ends with them."""
    worker, files = Attached(), []
    asked: Any = worker
    task = preparer(tmp_path, asked)
    for number in range(2):
        worker.engine = FakeEngine()
        preparing = asyncio.create_task(task.program(_SPEC, CallShape(), b"", 0.0))
        await worker.engine.next(Kind.PREPARE)
        content = link_pb2.Question(content=link_pb2.Content(name="some", size=5))
        told = await worker.ask(content.SerializeToString(), 1)
        assert bool(told.file) == bool(number)
        if not told.file:
            assert not (await worker.ask(link_pb2.Question(part=b"abc").SerializeToString(), 2)).file
            told = await worker.ask(link_pb2.Question(part=b"de").SerializeToString(), 3)
        worker.send(Kind.PREPARED, prepared(link_pb2.PreparedProgram()))
        [file] = (await preparing).files
        assert file.name == told.file
        files.append(file)
    assert files[0] is files[1]
    assert (tmp_path / files[0].name).read_bytes() == b"abcde"


@pytest.mark.parametrize(
    "questions",
    [
        [link_pb2.Question(part=b"abc")],
        [link_pb2.Question(content=link_pb2.Content(name="some", size=0))],
        [link_pb2.Question(content=link_pb2.Content(name="some", size=Limits().graph_bytes + 1))],
        [link_pb2.Question(content=link_pb2.Content(name="some", size=2)), link_pb2.Question(part=b"abc")],
    ],
)
async def test_values_that_no_worker_sends_are_refused(tmp_path: Path, questions: list[link_pb2.Question]) -> None:
    worker = Attached()
    asked: Any = worker
    preparing = asyncio.create_task(preparer(tmp_path, asked).program(_SPEC, CallShape(), b"", 0.0))
    await worker.engine.next(Kind.PREPARE)
    answers = [
        await worker.ask(question.SerializeToString(), number) for number, question in enumerate(questions, start=1)
    ]
    assert [answer.HasField("fault") for answer in answers] == [False] * (len(questions) - 1) + [True]
    preparing.cancel()
    await asyncio.wait([preparing])
