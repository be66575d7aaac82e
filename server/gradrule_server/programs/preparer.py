"""Gives tasks to compile workers, the processes that read graphs, and answers what they ask about rules and blobs.

This process passes graphs on as bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import math
import struct
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2
from gradrule_server.concurrency import TenantLocks
from gradrule_server.errors import GradruleError, NoMemoryLeft, error
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import CallShape, fault_message, shape_message
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.request_scheduler import EngineRequest
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.recovery.call_recovery import CallRecovery, ProcessWords
from gradrule_server.recovery.crash_history import CrashHistory, Workload
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.kept_values import KeptFile, KeptValues
from gradrule_server.registry.rule_entries import RuleEntry
from gradrule_server.registry.rules import RuleRegistry

_log = logging.getLogger(__name__)

# Length of the PreparedProgram, which comes before the CompileRequest.
_LENGTH = struct.Struct("<Q")

# An answer to a question is made on the event loop, and copied several times. One rule has at most 1 MiB.
_MAX_ANSWER_BYTES = 4 << 20

# A worker runs graphs of strangers, so its questions are limited as messages of callers are. A question holds 500
# names at most; all names stand in the task, or in a graph that is a blob.
_MAX_QUESTION_BYTES = 1 << 20
_MAX_TOTAL_BYTES = 64 << 20
_MAX_EXPLAINED_NAMES = 20
# A program has values of its graph and of variables.
_MAX_FILES = 2

_WORDS = ProcessWords("a process has that reads it", "process that read it")

AnswerT = TypeVar("AnswerT")

_serial = itertools.count()


class RegistryLookup:
    """Finds rules for one task; a name means the same rule throughout the task."""

    def __init__(self, registry: RuleRegistry) -> None:
        self._registry = registry
        self._found: dict[str, RuleEntry | None] = {}
        self._is_fresh: bool | None = None if registry.is_shared else True

    async def refresh(self) -> None:
        """Applies once what other servers have written before this task; rules in memory stay usable if that fails."""
        if self._is_fresh is None:
            self._is_fresh = await asyncio.to_thread(self._registry.refresh)

    def find(self, names: Iterable[str]) -> list[rule_pb2.Rule]:
        """Returns the rules of these names, without names that no rule has; each rule's alias is the requested name.

        BUILTIN rules lack their definitions, which every process has. USER rules lack them once the answer has 4 MiB;
        the worker asks for these again. Accesses the database for large rules.
        """
        found, left = [], _MAX_ANSWER_BYTES
        for name in names:
            if name not in self._found:
                self._found[name] = self._registry.find(name)
            entry = self._found[name]
            if entry is not None:
                found.append(_message(name, entry, is_complete=entry.kind == rule_pb2.RULE_KIND_USER and left > 0))
                left -= entry.size
        return found

    def unknown(self, name: str) -> GradruleError:
        """Returns UNKNOWN_RULE for a name, with similar names; UNAVAILABLE if another server may have the rule."""
        return self._registry.unknown(name, is_fresh=self._is_fresh is True)

    def snapshot(self, names: Iterable[str]) -> bytes:
        """Returns those of the named rules that `find` has found, as bytes that are stored with a program."""
        rules = [
            _message(name, entry, is_complete=True)
            for name in dict.fromkeys(names)
            if (entry := self._found.get(name)) is not None
        ]
        return rule_pb2.ListRulesResponse(rules=rules).SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that a worker has checked and expanded.

    `compile_request`: bytes of the `CompileRequest`. `files`: files of values that it names.
    """

    message: link_pb2.PreparedProgram
    compile_request: bytes
    files: tuple[KeptFile, ...] = ()


