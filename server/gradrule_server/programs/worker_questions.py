"""Answers what a compile worker asks while it works on a task: about rules, blobs and programs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.messages import fault_message
from gradrule_server.link.request_scheduler import EngineRequest
from gradrule_server.link.v1 import link_pb2
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.rule_entries import RuleEntry
from gradrule_server.registry.rules import RuleRegistry

_log = logging.getLogger(__name__)

# An answer is made on the event loop, and copied several times. One rule has at most 1 MiB.
_MAX_ANSWER_BYTES = 4 << 20

# A worker runs graphs of strangers, so its questions are limited as messages of callers are. A question holds 500
# names at most; all names stand in the task, or in a graph that is a blob.
_MAX_QUESTION_BYTES = 1 << 20
_MAX_TOTAL_BYTES = 64 << 20
_MAX_EXPLAINED_NAMES = 20
_DIGEST_BYTES = hashlib.sha256().digest_size


class RegistryLookup:
    """Finds rules for one task; a name means the same rule throughout the task."""

    def __init__(self, registry: RuleRegistry) -> None:
        self._registry = registry
        self._found: dict[str, RuleEntry | None] = {}

    def find(self, names: Iterable[str]) -> list[rule_pb2.Rule]:
        """Returns the rules of these names, without names that no rule has; each rule's alias is the requested name.

        BUILTIN rules lack their definitions, which every process has. USER rules lack them once the answer has 4 MiB;
        the worker asks for these again.
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
        """Returns UNKNOWN_RULE for a name, with similar names."""
        return self._registry.unknown(name)

    def snapshot(self, names: Iterable[str]) -> bytes:
        """Returns those of the named rules that `find` has found, as bytes that are stored with a program."""
        rules = [
            _message(name, entry, is_complete=True)
            for name in dict.fromkeys(names)
            if (entry := self._found.get(name)) is not None
        ]
        return rule_pb2.ListRulesResponse(rules=rules).SerializeToString(deterministic=True)


def _message(requested_name: str, entry: RuleEntry, *, is_complete: bool) -> rule_pb2.Rule:
    definition = entry.content.to_definition() if is_complete and entry.content is not None else None
    return rule_pb2.Rule(
        name=entry.op_type or entry.name, definition=definition, kind=entry.kind, aliases=[requested_name]
    )


class WorkerQuestions:
    """Answers the questions of a worker during one task.

    Args:
        blobs: The caller's blobs.
        rules: Finds rules by name; None: the task needs none.
        is_known: Returns whether a program with this digest of its spec is cached; None: the worker must not ask.
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
        self.has_reported_known = False
        """Whether the worker has learnt that the program is known."""
        self._explained = 0
        self.bytes_left = _MAX_TOTAL_BYTES
        """Bytes of questions that the worker may still send."""
        self._lock = threading.Lock()
        self._pinned: set[str] = set()
        self._is_closed = False
        self._answering: set[asyncio.Task[None]] = set()

    def answer(self, work: EngineRequest, payload: bytes) -> None:
        """Answers a question. Raises `DecodeError` or `ValueError` for a question that no correct worker sends."""
        self.bytes_left -= len(payload)
        if len(payload) > _MAX_QUESTION_BYTES or self.bytes_left < 0:
            raise ValueError("the questions of a compile worker are too large")
        question = link_pb2.Question.FromString(payload)
        task = asyncio.create_task(self._answer(work, question), name="answer-worker")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def close(self) -> None:
        """Unpins the blobs, which stay until the task has ended."""
        with self._lock:
            self._is_closed = True
        for name in self._pinned:
            self._blobs.unpin([name])

    async def _answer(self, work: EngineRequest, question: link_pb2.Question) -> None:
        try:
            answer = await self._find_answer(question)
        except GradruleError as cause:
            answer = link_pb2.Told(fault=fault_message(cause))
        except Exception:
            # Without an answer the worker would wait until the deadline.
            _log.exception("the question of a compile worker cannot be answered")
            failure = error(errors_pb2.ERROR_REASON_INTERNAL, "the server cannot look up what the program refers to")
            answer = link_pb2.Told(fault=fault_message(failure))
        work.connection.answer_question(work, answer.SerializeToString())

    async def _find_answer(self, question: link_pb2.Question) -> link_pb2.Told:
        match question.WhichOneof("question"):
            case "rules" if self._rules is not None:
                return link_pb2.Told(rules=self._rules.find(question.rules.names))
            case "unknown_rule" if self._rules is not None and self._explained < _MAX_EXPLAINED_NAMES:
                self._explained += 1
                unknown = await asyncio.to_thread(self._rules.unknown, question.unknown_rule)
                return link_pb2.Told(fault=fault_message(unknown))
            case "blob_sizes":
                return link_pb2.Told(sizes=await asyncio.to_thread(self._sizes, list(question.blob_sizes.names)))
            case "blob":
                # Pinning may verify the hash, which takes long.
                await asyncio.to_thread(self._pin, question.blob)
                return link_pb2.Told()
            case "spec_digest" if self._is_known is not None and len(question.spec_digest) == _DIGEST_BYTES:
                self.has_reported_known = self._is_known(question.spec_digest)
                return link_pb2.Told(is_known=self.has_reported_known)
            case kind:
                raise error(errors_pb2.ERROR_REASON_INTERNAL, f"a compile worker asked for {kind} out of place")

    def _pin(self, name: str) -> None:
        self._blobs.pin([name])
        with self._lock:
            if not self._is_closed and name not in self._pinned:
                self._pinned.add(name)
                return
        self._blobs.unpin([name])

    def _sizes(self, names: list[str]) -> list[int]:
        missing = set(self._blobs.missing(names))
        return [-1 if name in missing else self._blobs.size(name) for name in names]
