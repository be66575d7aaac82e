"""Has graphs read in compile workers: the front end passes their bytes on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.engine_request import EngineRequest
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import CallShape, fault_message, shape_message
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.programs.rule_lookup import RegistryLookup
from gradrule_server.recovery.call_recovery import culprit_error
from gradrule_server.recovery.crash_history import CrashHistory, Workload
from gradrule_server.recovery.endings import EngineLost
from gradrule_server.registry.blobs import BlobStore

_log = logging.getLogger(__name__)

# Processes that are killed from outside are not the graph's doing.
_MOST_KILLED = 5

# Bytes of the PreparedProgram, before it and the CompileRequest.
_LENGTH = struct.Struct("<Q")

# What a worker may ask: it runs other people's graphs, so its questions are bounded as messages of callers are. A
# question holds 500 names at most. Together they are names that stand in the task, or in a graph that is a blob.
_MOST_QUESTION_BYTES = 1 << 20
_MOST_BYTES_ASKED = 64 << 20
_MOST_EXPLAINED = 20
_DIGEST_BYTES = hashlib.sha256().digest_size

AnswerT = TypeVar("AnswerT")

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a worker answered. `compile_request`: bytes of the `CompileRequest`."""

    message: link_pb2.PreparedProgram
    compile_request: bytes