class Preparer:
    """Sends tasks to the compile workers of the tenant `owner`; refuses graphs that are in quarantine."""

    def __init__(
        self, pool: EnginePool, crash_history: CrashHistory, limits: Limits, blobs: BlobStore, owner: str
    ) -> None:
        self._workers = pool.workers
        self._recovery_workers = _RecoveryWorkers(pool)
        self._crash_history = crash_history
        self._limits = limits.to_values()
        self._blobs = blobs
        self._kept = KeptValues(blobs)
        self._max_file_bytes = limits.graph_bytes
        self._owner = owner

    async def program(
        self,
        spec: bytes,
        call: CallShape,
        rules: RegistryLookup | bytes,
        ends_at: float,
        *,
        is_kept: bool = False,
    ) -> Prepared:
        """Checks and expands a program. Raises `GradruleError` with all that is wrong.

        Args:
            spec: Bytes of the `ProgramSpec`.
            call: The structure of its calls.
            rules: The registry's rules, or the snapshot of a stored program's rules.
            ends_at: Loop time of the deadline; 0: none.
            is_kept: Whether the answer holds what the registry stores.
        """
        task = link_pb2.ProgramTask(
            spec=spec,
            call=shape_message(call),
            snapshot=rules if isinstance(rules, bytes) else None,
            namespace=f"gr{next(_serial)}",
            is_kept=is_kept,
        )
        keeping = _Keeping(self._kept, self._max_file_bytes)
        questions = _WorkerQuestions(self._blobs, None if isinstance(rules, bytes) else rules, keeping)
        request = link_pb2.PrepareRequest(program=task)
        read = functools.partial(_read_program, questions)
        return await self._run_task(request, _digest_of_graph(spec), questions, ends_at, read)

    async def variables(self, spec: bytes, ends_at: float) -> list[link_pb2.GraphVariable]:
        """Returns the variables of a spec's graph."""
        task = link_pb2.PrepareRequest(variables=link_pb2.VariablesTask(spec=spec))
        questions = _WorkerQuestions(self._blobs)
        return await self._run_task(task, _digest_of_graph(spec), questions, ends_at, _read_variables)

    async def describe_graph(self, spec: bytes, ends_at: float) -> bytes:
        """Returns the bytes of a `DescribeGraphResponse`. `spec`: Bytes of a `ProgramSpec`."""
        task = link_pb2.PrepareRequest(describe=spec)
        return await self._run_task(task, _digest_of_graph(spec), _WorkerQuestions(self._blobs), ends_at, bytes)

    async def rule(self, definition: rule_pb2.RuleDefinition, ends_at: float) -> rule_pb2.RuleDefinition:
        """Checks a rule that is a graph, and returns it with its graph as bytes."""
        task = link_pb2.PrepareRequest(rule=definition)
        workload = _digest(definition.SerializeToString(deterministic=True))
        questions = _WorkerQuestions(self._blobs)
        checked = await self._run_task(task, workload, questions, ends_at, link_pb2.CheckedRule.FromString)
        return checked.definition

    async def sample(self, request: bytes, rules: RegistryLookup, ends_at: float) -> link_pb2.RawEvaluateRequest:
        """Returns the call that computes what a `SampleRuleRequest` asks for. `request`: its bytes."""
        task = link_pb2.PrepareRequest(sample=request)
        questions = _WorkerQuestions(self._blobs, rules)
        return await self._run_task(task, _digest(request), questions, ends_at, link_pb2.RawEvaluateRequest.FromString)

    async def _run_task(
        self,
        task: link_pb2.PrepareRequest,
        graph: str,
        questions: _WorkerQuestions,
        ends_at: float,
        read: Callable[[bytes], AnswerT],
    ) -> AnswerT:
        """Returns the answer of a worker. A graph that ends a worker goes into quarantine.

        Args:
            task: The task, without limits.
            graph: Digest of the graph, which is blamed for crashes.
            questions: Answers the worker's questions.
            ends_at: Loop time of the deadline; 0: none.
            read: Parses the answer; raises `DecodeError` for a damaged one.
        """
        task.limits.update(self._limits)
        task.blob_folder = self._blobs.folder_name
        payload = task.SerializeToString()
        questions.bytes_left += len(payload)

        async def attempt(worker: Engine | None) -> AnswerT:
            if worker is not None:
                return await self._run_once(worker, payload, questions, ends_at, read)
            async with self._workers.hold(self._owner) as any_worker:
                return await self._run_once(any_worker, payload, questions, ends_at, read)

        workload = Workload(self._owner, graph, evaluate_pb2.DERIVATIVE_UNSPECIFIED)
        recovery = CallRecovery(self._recovery_workers, self._crash_history, ends_at=ends_at, words=_WORDS)
        recovery.is_building = True
        with contextlib.closing(questions):
            return await recovery.run(workload, attempt)

    async def _run_once(
        self,
        worker: Engine,
        payload: bytes,
        questions: _WorkerQuestions,
        ends_at: float,
        read: Callable[[bytes], AnswerT],
    ) -> AnswerT:
        try:
            return read(await worker.call(Kind.PREPARE, payload, ends_at or math.inf, on_question=questions.answer))
        except NoMemoryLeft as full:
            # The process does not return all of its memory. It works on one task at a time.
            self._workers.end(worker)
            full.is_alone = True
            raise
        except DecodeError as cause:
            _log.error("the answer of compile worker %s cannot be read: %s; ending it", worker.pid, cause)
            self._workers.end(worker)
            raise error(
                errors_pb2.ERROR_REASON_ENGINE_CRASHED, "the answer of the process that read the graph is damaged"
            ) from cause


