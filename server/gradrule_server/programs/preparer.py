"""Sends tasks to compile workers, the processes that read graphs; this process only passes their bytes on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, evaluate_pb2, rule_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import CallShape, shape_message
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.programs.worker_questions import RegistryLookup, WorkerQuestions
from gradrule_server.recovery.call_recovery import culprit_error
from gradrule_server.recovery.crash_history import CrashHistory, Workload
from gradrule_server.recovery.endings import EngineLost
from gradrule_server.registry.blobs import BlobStore

_log = logging.getLogger(__name__)

# A worker that is killed from outside is not the graph's fault, but each try costs time.
_MAX_KILLED = 5

# Length of the PreparedProgram, which comes before the CompileRequest.
_LENGTH = struct.Struct("<Q")

AnswerT = TypeVar("AnswerT")

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that a worker has checked and expanded. `compile_request`: bytes of the `CompileRequest`."""

    message: link_pb2.PreparedProgram
    compile_request: bytes


class Preparer:
    """Sends tasks to the compile workers of the tenant `owner`; refuses graphs that are in quarantine."""

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
            rules: The registry's rules, or the snapshot of a stored program's rules.
            ends_at: Loop time of the deadline; 0: none.
            is_known: Called with the digest of the spec; where it returns True the program is not prepared.
            is_kept: Whether the answer holds what the registry stores.
        """
        task = link_pb2.ProgramTask(
            spec=spec,
            call=shape_message(call),
            snapshot=rules if isinstance(rules, bytes) else None,
            namespace=f"gr{next(_serial)}",
            may_be_known=is_known is not None,
            is_kept=is_kept,
        )
        questions = WorkerQuestions(self._blobs, None if isinstance(rules, bytes) else rules, is_known)
        request = link_pb2.PrepareRequest(program=task)
        read = functools.partial(_read_program, questions)
        return await self._run_task(request, _digest_of_graph(spec), questions, ends_at, read)

    def graph_bytes(self, spec: bytes) -> int:
        """Returns the size of a spec's graph in bytes; 0 if the spec is damaged or the blob is missing."""
        try:
            graph = link_pb2.RawProgramSpec.FromString(spec).graph
            blob = link_pb2.RawGraphSource.FromString(graph).blob_sha256
            return self._blobs.size(blob) if blob else len(graph)
        except (DecodeError, GradruleError):
            # The worker reports what is wrong.
            return 0

    async def finish(
        self, plan: bytes, reply: bytes, device: str, workload: str, ends_at: float
    ) -> link_pb2.FinishedProgram:
        """Describes a program that an engine has compiled. Raises INACTIVE_OVERRIDE.

        Args:
            plan: `PreparedProgram.plan`.
            reply: The engine's answer, bytes of a `CompileReply`.
            device: The engine's device.
            workload: Digest of the graph, which is blamed for crashes.
            ends_at: Loop time of the deadline; 0: none.
        """
        task = link_pb2.PrepareRequest(finish=link_pb2.FinishTask(plan=plan, reply=reply, device=device))
        questions = WorkerQuestions(self._blobs)
        return await self._run_task(task, workload, questions, ends_at, link_pb2.FinishedProgram.FromString)

    async def variables(self, spec: bytes, ends_at: float) -> list[link_pb2.GraphVariable]:
        """Returns the variables of a spec's graph."""
        task = link_pb2.PrepareRequest(variables=link_pb2.VariablesTask(spec=spec))
        questions = WorkerQuestions(self._blobs)
        return await self._run_task(task, _digest_of_graph(spec), questions, ends_at, _read_variables)

    async def rule(self, definition: rule_pb2.RuleDefinition, ends_at: float) -> rule_pb2.RuleDefinition:
        """Checks a rule that is a graph, and returns it with its graph as bytes."""
        task = link_pb2.PrepareRequest(rule=definition)
        workload = _digest(definition.SerializeToString(deterministic=True))
        questions = WorkerQuestions(self._blobs)
        checked = await self._run_task(task, workload, questions, ends_at, link_pb2.CheckedRule.FromString)
        return checked.definition

    async def sample(self, request: bytes, rules: RegistryLookup, ends_at: float) -> link_pb2.RawEvaluateRequest:
        """Returns the call that computes what a `SampleRuleRequest` asks for. `request`: its bytes."""
        task = link_pb2.PrepareRequest(sample=request)
        questions = WorkerQuestions(self._blobs, rules)
        return await self._run_task(task, _digest(request), questions, ends_at, link_pb2.RawEvaluateRequest.FromString)

    async def _run_task(
        self,
        task: link_pb2.PrepareRequest,
        graph: str,
        questions: WorkerQuestions,
        ends_at: float,
        read: Callable[[bytes], AnswerT],
    ) -> AnswerT:
        """Returns the answer of a worker. A graph that ends two workers goes into quarantine.

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
        workload = Workload(self._owner, graph, evaluate_pb2.DERIVATIVE_UNSPECIFIED)
        self._crash_history.check(workload)
        killed, suspected = 0, False
        with contextlib.closing(questions):
            while True:
                try:
                    return await self._run_once(payload, questions, ends_at or math.inf, read)
                except EngineLost as lost:
                    if not lost.is_blamable:
                        killed += 1
                        if killed > _MAX_KILLED:
                            raise
                    elif suspected:
                        # A worker has one task at a time, so this graph ended both.
                        raise self._quarantine(workload, lost) from None
                    suspected = suspected or lost.is_blamable

    async def _run_once(
        self, payload: bytes, questions: WorkerQuestions, ends_at: float, read: Callable[[bytes], AnswerT]
    ) -> AnswerT:
        async with self._pool.workers.hold(self._owner) as worker:
            try:
                return read(await worker.call(Kind.PREPARE, payload, ends_at, on_ask=questions.answer))
            except GradruleError as cause:
                if cause.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED and not isinstance(cause, EngineLost):
                    # The process does not return all of its memory.
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


def _read_program(questions: WorkerQuestions, answer: bytes) -> Prepared:
    """Parses a prepared program but not its request, which is as large as the graph. Raises `DecodeError`."""
    start = _LENGTH.size
    if len(answer) >= start:
        start += _LENGTH.unpack_from(answer)[0]
    if len(answer) < start:
        raise DecodeError("it is too short")
    message = link_pb2.PreparedProgram.FromString(answer[_LENGTH.size : start])
    if message.nodes < 0 or (message.is_known and not questions.has_reported_known):
        raise DecodeError("it contradicts itself")
    return Prepared(message, answer[start:])


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