class Preparer:
    """Gives tasks to the compile workers of the tenant `owner`. `crash_history`: what is known of its graphs."""

    def __init__(
        self, pool: EnginePool, crash_history: CrashHistory, limits: Limits, blobs: BlobStore, owner: str
    ) -> None:
        self._pool = pool
        self._crash_history = crash_history
        self._limits = limits.to_values()
        self._blobs = blobs
        self._owner = owner

    async def program(
        self,
        spec: bytes,
        call: CallShape,
        rules: RegistryLookup | bytes,
        ends_at: float,
        *,
        is_known: Callable[[bytes], bool] | None = None,
        is_kept: bool = False,
    ) -> Prepared:
        """Checks and expands a program. Raises `GradruleError` with all that is wrong.

        Args:
            spec: Bytes of the `ProgramSpec`.
            call: The structure of its calls.
            rules: The registry's rules, or the snapshot of a kept program's.
            ends_at: Loop time of the deadline; 0: none.
            is_known: Called with the digest of the spec; where it returns True the program is not prepared.
            is_kept: Whether the answer holds what a registry keeps.
        """
        task = link_pb2.ProgramTask(
            spec=spec,
            call=shape_message(call),
            snapshot=rules if isinstance(rules, bytes) else None,
            namespace=f"gr{next(_serial)}",
            may_be_known=is_known is not None,
            is_kept=is_kept,
        )
        asked = _Asked(self._blobs, None if isinstance(rules, bytes) else rules, is_known)
        request = link_pb2.PrepareRequest(program=task)
        return await self._work(request, _graph_of(spec), asked, ends_at, asked.read_program)

    def graph_bytes(self, spec: bytes) -> int:
        """Returns how large the graph of a spec is; 0 where that cannot be told without reading it."""
        try:
            graph = link_pb2.RawProgramSpec.FromString(spec).graph
            blob = link_pb2.RawGraphSource.FromString(graph).blob_sha256
            return self._blobs.size(blob) if blob else len(graph)
        except (DecodeError, GradruleError):
            # The worker says what is wrong with it.
            return 0

    async def finish(
        self, plan: bytes, reply: bytes, device: str, workload: str, ends_at: float
    ) -> link_pb2.FinishedProgram:
        """Puts together what a program is that an engine has compiled. Raises INACTIVE_OVERRIDE."""
        task = link_pb2.PrepareRequest(finish=link_pb2.FinishTask(plan=plan, reply=reply, device=device))
        return await self._work(task, workload, _Asked(self._blobs), ends_at, link_pb2.FinishedProgram.FromString)

    async def variables(self, spec: bytes, ends_at: float) -> list[link_pb2.GraphVariable]:
        """Returns the variables of a spec's graph."""
        task = link_pb2.PrepareRequest(variables=link_pb2.VariablesTask(spec=spec))
        return await self._work(task, _graph_of(spec), _Asked(self._blobs), ends_at, _read_variables)

    async def rule(self, definition: rule_pb2.RuleDefinition, ends_at: float) -> rule_pb2.RuleDefinition:
        """Checks a rule that is a graph; returns it with its graph as bytes."""
        task = link_pb2.PrepareRequest(rule=definition)
        workload = _digest(definition.SerializeToString(deterministic=True))
        checked = await self._work(task, workload, _Asked(self._blobs), ends_at, link_pb2.CheckedRule.FromString)
        return checked.definition

    async def sample(self, request: bytes, rules: RegistryLookup, ends_at: float) -> link_pb2.RawEvaluateRequest:
        """Returns the request that samples a rule as a `SampleRuleRequest` asks."""
        task = link_pb2.PrepareRequest(sample=request)
        asked = _Asked(self._blobs, rules)
        return await self._work(task, _digest(request), asked, ends_at, link_pb2.RawEvaluateRequest.FromString)

    async def _work(
        self,
        task: link_pb2.PrepareRequest,
        graph: str,
        asked: _Asked,
        ends_at: float,
        read: Callable[[bytes], AnswerT],
    ) -> AnswerT:
        """Returns the answer of a worker. A graph that ends two workers is refused for a while.

        `graph`: what is blamed for crashes. `read`: reads the answer; `DecodeError` where it is none.
        """
        task.limits.update(self._limits)
        task.blob_folder = self._blobs.folder_name
        payload = task.SerializeToString()
        asked.bytes_left += len(payload)
        workload = Workload(self._owner, graph, evaluate_pb2.DERIVATIVE_UNSPECIFIED)
        self._crash_history.check(workload)
        killed, suspected = 0, False
        with contextlib.closing(asked):
            while True:
                try:
                    return await self._once(payload, asked, ends_at or math.inf, read)
                except EngineLost as lost:
                    if not lost.is_blamable:
                        killed += 1
                        if killed > _MOST_KILLED:
                            raise
                    elif suspected:
                        # A worker has one task at a time: what ends two of them is to blame.
                        raise self._quarantine(workload, lost) from None
                    suspected = suspected or lost.is_blamable

    async def _once(self, payload: bytes, asked: _Asked, ends_at: float, read: Callable[[bytes], AnswerT]) -> AnswerT:
        async with self._pool.workers.hold(self._owner) as worker:
            try:
                return read(await worker.call(Kind.PREPARE, payload, ends_at, on_ask=asked.answer))
            except GradruleError as cause:
                if cause.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED and not isinstance(cause, EngineLost):
                    # What it took does not come back as a whole.
                    self._pool.workers.end(worker)
                raise
            except DecodeError as cause:
                _log.error("the answer of compile worker %s cannot be read: %s; ending it", worker.pid, cause)
                self._pool.workers.end(worker)
                raise error(
                    errors_pb2.ERROR_REASON_ENGINE_CRASHED, "the answer of the process that read the graph is damaged"
                ) from cause

    def _quarantine(self, workload: Workload, lost: EngineLost) -> GradruleError:
        self._crash_history.quarantine(workload, str(lost.engine_end))
        return culprit_error(
            lost.engine_end, self._pool.memory_limit, "a process has that reads it", "process that read it"
        )