class _RecoveryWorkers:
    """Gives compile workers to `CallRecovery`. A worker has one task at a time, so each task runs alone."""

    def __init__(self, pool: EnginePool) -> None:
        self._workers = pool.workers
        self.memory_limit = pool.memory_limit
        self.trials = TenantLocks()

    def serves(self, owner: str) -> bool:
        """Returns True: a task waits for its worker when it runs."""
        return True

    async def provide(self, owner: str, ends_at: float = 0.0, patience_s: float = 0.0) -> None:
        """Does nothing, see `serves`."""

    def alone(self, owner: str) -> AbstractAsyncContextManager[Engine]:
        """Provides a worker for one task."""
        return self._workers.hold(owner)


class _WorkerQuestions:
    """Answers the questions of a worker during one task.

    Args:
        blobs: The caller's blobs.
        rules: Finds rules by name; None: the task needs none.
        keeping: Keeps values; None: the task has none.
    """

    def __init__(
        self,
        blobs: BlobStore,
        rules: RegistryLookup | None = None,
        keeping: _Keeping | None = None,
    ) -> None:
        self.keeping = keeping
        self._blobs = blobs
        self._rules = rules
        self._explained = 0
        self.bytes_left = _MAX_TOTAL_BYTES
        """Bytes of questions that the worker may still send."""
        self._pinned: set[str] = set()
        self._is_closed = False
        self._answering: set[asyncio.Task[None]] = set()

    def answer(self, work: EngineRequest, payload: bytes) -> None:
        """Answers a question. Raises `DecodeError` or `ValueError` for a question that no correct worker sends."""
        question = link_pb2.Question.FromString(payload) if len(payload) <= _MAX_QUESTION_BYTES else None
        # The file that it is for limits the bytes of a part.
        self.bytes_left -= 0 if question is not None and question.HasField("part") else len(payload)
        if question is None or self.bytes_left < 0:
            raise ValueError("the questions of a compile worker are too large")
        task = asyncio.create_task(self._answer(work, question), name="answer-worker")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def close(self) -> None:
        """Unpins the blobs, which stay until the task has ended; cancels answers that wait for blobs."""
        self._is_closed = True
        for task in self._answering:
            task.cancel()
        for name in self._pinned:
            self._blobs.unpin([name])

    async def _answer(self, work: EngineRequest, question: link_pb2.Question) -> None:
        try:
            answer = await self._find_answer(question)
        except GradruleError as cause:
            answer = link_pb2.Answer(fault=fault_message(cause))
        except Exception:
            # Without an answer the worker would wait until the deadline.
            _log.exception("the question of a compile worker cannot be answered")
            failure = error(errors_pb2.ERROR_REASON_INTERNAL, "the server cannot look up what the program refers to")
            answer = link_pb2.Answer(fault=fault_message(failure))
        work.connection.answer_question(work, answer.SerializeToString())

    async def _find_answer(self, question: link_pb2.Question) -> link_pb2.Answer:
        match question.WhichOneof("question"):
            case "rules" if self._rules is not None:
                await self._rules.refresh()
                return link_pb2.Answer(rules=await asyncio.to_thread(self._rules.find, question.rules.names))
            case "unknown_rule" if self._rules is not None and self._explained < _MAX_EXPLAINED_NAMES:
                self._explained += 1
                unknown = await asyncio.to_thread(self._rules.unknown, question.unknown_rule)
                return link_pb2.Answer(fault=fault_message(unknown))
            case "blob_sizes":
                names = list(question.blob_sizes.names)
                sizes = await self._blobs.look_up(lambda: self._blobs.sizes(names))
                return link_pb2.Answer(sizes=sizes)
            case "blob":
                await self._pin(question.blob)
                return link_pb2.Answer()
            case "content" if self.keeping is not None:
                return link_pb2.Answer(file=await asyncio.to_thread(self.keeping.open, question.content))
            case "part" if self.keeping is not None:
                return link_pb2.Answer(file=await asyncio.to_thread(self.keeping.write, question.part))
            case kind:
                raise error(errors_pb2.ERROR_REASON_INTERNAL, f"a compile worker asked an unexpected question: {kind}")

    async def _pin(self, name: str) -> None:
        await self._blobs.acquire([name])
        if self._is_closed or name in self._pinned:
            self._blobs.unpin([name])
        else:
            self._pinned.add(name)


class _Keeping:
    """Keeps the values that a worker sends during one task. `max_bytes`: most bytes of a file."""

    def __init__(self, kept: KeptValues, max_bytes: int) -> None:
        self._kept = kept
        self._max_bytes = max_bytes
        self._incoming: tuple[str, KeptFile] | None = None
        self._files: dict[str, KeptFile] = {}

    @property
    def files(self) -> tuple[KeptFile, ...]:
        """The files that the task has named."""
        return tuple(self._files.values())

    def open(self, content: link_pb2.Content) -> str:
        """Returns the name of the file with a content; empty: `write` receives it. Raises QUOTA_EXCEEDED."""
        file = self._kept.find(content.name)
        if file is None:
            if not 0 < content.size <= self._max_bytes or len(self._files) >= _MAX_FILES:
                raise ValueError(
                    f"a compile worker sends {content.size} bytes of values, {len(self._files)} files before"
                )
            self._incoming = content.name, self._kept.create(content.size)
            return ""
        self._files[content.name] = file
        return file.name

    def write(self, part: bytes) -> str:
        """Appends bytes; returns the name of the file once it is complete. Raises QUOTA_EXCEEDED."""
        if self._incoming is None:
            raise ValueError("a compile worker sends values without a name")
        name, file = self._incoming
        file.write(part)
        if not file.is_complete:
            return ""
        self._incoming = None
        self._kept.add(name, file)
        self._files[name] = file
        return file.name


def _message(requested_name: str, entry: RuleEntry, *, is_complete: bool) -> rule_pb2.Rule:
    content = entry.full_content() if is_complete else None
    definition = None if content is None else content.to_definition()
    return rule_pb2.Rule(name=entry.name, definition=definition, kind=entry.kind, aliases=[requested_name])


def _read_program(questions: _WorkerQuestions, answer: bytes) -> Prepared:
    """Parses a prepared program but not its request, which is as large as the graph. Raises `DecodeError`."""
    start = _LENGTH.size
    if len(answer) >= start:
        start += _LENGTH.unpack_from(answer)[0]
    if len(answer) < start:
        raise DecodeError("it is too short")
    message = link_pb2.PreparedProgram.FromString(answer[_LENGTH.size : start])
    if message.nodes < 0:
        raise DecodeError("it has a negative number of nodes")
    return Prepared(message, answer[start:], () if questions.keeping is None else questions.keeping.files)


def _read_variables(answer: bytes) -> list[link_pb2.GraphVariable]:
    """Parses the variables that a worker has found. Raises `DecodeError`."""
    found = list(link_pb2.GraphVariables.FromString(answer).variables)
    if not all(item.names for item in found):
        raise DecodeError("a variable has no name")
    return found


def _digest_of_graph(spec: bytes) -> str:
    """Returns the digest of a spec's graph, which is blamed for crashes of workers; the graph is not parsed."""
    try:
        return _digest(link_pb2.RawProgramSpec.FromString(spec).graph)
    except DecodeError:
        return _digest(spec)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