class _Asked:
    """Answers what a worker asks during one task.

    Args:
        blobs: The caller's blobs.
        rules: The rules that names mean.
        is_known: Whether a program of this digest is known.
    """

    def __init__(
        self,
        blobs: BlobStore,
        rules: RegistryLookup | None = None,
        is_known: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._blobs = blobs
        self._rules = rules
        self._is_known = is_known
        self._has_said_known = False
        self._explained = 0
        self.bytes_left = _MOST_BYTES_ASKED
        """Bytes of questions that may still come."""
        self._holding = threading.Lock()
        self._held: set[str] = set()
        self._is_closed = False
        self._answering: set[asyncio.Task[None]] = set()

    def answer(self, work: EngineRequest, payload: bytes) -> None:
        """Answers a question. Raises `DecodeError` or `ValueError` for what no worker asks."""
        self.bytes_left -= len(payload)
        if len(payload) > _MOST_QUESTION_BYTES or self.bytes_left < 0:
            raise ValueError("the questions of a compile worker are too large")
        question = link_pb2.Question.FromString(payload)
        task = asyncio.create_task(self._answer(work, question), name="answer-worker")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def close(self) -> None:
        """Lets blobs go that stay while the task is worked on."""
        with self._holding:
            self._is_closed = True
        for name in self._held:
            self._blobs.unpin([name])

    def read_program(self, answer: bytes) -> Prepared:
        """Returns a prepared program, whose request is as large as its graph and is not parsed. `DecodeError`."""
        start = _LENGTH.size
        if len(answer) >= start:
            start += _LENGTH.unpack_from(answer)[0]
        if len(answer) < start:
            raise DecodeError("it is too short")
        message = link_pb2.PreparedProgram.FromString(answer[_LENGTH.size : start])
        if message.nodes < 0 or (message.is_known and not self._has_said_known):
            raise DecodeError("it contradicts itself")
        return Prepared(message, answer[start:])

    async def _answer(self, work: EngineRequest, question: link_pb2.Question) -> None:
        try:
            told = await self._told(question)
        except GradruleError as cause:
            told = link_pb2.Told(fault=fault_message(cause))
        except Exception:
            # The boundary of the process: without an answer the worker would wait until the deadline.
            _log.exception("the question of a compile worker cannot be answered")
            failure = error(errors_pb2.ERROR_REASON_INTERNAL, "the server cannot look up what the program refers to")
            told = link_pb2.Told(fault=fault_message(failure))
        work.connection.answer_question(work, told.SerializeToString())

    async def _told(self, question: link_pb2.Question) -> link_pb2.Told:
        match question.WhichOneof("question"):
            case "rules" if self._rules is not None:
                return link_pb2.Told(rules=self._rules.find(question.rules.names))
            case "unknown_rule" if self._rules is not None and self._explained < _MOST_EXPLAINED:
                self._explained += 1
                unknown = await asyncio.to_thread(self._rules.unknown, question.unknown_rule)
                return link_pb2.Told(fault=fault_message(unknown))
            case "blob_sizes":
                return link_pb2.Told(sizes=await asyncio.to_thread(self._sizes, list(question.blob_sizes.names)))
            case "blob":
                # Its hash may have to be checked, which takes long.
                await asyncio.to_thread(self._hold, question.blob)
                return link_pb2.Told()
            case "spec_digest" if self._is_known is not None and len(question.spec_digest) == _DIGEST_BYTES:
                self._has_said_known = self._is_known(question.spec_digest)
                return link_pb2.Told(is_known=self._has_said_known)
            case kind:
                raise error(errors_pb2.ERROR_REASON_INTERNAL, f"a compile worker asked for {kind} out of place")

    def _hold(self, name: str) -> None:
        self._blobs.pin([name])
        with self._holding:
            if not self._is_closed and name not in self._held:
                self._held.add(name)
                return
        self._blobs.unpin([name])

    def _sizes(self, names: list[str]) -> list[int]:
        missing = set(self._blobs.missing(names))
        return [-1 if name in missing else self._blobs.size(name) for name in names]


def _read_variables(answer: bytes) -> list[link_pb2.GraphVariable]:
    """Returns the variables that a worker found. `DecodeError`."""
    found = list(link_pb2.GraphVariables.FromString(answer).variables)
    if not all(item.names for item in found):
        raise DecodeError("a variable has no name")
    return found


def _graph_of(spec: bytes) -> str:
    """Returns what is blamed for a spec: the digest of its graph's bytes, which are not read."""
    try:
        return _digest(link_pb2.RawProgramSpec.FromString(spec).graph)
    except DecodeError:
        return _digest(spec)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
